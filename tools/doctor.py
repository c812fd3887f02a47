"""Says why a run's reward does not rise: `python tools/doctor.py RUN`.

The doctor reads metrics.jsonl, samples.jsonl and config.json. Its first line says whether the
reward rises. The next lines name the causes that it sees, with the numbers that show them and with
what to change. Mend the first cause first, because a later cause can follow from it.
docs/metrics.md says how each cause looks. The doctor grades the logged samples again, if their
labels are texts or if the task of the run can be loaded.

Single steps are noisy. So the doctor compares the means of the first and of the last steps: of a
tenth of the run, but of at least three steps.
"""

import argparse
import contextlib
import importlib.util
import json
import re
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    # Ctrl-C ends this process in one line, also while the imports below take seconds.
    signal.signal(signal.SIGINT, lambda *_: sys.exit("stopped"))

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import reward  # noqa: E402
from tools.runs import describe, read_metrics  # noqa: E402

# The causes, in the order of what explains what:
# - If the samples, the rewards or the advantages are false, all later numbers are false.
# - Steps that are too large break the policy. Then the reward falls, the responses become endless,
#   and the entropy goes up or down. So after a fall of the reward no later cause is named.
# - Without a right response the policy learns nothing. A truncated response has no answer. So if no
#   response ends, nothing shows if the form is right, and only the truncation is named.
# - If the first steps truncate long answers, or all responses are alike, pass_at_n falls. So a fall
#   of pass_at_n alone shows steps that are too large only without these two.
# - Each cause slows a run, so "too slow" is named alone.
TEXTS = """
constant pay: what is paid is not what is graded: all {logged} logged samples were paid
{constant:.2f}. Look at Grader.results of the task, and at `paid` of the variants

rewards of neighbours: the rewards belong to other samples. Graded again, the responses agree with
their own rewards by {graded_own:.2f}, and with the rewards of the samples {graded_side} them by
{graded_other:.2f} (1: wholly, 0: not at all). Look at the keys in the Grader of the task

pay of neighbours: the pay belongs to other samples. It agrees with the samples' own rewards by
{paid_own:.2f}, and with the rewards of the samples {paid_side} them by {paid_other:.2f} (1: wholly,
0: not at all). Look at the order of the list that `paid` returns

wrong rewards: what is paid is not what is graded. Graded again, the responses agree with their
rewards by {graded_own:.2f} (1: wholly, 0: not at all). Look at the Grader of the task

other pay: what is paid is not what is graded. The pay went from {first.paid:.2f} to
{last.paid:.2f}, and the reward from {first.reward:.2f} to {last.reward:.2f}{agreed}. Look at `paid`
of the variants

wrong sign: the advantages point away from the pay: they agree with it by {sign:.2f} (usual: above
0.9). Look at the estimator, and at the variants that change advantages

moved labels: the labels belong to other problems. {moved:.0%} of the answers fit the label of the
problem {moved_side} theirs, and {fitting:.0%} fit their own. Look at how the file was made

stale sampler: the sampler and the learner differ by {last.approx_kl:.3f} nats a token (approx_kl;
usual: below 0.001). Check Sampler.sync, the dtypes, and your changes to the model

lost verdicts: {unchecked:.0%} of the answers got no verdict, and counted as wrong
(reward_lost). Read what the run printed: it may say why the grader or its jail fails here

steps too large: the reward was {best:.2f} up to step {best_step} and is {last.reward:.2f} in the
last steps. pass_at_n went from {first.pass_at_n:.2f} to {late_pass_at_n:.2f}, and truncated from
{table.truncated.iloc[0]:.0%} to {last.truncated:.0%}. Divide --actor_learning_rate by
{divisor}{few_samples}

format never met: no response of {steps} steps was right (reward is 0){form}{hint}. tools/samples.py
shows the responses. If the grader does not find their answers, change --template, --answer_form or
--stop

truncated answers: the length limit truncates {first.truncated:.0%} of the responses in the first
steps and {last.truncated:.0%} in the last steps (truncated). A truncated response gets no reward.
Raise --generate_max_len

form often missed: only {answered:.0%} of the responses that end have an answer in the right form
(answered). tools/samples.py shows the others. Look at --template, --answer_form, --stop and
--temperature (usual: 1)

problems too hard: nearly no response of {steps} steps was right{form}. Take easier problems.
If tools/samples.py shows right answers, check the labels

entropy collapse: the responses to each problem have become alike, but the reward is only
{last.reward:.2f}. The entropy went from {first.entropy:.3f} to {last.entropy:.3f}, and the mean
size of the advantages from {first.advantage_abs:.2f} to {last.advantage_abs:.2f}. The policy does
not recover: start from an earlier checkpoint, with --temperature 1 and a lower
--actor_learning_rate{few_samples}

no gradient: the gradient of the policy is 0 (policy_grad_norm), so the policy does not change. Look
at token_loss of the variants

rate still rises: after {steps} steps policy_lr is {last_rate:.1e}, and the rate is still rising to
{full_rate:.1e}. Lower --warmup_updates

rate has ended: policy_lr is {last_rate:.1e} in the last steps. It was {peak_rate:.1e} before. Look
at policy_rate of the variants

strong KL: a KL term with the factor {kl_factor:g} holds the policy at the base model. Lower
--{kl_flag} (usual: 0.1 or less)

flat groups: the mean size of the advantages is {last.advantage_abs:.2f} (advantage_abs): in most
groups all responses are right, or all are wrong. Take problems that the model solves sometimes, or
raise --n_samples_per_prompt

critic explains nothing: the critic explains {explained:.2f} of the variance of the returns
(explained_variance). Set --critic_learning_rate to 1 to 5 times the policy's, or take --estimator
grpo, which has no critic

too slow: {steps} steps brought the reward from {first.reward:.2f} to {last.reward:.2f}, and
{first.pass_at_n:.0%} of the first problems had a right response (pass_at_n). Multiply
--actor_learning_rate by 3, or train longer. --variant log_ratio shows if the sampler is stale
"""
# It follows the rate. docs/chain.md has measured what helps.
FEW_SAMPLES = """, or draw four times {count:.0f} samples a step, or add --variant kl_loss
--kl_loss_coef 0.3. In the small runs of docs/chain.md each of these prevented nearly all breaks;
--max_norm 0.1 and an entropy bonus of 0.01 did not"""
METRICS = "reward pass_at_n answered truncated response_length total_length entropy reward_lost"
METRICS += " explained_variance approx_kl advantage_abs seconds tokens_per_second"
METRICS += " paid policy_lr policy_grad_norm"
# Columns of samples.jsonl, and their types.
COLUMNS = {"step": int, "problem": int, "label": object, "response": str, "finish_reason": str}
COLUMNS |= {"reward": int | float, "paid": int | float, "advantages": list | None}
FEWEST_STEPS = 10  # With fewer steps the first and the last ones cannot be compared.
SOLVED = 0.9  # From this reward on, the reward need not rise.
SMALL = 0.1  # Below this mean size of the advantages, most groups are flat.
FLAT = 0.2  # Above this gap of pass_at_n and reward, many groups are not flat.
LOST = 0.1  # A larger fall of pass_at_n means that problems are lost.
LITTLE_EXPLAINED = 0.02  # Below this explained variance, the critic is no use.
TRUNCATED = 0.3  # From this share of truncated responses on, too many are truncated.
FEW = 0.05  # Below this share of the responses, there are nearly none.
USUAL = 0.7  # This share of the responses that end, or more, should have an answer.
NEVER = 0.02  # Below this reward, there is nearly no right response.
MOST_SECONDS = 20  # for grading again
AGREES = 0.5  # Below this correlation within groups, two columns of samples do not agree.


