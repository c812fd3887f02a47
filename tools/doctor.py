"""Says why a run's reward does not rise: `python tools/doctor.py RUN`.

The doctor reads metrics.jsonl. Its first line says whether the reward rises. The next lines name
the causes that it sees, with the numbers that show them and with what to change. Mend the first
cause first, because a later cause can follow from it. docs/metrics.md says how each cause looks.

Single steps are noisy. So the doctor compares the means of the first and of the last steps: of a
tenth of the run, but of at least three steps.
"""

import argparse
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    # Ctrl-C ends this process in one line, also while the imports below take seconds.
    signal.signal(signal.SIGINT, lambda *_: sys.exit("stopped"))

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.runs import describe, read_metrics

# The causes, in the order of what explains what:
# - If the samples or the rewards are false, all later numbers are false.
# - Steps that are too large break the policy. Then the reward falls, the responses become endless,
#   and the entropy goes up or down. So after a fall of the reward no later cause is named.
# - Without a right response the policy learns nothing. A truncated response has no answer. So if no
#   response ends, nothing shows if the form is right, and only the truncation is named.
# - If the first steps truncate long answers, or all responses are alike, pass_at_n falls. So a fall
#   of pass_at_n alone shows steps that are too large only without these two.
# - Each cause slows a run, so "too slow" is named alone.
TEXTS = """
stale sampler: the sampler and the learner differ by {last.approx_kl:.3f} nats a token (approx_kl;
usual: below 0.001). Check Sampler.sync, the dtypes, and your changes to the model

lost verdicts: {unchecked:.0%} of the answers got no verdict, and counted as wrong
(reward_lost). Read run.log: it may say why the grader or its sandbox fails here

steps too large: the reward was {best:.2f} up to step {best_step} and is {last.reward:.2f} in the
last steps. pass_at_n went from {first.pass_at_n:.2f} to {late_pass_at_n:.2f}, and truncated from
{table.truncated.iloc[0]:.0%} to {last.truncated:.0%}. Divide --actor_learning_rate by {divisor}

format never met: no response of {steps} steps was right (reward is 0){form}. tools/samples.py shows
the responses. If the grader does not find their answers, change --template, --answer_form or --stop

truncated answers: the length limit truncates {first.truncated:.0%} of the responses in the first
steps and {last.truncated:.0%} in the last steps (truncated). A truncated response gets no reward.
Raise --generate_max_len

form often missed: only {answered:.0%} of the responses that end have an answer in the right form
(answered). tools/samples.py shows the others. Look at --template, --answer_form, --stop and
--temperature (usual: 1)

problems too hard: no response of {steps} steps was right (reward is 0){form}. Take easier problems.
If tools/samples.py shows right answers, check the labels

entropy collapse: the responses to each problem have become alike, but the reward is only
{last.reward:.2f}. The entropy went from {first.entropy:.3f} to {last.entropy:.3f}, and the share of
tokens with an advantage from {first.learnt_from:.0%} to {last.learnt_from:.0%}. The policy does not
recover: start from an earlier checkpoint, with --temperature 1 and a lower --actor_learning_rate

flat groups: only {last.learnt_from:.0%} of the tokens have an advantage other than 0
(policy_tokens): in most groups all responses are right, or all are wrong. Take problems that the
model solves sometimes, or raise --n_samples_per_prompt

critic explains nothing: the critic explains {explained:.2f} of the variance of the returns
(explained_variance). Set --critic_learning_rate to 1 to 5 times the policy's, or take --estimator
grpo, which has no critic

too slow: {steps} steps brought the reward from {first.reward:.2f} to {last.reward:.2f}, and
{first.pass_at_n:.0%} of the first problems had a right response (pass_at_n). Multiply
--actor_learning_rate by 3, or train longer. --variant log_ratio shows if the sampler is stale
"""
METRICS = "reward pass_at_n answered truncated response_length total_length entropy reward_lost"
METRICS += " explained_variance approx_kl policy_tokens seconds tokens_per_second"
FEWEST_STEPS = 10  # With fewer steps the first and the last ones cannot be compared.
SOLVED = 0.9  # From this reward on, the reward need not rise.
FLAT = 0.2  # Below this share of tokens with an advantage, there is little to learn from.
LOST = 0.1  # A larger fall of pass_at_n means that problems are lost.
LITTLE_EXPLAINED = 0.02  # Below this explained variance, the critic is no use.
TRUNCATED = 0.3  # From this share of truncated responses on, too many are truncated.
FEW = 0.05  # Below this share of the responses, there are nearly none.
USUAL = 0.7  # This share of the responses that end, or more, should have an answer.


