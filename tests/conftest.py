"""What the tests share: a tiny model, problems, and functions that start the real train.py."""

import contextlib
import fcntl
import functools
import gc
import importlib.util
import io
import json
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from forks import Fork

ROOT = Path(__file__).parent.parent
# 500 problems of MATH and 100 of GSM8K, with their license.
DATA = ROOT / "tests" / "data"
SHARD_EVERYTHING = ROOT / "tests" / "shard_everything.py"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
# Tests send a SIGHUP, which is ignored under nohup. nanoorz/environment.py looks at its import.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Two processes run the tests on two cores.
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The flags of a whole run that takes seconds.
SMALL = {"template": "demo", "rollout_batch_size": 4, "n_samples_per_prompt": 4}
SMALL |= {"critic_updates": 2, "max_steps": 3, "prompt_max_len": 16, "generate_max_len": 32}
SMALL |= {"max_len": 64, "packing_max_len": 64, "micro_train_batch_size": 4}
SMALL |= {"micro_rollout_batch_size": 32, "kv_cache_gb": 0.25, "stop": "", "warmup_updates": 2}
SMALL |= {"actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3, "zero_stage": 0}
SMALL |= {"bf16": "false", "gradient_checkpointing": "false", "eval_interval": 0}

ACCELERATE = ["-m", "accelerate.commands.accelerate_cli", "launch"]
PLACE = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]

# Two processes take the files in this order. A long file at the end would leave one idle.
LONGEST_FIRST = "families resume two_machines variant_effects variant_runs train ppo "
LONGEST_FIRST = (LONGEST_FIRST + "evaluate base_model lab code reward").split()

# A test of these files, or with one of these fixtures, starts engines or many processes.
ENGINE_FILES = {"test_resume", "test_two_machines", "test_variant_runs", "test_copies"}
ENGINE_FIXTURES = {"results", "one_rank", "found", "runs"}


def pytest_collection_modifyitems(config, items):
    rank = {f"test_{name}": k for k, name in enumerate(LONGEST_FIRST)}
    # If pytest stops at the first failure, the quick files come first.
    wants_first = config.getoption("maxfail") == 1
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)), reverse=wants_first)
    for item in items:
        if item.path.stem in ENGINE_FILES or ENGINE_FIXTURES & set(item.fixturenames):
            item.add_marker("engine")


def unpack(path, folder):
    """Unpacks an archive of ours. Python 3.11.2, which Debian 12 has, knows no filters."""
    with tarfile.open(path) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)


def arguments(flags: dict) -> list[str]:
    """The flags as words of a command line. A list has several values. None leaves a flag out."""
    words = []
    for name, value in flags.items():
        if value is not None:
            words.append(f"--{name}")
            for one in value if isinstance(value, (list, tuple)) else [value]:
                words.append(str(one).lower() if isinstance(one, bool) else str(one))
    return words


def config(**changes):
    """A run's settings, a train.Config: SMALL with these changes. Each name must be a flag."""
    import train

    own = {"model": "-", "data": "-", "attention": "sdpa"}
    return train.parse_flags(arguments(SMALL | own | changes))


def run_tool(name, *words) -> tuple[int, str, str]:
    """`python tools/NAME.py WORDS` in this process: its exit code, its output, its errors."""
    output = io.StringIO()
    errors = io.StringIO()
    code = 0
    argv = mock.patch.object(sys, "argv", [f"{name}.py", *map(str, words)])
    with argv, contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            runpy.run_path(str(ROOT / "tools" / f"{name}.py"), run_name="__main__")
        except SystemExit as left:
            code = left.code or 0
    return code, output.getvalue(), errors.getvalue()


class Process(subprocess.Popen):
    def __exit__(self, *error):
        # A test that has failed does not wait for its process.
        if error[0]:
            self.kill()
        super().__exit__(*error)