class Run:
    """The metrics of a run, their means over its first and its last steps, and what they show."""

    def __init__(self, metrics: pd.DataFrame, samples=(), config=None):
        """samples: the lines of samples.jsonl. config: config.json."""
        # Steps without policy_lr train the critic alone, and the policy stays as it is.
        if "policy_lr" in metrics:
            metrics = metrics[metrics.policy_lr.notna()]
        table = metrics.reindex(columns=METRICS.split())
        tokens = table.tokens_per_second * table.seconds
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
        enough = np.nanmax([0.2 * (first.pass_at_n - first.reward), 0.02])
        self.is_clear = self.gain > 4 * self.noise / self.window**0.5
        # With a penalty a run learns slowly, and learns all the same.
        has_grown = self.is_clear and self.gain > max(0.6 * first.reward, 0.02)
        self.rises = not self.fell and (self.gain > enough or has_grown)
        self.divisor = 10 if last.reward < 0.2 * self.best else 3
        count = (tokens / table.total_length).median()
        told = FEW_SAMPLES.format(count=count) if count < 64 else ""
        self.few_samples = " ".join(told.split())
        self.config = config or {}
        # The shipped variants that pay something else do it on purpose.
        pairs = self.config.get("variants", [])
        names = [str(pair[0]) for pair in pairs if isinstance(pair, list) and pair]
        self.pays_else = [f"--variant {name}" for name in names if changes_pay(name)]
        if self.config.get("reward_weights"):
            self.pays_else.append("--reward_weights")
        self.read_rates()
        self.read_samples(pd.DataFrame(samples))

    def read_rates(self):
        rates = self.table.policy_lr.dropna()
        self.full_rate = self.config.get("actor_learning_rate", np.nan)
        self.last_rate = rates.tail(self.window).mean()
        self.peak_rate = rates.max()
        self.is_rate_rising = rates.is_monotonic_increasing and self.last_rate < self.full_rate / 2
        factors = {name: self.config.get(name, 0) for name in ("kl_loss_coef", "kl_penalty_coef")}
        self.kl_flag = max(factors, key=factors.get)
        self.kl_factor = factors[self.kl_flag]

    def read_samples(self, samples: pd.DataFrame):
        """Compares pay, rewards, a second grading and advantages of the logged samples."""
        self.samples = samples
        self.hint = self.agreed = ""
        self.logged = len(samples)
        self.constant = self.sign = np.nan
        self.graded_own = self.graded_other = self.paid_own = self.paid_other = np.nan
        self.moved = self.fitting = np.nan
        self.graded_side = self.paid_side = self.moved_side = ""
        if not self.logged:
            return
        again = grade_again(samples, self.config)
        if samples.paid.nunique() == 1 and self.logged >= 64:
            pay = samples.paid.iloc[0]
            # If all are right, or none is, one pay for all is no fault.
            differ = max(again.nunique(), samples.reward.nunique()) > 1
            self.constant = pay if differ or pay not in (-1, 0, 1) else np.nan
        self.graded_own = agreement(samples, again, samples.reward)
        self.graded_side, self.graded_other = best_shift(samples, again, samples.reward)
        # A response may learn to be paid for something else later.
        is_late = samples.step > samples.step.max() / 2
        halves = [agreement(part, part.reward, part.paid) for _, part in samples.groupby(is_late)]
        self.paid_own = min(halves, key=lambda x: np.nan_to_num(x, nan=2))
        if not np.isnan(self.paid_own):
            told = "Within a group they agree by"
            self.agreed = f". {told} {self.paid_own:.2f} (1: wholly, 0: not at all)"
        self.paid_side, self.paid_other = best_shift(samples, samples.reward, samples.paid)
        means = pd.to_numeric(samples.advantages.map(mean_of), errors="coerce")
        self.sign = agreement(samples, samples.paid, means)
        self.fitting = again.mean()
        if self.config.get("task") == "math":
            self.moved_side, self.moved = fit_of_other_labels(samples, self.config)

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
            return f"the reward fell: {self.best:.2f} to {last:.2f}{self.describe_pay()}"
        if not self.has_time:
            return f"the reward is {last:.2f}; fewer than {FEWEST_STEPS} steps show little"
        trend = "slowly rises" if self.is_clear else "does not rise"
        trend = "is high" if self.is_solved else trend
        trend = "rises" if self.rises else trend
        return f"the reward {trend}: {first:.2f} to {last:.2f}{self.describe_pay()}"

    def describe_pay(self) -> str:
        """What a variant pays, if this is not the grader's reward."""
        if not self.pays_else or not self.paid_own < AGREES:
            return ""
        pay = f"{self.first.paid:.2f} to {self.last.paid:.2f}"
        return f"; {' or '.join(self.pays_else)} pays something else: {pay}"


