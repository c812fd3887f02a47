"""tools/card.py, which makes the page of a machine with a GPU; its parts run on a CPU here."""

import json
import os
import re
import shlex

import psutil
import pytest
from conftest import ROOT, start_python, wait_until

from lib.common import UserError
from tools import bench_gpu, card


def test_every_file_of_gpu_tests_and_every_measurement_is_a_part():
    """What belongs to no part would never run on a card."""
    tests = {shlex.split(part.tests)[0] for part in card.PARTS.values() if part.tests}
    assert tests == {path.name for path in (ROOT / "tests").glob("test_gpu_*.py")}
    measured = {name for name, part in card.PARTS.items() if not part.tests}
    assert set(bench_gpu.PARTS_ON_GPU) == set(bench_gpu.PARTS_ON_CPU) == measured


@pytest.mark.engine
def test_what_a_part_started_ends_with_it(tmp_path):
    """A process of another session ends too: a train.py once went on and held the GPU."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    child = f"setsid sh -c 'echo started; sleep 1000' > {tmp_path}/pipe & wait"
    assert card.run_process(["sh", "-c", child], tmp_path / "log", 3) == "timed out"
    with open(reader, "rb", buffering=0) as pipe:
        assert pipe.read() == b"started\n"
        wait_until(lambda: pipe.read() == b"", seconds=60)  # None while the child lives


def test_a_page_has_all_parts_that_ran_beside_their_plan(tmp_path, monkeypatch, capsys):
    """A part that fails does not end the others. A later call of these versions adds its parts."""
    phase = {"seconds": 4.126, "gib": 38.02, "planned_seconds": 3.0, "planned_gib": 41.5}
    figures = json.dumps({"phases": {"rollout": phase}, "step_s": 9.5})
    about = dict.fromkeys(("card", "name", "cards", "memory", "driver", "cores"), "NVIDIA H100")
    about |= {"ram_gib": 128, "python": "3.11", "versions": {"torch": "2"}}
    scripts = {
        "cycle": "echo 'FAILED tests/x - |'; echo '= 2 failed, 3 passed in 1s ='; exit 1",
        "kernels": "echo '= 2 skipped, 10 deselected, 3 warnings in 3.10s ='",
        "zero2": f"echo '{figures}' > $0/figures.json",
    }
    monkeypatch.setattr(card, "ROOT", tmp_path)
    monkeypatch.setattr(card, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(card, "command_of", lambda name, to, _: ["sh", "-c", scripts[name], to])
    monkeypatch.setattr(card, "machine", lambda: about)
    words = ["--out", str(tmp_path / "cards")]
    assert card.main(["cycle", "kernels", *words]) == 1
    assert "    FAILED tests/x - |\n" in capsys.readouterr().out
    assert card.main(["zero2", *words]) == 0
    text = (tmp_path / "cards" / "nvidia-h100.md").read_text()
    assert "| zero2 | rollout | 4.13 | 3 | 38 | 41.5 |" in text
    assert "| zero2 | step_s | 9.5 | - | seconds of a step |" in text
    table = card.table_of_runs(card.read_pages(tmp_path / "cards"))
    for name, result in (("cycle", "failed"), ("kernels", "skipped"), ("zero2", "passed")):
        shows = re.escape(card.PARTS[name].shows)
        assert re.search(rf"\| {name} \| {shows} \| {result}, \d+ s, 20", table)
    with pytest.raises(UserError, match="^no such part: kernel; choose from cycle, "):
        card.main(["kernel", *words])
    about["versions"] = {"torch": "3"}
    with pytest.raises(UserError, match="h100.json is of versions .*: rename that page"):
        card.main(["zero2", *words])
    (tmp_path / "cards" / "nvidia-h100.json").write_text("{")
    with pytest.raises(UserError, match="h100.json is not a page of make card: remove it"):
        card.main(["zero2", *words])


@pytest.mark.slow
def test_a_signal_ends_the_part_and_keeps_those_that_have_ended(tmp_path):
    """A part that lived on would hold the GPU."""
    process = start_python(ROOT / "tools" / "card.py", "attention", "zero2", "--out", tmp_path)

    def running() -> list:
        found = psutil.process_iter(["ppid", "cmdline"])
        mine = [child for child in found if child.info["ppid"] == process.pid]
        return [child for child in mine if "zero2" in (child.info["cmdline"] or [])]

    wait_until(running, process)
    children = running()
    process.terminate()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors == "stopped; the results of the parts that have ended are kept\n"
    assert not psutil.wait_procs(children, timeout=60)[1]
    [path] = tmp_path.glob("*.json")
    [(name, part)] = json.loads(path.read_text())["parts"].items()
    assert (name, part["result"]) == ("attention", "passed")
    assert {"mfu", "head_share", "train_tokens_per_s"} <= part["figures"].keys()
