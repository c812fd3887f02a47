"""The samples whose answer is the most frequent one of their group are paid.

TTRL (arXiv 2504.16084): no label is looked at: agreement stands in for the verifier. The answer is
what the task's grader returns for a response that stopped by itself. Of answers as frequent as each
other the first wins.
Laboratory: accuracy 0.542 with it, 0.561 with labels (GRPO, 3 seeds).
"""

from collections import Counter


def paid(_original, samples, cfg):
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
