"""Makes sick and healthy runs, and writes their numbers into tests/doctor_runs.

`python tests/sick_runs.py FOLDER [NAME ...]` trains FOLDER/NAME: all runs, or those named. A run
whose name starts with "laboratory" or "chain" is one of that model, all others are of the demo.
"""

import json
import shlex
import shutil
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from statistics import mean

from conftest import ROOT, run_python, unpack

RECORDED = ROOT / "tests" / "doctor_runs"
SICK = ROOT / "tests" / "sick"
GRPO = ["--estimator", "grpo"]
SHARP = ["--temperature", "0.3", "--actor_learning_rate", "1e-3"]
# The flags behind those of the demo or of the laboratory, which decide what a run is ill with.
RUNS = {
    "ppo": [],
    "grpo": GRPO,
    # Fifteen of sixteen problems get an impossible answer.
    "flat_groups": [*GRPO, "--data", "hard.json"],
    # All problems do.
    "problems_too_hard": [*GRPO, "--data", "impossible.json"],
    # These stop strings often end a response inside its answer.
    "form_often_missed": [*GRPO, "--stop", "3", "7"],
    # A worked answer has 24 tokens and a guess 9.
    "truncated_answers": [*GRPO, "--generate_max_len", "16"],
    # The tag that opens the answer stands in the prompt, so no response holds it.
    "format_never_met": [*GRPO, "--template", "{question}<think></think><answer>"],
    # The demo's rate is 3e-4.
    "steps_too_large": [*GRPO, "--actor_learning_rate", "3e-3"],
    "too_slow": [*GRPO, "--actor_learning_rate", "3e-5"],
    "stale_sampler": [*GRPO, "--variant", "log_ratio"],
    "entropy_collapse": [*GRPO, "--template", "{question}<think></think>", *SHARP],
    # A thousand times the demo's.
    "critic_explains_nothing": ["--critic_learning_rate", "1"],
    # No response has an answer behind ####. The limit truncates seven of ten responses.
    "wrong_answer_form": [*GRPO, "--answer_form", "hashes", "--generate_max_len", "8"],
    # The next three were named wrongly: too slow, too slow, steps too large.
    "pays_constant": [*GRPO, "--task", SICK / "pays_constant.py"],
    "warmup_never_ends": [*GRPO, "--warmup_updates", "2000"],
    "pays_neighbour": [*GRPO, "--task", SICK / "pays_neighbour.py"],
    # These were written down before the doctor knew them.
    "paid_neighbour": [*GRPO, "--variant", SICK / "paid_neighbour.py"],
    "paid_for_length": [*GRPO, "--variant", SICK / "paid_for_length.py"],
    "wrong_sign": [*GRPO, "--variant", SICK / "wrong_sign.py"],
    "no_gradient": [*GRPO, "--variant", SICK / "no_gradient.py"],
    "rate_ends": [*GRPO, "--variant", SICK / "rate_ends.py"],
    "kl_too_strong": [*GRPO, "--variant", "kl_loss", "--kl_loss_coef", "100"],
    # Each problem has the label of the problem before it.
    "moved_labels": [*GRPO, "--data", "moved.json"],
    "laboratory": [],
    # A hundred times the laboratory's.
    "laboratory_large_steps": ["--actor_learning_rate", "2e-2"],
    "laboratory_neighbour": ["--task", SICK / "countdown_neighbour.py"],
    "laboratory_paid_neighbour": ["--variant", SICK / "paid_neighbour.py"],
    # Healthy runs in which the pay rightly differs from the reward.
    "laboratory_overlong": [*GRPO, "--variant", "overlong_penalty", "--overlong_cache", "14"],
    "laboratory_format": [*GRPO, "--variant", "format_reward"],
    "laboratory_kl_penalty": ["--variant", "kl_penalty", "--kl_penalty_coef", "0.1"],
    "chain": [*GRPO, "--max_steps", "105"],
    # A step of the chains has 16 samples.
    "chain_broken_policy": ["--lambd", "0.95", "--actor_learning_rate", "8e-4"],
    "chain_broken_and_alike": [*GRPO, "--max_steps", "105", "--actor_learning_rate", "16e-4"],
}
NUMBERS = ["step", "reward", "pass_at_n", "answered", "truncated", "response_length"]
NUMBERS += ["total_length", "entropy", "explained_variance", "approx_kl", "policy_tokens"]
NUMBERS += ["reward_lost", "seconds", "tokens_per_second", "paid", "policy_lr", "policy_grad_norm"]
TEXTS = ["step", "problem", "label", "response", "finish_reason", "reward", "paid"]
FLAGS = [
    "task",
    "answer_form",
    "variants",
    "actor_learning_rate",
    "kl_loss_coef",
    "kl_penalty_coef",
]
# The samples of all runs. The runs without samples are older.
SAMPLES = RECORDED / "samples.tar.xz"


