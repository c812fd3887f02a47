"""A sample gets reward 1 if its answer is the most frequent answer of its group (TTRL).

TTRL (arXiv 2504.16084) claims that agreement can replace the grader, so no label is needed. A
sample has an answer if the response stopped by itself and the task's grader returned an answer. If
two answers are equally frequent, the answer that comes first in the group wins.
Measured in the laboratory (GRPO, 3 seeds): the accuracy is 0.542 with majority_vote, and 0.561 with
labels.
"""

from collections import Counter

import ppo


class MajorityVote(ppo.Recipe):
    def paid(self, samples):
        votes = {}
        for sample in samples:
            if sample.answer is not None:
                votes.setdefault(sample.request.group, Counter())[sample.answer] += 1
        winners = {group: counts.most_common(1)[0][0] for group, counts in votes.items()}
        rewards = []
        for sample in samples:
            has_voted = sample.answer is not None
            rewards.append(float(has_voted and sample.answer == winners[sample.request.group]))
        return rewards