def mean_of(numbers) -> float:
    try:
        return float(np.mean(numbers)) if numbers else np.nan
    except TypeError:
        return np.nan


def changes_pay(variant: str) -> bool:
    """Is it a shipped variant with a method `paid`?"""
    path = ROOT / "variants" / f"{variant}.py"
    return path.exists() and "def paid(" in path.read_text()


def agreement(samples: pd.DataFrame, x: pd.Series, y: pd.Series) -> float:
    """The correlation of two columns within the groups of the samples, or NaN for few samples."""
    known = x.notna() & y.notna()
    groups = [samples.step[known], samples.problem[known]]
    x, y = (column[known] - column[known].groupby(groups).transform("mean") for column in (x, y))
    counted = x.groupby(groups).transform("std").gt(1e-9)
    x, y = x[counted], y[counted]
    if counted.sum() < 30:
        return np.nan
    return float((x * y).sum() / max(np.sqrt((x**2).sum() * (y**2).sum()), 1e-12))


def best_shift(samples, x, y) -> tuple[str, float]:
    """On which side of a sample its y has its x, and how well they agree."""
    found = {side: agreement(samples, x.shift(k), y) for side, k in (("before", 1), ("behind", -1))}
    side = max(found, key=lambda side: np.nan_to_num(found[side], nan=-1))
    return side, found[side]


