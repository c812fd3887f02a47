"""tools/card.py makes the page of a machine with a GPU. Here the parts run on a CPU."""

import json
import os
import re
from unittest import mock

import numpy as np
import psutil
import pytest
from conftest import ROOT, run_python, start_python, wait_until

from nanoorz.ranks import UserError
from tools import card


@pytest.mark.engine
def test_what_a_part_started_ends_with_it(tmp_path):
    """A process of another session ends too, because a train.py once stayed and held the GPU.

    The part gets SIGINT first. On an H100 the reason of a failed test was lost without it.
    """
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    child = f"setsid sh -c 'echo started; sleep 1000' > {tmp_path}/pipe & wait"
    part = ["sh", "-c", f"trap 'echo stopped; exit' INT; {child}"]
    assert card.run_process(part, tmp_path / "log", 3, str(tmp_path)) == "timed out"
    assert (tmp_path / "log").read_text() == "stopped\n"
    with open(reader, "rb", buffering=0) as pipe:
        assert pipe.read() == b"started\n"
        wait_until(lambda: pipe.read() == b"", seconds=60)  # None while the child lives


def test_a_page_has_all_parts_that_ran_beside_their_plan(tmp_path, monkeypatch, capsys):
    """A part that fails does not end the others. A later call of these versions adds its parts."""
    figures = json.dumps({"zero2": {"rollout: gib": 38.02, "rollout: planned_gib": 41.5}})
    about = dict.fromkeys(("card", "name", "driver"), "NVIDIA H100") | {"versions": {"torch": "2"}}
    scripts = {
        "cycle": "echo '= 2 failed, 3 passed in 1s ='; exit 1",
        "kernels": "echo '= 2 skipped, 10 deselected, 3 warnings in 3.10s ='; exit 5",
        "zero2": f"echo a line; echo '{figures}'; echo a warning",
    }
    monkeypatch.setattr(card, "ROOT", tmp_path)
    monkeypatch.setattr(card, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(card, "command_of", lambda name, _: ["sh", "-c", scripts[name]])
    monkeypatch.setattr(card, "machine", lambda: about)
    words = ["--out", str(tmp_path / "cards")]
    interrupt = mock.patch.object(card, "run_part", side_effect=KeyboardInterrupt)
    with interrupt, pytest.raises(KeyboardInterrupt):
        card.main(["cycle", *words])
    assert not list((tmp_path / "cards").iterdir()), "a page without a part says nothing"
    assert card.main(["cycle", "kernels", *words]) == 1
    assert card.main(["zero2", *words]) == 0
    text = (tmp_path / "cards" / "nvidia-h100.md").read_text()
    assert "| zero2 | rollout: gib | 38.02 |\n| zero2 | rollout: planned_gib | 41.5 |" in text
    table = card.table_of_runs(tmp_path / "cards")
    for name, result in (("cycle", "failed"), ("kernels", "skipped"), ("zero2", "passed")):
        shows = re.escape(card.PARTS[name][1])
        assert re.search(rf"\| {name} \| {shows} \| {result}, \d+ s, 20", table)
    with pytest.raises(SystemExit) as left:
        card.main(["kernel", *words])
    assert left.value.code == 2 and "no such part: kernel; choose" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        card.main(["cycle", "--timeout", "-1", *words])
    about["versions"] = {"torch": "3"}
    with pytest.raises(UserError, match="h100.json has versions .*: rename that page"):
        card.main(["zero2", *words])


@pytest.mark.slow
def test_a_signal_ends_the_part_and_keeps_those_that_have_ended(tmp_path):
    """A part that stays alive would hold the GPU."""
    process = start_python(ROOT / "tools" / "card.py", "zero3", "zero2", "--out", tmp_path)

    def running() -> list:
        found = psutil.process_iter(["ppid", "cmdline"])
        mine = [child for child in found if child.info["ppid"] == process.pid]
        # A child that has just been forked has the words of its parent, which end with the folder.
        return [child for child in mine if (child.info["cmdline"] or [])[-1:] == ["zero2"]]

    wait_until(running, process)
    children = running()
    process.terminate()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors == "stopped; the results of the parts that have ended are kept\n"
    assert not psutil.wait_procs(children, timeout=60)[1]
    [path] = tmp_path.glob("*.json")
    [(name, part)] = json.loads(path.read_text())["parts"].items()
    assert (name, part["result"]) == ("zero3", "passed")
    assert part["figures"]["seconds of a step"] > 0
    for phase in ("rollout", "policy", "sync"):
        for name in ("seconds", "gib", "planned_gib"):
            assert part["figures"][f"{phase}: {name}"] > 0


SCRIPT = """
import json, sys
from tools import bench
print(json.dumps(bench.{}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    ["bench_sync(sys.argv[1], 'tiny')", "bench_update(sys.argv[1], 'tiny', 24, 64, [128, 64])"],
)
def test_a_part_of_the_bench_has_figures(call, tmp_path):
    told = run_python("-c", SCRIPT.format(call), tmp_path, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    assert min(np.min(x) for x in json.loads(told.splitlines()[-1]).values()) > 0
