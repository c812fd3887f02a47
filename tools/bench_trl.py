"""TRL's GRPOTrainer beside train.py: the same model, prompts, sample count and lengths, no KL; every second sample
counts as right, so that no group is flat and neither side has less to train on.

bench.py's part `trl` imports this; `make bench` puts TRL into .venv/trl, on top of .venv's torch and transformers.
There this file runs as a script, with TRL generating by transformers: its colocated vLLM fails on a CPU.
"""
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRL = Path(os.environ.get("TRL_PYTHON", Path(sys.prefix) / "trl" / "bin" / "python"))


def alone() -> dict[str, str]:
    """The environment for a process that is not of this one's process group."""
    return {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def trl_seconds(model: str, data: str, prompts: int, samples: int, longest: int, parts: int, steps: int) -> list[float]:
    """In TRL's environment: seconds of each step, whose samples go through the model in `parts` micro-batches."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    seconds, questions = [], [json.loads(x)["question"] for x in Path(data).read_text().splitlines()]

    class Timer(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.begin = time.perf_counter()

        def on_step_end(self, *_, **__):
            seconds.append(time.perf_counter() - self.begin)

    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=prompts * samples // parts, max_steps=steps,
        gradient_accumulation_steps=parts, num_generations=samples, max_completion_length=longest, learning_rate=1e-9,
        temperature=1.0, beta=0.0, scale_rewards="group", use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to="none", save_strategy="no", logging_steps=10**6, disable_tqdm=True)
    trainer = GRPOTrainer(
        model=model, args=args, callbacks=[Timer()], train_dataset=Dataset.from_list(
            [{"prompt": f"{q}<think>"} for q in questions]),
        reward_funcs=lambda completions, **_: [k % 2.0 for k in range(len(completions))])
    trainer.train()
    return seconds


def ours(model: str, data: str, run_dir: str, prompts: int, samples: int, longest: int, rows: int, steps: int) -> list:
    """Each step's line of metrics.jsonl, of train.py with --estimator grpo."""
    flags = {
        "model": model, "data": data, "run_dir": run_dir, "template": "demo", "estimator": "grpo", "stop": "",
        "rollout_batch_size": prompts, "n_samples_per_prompt": samples, "max_steps": steps, "generate_max_len": longest,
        "prompt_max_len": 16, "max_len": longest + 16, "packing_max_len": longest + 16, "micro_train_batch_size": rows,
        "micro_rollout_batch_size": prompts * samples, "zero_stage": 0, "bf16": "false", "actor_learning_rate": 1e-9,
        "gradient_checkpointing": "false", "save_interval": 0, "log_with": "none", "eval_interval": 0}
    argv = [str(x) for name, value in flags.items() for x in (f"--{name}", value)]
    subprocess.run([sys.executable, __file__, "--ours", *argv], check=True, capture_output=True, env=alone())
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def compare(folder: str, name: str, model: str, prompts: int, samples: int, longest: int, rows: int) -> dict:
    """{"trl_vs_ours_NAME": (median, spread)} over three rounds of each in turn, each the median of steps 2 to 4."""
    data, ratios, best = f"{folder}/trl.jsonl", [], None
    Path(data).write_text("".join(json.dumps({"question": f"{a}+{b}", "answer": f"#### {a + b}"}) + "\n"
                                  for a in range(10, 26) for b in range(10, 26)))
    for k in range(3):
        lines = ours(model, data, f"{folder}/{name}{k}", prompts, samples, longest, rows, 4)
        mine = statistics.median(line["seconds"] for line in lines[1:])
        times = {}
        for parts in (1, 4) if best is None else (best,):  # its best setting, found in the first round
            argv = [TRL, __file__, model, data, *map(str, (prompts, samples, longest, parts, 4))]
            done = subprocess.run(argv, check=True, capture_output=True, text=True, env=alone())
            times[parts] = statistics.median(json.loads(done.stdout.splitlines()[-1])[1:])
        best = min(times, key=times.get)
        ratios.append(times[best] / mine)
    length = statistics.mean(line["response_length"] for line in lines)
    note = f"{min(ratios):.2f} to {max(ratios):.2f}; {mine:.1f} s a step of {prompts} x {samples} x {length:.0f} tokens"
    return {f"trl_vs_ours_{name}": (statistics.median(ratios), note)}


if __name__ == "__main__" and sys.argv[1] == "--ours":  # train.py with the flags behind it
    sys.path.insert(0, str(ROOT))
    import reward

    graded = reward.Grader.results
    reward.Grader.results = lambda self: {key: key % 2.0 for key in graded(self)}
    sys.argv[:2] = ["train.py"]
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
elif __name__ == "__main__":
    print(json.dumps(trl_seconds(*sys.argv[1:3], *map(int, sys.argv[3:]))))
