"""A GRPO step of TRL beside ours: `python studies/peers.py PYTHON`

PYTHON belongs to an environment with TRL: `python -m venv trl && trl/bin/pip install trl`. Both
sides have the same random model in fp32, prompts, numbers of samples and lengths, and no KL. A coin
is the reward. TRL samples by transformers, and we by vLLM. A round compares the medians of steps 2
to 4. The first of three rounds finds the best number of micro-batches for TRL.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if sys.argv[1:2] != ["trl"]:  # TRL's environment has no vLLM
    from tools import bench

# Size of the model, prompts, samples of each prompt, tokens of a response, our rows a micro-batch.
CASES = [("tiny", 64, 16, 48, 64), ("small", 4, 8, 96, 16)]


def our_flags(folder: str, size: str, prompts: int, samples: int, tokens: int, rows: int) -> str:
    return f"""{bench.RUN} {bench.FP32} --model {folder}/{size} --data {folder}/problems.jsonl
        --estimator grpo --rollout_batch_size {prompts} --n_samples_per_prompt {samples}
        --max_steps 4 --prompt_max_len 16 --generate_max_len {tokens} --max_len {tokens + 16}
        --packing_max_len {tokens + 16} --micro_train_batch_size {rows} --keep_last 0
        --micro_rollout_batch_size {prompts * samples} --actor_learning_rate 1e-9"""


def ours(*case) -> list[float]:
    with tempfile.TemporaryDirectory() as run:
        return [line["seconds"] for line in bench.train_steps(run, our_flags(*case))]


def trl(folder: str, size: str, prompts: int, samples: int, tokens: int, parts: int) -> list[float]:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    begins, ends = [], []

    class Timer(TrainerCallback):
        def on_step_begin(self, *_, **__):
            begins.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

    lines = Path(folder, "problems.jsonl").read_text().splitlines()
    settings = {"beta": 0.0, "scale_rewards": "group", "temperature": 1.0, "learning_rate": 1e-9}
    settings |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "max_steps": 4}
    settings |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    settings |= {"num_generations": samples, "max_completion_length": tokens}
    settings |= {"per_device_train_batch_size": prompts * samples // parts}
    trainer = GRPOTrainer(
        f"{folder}/{size}",
        lambda completions, **_: [k % 2.0 for k in range(len(completions))],
        GRPOConfig(folder, gradient_accumulation_steps=parts, **settings),
        Dataset.from_list([{"prompt": json.loads(line)["question"]} for line in lines]),
        callbacks=[Timer()],
    )
    trainer.train()
    return [end - begin for begin, end in zip(begins, ends)]


def median_of(python: str, *words) -> float:
    """Runs one side in a process of its own. Returns the median of the seconds of steps 2 to 4."""
    command = [python, __file__, *map(str, words)]
    output = subprocess.check_output(command, stderr=subprocess.DEVNULL)
    return sorted(json.loads(output.splitlines()[-1])[1:])[1]


def main():
    with tempfile.TemporaryDirectory() as folder:
        bench.write_problems(Path(folder, "problems.jsonl"))
        for size, prompts, samples, tokens, rows in CASES:
            bench.random_model(f"{folder}/{size}", size)
            case = (folder, size, prompts, samples, tokens)
            choices = (1, 2, 4)
            for _ in range(3):
                own = median_of(sys.executable, "ours", *case, rows)
                found = {parts: median_of(sys.argv[1], "trl", *case, parts) for parts in choices}
                choices = [min(found, key=found.get)]
                told = ", ".join(f"{parts}: {x:.2f} s" for parts, x in found.items())
                told += f"; ours {own:.2f} s, TRL / ours {min(found.values()) / own:.2f}"
                print(f"{size}: TRL by micro-batches {told}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] in ("ours", "trl"):
        side = {"ours": ours, "trl": trl}[sys.argv[1]]
        print(json.dumps(side(*sys.argv[2:4], *map(int, sys.argv[4:]))))
    else:
        main()