def start_python(*words, output=None, env=None, **options) -> subprocess.Popen:
    """Starts a Python process. Each output is a pipe, or both outputs go to the file `output`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with open(output or os.devnull, "w") as file:
        if output:
            pipes = {"stdout": file, "stderr": file}
        options = {"text": True, "cwd": ROOT} | pipes | options
        command = [sys.executable, *map(str, words)]
        return Process(command, env=clean_environment() | (env or {}), **options)


def run_python(*words, code=0, timeout=300, env=None, **options) -> subprocess.CompletedProcess:
    """Runs a Python process. It must end with this exit code. None allows any exit code."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        timeout=timeout,
        env=clean_environment() | (env or {}),
        **{"capture_output": True, "text": True, "cwd": ROOT} | options,
    )
    assert code in (None, done.returncode), f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done


@contextlib.contextmanager
def started_ranks(words, world=2, env=None, folders=None):
    """The ranks of a script, which are killed at the end. The rendezvous has its own port.

    folders: one for each rank to work in. Then `words` has a list for each rank.
    """
    ranks = []
    with held_port() as port:
        names = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if world > 1 else {}
        try:
            for rank in range(world):
                names |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                own = clean_environment() | (names if world > 1 else {}) | (env or {})
                if folders:
                    ranks.append(Fork(words[rank], own, folders[rank]))
                else:
                    ranks.append(Fork(words, own, ROOT))
            yield ranks
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def run_ranks(words, world=2, code=0, env=None) -> list[tuple[str, str]]:
    """Output and errors of each rank of a script. Every rank must end with this exit code."""
    with started_ranks(words, world, env) as processes:
        said = [process.communicate(timeout=500) for process in processes]
    assert {process.returncode for process in processes} == {code}, said
    return said


def launch(run_dir, ranks=1, code=0, env=None, **flags):
    """train.py with SMALL sizes, changed by flags. Every rank must end with this exit code."""
    words = [ROOT / "train.py", *arguments(SMALL | flags | {"run_dir": run_dir})]
    said = zip(*run_ranks(words, ranks, code, env))
    return subprocess.CompletedProcess(words, code, *map("".join, said))


@contextlib.contextmanager
def held_port():
    """A port for a rendezvous that starts much later.

    The port is bound, so no other process gets it. Nobody listens on it, so the rendezvous can.
    """
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("", 0))
        yield str(s.getsockname()[1])


def clean_environment() -> dict:
    """The environment without the process group that a test of this process may have joined."""
    return {name: value for name, value in os.environ.items() if name not in PLACE}


def stand_in(folder: Path, name: str, script: str) -> None:
    """Writes a program of this name. The caller puts the folder into PATH."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def write(folder, name, content) -> str:
    """Writes bytes, a text, or a value as JSON. Returns the path."""
    if not isinstance(content, str | bytes):
        content = json.dumps(content)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder / name)


def jsonl(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def same_metrics(line: dict) -> dict:
    """A metrics line without the numbers that differ between equal runs."""
    differ = ("seconds", "tokens_per_second", "memory")
    return {key: value for key, value in line.items() if not key.startswith(differ)}


def wait_until(condition, process=None, seconds=300) -> None:
    """Waits for the condition. The test fails if the process ends first or the time is over."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, "the process ended"
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.02)


def is_on_gpu(request) -> bool:
    """Skips a test for a GPU if torch finds none."""
    if request.param == "cpu":
        return False
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return True


ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=[ON_GPU, pytest.param("cpu", marks=pytest.mark.slow)])
def device(request):
    """For tests in this process. The GPU's memory is freed after each test."""
    if not is_on_gpu(request):
        yield torch.device("cpu")
        return
    yield torch.device("cuda", 0)
    # An engine has references to itself.
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(params=[ON_GPU], scope="module")
def place(request) -> str:
    """For tests that start vLLM in its own process."""
    if not importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is not installed")
    is_on_gpu(request)
    return request.param


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(device, ...): a model with random weights, made once; tiny on a CPU."""
    import tiny as maker

    from tools import bench

    @functools.cache
    def make(kind: str, **changes) -> str:
        folder = tmp_path_factory.mktemp("model")
        if kind == "cpu":
            tied = changes.get("tie_word_embeddings", True)
            return str(maker.make_model(folder, tied=tied, max_position_embeddings=1024))
        return bench.random_model(str(folder), **changes)

    return make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Flags of train.py: a tied tiny model, and files of problems that its tokenizer covers."""
    import tiny as maker

    folder = tmp_path_factory.mktemp("tiny")
    rng = random.Random(0)
    train = []
    held_out = []
    for _ in range(40):
        a = rng.randrange(10, 100)
        b = rng.randrange(10, 100)
        question = {"from": "human", "value": f"{a}+{b}"}
        train.append([question, {"from": "assistant", "ground_truth": {"value": str(a + b)}}])
        question = {"from": "user", "value": f"{a}+{b}"}
        held_out.append({"prompt": [question], "final_answer": str(a + b)})
    (folder / "train.json").write_text(json.dumps(train))
    (folder / "eval.json").write_text(json.dumps(held_out[:8]))
    return {
        "model": str(maker.make_model(folder / "model")),
        "data": str(folder / "train.json"),
        "eval_data": str(folder / "eval.json"),
    }