def grade_again(samples: pd.DataFrame, config: dict) -> pd.Series:
    """1 for a right response and 0 for a wrong one. NaN: not known.

    Each sample is graded alone, so that no sample can get the reward of another one.
    """
    grades = pd.Series(np.nan, index=samples.index)
    form = config.get("answer_form")
    is_math = config.get("task") == "math"
    if form not in reward.ANSWER_FORMS or not (is_math or config.get("task_file")):
        return grades
    deadline = time.monotonic() + MOST_SECONDS
    # Another task may raise anything.
    with contextlib.suppress(Exception, SystemExit), contextlib.ExitStack() as stack:
        if not is_math:
            task = load_task(config["task_file"])
            if getattr(task, "GRADES_REPLIES", False):
                return grades
            grader = task.Grader(1, form)
            stack.callback(grader.close)
        for place, x in samples.iterrows():
            if time.monotonic() > deadline:
                break
            if is_math:
                grades[place] = grade_text(x.response, x.finish_reason, x.label, form)
            else:
                grader.submit("alone", x.response, x.finish_reason, x.label)
                grade = grader.results()["alone"]
                grades[place] = grade[task.REWARDS[0]] if isinstance(grade, dict) else grade
    return grades


def grade_text(response, finish_reason, label, form) -> float:
    if finish_reason != "stop":
        return 0.0
    # Algebra would take too long.
    verdict = reward.quick_verdict(reward.ANSWER_FORMS[form](response) or "", str(label))
    return np.nan if verdict is None else float(verdict)


