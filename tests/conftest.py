"""Shared by the tests: a tiny model, problems, and one way to launch the real train.py."""
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))  # as rollout.py does

SMALL = {  # the sizes of a whole run that takes seconds
    "template": "demo", "rollout_batch_size": 4, "n_samples_per_prompt": 4, "critic_update_steps": 2, "max_steps": 3,
    "prompt_max_len": 16, "generate_max_len": 32, "max_len": 64, "packing_max_len": 64, "micro_train_batch_size": 4,
    "micro_rollout_batch_size": 32, "kv_cache_gb": 0.25, "stop": "", "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-3, "num_warmup_steps": 2, "zero_stage": 0, "bf16": "false",
    "gradient_checkpointing": "false", "eval_interval": 0, "zero3_persistence_threshold": 0}


ACCELERATE = ["-m", "accelerate.commands.accelerate_cli", "launch"]


LONGEST_FIRST = ["resume", "two_machines", "ckpt", "train", "ppo", "reward", "levers"]


def pytest_collection_modifyitems(items):
    """Files are dealt to two processes in this order: a long one at the end would leave one of them idle."""
    rank = {f"test_{name}": k for k, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def launch(run_dir, ranks: int = 1, timeout: float = 300, check: bool = True, env=None, **flags):
    """train.py with SMALL sizes, changed by flags (a list becomes several values); several ranks by accelerate, which
    one rank is spared: it does nothing there but import itself for 5 s (test_trainer_does_not_outlive... has it)."""
    launcher = [*ACCELERATE, "--use_deepspeed", "--num_processes", str(ranks), "--num_machines", "1",
                "--main_process_port", "0"]  # a free one: other tests launch at the same time
    command = [sys.executable, *(launcher if ranks > 1 else []), str(ROOT / "train.py")]
    for name, value in (SMALL | flags | {"run_dir": str(run_dir)}).items():
        command += [f"--{name}", *(map(str, value) if isinstance(value, (list, tuple)) else [str(value)])]
    env = clean_environment() | (env or {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=env)
    if check:
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


@contextlib.contextmanager
def held_port():
    """A port for a rendezvous that starts much later: bound, so that nobody else is given it, but not listened on, so
    that the rendezvous can. Chosen and let go, it was another test's by then now and then."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("", 0))
        yield str(s.getsockname()[1])


def clean_environment() -> dict:
    """Without the process group that a test of this process may have joined."""
    return {k: v for k, v in os.environ.items() if k not in (
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}


def jsonl(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def same_metrics(line: dict) -> dict:
    """A metrics line without what may differ between equal runs: times, rates and memory."""
    return {key: value for key, value in line.items()
            if not key.startswith(("seconds", "tokens_per_second", "mfu", "memory", "communication_seconds"))}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tied tiny model and problem files that its tokenizer covers: {"model", "data", "eval_data"}."""
    import tiny as maker

    folder = tmp_path_factory.mktemp("tiny")
    rng = random.Random(0)
    pairs = [(rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(40)]
    train = [[{"from": "human", "value": f"{a}+{b}"}, {"from": "assistant", "ground_truth": {"value": str(a + b)}}]
             for a, b in pairs]
    held = [{"prompt": [{"from": "user", "value": f"{a}+{b}"}], "final_answer": str(a + b)} for a, b in pairs[:8]]
    (folder / "train.json").write_text(json.dumps(train))
    (folder / "eval.json").write_text(json.dumps(held))
    return {"model": str(maker.make_model(folder / "model")), "data": str(folder / "train.json"),
            "eval_data": str(folder / "eval.json")}


def equal_runs(a: Path, b: Path) -> None:
    assert (a / "samples.jsonl").read_text() == (b / "samples.jsonl").read_text()
    assert (a / "eval.jsonl").read_text() == (b / "eval.jsonl").read_text()
    assert list(map(same_metrics, jsonl(a / "metrics.jsonl"))) == list(map(same_metrics, jsonl(b / "metrics.jsonl")))
    last = max({p.name for p in a.glob("step_*")} & {p.name for p in b.glob("step_*")})
    for file in sorted((a / last).rglob("*.pt")):  # weights, masters, moments of every rank
        one, two = (torch.load(r / last / file.relative_to(a / last), weights_only=False) for r in (a, b))
        compare(one, two, file.name)


def compare(one, two, where: str) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, two), where
    elif isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            compare(one[key], two[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), where
        for k, (x, y) in enumerate(zip(one, two)):
            compare(x, y, f"{where}/{k}")


@pytest.fixture(scope="session")
def whole(tiny, tmp_path_factory):
    """The folder of an undisturbed run with these flags, made once."""
    runs = {}

    def run(ranks=1, **flags) -> Path:
        key = json.dumps([ranks, flags], sort_keys=True)
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("whole")
            launch(runs[key], ranks=ranks, **tiny | flags)
        return runs[key]
    return run
