"""The house: arrows go down, settings are read, and the loop fits on one screen.

What a run loads is counted in test_train.py, over the modules of a run.
"""

import ast
import re

import pytest
from conftest import ROOT

import train
from lib import advice

STAGES = ("train", "rollout", "reward", "ppo", "ckpt")
FOLDERS = ("lib", "tasks", "tools", "variants")
LOOP_LINES = 60  # one screen
# What a file may import of this repository, by its place in the house.
BELOW = {
    "tools": {*STAGES, "lib", "tasks", "tools"},
    "train": {*STAGES, "lib"},
    "tasks": {"lib", "tasks"},
    "variants": {*STAGES, "lib", "tasks"},
    "lib": {"lib"},
} | dict.fromkeys(STAGES[1:], {"lib"})
# A stage is copied together with these. (Other imports may stand inside a function.)
COPIED_WITH = {
    "rollout.py": {"lib.common"},
    "reward.py": {"lib.common", "lib.equal"},
    "ppo.py": {"lib.common"},
    "ckpt.py": {"lib.common"},
}

FILES = [ROOT / f"{stage}.py" for stage in STAGES]
FILES += sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))


def imports(text: str, top_only=False) -> set[str]:
    """The modules of this repository that a text imports."""
    tree = ast.parse(text)
    found = set()
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in FOLDERS:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return {name for name in found if name.partition(".")[0] in (*STAGES, *FOLDERS)}


def upward(place: str, text: str) -> set[str]:
    """The imports that do not go down."""
    return {name for name in imports(text) if name.partition(".")[0] not in BELOW[place]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    place = path.stem
    if path.parent != ROOT:
        place = path.parent.name
    assert not upward(place, path.read_text())


@pytest.mark.parametrize("name", COPIED_WITH)
def test_a_stage_can_be_copied(name):
    assert imports((ROOT / name).read_text(), top_only=True) <= COPIED_WITH[name]


def test_lib_has_no_circle():
    graph = {f"lib.{path.stem}": imports(path.read_text()) for path in (ROOT / "lib").glob("*.py")}
    while graph:
        free = {name for name, needed in graph.items() if not needed & graph.keys()}
        assert free, f"these import each other: {sorted(graph)}"
        graph = {name: needed for name, needed in graph.items() if name not in free}


def test_every_setting_is_read():
    texts = [path.read_text() for path in FILES if path.parent.name != "tools"]
    read = set(re.findall(r"\bcfg\.(\w+)", "\n".join(texts)))
    assert not vars(train.Config()).keys() - read


def test_every_setting_has_advice():
    assert not vars(train.Config()).keys() - advice.advice(train.Config).keys()


def test_the_loop_fits_one_screen_and_has_a_banner_for_each_phase():
    text = (ROOT / "train.py").read_text()
    loop = re.search(r"\n( +)for step in range\(.*?(?=\n(?!\1 |\n))", text, re.DOTALL)[0]
    assert loop.count("\n") <= LOOP_LINES
    banners = " ".join(re.findall(r"\n +# (\d\. .*)", loop))
    assert re.findall(r"(\d)\. ", banners) == list("123456789")
