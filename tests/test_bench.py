"""tools/bench.py measures a machine, here a CPU."""

import re

import pytest
from conftest import ROOT, run_python

from tools import bench


@pytest.mark.slow
def test_parts_have_positive_figures():
    told = run_python(ROOT / "tools" / "bench.py", "sync", "step").stdout
    values = re.findall(r"^\| (?:sync|step) .* (\S+) \|$", told, re.MULTILINE)
    # Part sync has 1 figure. Part step has 1, and 3 for each of 3 phases.
    assert len(values) == 11
    for value in values:
        assert float(value.replace(",", "")) > 0


def test_a_page_has_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "versions", lambda: {"torch": "2.13.0", "git_commit": "abc"})
    rows = ["| step | rollout: GiB | 14.16 |", "| critic | failed | |"]
    text = bench.write_page(rows).read_text()
    assert text.startswith("# ") and "torch 2.13.0, git_commit abc, date 20" in text
    assert text.endswith("| --- | --- | --- |\n" + "\n".join(rows) + "\n")
