"""Runs are killed at random instants: no checkpoint is lost, and the end is the same to the bit.

A run of a random model saves after each step. SIGKILL ends all ranks or one, mostly inside a save,
and the same command resumes. For more kills: `KILLS=25 pytest -m slow -o faulthandler_timeout=0`.
"""

import os
import random
import shlex
import signal
import time

import pytest
from conftest import ROOT, equal_runs, held_port, start_python, wait_until

import ckpt
from tools import bench

FLAGS = f"{bench.STEP} {bench.ON_CPU} {bench.FP32} --estimator gae --generate_max_len 16"
FLAGS += " --max_len 96 --save_interval 1 --keep_last 3 --eval_interval 2"
KILLS = int(os.environ.get("KILLS", "3"))


class Killed:
    """A run of several ranks that is killed and started again."""

    def __init__(self, folder, ranks, port):
        self.folder = folder
        self.run = folder / "run"
        self.ranks = ranks
        self.port = port

    def start(self, name, steps):
        """Starts a process for each rank. Each of them prints to NAME_RANK.txt."""
        flags = f"{FLAGS} --zero_stage {3 if self.ranks > 1 else 0} --model {self.folder}/model"
        problems = f"{self.folder}/problems.jsonl"
        flags += f" --data {problems} --eval_data {problems} --run_dir {self.folder}/{name}"
        words = [ROOT / "train.py", *shlex.split(flags), "--max_steps", steps]
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        env |= {"WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks)}
        for rank in map(str, range(self.ranks)):
            output = self.folder / f"{name}_{rank}.txt"
            yield start_python(*words, output=output, env=env | {"RANK": rank, "LOCAL_RANK": rank})

    def newest(self):
        return max(map(ckpt.step_of, ckpt.checkpoints(self.run)), default=0)

    def kill_once(self, rng):
        """Starts the run and kills it."""
        begin = self.newest()
        processes = list(self.start("run", 10**6))
        wait_until(lambda: self.newest() > begin, processes[0])
        time.sleep(rng.uniform(0, 3))
        if rng.random() < 0.7:
            wait_until(lambda: list(self.run.glob(".saving_*")), processes[0])
            time.sleep(rng.uniform(0, 0.05))
        seen = self.newest()
        for process in rng.choice([processes, processes[:1], processes[-1:]]):
            process.send_signal(signal.SIGKILL)
        # A rank that was not killed notices that the other one is gone.
        for process in processes:
            process.wait(300)
        assert self.newest() >= seen, f"step {seen} of {self.run} is lost"
        return bool(list(self.run.glob(".saving_*")))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_kill_loses_a_checkpoint(tmp_path, ranks):
    bench.random_model(str(tmp_path / "model"))
    bench.write_problems(tmp_path / "problems.jsonl")
    rng = random.Random()
    with held_port() as port:
        killed = Killed(tmp_path, ranks, port)
        inside = sum(killed.kill_once(rng) for _ in range(KILLS))
        steps = killed.newest() + 3
        for name in ("run", "undisturbed"):
            for process in list(killed.start(name, steps)):
                assert process.wait() == 0, f"see {tmp_path}/{name}_0.txt"
    print(f"{KILLS} kills, {inside} inside a save, {steps} steps")
    equal_runs(tmp_path / "undisturbed", tmp_path / "run")
