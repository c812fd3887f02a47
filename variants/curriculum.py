"""Each pass over the problems goes from easy to hard ("Curriculum learning", Bengio et al. 2009).

Problems that are equally hard stay shuffled. Short questions are easy. In Countdown few numbers are
easy, and then large targets, which only products reach.
Laboratory: accuracy 0.548 with it, 0.561 without it (GRPO, 3 seeds).
"""


def pass_order(original, problems, cfg, pass_number):
    # Sorting is stable, so it keeps the shuffle among equals.
    return sorted(original(problems, cfg, pass_number), key=lambda i: _difficulty(problems[i]))


def _difficulty(problem):
    if isinstance(problem.label, dict):
        return problem.label["pick"] or len(problem.label["numbers"]), -problem.label["target"]
    return len(problem.question)