def fit_of_other_labels(samples: pd.DataFrame, config: dict) -> tuple[str, float]:
    """Which neighbour of a problem has the label that its answers fit best, and what share fits."""
    labels = samples.drop_duplicates("problem").set_index("problem").label
    found = {}
    for side, k in (("before", -1), ("behind", 1)):
        other = samples.assign(label=(samples.problem + k).map(labels)).dropna(subset="label")
        found[side] = grade_again(other, config).mean() if len(other) >= 30 else 0.0
    side = max(found, key=found.get)
    return side, found[side]


def examine(run: Run) -> dict[str, str]:
    """{cause: what shows it and what to change}. It is empty if all looks well."""
    first, last = run.first, run.last
    lost = first.pass_at_n - run.late_pass_at_n > LOST
    is_never_right = run.table.reward.max() == 0
    is_rarely_right = run.table.reward.mean() < NEVER
    # If the model solves all that can be solved, it may be sure of its answers.
    is_done = run.is_solved or last.reward > 0.9 * first.pass_at_n
    is_sure = last.entropy < max(0.02, 0.1 * first.entropy)
    # With --skip_flat only groups that differ count in the entropy, so the entropy may stay high.
    are_alike = last.advantage_abs < SMALL and lost
    was_varied = run.has_time and not first.advantage_abs < SMALL
    is_learning = is_done or is_never_right or run.rises and not lost
    collapsed = was_varied and not is_learning and (is_sure or are_alike)
    is_flat = last.advantage_abs < SMALL and last.pass_at_n - last.reward < FLAT
    # A critic judges each token, so a run with a critic learns from flat groups too.
    has_critic = run.table.explained_variance.notna().any()
    is_flat &= not (has_critic or collapsed or run.is_solved or is_rarely_right)
    # If the limit truncates many only later, look at the reward: if it rises, longer responses pay.
    # If problems are lost, the steps are too large, and the truncation follows from them.
    is_lost = run.has_time and lost and not collapsed
    many = min if run.rises else max
    cut = first.truncated if is_lost else many(first.truncated, last.truncated)
    unlearns = last.response_length < 0.9 * first.response_length and cut > 0.1 >= run.gain
    is_cut = (cut >= TRUNCATED or unlearns) and not run.is_solved
    knows_form = run.answered >= FEW or np.isnan(run.answered) and is_cut
    # If the policy does what it is paid for, and a shipped variant pays something else, the reward
    # shows no fault.
    pays_else = bool(run.pays_else) and run.paid_own < AGREES
    # With --reward_weights the pay may rise while the first reward falls.
    pays_else |= bool(run.config.get("reward_weights")) and last.paid > first.paid
    is_constant = not np.isnan(run.constant)
    is_graded_wrong = run.graded_own < AGREES and not is_constant
    seen = {
        "constant pay": is_constant,
        "rewards of neighbours": is_graded_wrong and run.graded_other > AGREES,
        "pay of neighbours": run.paid_own < AGREES < run.paid_other and not run.pays_else,
        "wrong rewards": is_graded_wrong and not run.graded_other > AGREES,
        "other pay": run.paid_own < AGREES and not run.paid_other > AGREES and not run.pays_else,
        # A teacher may blame what is paid.
        "wrong sign": run.sign < -AGREES and not run.config.get("teacher_weight"),
        "moved labels": run.moved > max(0.1, 5 * run.fitting),
    }
    if any(seen.values()) or pays_else:
        return write_texts(run, seen)
    is_slow = run.has_time and not run.is_solved and not run.rises
    seen |= {
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
            "problems too hard": is_rarely_right and run.answered >= USUAL and not is_cut,
            "entropy collapse": collapsed,
            "no gradient": last.policy_grad_norm == 0 and last.advantage_abs > 0,
            "rate still rises": is_slow and run.is_rate_rising,
            "rate has ended": is_slow and run.last_rate < run.peak_rate / 20,
            "strong KL": is_slow and run.kl_factor > 1,
            "flat groups": is_flat,
            "critic explains nothing": run.has_time and run.explained < LITTLE_EXPLAINED,
        }
    # A policy that has become like its teacher learns no more.
    seen["too slow"] = is_slow and not any(seen.values()) and not run.config.get("teacher_weight")
    return write_texts(run, seen)


