"""Says why a run's reward does not rise: `python tools/doctor.py RUN`.

The doctor reads metrics.jsonl, samples.jsonl, config.json and the code that the run has kept. Its
first line says whether the reward rises. The next lines name the causes that it sees, with the
numbers that show them and with what to change. Mend the first cause first, because a later cause
can follow from it. docs/metrics.md says how each cause looks.

Single steps are noisy. So the doctor compares the means of the first and of the last steps: of a
tenth of the run, but of at least three steps.
"""

import contextlib
import itertools
import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import reward
from nanoorz.equal import quick_verdict
from nanoorz.log import other_form
from tools.runs import read_lines, read_metrics, refuse, run_folder

FEWEST_STEPS = 10  # With fewer steps the first and the last ones cannot be compared.
SOLVED = 0.9  # From this reward on, the reward need not rise.
MOST_SAMPLES = 20_000  # samples.jsonl of a long run has gigabytes. Its beginning shows the faults.
# A metric that a run has not logged is NaN. Every comparison with NaN is false.
METRICS = ["reward", "paid", "pass_at_n", "answered", "truncated", "response_length", "entropy"]
METRICS += ["advantage_abs", "approx_kl", "explained_variance", "reward_lost", "policy_lr"]
METRICS += ["drawn_tokens"]