class Run:
    """The metrics of a run, their means over its first and its last steps, and what they show."""

    def __init__(self, metrics: pd.DataFrame):
        # Steps without policy_lr train the critic alone, and the policy stays as it is.
        if "policy_lr" in metrics:
            metrics = metrics[metrics.policy_lr.notna()]
        table = metrics.reindex(columns=METRICS.split())
        tokens = table.tokens_per_second * table.seconds
        table["learnt_from"] = table.policy_tokens / tokens  # share with an advantage
        self.table = table
        self.steps = len(table)
        self.has_time = self.steps >= FEWEST_STEPS
        self.window = max(3, self.steps // 10)
        self.first = first = table.head(self.window).mean()
        self.last = last = table.tail(self.window).mean()
        self.is_solved = last.reward > SOLVED
        self.unchecked = table.reward_lost.mean() / (tokens / table.total_length).mean()
        # If nearly all rewards are equal, there is little to explain.
        late = table[self.steps // 4 :]
        self.explained = late.explained_variance[late.reward.between(0.05, SOLVED)].mean()
        # Only responses that end show if the model knows the form.
        shares = [x.answered / (1 - x.truncated) for x in (first, last) if x.truncated < 1 - FEW]
        self.answered = max(shares, default=np.nan)
        self.form = f"; {self.answered:.0%} of the responses that end have an answer (answered)"
        self.form = "" if np.isnan(self.answered) else self.form
        self.late_pass_at_n = table.pass_at_n[self.steps // 2 :].mean()
        self.gain = last.reward - first.reward
        # The error of one step, from the differences of neighbours. A fall is few of them.
        self.noise = table.reward.diff().abs().quantile(0.8) / 1.8
        self.best, self.best_step, self.fell = self.find_fall()
        self.rises = not self.fell and self.gain > max(0.2 * (first.pass_at_n - first.reward), 0.02)
        self.divisor = 10 if last.reward < 0.2 * self.best else 3

    def find_fall(self) -> tuple[float, int, bool]:
        """The best reward, its step, and whether the reward fell from there beyond the noise."""
        # The limit ends most responses, and ended few before: this is no noise.
        is_endless = self.last.truncated - self.table.truncated.min() > 0.5
        # The first update can break a policy. So the first step alone is a window too.
        for size, fewest in ((3, 1), (self.window, self.window)):
            means = self.table.reward.rolling(size, min_periods=fewest).mean().dropna()
            fall = means.max() - self.last.reward
            is_clear = is_endless or fall > max(0.02, 6 * self.noise / size**0.5)
            fell = is_clear and fall > 0.4 * means.max() and (self.has_time or is_endless)
            if fell:
                break
        return means.max(), max(means.index, key=means.get, default=0), fell

    def describe(self) -> str:
        first, last = self.first.reward, self.last.reward
        if self.fell:
            return f"the reward fell: {self.best:.2f} to {last:.2f}"
        if not self.has_time:
            return f"the reward is {last:.2f}; fewer than {FEWEST_STEPS} steps show little"
        is_clear = self.gain > 4 * self.noise / self.window**0.5
        trend = "is high" if self.is_solved else "slowly rises" if is_clear else "does not rise"
        return f"the reward {'rises' if self.rises else trend}: {first:.2f} to {last:.2f}"


def examine(run: Run) -> dict[str, str]:
    """{cause: what shows it and what to change}. It is empty if all looks well."""
    first, last = run.first, run.last
    lost = first.pass_at_n - run.late_pass_at_n > LOST
    is_never_right = run.table.reward.max() == 0
    # If the model solves all that can be solved, it may be sure of its answers.
    is_done = run.is_solved or last.reward > 0.9 * first.pass_at_n
    is_sure = last.entropy < max(0.02, 0.1 * first.entropy)
    # Without a critic only groups that differ count in the entropy, so the entropy may stay high.
    are_alike = last.learnt_from < FLAT and lost
    was_varied = run.has_time and not first.learnt_from < FLAT
    collapsed = was_varied and not (is_done or is_never_right) and (is_sure or are_alike)
    is_flat = last.learnt_from < FLAT and last.pass_at_n - last.reward < FLAT
    # A critic judges each token, so a run with a critic learns from flat groups too.
    has_critic = run.table.explained_variance.notna().any()
    is_flat &= not (has_critic or collapsed or run.is_solved or is_never_right)
    # If the limit truncates many only later, look at the reward: if it rises, longer responses pay.
    # If problems are lost, the steps are too large, and the truncation follows from them.
    is_lost = run.has_time and lost and not collapsed
    many = min if run.rises else max
    cut = first.truncated if is_lost else many(first.truncated, last.truncated)
    unlearns = last.response_length < 0.9 * first.response_length and cut > 0.1 >= run.gain
    is_cut = (cut >= TRUNCATED or unlearns) and not run.is_solved
    knows_form = run.answered >= FEW or np.isnan(run.answered) and is_cut
    seen = {
        # The mean ratio says nothing, because it is 1 for any two distributions.
        "stale sampler": last.approx_kl > 0.02,
        "lost verdicts": run.unchecked > 0.01,
        "steps too large": run.fell or is_lost and not is_cut,
    }
    if not run.fell:
        seen |= {
            "format never met": is_never_right and not knows_form,
            "truncated answers": is_cut,
            "form often missed": FEW <= run.answered < USUAL,
            "problems too hard": is_never_right and run.answered >= USUAL and not is_cut,
            "entropy collapse": collapsed,
            "flat groups": is_flat,
            "critic explains nothing": run.has_time and run.explained < LITTLE_EXPLAINED,
        }
    seen["too slow"] = run.has_time and not any([run.is_solved, run.rises, *seen.values()])
    texts = dict(" ".join(text.split()).split(": ", 1) for text in TEXTS.split("\n\n"))
    return {cause: text.format(**vars(run)) for cause, text in texts.items() if seen.get(cause)}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    folder = parser.parse_args().run
    try:
        metrics = read_metrics(folder)
    except OSError as error:
        parser.exit(2, f"error: {describe(error, folder)}\n")
    if "reward" not in metrics:
        parser.exit(
            2,
            f"error: {folder}/metrics.jsonl is absent or has no reward; give the folder of a run\n",
        )
    run = Run(metrics)
    found = examine(run)
    print(f"{len(metrics)} steps; {run.describe()}{'' if found else '; nothing looks wrong'}")
    for cause, text in found.items():
        print(f"{cause}: {text}")
    if not found and run.last.truncated >= TRUNCATED:
        share = f"{run.last.truncated:.0%} of the responses in the last steps (truncated)"
        print(f"the limit ends {share}: a higher --generate_max_len may help further")


if __name__ == "__main__":
    main()
