"""Says why a run's reward does not rise: `python tools/doctor.py RUN`.

The doctor reads metrics.jsonl. It names each cause that it sees, with the number that shows the
cause and with what to change. The first cause is the one to mend first, because a later cause can
follow from it. docs/metrics.md says how each cause looks, and how sure it is.

Single steps are noisy. So the doctor compares the means of the first and of the last steps: of a
tenth of the run, but of at least three steps.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.runs import read_metrics

METRICS = ["reward", "pass_at_n", "answered", "truncated", "response_length", "total_length"]
METRICS += ["entropy", "explained_variance", "approx_kl", "policy_tokens", "reward_lost"]
METRICS += ["seconds", "tokens_per_second"]
FEWEST_STEPS = 10  # With fewer steps the first and the last ones cannot be compared.
SOLVED = 0.9  # From this reward on, the reward need not rise.
FLAT = 0.2  # Below this share of tokens with an advantage, there is little to learn from.
LOST = 0.1  # A larger fall of pass_at_n means that problems are lost.
LITTLE_EXPLAINED = 0.02  # Below this explained variance, the critic is no use.
TRUNCATED = 0.3  # From this share of truncated responses on, too many are truncated.


class Run:
    """The metrics of a run, and their means over its first and its last steps."""

    def __init__(self, metrics: pd.DataFrame):
        table = metrics.reindex(columns=METRICS)
        table["tokens"] = table.tokens_per_second * table.seconds
        table["learnt_from"] = table.policy_tokens / table.tokens  # share with an advantage
        self.table = table
        self.steps = len(table)
        self.window = max(3, self.steps // 10)
        self.first = table.head(self.window).mean()
        self.last = table.tail(self.window).mean()
        self.is_solved = self.last.reward > SOLVED
        self.has_critic = table.explained_variance.notna().any()
        # By how much pass_at_n fell, from the first window to the second half of the run.
        self.lost = self.first.pass_at_n - table.pass_at_n[self.steps // 2 :].mean()


def look_at_samples(run: Run) -> dict[str, str]:
    """{cause: what shows it and what to change}. All functions look_at_... return this."""
    first, last, table = run.first, run.last, run.table
    found = {}
    # The mean ratio says nothing, because it is 1 for any two distributions.
    if last.approx_kl > 0.02:
        found["stale sampler"] = (
            f"the sampler and the learner differ by {last.approx_kl:.3f} nats a token (approx_kl; "
            "usual: below 0.001). Check Sampler.sync, the dtypes, and your changes to the model"
        )
    unchecked = table.reward_lost.mean() / (table.tokens / table.total_length).mean()
    if unchecked > 0.01:
        found["lost checks"] = (
            f"{unchecked:.0%} of the checks ended without a verdict, and counted as wrong "
            "(reward_lost). Read run.log: it may say why a check or its sandbox fails here"
        )
    share = table.answered.mean()
    form = "" if np.isnan(share) else f"; {share:.0%} have an answer in the right form (answered)"
    if not table.reward.any() and not last.truncated > TRUNCATED:
        found["format never met"] = (
            f"no response of {run.steps} steps was right (reward is 0){form}. tools/samples.py "
            "shows the responses. If the grader does not find their answers, change --template, "
            "--answer_form or --stop. If the answers are wrong, take easier problems"
        )
    share = max(first.truncated, last.truncated)
    is_shorter = last.response_length < 0.9 * first.response_length
    unlearns = is_shorter and share > 0.1 and not last.reward - first.reward > 0.1
    if (share >= TRUNCATED or unlearns) and not run.is_solved:
        found["truncated answers"] = (
            f"the length limit truncates {first.truncated:.0%} of the responses in the first steps "
            f"and {last.truncated:.0%} in the last steps (truncated). A truncated response gets no "
            "reward, so the model unlearns long answers. Raise --generate_max_len"
        )
    return found


def look_at_the_policy(run: Run) -> dict[str, str]:
    first, last = run.first, run.last
    found = {}
    has_time = run.steps >= FEWEST_STEPS
    # If the model solves all that can be solved, it may be sure of its answers.
    is_done = run.is_solved or last.reward > 0.9 * first.pass_at_n
    is_sure = last.entropy < max(0.02, 0.1 * first.entropy)
    # Without a critic only groups that differ count in the entropy, so the entropy may stay high.
    are_alike = last.learnt_from < FLAT and run.lost > LOST
    if has_time and not is_done and not first.learnt_from < FLAT and (is_sure or are_alike):
        found["entropy collapse"] = (
            "the responses to each problem have become alike, but the reward is only "
            f"{last.reward:.2f}. The entropy went from {first.entropy:.3f} to {last.entropy:.3f}, "
            f"and the share of tokens with an advantage from {first.learnt_from:.0%} to "
            f"{last.learnt_from:.0%}. The policy does not recover from this: start from an earlier "
            "checkpoint, with --temperature 1 and a lower --actor_learning_rate"
        )
        # Flat groups and a fall of pass_at_n follow from responses that are alike.
        return found
    # A critic judges each token, so a run with a critic learns from flat groups too.
    is_flat = last.learnt_from < FLAT and last.pass_at_n - last.reward < FLAT
    if is_flat and not run.has_critic and not run.is_solved and run.table.reward.any():
        found["flat groups"] = (
            f"only {last.learnt_from:.0%} of the tokens have an advantage other than 0 "
            "(policy_tokens): in most groups all responses are right, or all are wrong. Take "
            "problems that the model solves sometimes, or raise --n_samples_per_prompt"
        )
    fall = describe_fall(run)
    if has_time and fall:
        found["steps too large"] = f"{fall}. Divide --actor_learning_rate by 3"
    return found


def describe_fall(run: Run) -> str | None:
    """What the policy has lost: problems that it solved, or reward beyond the noise."""
    solved = run.first.pass_at_n
    if run.lost > LOST:
        return f"pass_at_n fell from {solved:.2f} to {solved - run.lost:.2f}: problems are lost"
    means = run.table.reward.rolling(run.window, min_periods=1).mean()[run.window - 1 :]
    # The error of a window's mean, from the differences of neighbouring steps.
    noise = np.sqrt((run.table.reward.diff() ** 2).mean() / 2 / run.window)
    if means.max() - run.last.reward > max(0.4 * means.max(), 6 * noise):
        best = f"{means.max():.2f} up to step {means.idxmax()}"
        return f"the reward was {best} and is {run.last.reward:.2f} in the last steps"
    return None


def look_at_the_critic(run: Run) -> dict[str, str]:
    found = {}
    # If nearly all rewards are equal, there is little to explain.
    late = run.table[run.steps // 4 :]
    explained = late.explained_variance[late.reward.between(0.05, SOLVED)].mean()
    if run.steps >= FEWEST_STEPS and explained < LITTLE_EXPLAINED:
        found["critic explains nothing"] = (
            f"the critic explains {explained:.2f} of the variance of the returns "
            "(explained_variance). Set --critic_learning_rate to 1 to 5 times the policy's, or "
            "take --estimator grpo, which has no critic"
        )
    return found


def look_at_speed(run: Run) -> dict[str, str]:
    """examine calls this function only if it found no cause, because each cause slows a run."""
    first, last = run.first, run.last
    found = {}
    closed = (last.reward - first.reward) / max(first.pass_at_n - first.reward, 1e-9)
    if run.steps >= FEWEST_STEPS and not run.is_solved and closed <= 0.2:
        found["too slow"] = (
            f"the reward went from {first.reward:.2f} to {last.reward:.2f} in {run.steps} steps, "
            f"and {first.pass_at_n:.0%} of the first problems had a right response (pass_at_n). "
            "Multiply --actor_learning_rate by 3, or train longer. Run once with --variant "
            "log_ratio, which shows if the sampler is stale"
        )
    return found


def examine(metrics: pd.DataFrame) -> dict[str, str]:
    """{cause: what shows it and what to change}. It is empty if all looks well."""
    # Steps without policy_lr train the critic alone, and the policy stays as it is.
    if "policy_lr" in metrics:
        metrics = metrics[metrics.policy_lr.notna()]
    run = Run(metrics)
    found = {}
    # A later cause can follow from an earlier one.
    for look in (look_at_samples, look_at_the_policy, look_at_the_critic):
        found |= look(run)
    return found or look_at_speed(run)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("run", type=Path, metavar="RUN")
    run = parser.parse_args().run
    try:
        metrics = read_metrics(run)
    except OSError as error:
        parser.exit(2, f"error: {error}\n")
    if "reward" not in metrics:
        path = run / "metrics.jsonl"
        parser.exit(2, f"error: {path} has no step with a reward; give the folder of a run\n")
    found = examine(metrics)
    rewards = metrics.reward.dropna()
    print(f"{len(metrics)} steps, reward {rewards.iloc[0]:.3f} to {rewards.iloc[-1]:.3f}")
    for cause, text in found.items():
        print(f"{cause}: {text}")
    if not found:
        print("nothing looks wrong")
    if len(metrics) < FEWEST_STEPS:
        print(f"fewer than {FEWEST_STEPS} steps show little")


if __name__ == "__main__":
    main()
