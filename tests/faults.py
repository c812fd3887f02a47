"""Kills ranks at random instants with SIGKILL and looks at what is left; no part of the gate.

    python tests/faults.py --kills 50

Most kills hit two ranks that only step small engines and save with ckpt.py, so that most instants
are inside a save. The last five hit the whole train.py with two ranks. It ends with one JSON line:
kills, published checkpoints, how many of them were lost (gone, or incomplete), how many torn ones
were loaded, and whether the final parameters are those of a run that nobody disturbed.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from conftest import ROOT, SMALL, arguments, clean_environment, held_port

import ckpt

# It says where DeepSpeed's compiled op is.
import lib.models  # noqa: F401

TRAIN = str(ROOT / "train.py")


# ---- one rank that is killed ---------------------------------------------------------------------


def work(run: Path, until: int):
    """Resumes, steps, and saves after every step.

    Rank 0 notes each published step and the hash of its weights.
    """
    import torch
    import torch.distributed as dist

    from lib.common import start_distributed

    rank, world, _, _ = start_distributed()
    lock = ckpt.claim(run, 0)  # noqa: F841
    engine = make_engine()
    flags = {"zero_stage": 2, "lr_end": None}
    now = ckpt.RunState(total_steps=10**9, world=world, config=flags)
    path, state = ckpt.find_start(run, "auto", now, {})
    ckpt.restore(run, path, {"policy": engine}, state)
    if rank == 0:
        note(run / "loaded.txt", state.step, hash_of_weights(engine))
    for step in range(state.step, until):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, 256, generator=generator)  # (8, 256)
        engine.backward(engine(inputs).square().mean())
        engine.step()
        state.finish_step(run, {})
        error = ckpt.save(run, state, {"policy": engine}, [], keep_last=3)
        assert error is None, error
        if rank == 0:
            note(run / "published.txt", step + 1, hash_of_weights(engine))
    dist.barrier()


def make_engine():
    import deepspeed
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 256)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def hash_of_weights(engine) -> str:
    weights = [parameter.detach().numpy().tobytes() for parameter in engine.module.parameters()]
    return hashlib.sha256(b"".join(weights)).hexdigest()


def note(path: Path, step: int, digest: str):
    with path.open("a") as file:
        file.write(f"{step} {digest}\n")
        file.flush()
        os.fsync(file.fileno())


def notes(path: Path) -> list[tuple[int, str]]:
    """Without a line that a kill has cut."""
    lines = path.read_text().splitlines() if path.exists() else []
    words = [line.split() for line in lines]
    return [(int(step), digest) for step, digest in (pair for pair in words if len(pair) == 2)]


# ---- two ranks, and their ends -------------------------------------------------------------------


def start(command: list[str], port: str) -> list[subprocess.Popen]:
    """Two ranks of a script on this machine."""
    names = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env = clean_environment() | names
    ranks = []
    for rank in "01":
        ranks.append(
            subprocess.Popen(
                [sys.executable, *command],
                env=env | {"RANK": rank, "LOCAL_RANK": rank},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
    return ranks


def wait_while(condition, ranks: list[subprocess.Popen]):
    """And while both ranks live."""
    while condition() and all(process.poll() is None for process in ranks):
        time.sleep(0.02)


def kill(ranks: list[subprocess.Popen], rng: random.Random):
    """One rank or both; a survivor must notice by itself."""
    for process in rng.choice([ranks, ranks[:1], ranks[1:]]):
        process.send_signal(signal.SIGKILL)
    for process in ranks:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            print("a survivor hung", flush=True)
            process.kill()
            process.wait()


def finish(command: list[str], port: str):
    for process in start(command, port):
        assert process.wait(900) == 0


def engine_kills(folder: Path, kills: int, rng: random.Random, port: str) -> dict:
    """Kills during engines and saves alone."""
    run = folder / "run"
    worker = [__file__, "--worker"]
    lost = 0
    torn_loaded = 0
    for k in range(kills):
        loads = len(notes(run / "loaded.txt"))
        ranks = start([*worker, str(run), "100000"], port)
        wait_while(lambda loads=loads: len(notes(run / "loaded.txt")) == loads, ranks)
        time.sleep(rng.uniform(0, 1.5))
        kill(ranks, rng)
        published = dict(notes(run / "published.txt"))
        newest = newest_complete(run)
        if published and newest < max(published):
            lost += 1
        for step, digest in notes(run / "loaded.txt")[loads:]:
            if published.get(step, digest) != digest:
                torn_loaded += 1
        print(f"kill {k + 1}: newest {newest}", flush=True)
    published = dict(notes(run / "published.txt"))
    until = max(published, default=0) + 5
    ends = set()
    for name in ("run", "whole"):
        finish([*worker, str(folder / name), str(until)], port)
        ends.add(dict(notes(folder / name / "published.txt"))[until])
    return {
        "published": len(published),
        "lost": lost,
        "torn_loaded": torn_loaded,
        "bit_exact": len(ends) == 1,
    }


def newest_complete(run: Path) -> int:
    complete = [path for path in ckpt.checkpoints(run) if ckpt.manifest(path)]
    return max(map(ckpt.step_of, complete), default=0)


def train_kills(folder: Path, kills: int, rng: random.Random, port: str) -> bool:
    """Kills of the whole train.py with two ranks under ZeRO 3.

    Returns whether it ends like a run that nobody disturbed.
    """
    steps = 4 * kills
    flags = SMALL | write_model_and_problems(folder)
    flags |= {"max_steps": steps, "save_interval": 1, "zero_stage": 3}
    run = folder / "run"
    whole = folder / "whole"
    command = [TRAIN, *arguments(flags | {"run_dir": run})]
    for k in range(kills):
        before = newest_complete(run)
        ranks = start(command, port)
        wait_while(lambda before=before: newest_complete(run) == before, ranks)
        time.sleep(rng.uniform(0, 1.0))
        kill(ranks, rng)
        print(f"train.py kill {k + 1}: newest {newest_complete(run)}", flush=True)
    finish(command, port)
    finish([TRAIN, *arguments(flags | {"run_dir": whole})], port)
    shards = [path.relative_to(whole) for path in (whole / "policy").glob("*.safetensors")]
    same = [(run / path).read_bytes() == (whole / path).read_bytes() for path in shards]
    return all(same) and len(same) > 0 and newest_complete(run) == newest_complete(whole) == steps


def write_model_and_problems(folder: Path) -> dict:
    from tiny import make_model

    problems = []
    for a in range(10, 16):
        for b in range(10, 16):
            answer = {"from": "assistant", "ground_truth": {"value": str(a + b)}}
            problems.append([{"from": "human", "value": f"{a}+{b}"}, answer])
    path = folder / "train.json"
    path.write_text(json.dumps(problems))
    return {"model": make_model(folder / "model"), "data": path}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--train_kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", nargs=2)
    args = parser.parse_args()
    if args.worker:
        run, until = args.worker
        return work(Path(run), int(until))
    rng = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp())
    (folder / "train").mkdir()
    with held_port() as port:
        result = engine_kills(folder, args.kills - args.train_kills, rng, port)
        if args.train_kills:
            result["bit_exact"] &= train_kills(folder / "train", args.train_kills, rng, port)
    shutil.rmtree(folder)
    print(json.dumps({"kills": args.kills} | result))


if __name__ == "__main__":
    main()