@pytest.fixture(scope="session")
def other_critic(tmp_path_factory):
    """A token classifier of one label, smaller than `tiny`'s model, with the same tokenizer.

    It has no bias. For two ranks ZeRO-3 pads a bias with memory that is not initialised, and the
    padding differs between two equal runs.
    """
    import tiny as maker
    from transformers import Qwen2Config, Qwen2ForTokenClassification

    folder = tmp_path_factory.mktemp("critic")
    maker.make_model(folder, hidden=32, layers=1, seed=7)
    config = Qwen2Config.from_pretrained(folder, num_labels=1)
    config.token_classification_bias = False
    critic = Qwen2ForTokenClassification.from_pretrained(folder, config=config)
    with torch.no_grad():
        critic.score.weight.copy_(torch.linspace(-1, 1, 32))
    critic.save_pretrained(folder)
    return str(folder)


def equal_runs(a: Path, b: Path) -> None:
    assert (a / "samples.jsonl").read_text() == (b / "samples.jsonl").read_text()
    assert (a / "eval.jsonl").read_text() == (b / "eval.jsonl").read_text()
    ours, theirs = (jsonl(run / "metrics.jsonl") for run in (a, b))
    assert list(map(same_metrics, ours)) == list(map(same_metrics, theirs))
    last = max({p.name for p in a.glob("step_*")} & {p.name for p in b.glob("step_*")})
    states = [json.loads((run / last / "state.json").read_text()) for run in (a, b)]
    assert states[0]["engines"] == states[1]["engines"]
    # These files hold the masters and moments.
    files = sorted((a / last).rglob("*.safetensors"))
    assert files
    for file in files:
        assert file.read_bytes() == (b / file.relative_to(a)).read_bytes(), file


@pytest.fixture(scope="session")
def process_group():
    """The process group of a run of one rank, in this process, which has one thread."""
    import torch.distributed as dist

    from nanoorz.ranks import start_distributed

    if not dist.is_initialized():
        start_distributed()
        torch.set_num_threads(1)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MB (tmpfs). If the machine allows no mount, the test is skipped."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path, room: int) -> None:
    """Fills the disk, so that `room` bytes are free."""
    (disk / "ballast").write_bytes(b"x" * max(0, shutil.disk_usage(disk).free - room))


@pytest.fixture
def shared_memory():
    """For a run with a shared sampler. On a CPU the shared memory of all runs has one name.

    So one such test runs at a time. What a dead run has left behind is removed.
    """
    with open(Path(tempfile.gettempdir(), "nanoorz_shared_memory"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left_over in Path("/dev/shm").glob("-tp:*-cpushm_*"):
            left_over.unlink()
        yield
        for left_over in Path("/dev/shm").glob("-tp:*-cpushm_*"):
            left_over.unlink()


@pytest.fixture(scope="session")
def jail():
    """Skips a test where no program can be contained, and says why."""
    from nanoorz.ranks import UserError
    from tasks.jail import Jail

    try:
        jail = Jail(cpu_seconds=1, wall_seconds=60, memory_mb=256)
    except UserError as error:
        pytest.skip(str(error))
    yield jail
    jail.close()
