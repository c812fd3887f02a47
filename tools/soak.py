"""Long runs of train.py with random models, killed or watched from outside. By hand, for hours.

    python tools/soak.py kills [--kills 50] [--seed 0]
    python tools/soak.py steps [--steps 40] [--starts 1] [--layers 14]

kills   Two ranks of a tiny model at ZeRO 3 save after every step. At a random instant SIGKILL ends
        one rank or both, mostly inside a save. Then the same command starts again. A published
        checkpoint must never be lost. The run must end with the logs and the weights of a run that
        nobody disturbed.
steps   A run of one rank of a model of 98 million parameters (of 14 layers), in one start or in
        several. Its processes are looked at four times a second. After a while their memory,
        threads and open files must not grow any more.

A line of JSON at the end has the figures. What went wrong is said behind it, and the exit code is
1 then. The folder of the runs is deleted if all went well.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

import ckpt  # noqa: E402
from tools import bench_gpu  # noqa: E402

# Every process of a run inherits this variable, wherever it stands in the process tree.
MARK = "NANOORZ_SOAK"
# Every second response counts as right, and is graded all the same.
FLAGS = {
    "task": ROOT / "tools" / "bench_task.py",
    "answer_form": "last_number",
    "template": "plain",
    "critic_updates": 2,
    "bf16": "false",
    "eval_interval": 0,
}
KILLS = FLAGS | bench_gpu.TINY_FLAGS | {"zero_stage": 3, "save_interval": 1, "keep_last": 3}
STEPS = FLAGS | {
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "prompt_max_len": 48,
    "generate_max_len": 400,
    "max_len": 448,
    "packing_max_len": 448,
    "micro_rollout_batch_size": 16,
    "kv_cache_gb": 0.5,
    # One word in a hundred of a random model has one of these: responses of 1 to 400 tokens.
    "stop": "bb cc dd",
    "zero_stage": 0,
    "keep_last": 1,
}
MODEL = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 16384,
}


# ---- runs ------------------------------------------------------------------------------------


def write_inputs(folder: Path, **model) -> dict:
    """The flags of a random model, and of problems whose answers need a grading process."""
    path = folder / "problems.jsonl"
    with path.open("w") as file:
        for k in range(200):
            problem = {"question": f"what is {k}+{k}?", "answer": rf"\sqrt{{{4 * k * k}}}"}
            file.write(json.dumps(problem) + "\n")
    return {
        "model": bench_gpu.make_model(str(folder / "model"), bench_gpu.SMALL, **model),
        "data": path,
    }


def start(folder: Path, flags: dict, **names: str) -> subprocess.Popen:
    """One rank of train.py. What it says is in a file of the folder, and TMPDIR is a folder there.

    names: variables of the environment.
    """
    words = []
    for name, value in flags.items():
        words += [f"--{name}", *str(value).split(" ")]
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    env = os.environ | {MARK: folder.name, "TMPDIR": str(temporary)} | names
    with (folder / f"rank{names.get('RANK', 0)}.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
        )


def strays(folder: Path) -> list[str]:
    """The processes of the folder's runs that live 10 s after the last run's end."""
    give_up = time.monotonic() + 10
    found = ["?"]
    while found and time.monotonic() < give_up:
        time.sleep(0.1)
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == folder.name:
                    found.append(" ".join(process.cmdline()))
    return found


def lines_of(run: Path, name: str) -> list[dict]:
    """The lines of a log, without what differs between two equal runs."""
    lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
    differ = ("seconds", "tokens_per_second", "memory")
    return [{key: line[key] for key in line if not key.startswith(differ)} for line in lines]


# ---- kills -----------------------------------------------------------------------------------


def start_ranks(folder: Path, flags: dict, port: int) -> list[subprocess.Popen]:
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    names |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [start(folder, flags, **names, RANK=rank, LOCAL_RANK=rank) for rank in "01"]


def newest_step(run: Path) -> int:
    """Of the complete checkpoints."""
    complete = [path for path in ckpt.checkpoints(run) if ckpt.manifest(path)]
    return max(map(ckpt.step_of, complete), default=0)


def wait_while(condition, ranks: list[subprocess.Popen]) -> None:
    """And while both ranks live."""
    while condition() and all(rank.poll() is None for rank in ranks):
        time.sleep(0.01)


def kill_once(folder: Path, flags: dict, port: int, rng: random.Random, found: dict) -> None:
    """Starts the run, kills one rank or both while it steps and saves, and counts what it sees."""
    run = flags["run_dir"]
    newest = newest_step(run)
    old = set(run.glob(".saving_*"))
    ranks = start_ranks(folder, flags, port)
    said = folder / "rank0.txt"
    wait_while(lambda: "ready after" not in said.read_text(), ranks)
    if f"from step {newest}, ready after" not in said.read_text():
        found["wrong starts"] += 1
    time.sleep(rng.uniform(0, 1.5))
    if rng.random() < 0.7:
        wait_while(lambda: not set(run.glob(".saving_*")) - old, ranks)
        time.sleep(rng.uniform(0, 0.05))
    seen = newest_step(run)
    for rank in rng.choice([ranks, ranks[:1], ranks[1:]]):
        rank.send_signal(signal.SIGKILL)
    for rank in ranks:
        try:
            rank.wait(60)
        except subprocess.TimeoutExpired:
            # A survivor must notice by itself.
            found["hung"] += 1
            rank.kill()
            rank.wait()
    if newest_step(run) < seen:
        found["lost"] += 1
    if set(run.glob(".saving_*")) - old:
        found["kills inside a save"] += 1
    found["published"] = newest_step(run)


def differences(one: Path, two: Path) -> list[str]:
    """The logs and the exported weights that are not the same in two runs."""
    logs = ("metrics.jsonl", "samples.jsonl")
    found = [name for name in logs if lines_of(one, name) != lines_of(two, name)]
    for path in two.glob("*/*.safetensors"):
        if path.read_bytes() != (one / path.relative_to(two)).read_bytes():
            found.append(str(path.relative_to(two)))
    return found


def kills(folder: Path, args) -> tuple[dict, list[str]]:
    rng = random.Random(args.seed)
    flags = KILLS | write_inputs(folder, **bench_gpu.TINY)
    flags |= {"run_dir": folder / "run", "max_steps": 10**6}
    found = {"kills": args.kills, "kills inside a save": 0, "published": 0}
    counts = {"lost": 0, "hung": 0, "wrong starts": 0}
    found |= counts
    # The port is bound for the whole time, so that nobody else is given it.
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        port = held.getsockname()[1]
        for number in range(args.kills):
            kill_once(folder, flags, port, rng, found)
            print(f"kill {number + 1}: {found}", flush=True)
        flags["max_steps"] = found["published"] + 3
        for name in ("run", "whole"):
            for rank in start_ranks(folder, flags | {"run_dir": folder / name}, port):
                if rank.wait() != 0:
                    return found, [f"the run {name} failed: see {folder}/rank0.txt"]
    wrong = [f"{found[name]} {name}" for name in counts if found[name]]
    wrong += [f"another {name}" for name in differences(folder / "run", folder / "whole")]
    return found, wrong


# ---- steps -----------------------------------------------------------------------------------


def watch(process: subprocess.Popen, run: Path) -> list[dict]:
    """What all processes of a run hold, four times a second until it ends."""
    main = psutil.Process(process.pid)
    looks = []
    while process.poll() is None:
        # A process may end between two of these questions.
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            family = [main, *main.children(recursive=True)]
            look = {
                "step": (run / "metrics.jsonl").read_bytes().count(b"\n") + 1,
                "processes": len(family),
                "gib": sum(process.memory_info().rss for process in family) / 2**30,
                "threads": sum(process.num_threads() for process in family),
                "open files": sum(process.num_fds() for process in family),
            }
            looks.append(look)
        time.sleep(0.25)
    return looks


def early_and_late(looks: list[dict], name: str, of, steps: int) -> list[float]:
    """The medians over the steps of the second eighth of a run, and of its last eighth.

    Of a step it is of(what was seen).
    """
    seen = defaultdict(list)
    for look in looks:
        seen[look["step"]].append(look[name])
    early = [of(seen[step]) for step in seen if steps / 8 < step <= steps / 4]
    late = [of(seen[step]) for step in seen if steps * 7 / 8 < step <= steps]
    return [statistics.median(early), statistics.median(late)]


def steps(folder: Path, args) -> tuple[dict, list[str]]:
    run = folder / "run"
    each = args.steps // args.starts
    flags = STEPS | write_inputs(folder, **MODEL, num_hidden_layers=args.layers)
    # The first save starts two threads that stay.
    flags |= {"run_dir": run, "save_interval": max(1, each // 8)}
    shared = set(Path("/dev/shm").iterdir())
    looks = []
    for begin in range(0, args.steps, each):
        process = start(folder, flags | {"max_steps": begin + each})
        seen = watch(process, run)
        if process.returncode != 0:
            return {}, [f"the run failed: see {folder}/rank0.txt"]
        # In its first step a start fills caches.
        looks += [look for look in seen if begin + 1 < look["step"] <= begin + each]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lengths = [sample["length"] for sample in lines_of(run, "samples.jsonl")]
    memory = {}
    for name, of in (("GiB that a step returns to", min), ("GiB at most in a step", max)):
        memory[name] = early_and_late(looks, "gib", of, args.steps)
    counts = {}
    for name in ("processes", "threads", "open files"):
        counts[name] = early_and_late(looks, name, statistics.median, args.steps)
    wrong = []
    for name, (early, late) in memory.items():
        if abs(late / early - 1) > 0.05:
            wrong.append(f"{name}: from {early:.3f} to {late:.3f}")
    # A grading process starts when it is first needed, with threads and files of its own.
    early, late = counts["processes"]
    if early == late:
        wrong += [f"{name} change: {pair}" for name, pair in counts.items() if len(set(pair)) > 1]
    if [line["step"] for line in lines] != list(range(1, args.steps + 1)):
        wrong.append("metrics.jsonl does not have each step once")
    wrong += [f"left in TMPDIR: {path}" for path in (folder / "tmp").iterdir()]
    found = memory | counts
    found["seconds"] = early_and_late(lines, "seconds", max, args.steps)
    found["lengths"] = [min(lengths), statistics.median(lengths), max(lengths)]
    for name in ("metrics.jsonl", "samples.jsonl"):
        found[f"bytes a step of {name}"] = (run / name).stat().st_size / args.steps
    # Other runs on this machine have files there too.
    found["new in /dev/shm"] = len(set(Path("/dev/shm").iterdir()) - shared)
    return found, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("kind", choices=["kills", "steps"])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--layers", type=int, default=14)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak_"))
    found, wrong = {"kills": kills, "steps": steps}[args.kind](folder, args)
    wrong += [f"still alive: {stray}" for stray in strays(folder)]
    print(json.dumps(found))
    for text in wrong:
        print(f"WRONG: {text}")
    if wrong:
        print(f"the runs are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