class Run:
    """The numbers of a run, and their means over its first and its last steps."""

    def __init__(self, metrics: pd.DataFrame, samples: pd.DataFrame, config: dict):
        """metrics: as read_metrics returns it. samples: the lines of samples.jsonl."""
        # A step without policy_lr trains the critic alone.
        table = metrics.reindex(columns=METRICS)
        if table.policy_lr.notna().any():
            table = table[table.policy_lr.notna()]
        self.table, self.samples, self.config = table, samples, config
        self.steps = len(table)
        self.window = max(3, self.steps // 10)
        self.first, self.last = table.head(self.window).mean(), table.tail(self.window).mean()
        self.gain = self.last.reward - self.first.reward
        # The error of a mean over a window, from the differences of neighbours.
        self.error = table.reward.diff().std() / np.sqrt(2 * self.window)
        self.rises = self.gain > max(0.02, 3 * self.error)
        # The first update can break a policy, so the best mean is over few steps.
        size = max(3, self.steps // 20)
        means = table.reward.rolling(size, min_periods=min(3, self.steps)).mean()
        self.best, self.best_step = means.max(), means.idxmax()
        fall = self.best - self.last.reward
        self.falls = fall > 0.4 * self.best and fall > max(0.02, 3 * self.error)
        # Only responses that end show whether the model knows the form.
        self.in_form = self.last.answered / (1 - self.last.truncated)

    def agreement(self, x: pd.Series, y: pd.Series) -> float:
        """The correlation of two columns of the samples within the groups of a problem."""
        groups = [self.samples.step, self.samples.problem]
        x, y = (column - column.groupby(groups).transform("mean") for column in (x, y))
        return x.corr(y)


def heading(run: Run) -> str:
    first, last = run.first.reward, run.last.reward
    if run.steps < FEWEST_STEPS:
        return f"the reward is {last:.2f}; fewer than {FEWEST_STEPS} steps show little"
    if run.falls:
        return f"the reward fell: {run.best:.2f} at step {run.best_step} to {last:.2f}"
    trend = "rises" if run.rises else "does not rise"
    if last > SOLVED:
        trend = "is high"
    return f"the reward {trend}: {first:.2f} to {last:.2f}"


def faults(run: Run, loss_sign: float) -> Iterator[str]:
    """The causes that make all later numbers false. loss_sign: of `read_loss_sign`."""
    first, last, samples = run.first, run.last, run.samples
    drawn = (run.table.drawn_tokens / run.table.response_length).sum()
    lost = run.table.reward_lost.sum() / drawn
    if lost > 0.01:
        yield (
            f"lost verdicts: {lost:.0%} of the answers got no verdict, and counted as wrong "
            "(reward_lost). Read what the run printed: it may say why the grader fails"
        )
    if len(samples):
        moved, own = fit_of_labels(samples, run.config)
        if moved > max(0.1, 5 * own):
            yield (
                f"moved labels: {moved:.0%} of the answers fit the label of a neighbouring "
                f"problem, and {own:.0%} fit their own. Look at how the file was made"
            )
    if "advantages" in samples and not run.config.get("teacher_weight"):
        advantages = samples.advantages.map(np.mean, na_action="ignore").astype(float)
        sign = run.agreement(samples.paid, advantages)
        if sign < -0.5:
            yield (
                f"wrong sign: the advantages point away from the pay (correlation {sign:.2f}). "
                "Look at the estimator, and at the variants that change advantages"
            )
    if loss_sign < 0:
        yield (
            "wrong sign: token_loss falls if a token with a positive advantage becomes less likely."
            " It must fall if this token becomes more likely, as -advantages * logprobs does"
        )
    if last.approx_kl > 0.02:
        yield (
            f"stale sampler: the sampler and the policy differ by {last.approx_kl:.3f} nats a token"
            " (approx_kl; usual: below 0.001). Look at named_weights, and at changes of the model"
        )
    if last.paid - first.paid > 0.05 > run.gain:
        yield (
            f"another pay: what is paid went from {first.paid:.2f} to {last.paid:.2f}, and the "
            f"reward from {first.reward:.2f} to {last.reward:.2f}. The policy learns what "
            "`paid` or --reward_weights pay"
        )


def causes(run: Run) -> list[str]:
    """What holds a run back in which all numbers are true."""
    found = []
    first, last = run.first, run.last
    if run.falls:
        since = "from the first steps on" if run.best_step <= run.window else "then"
        found.append(
            f"steps too large: the reward was {run.best:.2f} and fell {since}, to "
            f"{last.reward:.2f}. Entropy went from {first.entropy:.2f} to {last.entropy:.2f}, "
            f"truncated from {first.truncated:.0%} to {last.truncated:.0%}. Divide "
            "--actor_learning_rate by 3 to 10, draw more samples a step, or add --variant kl_loss"
        )
        return found
    if max(first.truncated, last.truncated) > 0.2 and not run.rises and last.reward < SOLVED:
        found.append(
            f"truncated answers: the limit of tokens ends {first.truncated:.0%} of the responses "
            f"in the first steps and {last.truncated:.0%} in the last steps (truncated). A "
            "truncated response gets no reward. Raise --generate_max_len"
        )
    if run.in_form < 0.7:
        found.append(
            f"format never met: {run.in_form:.0%} of the responses that end have an answer in the "
            f"form of --answer_form{find_hint(run)}. tools/samples.py shows the responses. Look at "
            "--template, --answer_form and --stop"
        )
    elif run.table.reward.mean() < 0.02:
        found.append(
            f"problems too hard: nearly no response of {run.steps} steps was right. Take easier "
            "problems, or a better base model. If tools/samples.py shows right answers, check the "
            "labels"
        )
    if run.steps < FEWEST_STEPS or run.rises or last.reward > SOLVED:
        return found
    if last.entropy < max(0.02, 0.1 * first.entropy):
        found.append(
            f"entropy collapse: the responses to a problem have become alike (entropy "
            f"{first.entropy:.3f} to {last.entropy:.3f}), and the reward is {last.reward:.2f}. "
            "Start from an earlier checkpoint, with --temperature 1 and a lower "
            "--actor_learning_rate"
        )
    elif last.advantage_abs < 0.1 and last.reward > 0.02:
        found.append(
            f"flat groups: the mean size of the advantages is {last.advantage_abs:.2f} "
            "(advantage_abs): in most groups all responses are right, or all are wrong. Take "
            "problems that the model solves sometimes, or raise --n_samples_per_prompt"
        )
    # Without right responses there is nothing to explain.
    if last.explained_variance < 0.02 and last.reward > 0.05:
        found.append(
            f"critic explains nothing: it explains {last.explained_variance:.2f} of the variance "
            "of the returns (explained_variance). Set --critic_learning_rate to 1 to 5 times the "
            "policy's, or take --estimator grpo, which has no critic"
        )
    if not found:
        full_rate = run.config.get("actor_learning_rate", np.nan)
        found.append(
            f"too slow: {run.steps} steps brought the reward from {first.reward:.2f} to "
            f"{last.reward:.2f}, and policy_lr is {last.policy_lr:.1e} of {full_rate:.1e}. Train "
            "longer, or multiply --actor_learning_rate by 3"
        )
    return found


def fit_of_labels(samples: pd.DataFrame, config: dict) -> tuple[float, float]:
    """The share of the answers that fit the label of the problem before or behind theirs, and the
    share that fit their own label. (0, 0) for a task whose labels are no texts."""
    form = reward.ANSWER_FORMS.get(config.get("answer_form"))
    if config.get("task") != "math" or not form:
        return 0, 0
    label_of = samples.drop_duplicates("problem").set_index("problem").label
    answers = samples.response.map(form)

    def share(distance: int) -> float:
        labels = (samples.problem + distance).map(label_of)
        known = answers.notna() & labels.notna()
        fits = [quick_verdict(*pair) is True for pair in zip(answers[known], labels[known])]
        return np.mean(fits) if len(fits) >= 30 else 0

    return max(share(-1), share(1)), share(0)


def find_hint(run: Run) -> str:
    """In what other form the responses have their answers."""
    form = run.config.get("answer_form")
    if run.samples.empty or form not in reward.ANSWER_FORMS:
        return ""
    texts = run.samples.response[run.samples.finish_reason == "stop"].tolist()
    name, count = other_form(texts, form, reward.ANSWER_FORMS)
    return f"; {count} of {len(texts)} have one as --answer_form {name} finds it" if name else ""


def read_loss_sign(folder: Path, config: dict) -> float:
    """Above 0 if the run's token_loss falls when tokens with a positive advantage become likelier.

    It runs the code that the run has kept. NaN: a token_loss that needs more than two tokens.
    """
    # The kept ppo.py comes before that of this folder, which may have other code now.
    sys.path.insert(0, str(folder / "code"))
    import torch

    import train
    from nanoorz.variants import kept_files

    logprobs = torch.full((2,), -1.0, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0])
    with contextlib.suppress(Exception):
        cfg = train.parse_flags(["--variant", *kept_files(folder, config["variants"])])
        loss = cfg.token_loss(logprobs, torch.ones(2), advantages, None, None, {})  # (2,)
        loss.sum().backward()
        return -(logprobs.grad * advantages).sum().item()
    return np.nan


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", type=run_folder, metavar="RUN", help="the folder of a run")
    folder = parser.parse_args().run
    metrics = read_metrics(folder)
    if "reward" not in metrics:
        refuse(f"{folder}/metrics.jsonl has no step yet")
    config = json.loads((folder / "config.json").read_text())
    lines = itertools.islice(read_lines(folder / "samples.jsonl"), MOST_SAMPLES)
    run = Run(metrics, pd.DataFrame(lines), config)
    print(f"{len(metrics)} steps; {heading(run)}")
    found = list(faults(run, read_loss_sign(folder, config))) or causes(run)
    print("\n".join(found or ["nothing looks wrong"]))


if __name__ == "__main__":
    main()
