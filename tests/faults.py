"""Kills -9 ranks at random instants and looks at what is left: `python tests/faults.py --kills 50`. Outside the gate.

Most kills hit two ranks that only step small engines and save with ckpt.py, so that most instants are inside a save;
the last five hit the whole train.py with two ranks. Ends with one JSON line: kills, published checkpoints, how many of
them were lost (gone, or incomplete), how many torn ones were loaded, and whether the final parameters are those of a
run that nobody disturbed.
"""
import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import ckpt

ROOT = Path(__file__).parent.parent


def work(run: Path, until: int) -> None:
    """One rank: resume, step, save after every step; rank 0 notes each published step and the hash of its weights."""
    import deepspeed
    import torch
    import torch.distributed as dist

    import rollout

    rank, *_ = rollout.start_distributed()
    lock = ckpt.preflight(run, 0)  # noqa: F841
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}})[0]

    def digest() -> str:
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()

    start, path = 0, ckpt.newest(run, "auto")
    if path:
        ckpt.load(path, [("policy", engine)])
        start = json.loads((path / "state.json").read_text())["step"]
    if rank == 0:
        ckpt.rewind(run, start, {})
        note(run / "loaded.txt", start, digest())
    for step in range(start, until):
        inputs = torch.randn(8, 256, generator=torch.Generator().manual_seed(step))  # (8, 256)
        engine.backward(engine(inputs).square().mean())
        engine.step()
        error = ckpt.save(run, step + 1, [("policy", engine)], {"step": step + 1}, [], keep_last=3)
        assert error is None, error
        if rank == 0:
            note(run / "published.txt", step + 1, digest())
    dist.barrier()


def note(path: Path, step: int, digest: str) -> None:
    with path.open("a") as file:
        file.write(f"{step} {digest}\n")
        file.flush()
        os.fsync(file.fileno())


def notes(path: Path) -> list[tuple[int, str]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(line.split()[0]), line.split()[1]) for line in lines if len(line.split()) == 2]


def start(command: list[str]) -> list[subprocess.Popen]:
    """Two ranks of a script on this machine."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [subprocess.Popen([sys.executable, *command], env=env | {"RANK": rank, "LOCAL_RANK": rank},
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for rank in "01"]


def kill(ranks: list[subprocess.Popen], rng: random.Random) -> None:
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


def engine_kills(folder: Path, kills: int, rng: random.Random) -> dict:
    """Kills during engines and saves alone."""
    run, counts = folder / "run", {"published": 0, "lost": 0, "torn_loaded": 0}
    worker = [__file__, "--worker"]
    for k in range(kills):
        loads, ranks = len(notes(run / "loaded.txt")), start([*worker, str(run), "100000"])
        while len(notes(run / "loaded.txt")) == loads and all(p.poll() is None for p in ranks):
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 1.5))
        kill(ranks, rng)
        published, loaded = dict(notes(run / "published.txt")), notes(run / "loaded.txt")
        complete = [ckpt.step_of(p) for p in ckpt.checkpoints(run) if ckpt.manifest(p)]
        if published and max(complete, default=0) < max(published):
            counts["lost"] += 1
        counts["torn_loaded"] += sum(published.get(step, digest) != digest for step, digest in loaded[loads:])
        print(f"kill {k + 1}: newest {max(complete, default=0)}", flush=True)
    until = max([step for step, _ in notes(run / "published.txt")], default=0) + 5
    for name in ("run", "whole"):
        for process in start([*worker, str(folder / name), str(until)]):
            assert process.wait(600) == 0
    ends = [dict(notes(folder / name / "published.txt"))[until] for name in ("run", "whole")]
    return counts | {"published": len(dict(notes(run / "published.txt"))), "bit_exact": ends[0] == ends[1]}


def train_kills(folder: Path, kills: int, rng: random.Random) -> bool:
    """Kills of the whole train.py with two ranks under ZeRO 3; True if the end equals an undisturbed run's."""
    from conftest import SMALL
    from tiny import make_model

    pairs = [(a, b) for a in range(10, 16) for b in range(10, 16)]
    items = [[{"from": "human", "value": f"{a}+{b}"}, {"from": "assistant", "ground_truth": {"value": str(a + b)}}]
             for a, b in pairs]
    (folder / "train.json").write_text(json.dumps(items))
    flags = SMALL | {"model": make_model(folder / "model"), "data": folder / "train.json", "max_steps": 4 * kills,
                     "save_interval": 1, "zero_stage": 3}
    for name in ("run", "whole"):
        argv = [str(x) for key, value in (flags | {"run_dir": folder / name}).items() for x in (f"--{key}", value)]
        for k in range(kills if name == "run" else 0):
            before, ranks = ckpt.checkpoints(folder / name)[:1], start([str(ROOT / "train.py"), *argv])
            while ckpt.checkpoints(folder / name)[:1] == before and all(p.poll() is None for p in ranks):
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 1.0))
            kill(ranks, rng)
            print(f"train.py kill {k + 1}: newest {ckpt.checkpoints(folder / name)[:1]}", flush=True)
        for process in start([str(ROOT / "train.py"), *argv]):
            assert process.wait(900) == 0
    last = f"step_{4 * kills:06d}"
    shards = [p.relative_to(folder / "whole") for p in (folder / "whole" / "policy").glob("*.safetensors")]
    same = all((folder / "run" / p).read_bytes() == (folder / "whole" / p).read_bytes() for p in shards)
    return same and all((folder / name / last).is_dir() for name in ("run", "whole"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--train_kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", nargs=2)
    args = parser.parse_args()
    if args.worker:
        return work(Path(args.worker[0]), int(args.worker[1]))
    folder, rng = Path(tempfile.mkdtemp()), random.Random(args.seed)
    result = engine_kills(folder, args.kills - args.train_kills, rng)
    (folder / "whole_train").mkdir()
    result["bit_exact"] &= train_kills(folder / "whole_train", args.train_kills, rng) if args.train_kills else True
    shutil.rmtree(folder)
    print(json.dumps({"kills": args.kills} | result))
    return None


if __name__ == "__main__":
    main()
