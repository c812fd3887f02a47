"""What bench.py's part `trl` starts for the other side: GRPO steps of TRL's GRPOTrainer.

    .venv/trl/bin/python tools/bench_trl.py MODEL DATA PROMPTS SAMPLES LONGEST PARTS

It has the model, prompts, number of samples and lengths of train.py's steps, and no KL. Every
second sample counts as right, as in bench_task.py, so that no group is flat and neither side has
less to train on. `make bench` puts TRL into .venv/trl, on top of .venv's torch and transformers.
TRL samples by transformers, because its vLLM in the same process fails on a CPU.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

SETTINGS = {
    "max_steps": 4,
    "learning_rate": 1e-9,
    "temperature": 1.0,
    "beta": 0.0,
    "scale_rewards": "group",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 10**6,
    "disable_tqdm": True,
}


def trl(model: str, data: str, prompts: int, samples: int, longest: int, parts: int) -> list[float]:
    """Seconds of each step, whose samples go through the model in `parts` micro-batches."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    seconds = []

    class Timer(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.begin = time.perf_counter()

        def on_step_end(self, *_, **__):
            seconds.append(time.perf_counter() - self.begin)

    records = []
    for line in Path(data).read_text().splitlines():
        records.append({"prompt": json.loads(line)["question"] + "<think>"})
    sizes = {
        "per_device_train_batch_size": prompts * samples // parts,
        "gradient_accumulation_steps": parts,
        "num_generations": samples,
        "max_completion_length": longest,
    }
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(output_dir=tempfile.mkdtemp(), **SETTINGS, **sizes),
        callbacks=[Timer()],
        train_dataset=Dataset.from_list(records),
        reward_funcs=every_second,
    )
    trainer.train()
    return seconds


def every_second(completions: list, **_) -> list[float]:
    return [k % 2.0 for k in range(len(completions))]


if __name__ == "__main__":
    model, data, *sizes = sys.argv[1:]
    print(json.dumps(trl(model, data, *map(int, sizes))))
