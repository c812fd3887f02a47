"""The other side of bench.py's part `trl`: prints the seconds of four GRPO steps of TRL.

    .venv/trl/bin/python tools/bench_trl.py MODEL DATA PROMPTS SAMPLES LIMIT PARTS

TRL gets the model, the prompts, the number of samples and the limit of train.py's steps. A coin is
the reward on both sides. The samples go through the model in PARTS micro-batches. TRL draws them by
transformers, because its vLLM in the same process fails on a CPU.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SETTINGS = {"max_steps": 4, "learning_rate": 1e-9, "beta": 0.0, "scale_rewards": "group"}
SETTINGS |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
SETTINGS |= {"temperature": 1.0, "report_to": "none", "save_strategy": "no"}
SETTINGS |= {"logging_steps": 10**6, "disable_tqdm": True}


class Timer(TrainerCallback):
    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *_, **__):
        self.begin = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.begin)


def coins(completions: list, **_) -> list[float]:
    return [float(random.random() < 0.5) for _ in completions]


def main(model: str, data: str, prompts: int, samples: int, limit: int, parts: int) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    lines = Path(data).read_text().splitlines()
    questions = [{"prompt": json.loads(line)["question"] + "<think>"} for line in lines]
    sizes = {
        "per_device_train_batch_size": prompts * samples // parts,
        "gradient_accumulation_steps": parts,
        "num_generations": samples,
        "max_completion_length": limit,
    }
    timer = Timer()
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(output_dir=tempfile.mkdtemp(), **SETTINGS, **sizes),
        callbacks=[timer],
        train_dataset=Dataset.from_list(questions),
        reward_funcs=coins,
    )
    trainer.train()
    print(json.dumps(timer.seconds))


if __name__ == "__main__":
    model, data, *sizes = sys.argv[1:]
    main(model, data, *map(int, sizes))
