"""Makes sick and healthy runs of the demo, and writes their numbers into tests/doctor_runs.

`python tests/sick_runs.py FOLDER [NAME ...]` trains FOLDER/NAME: all runs, or those named.
"""

import json
import shutil
import sys
from pathlib import Path

from conftest import ROOT, run_python

RECORDED = ROOT / "tests" / "doctor_runs"
GRPO = ["--estimator", "grpo"]
SHARP = ["--temperature", "0.3", "--actor_learning_rate", "1e-3"]
# The flags behind those of the demo, which decide what a run is ill with.
RUNS = {
    "ppo": [],
    "grpo": GRPO,
    # Fifteen of sixteen problems get an impossible answer.
    "flat_groups": [*GRPO, "--data", "hard.json"],
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
}
NUMBERS = ["step", "reward", "pass_at_n", "truncated", "response_length", "total_length", "entropy"]
NUMBERS += ["explained_variance", "approx_kl", "policy_tokens", "reward_lost", "seconds"]
NUMBERS += ["tokens_per_second"]


def main(folder: str, *names: str) -> None:
    folder = Path(folder).absolute()
    base = folder / "base"
    run_python(ROOT / "tools/base_model.py", "addition", base, "--seed", 42, timeout=None)
    problems = json.loads((base / "train.json").read_text())
    for number, problem in enumerate(problems):
        if number % 16:
            problem["answer"] = str(int(problem["answer"]) + 50)
    (folder / "hard.json").write_text(json.dumps(problems))
    for name in names or RUNS:
        run = folder / name
        shutil.copytree(base, run / "base")
        script = "tests/stale_train.py" if name == "stale_sampler" else "train.py"
        # Evaluations and logs are left out.
        flags = ["--eval_interval", "0", *RUNS[name], "--run_dir", run]
        # One thread, as under accelerate launch. Relative paths are those of FOLDER.
        env = {"OMP_NUM_THREADS": "1"}
        run_python(ROOT / script, *flags, cwd=folder, env=env, timeout=None)
        (RECORDED / name).mkdir(parents=True, exist_ok=True)
        with (RECORDED / name / "metrics.jsonl").open("w") as file:
            for text in (run / "metrics.jsonl").read_text().splitlines():
                line = json.loads(text, parse_float=lambda x: float(f"{float(x):.4g}"))
                numbers = {key: value for key, value in line.items() if key in NUMBERS}
                file.write(json.dumps(numbers) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