def main(folder: str, *names: str) -> None:
    folder = Path(folder).absolute()
    for task, seed in (("addition", 42), ("countdown", 1), ("chain", 1)):
        tool = ROOT / "tools/base_model.py"
        run_python(tool, task, folder / task, "--seed", seed, timeout=None)
    problems = json.loads((folder / "addition/train.json").read_text())
    for name, easy in (("hard", problems[::16]), ("impossible", [])):
        changed = [x if x in easy else x | {"answer": int(x["answer"]) + 50} for x in problems]
        (folder / f"{name}.json").write_text(json.dumps(changed))
    labels = [problem["answer"] for problem in problems]
    moved = [x | {"answer": label} for x, label in zip(problems, labels[-1:] + labels)]
    (folder / "moved.json").write_text(json.dumps(moved))
    for name in names or RUNS:
        if name.startswith(("laboratory", "chain")):
            base = folder / ("chain" if name.startswith("chain") else "countdown")
            flags = [*shlex.split((base / "flags.txt").read_text()), "--seed", 1]
        else:
            shutil.copytree(folder / "addition", folder / name / "base")
            flags = []
        script = "tests/changed_train.py" if name == "stale_sampler" else "train.py"
        # Evaluations are left out.
        flags += ["--eval_interval", "0", *RUNS[name], "--run_dir", folder / name]
        # One thread, as under accelerate launch. Relative paths are those of FOLDER.
        env = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "CHANGE": "stop_syncs",
            "SYNCS": "4",
        }
        run_python(ROOT / script, *flags, cwd=folder, env=env, timeout=None)
        record(folder / name, RECORDED / name)
    pack_samples()


def pack_samples() -> None:
    """Moves the samples of the recorded runs into one archive, beside those that are in it."""
    with tempfile.TemporaryDirectory() as place:
        if SAMPLES.exists():
            unpack(SAMPLES, place)
        for path in RECORDED.glob("*/samples.jsonl"):
            target = Path(place, path.parent.name, path.name)
            target.parent.mkdir(exist_ok=True)
            shutil.move(path, target)
        with tarfile.open(SAMPLES, "w:xz") as archive:
            for folder in sorted(Path(place).iterdir()):
                archive.add(folder, folder.name)


def record(run: Path, place: Path) -> None:
    """Writes what the doctor reads: numbers, flags, and 64 samples of each step."""
    place.mkdir(parents=True, exist_ok=True)
    config = json.loads((run / "config.json").read_text())
    flags = {name: config[name] for name in FLAGS if name in config}
    # A path is one of this machine.
    flags["task"] = Path(flags["task"]).name
    (place / "config.json").write_text(json.dumps(flags))
    counts = Counter()
    with (place / "samples.jsonl").open("w") as file:
        for text in (run / "samples.jsonl").read_text().splitlines():
            line = json.loads(text)
            counts[line["step"]] += 1
            # Labels are compared with those of neighbours, which few samples have.
            if counts[line["step"]] <= (256 if place.name == "moved_labels" else 64):
                kept = {name: line[name] for name in TEXTS}
                if line.get("advantages"):
                    kept["advantages"] = [round(mean(line["advantages"]), 3)]
                file.write(json.dumps(kept) + "\n")
    with (place / "metrics.jsonl").open("w") as file:
        for text in (run / "metrics.jsonl").read_text().splitlines():
            line = json.loads(text, parse_float=lambda x: float(f"{float(x):.4g}"))
            numbers = {key: value for key, value in line.items() if key in NUMBERS}
            file.write(json.dumps(numbers) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
