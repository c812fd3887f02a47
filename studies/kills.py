"""Kills a run at random instants: `python studies/kills.py RANKS KILLS`

A run of a random model saves after each step. SIGKILL ends all ranks or one, mostly inside a save,
and the same command resumes. An assertion fails if a finished checkpoint is lost, if a rank hangs,
or if logs or weights at the end differ in a bit from those of a run that nothing disturbed.
"""

import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ckpt
from tools import bench

FLAGS = f"{bench.STEP} {bench.ON_CPU} {bench.FP32} --estimator gae --generate_max_len 16"
FLAGS += " --max_len 96 --save_interval 1 --keep_last 3 --zero_stage"


def start(folder: Path, run: str, steps: int, count: int, port: int) -> list[subprocess.Popen]:
    """Starts a process for each rank. Rank 0 prints to RUN_0.txt."""
    flags = f"{FLAGS} {3 if count > 1 else 0} --model {folder}/model --max_steps {steps}"
    flags += f" --data {folder}/problems.jsonl --run_dir {folder}/{run}"
    command = [sys.executable, bench.ROOT / "train.py", *shlex.split(flags)]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks = []
    for rank in map(str, range(count)):
        with (folder / f"{run}_{rank}.txt").open("w") as output:
            env |= {"RANK": rank, "LOCAL_RANK": rank}
            ranks.append(subprocess.Popen(command, stdout=output, stderr=output, env=env))
    return ranks


def newest_step(run: Path) -> int:
    return max(map(ckpt.step_of, filter(ckpt.read_manifest, ckpt.checkpoints(run))), default=0)


def wait_until(condition, ranks: list[subprocess.Popen]):
    while not condition():
        time.sleep(0.005)
        assert all(rank.poll() is None for rank in ranks), "a rank has ended, see run_0.txt"


def kill_once(folder: Path, count: int, port: int) -> bool:
    """Starts the run and kills it. Returns whether the kill left an unfinished checkpoint."""
    run = folder / "run"
    begin = newest_step(run)
    old = set(run.glob(".saving_*"))
    ranks = start(folder, "run", 10**6, count, port)
    wait_until(lambda: newest_step(run) > begin, ranks)
    time.sleep(random.uniform(0, 10))
    if random.random() < 0.7:
        wait_until(lambda: set(run.glob(".saving_*")) - old, ranks)
        time.sleep(random.uniform(0, 0.05))
    seen = newest_step(run)
    for rank in random.choice([ranks, ranks[:1], ranks[-1:]]):
        rank.send_signal(signal.SIGKILL)
    for rank in ranks:
        rank.wait(120)  # the rank that was not killed notices that the other one is gone
    assert newest_step(run) >= seen, f"step {seen} of {run} is lost"
    return bool(set(run.glob(".saving_*")) - old)


def results(run: Path) -> list:
    """The lines of the logs, without times and memory, and the bytes of the exported weights."""
    text = (run / "metrics.jsonl").read_text() + (run / "samples.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    timed = ("seconds", "tokens_per_second", "memory")
    lines = [{k: line[k] for k in line if not k.startswith(timed)} for line in lines]
    return lines + [(run / x / "model.safetensors").read_bytes() for x in ("policy", "critic")]


def main():
    count, kills, folder = *map(int, sys.argv[1:]), Path(tempfile.mkdtemp(prefix="kills_"))
    bench.random_model(str(folder / "model"), "tiny")
    bench.write_problems(folder / "problems.jsonl")
    with socket.socket() as held:  # no other program gets this port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        port = held.getsockname()[1]
        inside = sum(kill_once(folder, count, port) for _ in range(kills))
        steps = newest_step(folder / "run")
        for run in ("run", "undisturbed"):
            codes = [rank.wait() for rank in start(folder, run, steps + 3, count, port)]
            assert not any(codes), f"see {folder}/{run}_0.txt"
    assert results(folder / "run") == results(folder / "undisturbed"), f"see {folder}"
    print(f"{kills} kills, {inside} inside a save, {steps} checkpoints: none lost, equal end")


if __name__ == "__main__":
    main()
