"""Two ways of making requests that save tokens: --first_stage and --adaptive_len.

train.py loads this file only when one of the two flags is given. What they remember is part of the
run's state, so that a resumed run makes the same requests.
"""

import dataclasses
import statistics


class Levers:
    """Stands between the loop and `Rollout.draw`, with the same signature.

    memory is a JSON object that a checkpoint keeps: {"solved": {problem: was any sample of its last
    visit right}, "limits": {problem: response tokens}}.
    """

    def __init__(self, rollout, cfg, memory):
        self.rollout = rollout
        self.cfg = cfg
        self.solved = memory.setdefault("solved", {})
        limits = memory.setdefault("limits", {})
        self.budget = LengthBudget(cfg.generate_max_len, limits)

    def draw(self, requests, clock):
        """The samples of a step, in the order of problem and index. Raises Stopped."""
        if self.cfg.adaptive_len:
            requests = [self.budget.apply(request) for request in requests]
        if self.cfg.first_stage:
            samples = self.draw_in_two_stages(requests, clock)
        else:
            samples = self.rollout.draw(requests, clock)
        if self.cfg.adaptive_len:
            self.budget.update(samples)
        return samples

    def draw_in_two_stages(self, requests, clock):
        """A few samples of every problem, the others only where they can teach something.

        An estimator takes the samples that there are: groups may have two sizes.
        """
        few = [request for request in requests if request.index < self.cfg.first_stage]
        samples = self.rollout.draw(few, clock)
        teaching = set()
        for group, tried in by_group(samples).items():
            if self.can_teach(tried):
                teaching.add(group)
        rest = []
        for request in requests:
            if request.index >= self.cfg.first_stage and request.group in teaching:
                rest.append(request)
        samples = samples + self.rollout.draw(rest, clock)
        samples.sort(key=lambda sample: (sample.request.group, sample.request.index))
        self.remember_solved(samples)
        clock.numbers |= savings(samples, self.cfg.n_samples_per_prompt)
        return samples

    def can_teach(self, tried):
        """Are the problem's other samples worth drawing?

        They are where rewards differ. Where all are 0, they are if a sample was right at the last
        visit, or if this is the first visit. A program that passes no test is not worth more.
        """
        rewards = {sample.reward for sample in tried}
        if len(rewards) > 1:
            return True
        if max(rewards) > 0 or self.cfg.task == "code":
            return False
        return self.solved.get(problem_key(tried[0]), True)

    def remember_solved(self, samples):
        for key, visited in by_problem(samples).items():
            self.solved[key] = any(sample.reward > 0 for sample in visited)


class LengthBudget:
    """--adaptive_len: a problem's limit follows what its finished responses needed.

    So a few endless responses do not hold up a batch. All ranks compute the same limits from the
    same samples. A problem that was not seen yet has the limit of the last batch.
    """

    MARGIN = 1.5  # room over the longest finished response
    TRUNCATED_SHARE = 0.1  # above it a limit grows
    UNSEEN = ""

    def __init__(self, most, limits: dict[str, int]):
        """most: tokens; no limit is above it. limits is changed in place."""
        self.most = most
        self.limits = limits
        self.limits.setdefault(self.UNSEEN, most)

    def limit_of(self, key):
        return self.limits.get(key, self.limits[self.UNSEEN])

    def apply(self, request):
        limit = self.limit_of(str(request.problem.index))
        return dataclasses.replace(request, max_tokens=limit)

    def update(self, samples):
        """Learns from one step's samples: a limit for each problem, and one for unseen problems."""
        new_limits = {}
        for key, visited in by_problem(samples).items():
            new_limits[key] = self.next_limit(self.limit_of(key), visited)
        new_limits[self.UNSEEN] = self.next_limit(self.limits[self.UNSEEN], samples)
        self.limits |= new_limits

    def next_limit(self, limit, samples):
        """Doubled while too many responses are cut; else the longest finished one and some room."""
        finished = []
        for sample in samples:
            if sample.finish_reason == "stop":
                finished.append(len(sample.response_ids))
        truncated = len(samples) - len(finished)
        if truncated > self.TRUNCATED_SHARE * len(samples):
            return min(self.most, 2 * limit)
        return min(self.most, int(self.MARGIN * max(finished)))


def by_group(samples) -> dict[int, list]:
    groups = {}
    for sample in samples:
        groups.setdefault(sample.request.group, []).append(sample)
    return groups


def by_problem(samples):
    """A problem may come twice in a step, at the border of two passes."""
    problems = {}
    for sample in samples:
        problems.setdefault(problem_key(sample), []).append(sample)
    return problems


def problem_key(sample):
    """Problems are JSON keys in a checkpoint."""
    return str(sample.request.problem.index)


def savings(samples, full) -> dict[str, float]:
    """Share of problems that got all samples, and the tokens that the other samples would have
    taken at their group's mean length."""
    groups = list(by_group(samples).values())
    saved = 0.0
    expanded = 0
    for group in groups:
        if len(group) == full:
            expanded += 1
        mean_length = statistics.mean(len(sample.response_ids) for sample in group)
        saved += (full - len(group)) * mean_length
    return {"prompts_expanded": expanded / len(groups), "tokens_saved": saved}
