"""A sample gets reward 1 if its answer is the most frequent answer of its group (TTRL).

TTRL (arXiv 2504.16084) claims that agreement can replace the grader, so no label is needed. Only a
response that stopped by itself with an answer has a vote. Answers that a quick rule of
nanoorz/equal.py calls equal, such as 1/2 and 0.5, are one. Of two equally frequent answers the one
that comes first in the group wins.
In the laboratory (GRPO, 3 seeds) the accuracy is 0.542 with it and 0.561 with labels.
"""

from collections import Counter

import ppo
from nanoorz.equal import quick_verdict


class MajorityVote(ppo.Recipe):
    def paid(self, samples):
        votes = {}  # {group: {answer: its number of votes}}
        answers = []  # each sample's answer, in the spelling that came first in its group
        for sample in samples:
            counts = votes.setdefault(sample.request.group, Counter())
            answers.append(_find(sample.answer, counts))
            if sample.answer is not None:
                counts[answers[-1]] += 1
        rewards = []
        for sample, answer in zip(samples, answers):
            counts = votes[sample.request.group]
            is_winner = answer is not None and answer == counts.most_common(1)[0][0]
            rewards.append(float(is_winner))
        return rewards


def _find(answer, known):
    """The equal one of the known answers, or else the answer itself."""
    if answer is None or answer in known:
        return answer
    return next((x for x in known if quick_verdict(answer, x)), answer)
