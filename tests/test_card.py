"""tools/card.py, which makes the page of a machine with a GPU; its parts run on a CPU here."""

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT, clean_environment

from lib.common import UserError
from tools import card

PART = {
    "result": "passed",
    "seconds": 61.4,
    "last": "step_s 9.5",
    "notes": [],
    "figures": {},
    "date": "2026-11-23",
    "commit": "0123456789",
}
MACHINE = {
    "card": "NVIDIA H100 80GB HBM3",
    "name": "NVIDIA H100 80GB HBM3",
    "cards": 1,
    "memory": "81559 MiB",
    "driver": "580.65",
    "cores": 16,
    "ram_gib": 128,
    "python": "3.11.7",
    "versions": {"torch": "2.13.0"},
}


def test_every_file_of_gpu_tests_is_a_part():
    """A file that belongs to no part would never run on a card."""
    named = {shlex.split(part.tests)[0] for part in card.PARTS.values() if part.tests}
    assert named == {path.name for path in (ROOT / "tests").glob("test_gpu_*.py")}


@pytest.mark.parametrize(
    "words, message",
    [
        (["cycle", "kernel"], "^no such part: kernel; choose from cycle, kernels, "),
        (["--timeout", "0"], "^--timeout 0.0: give a number of seconds above 0$"),
        (["--timeout", "nan"], "^--timeout nan: "),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(words, message):
    with pytest.raises(UserError, match=message):
        card.main(words)


# ---- a part --------------------------------------------------------------------------------------


def test_what_a_part_started_ends_with_it(tmp_path):
    """A train.py went on when the time of its part was up, and held the GPU. A launcher gives its
    ranks sessions of their own."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    # It says something, so the pipe has had a writer, and holds it open until it ends.
    child = f"setsid sh -c 'echo begun; exec sleep 1000' > {pipe} 2>&1"
    assert card.run_process(["sh", "-c", f"{child} & wait"], tmp_path / "log", 2) == "timed out"
    said = b""
    while select.select([reader], [], [], 60)[0]:
        said = os.read(reader, 100)
        if not said:
            break
    os.close(reader)
    assert said == b"", "it still runs"


@pytest.mark.parametrize("code, result", [(0, "passed"), (3, "failed")])
def test_a_part_is_judged_by_its_exit_code(code, result, tmp_path):
    log = tmp_path / "log"
    assert card.run_process(["sh", "-c", f"echo out; echo err >&2; exit {code}"], log, 60) == result
    assert log.read_text() == "out\nerr\n"


@pytest.mark.parametrize(
    "summary, is_empty",
    [
        ("35 passed, 3 skipped, 4 deselected in 61.20s (0:01:01)", False),
        ("1 failed, 2 skipped in 3.10s", False),
        ("1 error in 3.10s", False),
        ("2 skipped, 10 deselected in 3.10s", True),
        ("12 deselected in 3.10s", True),
        ("2 skipped, 10 deselected, 3 warnings in 3.10s", True),
        ("no tests ran in 0.10s", True),
    ],
)
def test_a_part_that_tried_nothing_has_not_passed(summary, is_empty):
    assert bool(card.re.fullmatch(card.NOTHING_TRIED, summary)) == is_empty


# ---- the page ------------------------------------------------------------------------------------


def test_the_page_has_each_phase_beside_its_plan():
    phase = {"seconds": 4.126, "gib": 38.02, "planned_seconds": 3.0, "planned_gib": 41.5}
    figures = {"phases": {"rollout": phase}, "step_s": 9.5}
    lost = PART | {"result": "failed", "last": "2 failed | 3 passed", "notes": ["FAILED x - y"]}
    parts = {"zero2": PART | {"figures": figures}, "kernels": lost}
    text = card.page({"machine": MACHINE, "parts": parts})
    assert text.startswith("# NVIDIA H100 80GB HBM3\n")
    assert "1 card(s) of 81559 MiB, driver 580.65, 16 cores" in text
    assert "| zero2 | rollout | 4.13 | 3 | 38 | 41.5 |" in text
    assert "| zero2 | step_s | 9.5 | - | seconds of a step |" in text
    assert "| failed | 61 | 2 failed \\| 3 passed | 2026-11-23, 0123456789 |" in text
    assert "\n    FAILED x - y\n" in text
    assert text.index("| kernels |") < text.index("| zero2 |")
    assert "no GPU" not in text
    text = card.page({"machine": MACHINE | {"card": None}, "parts": parts})
    assert "no GPU" in text and "| failed (CPU) |" in text


def test_a_page_keeps_its_parts_while_the_versions_are_the_same(tmp_path):
    """Ten minutes of a rented GPU have room for some of the parts."""
    card.write({"machine": MACHINE, "parts": {"zero2": PART}}, tmp_path)
    assert card.earlier(MACHINE, tmp_path) == {"zero2": PART}
    assert card.earlier(MACHINE | {"cores": 8}, tmp_path) == {"zero2": PART}
    assert card.earlier(MACHINE | {"name": "NVIDIA L4"}, tmp_path) == {}
    for change in ({"versions": {"torch": "2.14.0"}}, {"driver": "590.1"}):
        with pytest.raises(UserError, match="h100-80gb-hbm3.json is of .*: rename that page"):
            card.earlier(MACHINE | change, tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_damaged_page_is_one_line(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match="x.json is not a page of make card: remove it"):
        card.read_pages(tmp_path)


def test_the_table_of_runs_has_a_column_for_each_page(tmp_path):
    cpu = MACHINE | {"card": None, "name": "AMD EPYC (CPU)"}
    card.write({"machine": cpu, "parts": {"zero2": PART | {"result": "failed"}}}, tmp_path)
    without = card.table_of_runs(card.read_pages(tmp_path))
    assert "No GPU is among these machines" in without
    card.write({"machine": MACHINE, "parts": {"zero2": PART}}, tmp_path)
    table = card.table_of_runs(card.read_pages(tmp_path))
    assert "No GPU is among these machines" not in table
    assert "[NVIDIA H100 80GB HBM3](cards/nvidia-h100-80gb-hbm3.md) | [AMD EPYC (CPU)]" in table
    row = "| passed, 61 s, 2026-11-23 | failed (CPU), 61 s, 2026-11-23 |\n"
    assert f"| zero2 | {card.PARTS['zero2'].shows} {row}" in table
    page = f"before\n{card.MARKS[0]}old\n{card.MARKS[1]}after\n"
    assert card.with_table(page, "new\n") == page.replace("old", "new")


@pytest.mark.slow
def test_a_signal_ends_the_part_too(tmp_path):
    """The part lived on, and would have held the GPU."""
    command = [sys.executable, str(ROOT / "tools" / "card.py"), "zero2", "--out", str(tmp_path)]
    process = subprocess.Popen(command, env=clean_environment(), stderr=subprocess.PIPE, text=True)
    started = []
    while process.poll() is None and not started:
        time.sleep(0.1)
        # git is a child too, and ends by itself.
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                started += [child] * ("zero2" in child.cmdline())
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors.endswith("stopped; the results of the parts that have ended are kept\n")
    assert not psutil.wait_procs(started, timeout=60)[1]


@pytest.mark.slow
def test_a_part_that_fails_does_not_end_the_others(tmp_path):
    """And a later call adds to the page."""

    def run(*parts: str, **env: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / "tools" / "card.py"), *parts, "--out", str(tmp_path)]
        env = clean_environment() | env
        return subprocess.run(command, capture_output=True, text=True, env=env)

    # vLLM asks for a number.
    done = run("sampling", "advantages", VLLM_ENABLE_V1_MULTIPROCESSING="nonsense")
    assert done.returncode == 1, done.stderr
    assert "sampling     failed in " in done.stdout and "advantages   passed in " in done.stdout
    assert "'nonsense'" in done.stdout
    done = run("zero2")
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    results = {name: part["result"] for name, part in found["parts"].items()}
    assert results == {"sampling": "failed", "advantages": "passed", "zero2": "passed"}
    assert set(found["parts"]["zero2"]["figures"]["phases"]) == {
        "rollout",
        "critic",
        "policy",
        "sync",
    }
    assert path.with_suffix(".md").read_text() == card.page(found)