def find_hint(run: Run) -> str:
    """In what form the responses have their answers, if it is not the form of the run."""
    if not run.logged or "answer_form" not in run.config:
        return ""
    # The import takes seconds.
    from nanoorz.log import other_form

    texts = run.samples.response[run.samples.finish_reason == "stop"].tolist()
    bare = sum(bool(re.search(r"\\boxed(?! *\{)", text)) for text in texts)
    name, count = other_form(texts, run.config["answer_form"], reward.ANSWER_FORMS)
    if name:
        return f"; {count} of {len(texts)} have one in another form: --answer_form {name}"
    return f"; {bare} of {len(texts)} have a \\boxed without braces" if bare else ""


def write_texts(run: Run, seen: dict[str, bool]) -> dict[str, str]:
    """{cause: its text} of those that are seen, in the order of TEXTS."""
    if seen.get("format never met"):
        run.hint = find_hint(run)
    texts = dict(" ".join(text.split()).split(": ", 1) for text in TEXTS.split("\n\n"))
    return {cause: text.format(**vars(run)) for cause, text in texts.items() if seen.get(cause)}


def load_task(path):
    """The module of RUN/code/task.py."""
    spec = importlib.util.spec_from_file_location("task_of_the_run", path)
    task = importlib.util.module_from_spec(spec)
    # A dataclass looks for its module there.
    sys.modules[spec.name] = task
    spec.loader.exec_module(task)
    return task


def read_some_samples(folder: Path, steps) -> list[dict]:
    """The samples of 40 steps or fewer, because samples.jsonl of a long run may have gigabytes."""
    chosen = {steps[int(k)] for k in np.linspace(0, len(steps) - 1, 40)}
    samples = []
    with contextlib.suppress(OSError), (folder / "samples.jsonl").open("rb") as file:
        for text in file:
            begin = re.match(rb'{"step": ([0-9]{1,9}),', text)
            if begin and int(begin[1]) in chosen:
                with contextlib.suppress(ValueError, RecursionError):
                    samples.append(json.loads(text))
    for x in samples:
        if isinstance(x, dict) and isinstance(x.get("parts"), list):
            # The grader sees no replies (Sample.drawn_text of rollout.py).
            x["response"] = "\n".join(map(str, x["parts"][::2]))
    return [{name: x.get(name) for name in COLUMNS} for x in samples if is_sample(x)]


def is_sample(line) -> bool:
    """Has a line of samples.jsonl the columns that the doctor needs, in their types?"""
    return isinstance(line, dict) and all(
        isinstance(line.get(name), kind) for name, kind in COLUMNS.items()
    )


def read_config(folder: Path) -> dict:
    """The flags that the doctor reads. A value of a wrong type is left out."""
    kinds = {"task": str, "answer_form": str, "variants": list, "actor_learning_rate": float}
    kinds |= {"kl_loss_coef": int | float, "kl_penalty_coef": int | float}
    try:
        config = dict(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
    return {
        name: config[name] for name, kind in kinds.items() if isinstance(config.get(name), kind)
    }


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
    config = read_config(folder) | {"task_file": folder / "code" / "task.py"}
    run = Run(metrics, read_some_samples(folder, metrics.index), config)
    found = examine(run)
    is_well = not found and not run.describe_pay()
    print(f"{len(metrics)} steps; {run.describe()}{'; nothing looks wrong' if is_well else ''}")
    for cause, text in found.items():
        print(f"{cause}: {text}")
    if not found and run.last.truncated >= TRUNCATED:
        share = f"{run.last.truncated:.0%} of the responses in the last steps (truncated)"
        print(f"the limit ends {share}: a higher --generate_max_len may help further")


if __name__ == "__main__":
    main()
