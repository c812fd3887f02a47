"""Says why a run's reward does not rise: `python tools/doctor.py RUN`.

It reads metrics.jsonl and names each cause that it sees, with its number and what to change. What
the causes look like, and how sure one can be of them, stands in docs/doctor.md. Where no response
was ever right it shows three of samples.jsonl, because only they can tell why.

A step is noisy, so the findings compare windows of steps: a tenth of the run, but at least three.
"""

import argparse
import json
import statistics
from pathlib import Path

import numpy as np

FEWEST_STEPS = 10  # to compare the first with the last
SOLVED = 0.9  # such a reward need not rise
FLAT = 0.2  # too few tokens with a signal
LOST = 0.1  # a fall of pass_at_n that is much
LITTLE_EXPLAINED = 0.02  # of the returns' variance
TRUNCATED = 0.3  # too many responses


class Run:
    """The curves of a metrics.jsonl: `run["reward"]` is (S,), NaN in steps that lack the number."""

    def __init__(self, lines: list[dict]):
        self.lines = lines
        self.steps = len(lines)
        self.window = max(3, self.steps // 10)
        self.reward = self["reward"]  # (S,)
        self.first = self.start("reward")
        self.last = self.end("reward")

    def __getitem__(self, name: str) -> np.ndarray:
        return np.array([line.get(name, np.nan) for line in self.lines])  # (S,)

    def has(self, name: str) -> bool:
        return any(name in line for line in self.lines)

    def start(self, name: str) -> float:
        return mean(self[name][: self.window])

    def end(self, name: str) -> float:
        return mean(self[name][-self.window :])

    def best(self) -> tuple[float, int]:
        """The highest reward of any window, and the step at which that window ends."""
        ends = range(min(self.window, self.steps), self.steps + 1)
        means = [mean(self.reward[end - self.window : end]) for end in ends]
        place = int(np.argmax(means))
        return means[place], ends[place]

    def noise(self) -> float:
        """How far a window's mean reward is off by chance, judged by neighbouring steps."""
        differences = np.diff(self.reward)  # (S - 1,)
        return np.sqrt(np.mean(differences**2) / 2 / self.window) if len(differences) else 0.0

    def tokens(self) -> np.ndarray:
        """The tokens of each step's samples, (S,)."""
        return self["tokens_per_second"] * self["seconds"]

    def signal(self) -> np.ndarray:
        """The share of each step's tokens whose advantage is not 0, (S,)."""
        return self["policy_tokens"] / self.tokens()


def mean(values: np.ndarray) -> float:
    """NaN only where no step has the number."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


# ---- causes: each function returns what it sees and what to change, or nothing -------------------


def stale_sampler(run: Run) -> str | None:
    # The mean ratio says nothing, since it is 1 for any two distributions.
    apart = run.end("approx_kl")
    if not apart > 0.02:
        return None
    return (
        f"sampler and trainer differ by {apart:.3f} nats a token (approx_kl, usually below 0.001); "
        "responses come from other weights than those that learn: look at Sampler.sync, at the "
        "dtypes, and at changes of the model that vLLM does not know"
    )


def lost_checks(run: Run) -> str | None:
    samples = run.tokens() / run["total_length"]  # (S,)
    share = run["reward_lost"].sum() / samples.sum()
    if not share > 0.01:
        return None
    return (
        f"{share:.0%} of the checks ended without a verdict (reward_lost) and counted as wrong; "
        "run.log may say why a check or its sandbox does not work here"
    )


def format_never_met(run: Run) -> str | None:
    if run.reward.any() or run.end("truncated") > TRUNCATED:
        return None
    found = ""
    if run.has("answered"):
        found = f", and {mean(run['answered']):.0%} held an answer in its form (answered)"
    return (
        f"none of the responses of {run.steps} steps was right (reward is 0){found}; read a few: "
        "if they have an answer that is not found, --template, --answer_form or --stop does not "
        "fit what the reward looks for, and else the problems are too hard for this model"
    )


def truncated(run: Run) -> str | None:
    share = max(run.start("truncated"), run.end("truncated"))
    shorter = run.end("response_length") < 0.9 * run.start("response_length")
    if run.last > SOLVED:
        return None
    learnt = run.last - run.first > 0.1
    if not share >= TRUNCATED and (learnt or not (shorter and share > 0.1)):
        return None
    return (
        f"{run.start('truncated'):.0%} of the responses are cut off at first and "
        f"{run.end('truncated'):.0%} at last (truncated), and they get no reward, so that long "
        "answers are unlearned: raise --generate_max_len, or give a --stop that ends them"
    )


def entropy_collapsed(run: Run) -> str | None:
    # A model that is sure because it solves all that can be solved has not collapsed.
    if run.last > SOLVED or run.last > 0.9 * run.start("pass_at_n"):
        return None
    before = run.start("entropy")
    after = run.end("entropy")
    is_sure = after < max(0.02, 0.1 * before)
    # Without a critic the entropy is that of the groups that still differ, so it may stay high.
    are_alike = signal_at_end(run) < FLAT and lost_problems(run) > LOST
    if signal_at_first(run) < FLAT or not (is_sure or are_alike):
        return None
    signal = f"{signal_at_first(run):.0%} and {signal_at_end(run):.0%}"
    return (
        f"the responses to a problem have become alike, though the reward is {run.last:.2f}: "
        f"entropy {before:.3f} at first and {after:.3f} now, tokens with an advantage {signal}; "
        "set --temperature to 1, lower --actor_learning_rate, and start from an earlier "
        "checkpoint, since this does not come back by itself"
    )


def flat_groups(run: Run) -> str | None:
    # A critic judges tokens by themselves, so it learns from flat groups too.
    if run.has("explained_variance") or run.last > SOLVED or run.reward.max() == 0:
        return None
    solved = run.end("pass_at_n")
    if not (signal_at_end(run) < FLAT and solved - run.last < FLAT):
        return None
    return (
        f"only {signal_at_end(run):.0%} of the tokens have an advantage that is not 0 "
        f"(policy_tokens), and pass_at_n is {solved:.2f} where the reward is {run.last:.2f}: in "
        "most groups all responses are right or all are wrong; take problems "
        "that the model solves now and then, more of them a step (--rollout_batch_size), or more "
        "--n_samples_per_prompt"
    )


def signal_at_first(run: Run) -> float:
    return mean(run.signal()[: run.window])


def signal_at_end(run: Run) -> float:
    return mean(run.signal()[-run.window :])


def lost_problems(run: Run) -> float:
    """By how much pass_at_n has fallen, from the first window to the second half."""
    return run.start("pass_at_n") - mean(run["pass_at_n"][run.steps // 2 :])


def steps_too_large(run: Run) -> str | None:
    before = run.start("pass_at_n")
    after = before - lost_problems(run)
    best, step = run.best()
    fell = best - run.last
    if before - after > LOST:
        sign = f"pass_at_n fell from {before:.2f} to {after:.2f}: problems that it solved are lost"
    elif fell > max(0.4 * best, 6 * run.noise()):
        sign = f"the reward was {best:.2f} up to step {step} and is {run.last:.2f} now"
    else:
        return None
    return f"{sign}; lower --actor_learning_rate to a third, or raise --warmup_updates"


def critic_explains_nothing(run: Run) -> str | None:
    if not run.has("explained_variance"):
        return None
    explained = run["explained_variance"]  # (S,)
    # Where nearly all rewards are equal there is little to explain.
    unsolved = (run.reward > 0.05) & (run.reward < SOLVED)  # (S,)
    late = np.arange(run.steps) >= run.steps // 4  # (S,)
    usual = mean(explained[unsolved & late])
    if not usual < LITTLE_EXPLAINED:
        return None
    return (
        f"the critic explains {usual:.2f} of the returns' variance (explained_variance), which "
        "a constant would do as well; set --critic_learning_rate to 1 to 5 times the "
        "policy's, or take --estimator grpo, which has no critic"
    )


def norm_spikes(run: Run) -> str | None:
    norms = run["policy_grad_norm"]  # (S,)
    spikes = []
    for k in range(6, run.steps):
        # The norm is 0 where no step was taken.
        before = [norm for norm in norms[max(0, k - 20) : k] if norm > 0]
        if before and norms[k] > 10 * statistics.median(before):
            spikes.append(str(run.lines[k]["step"]))
    if not spikes:
        return None
    return (
        f"the gradient's norm was ten times the usual at step {', '.join(spikes)} "
        "(policy_grad_norm); it is clipped, so once is harmless: look at that step's samples"
    )


def slow(run: Run) -> str | None:
    """Only where nothing else was found: any cause above makes a run slow."""
    best_of_group = run.start("pass_at_n")
    closed = (run.last - run.first) / max(best_of_group - run.first, 1e-9)
    if run.steps < FEWEST_STEPS or run.last > SOLVED or closed > 0.2:
        return None
    return (
        f"the reward went from {run.first:.2f} to {run.last:.2f} in {run.steps} steps, though "
        f"{best_of_group:.0%} of the problems had a right response at first (pass_at_n) and "
        "nothing else is wrong: raise --actor_learning_rate to three times, or wait; run with "
        "--log_ratio true once, to know that the sampler follows"
    )


# In the order in which they are said. Another cause can be a consequence of the first one.
CAUSES = {
    "stale sampler": stale_sampler,
    "lost checks": lost_checks,
    "format never met": format_never_met,
    "truncated answers": truncated,
    "entropy collapse": entropy_collapsed,
    "flat groups": flat_groups,
    "steps too large": steps_too_large,
    "critic explains nothing": critic_explains_nothing,
    "gradient spikes": norm_spikes,
}
NEED_TIME = ("entropy collapse", "steps too large", "critic explains nothing")


def examine(lines: list[dict]) -> dict[str, str]:
    """{cause: what is seen of it} of the lines of a metrics.jsonl; empty where all looks well."""
    # While the critic learns alone the policy stays as it is.
    run = Run([line for line in lines if "policy_lr" in line] or lines)
    found = {}
    for cause, look in CAUSES.items():
        if cause in NEED_TIME and run.steps < FEWEST_STEPS:
            continue
        sign = look(run)
        if sign:
            found[cause] = sign
    if "entropy collapse" in found:
        # Both follow from responses that are alike.
        found.pop("flat groups", None)
        found.pop("steps too large", None)
    sign = slow(run)
    if sign and not found:
        found["too slow"] = sign
    return found


def read_lines(path: Path) -> list[dict]:
    """Raises OSError, and ValueError for what is no table of numbers by name."""
    whole, _, _ = path.read_text().rpartition("\n")
    # A run that goes on may be writing the last line.
    lines = [json.loads(text) for text in whole.splitlines()]
    if not lines:
        raise ValueError("no step is in it yet")
    for line in lines:
        if not isinstance(line, dict) or not isinstance(line.get("reward"), int | float):
            raise ValueError("a line is not that of a step")
    return lines


def count_lost_per_step(run: Path, lines: list[dict]) -> None:
    """In the folders of older runs reward_lost is a sum, which starts anew with each process."""
    config = run / "config.json"
    if not config.exists() or "reward" not in json.loads(config.read_text()):
        return
    before = 0
    for line in lines:
        total = line.get("reward_lost", 0)
        line["reward_lost"] = max(0, total - before)
        before = total


def show_responses(run: Path) -> None:
    """Prints answers to three problems of the last step in samples.jsonl, if there is one."""
    path = run / "samples.jsonl"
    if not path.exists() or path.stat().st_size == 0:
        return
    samples = [json.loads(text) for text in path.read_text().splitlines()]
    last_step = samples[-1]["step"]
    answered = {}
    for sample in samples:
        if sample["step"] == last_step:
            answered.setdefault(sample["question"], sample)
    for sample in list(answered.values())[:3]:
        print(f"  {sample['question']!r} -> {sample['response']!r}; label {sample['label']!r}")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("run", type=Path, metavar="RUN")
    run = parser.parse_args().run
    path = run / "metrics.jsonl"
    try:
        lines = read_lines(path)
        count_lost_per_step(run, lines)
        found = examine(lines)
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {path}: {error}; give the folder of a run\n")
    rewards = f"{lines[0]['reward']:.3f} to {lines[-1]['reward']:.3f}"
    print(f"{len(lines)} steps, reward {rewards}")
    for cause, sign in found.items():
        print(f"{cause}: {sign}")
    if "format never met" in found:
        show_responses(run)
    if not found:
        print("nothing looks wrong")
    if len(lines) < FEWEST_STEPS:
        print(f"fewer than {FEWEST_STEPS} steps say little")


if __name__ == "__main__":
    main()
