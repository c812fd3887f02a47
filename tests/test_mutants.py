"""The table of mutants fits the code. `python tests/mutants.py` tries them; that takes a while."""

import re
from pathlib import Path

import pytest
from mutant_table import MUTANTS

ROOT = Path(__file__).parent.parent


def test_there_are_enough_of_them():
    names = [(mutant.file, mutant.name) for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 60


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.name}")
def test_a_mutant_still_fits(mutant):
    """Its old text occurs exactly once, and the tests that must kill it are there."""
    found = (ROOT / mutant.file).read_text().count(mutant.old)
    assert found == 1, f"{mutant.file}: the old text occurs {found} times: {mutant.old!r}"
    assert mutant.new != mutant.old
    assert mutant.tests
    for test in mutant.tests:
        file, name = re.match(r"(tests/\w+\.py)::(\w+)", test).groups()
        assert re.search(rf"^ *def {name}\(", (ROOT / file).read_text(), re.MULTILINE), test
