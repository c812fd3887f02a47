"""Imports go down, and settings are read."""

import ast
import dataclasses
import inspect
import re

from conftest import ROOT

import train

STAGES = ("train", "rollout", "reward", "ppo", "ckpt")
FOLDERS = ("nanoorz", "tasks", "tools", "variants")
# What a file may import of this repository, by its place in the house.
BELOW = {
    "tools": {*STAGES, "nanoorz", "tasks", "tools"},
    "train": {*STAGES, "nanoorz"},
    "tasks": {"reward", "nanoorz", "tasks"},
    "variants": {*STAGES, "nanoorz", "tasks", "variants"},
    "nanoorz": {"nanoorz"},
} | dict.fromkeys(STAGES[1:], {"nanoorz"})
# The export of a checkpoint asks the recipe for the model.
BELOW["ckpt"] = {"nanoorz", "ppo"}
# A file is copied together with these. Without families.py and text_part.py a copy of rollout.py
# draws from models of text alone.
COPIED_WITH = {
    "rollout.py": {
        "nanoorz.families",
        "nanoorz.text_part",
        "nanoorz.environment",
        "nanoorz.ranks",
    },
    "reward.py": {f"nanoorz.{name}" for name in ("ranks", "equal", "algebra", "records")},
    "ppo.py": {"nanoorz.ranks", "nanoorz.flags"},
    "ckpt.py": {f"nanoorz.{name}" for name in ("environment", "ranks", "variants", "flags")}
    # Only the export of a checkpoint needs these.
    | {"ppo", "nanoorz.families", "nanoorz.models"},
    "nanoorz/head.py": set(),
}

FILES = [ROOT / f"{stage}.py" for stage in STAGES]
FILES += sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))


def imports(path) -> set[str]:
    """The modules of this repository that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in FOLDERS:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return {name for name in found if name.partition(".")[0] in (*STAGES, *FOLDERS)}


def test_imports_go_down():
    for path in FILES:
        place = path.stem if path.parent == ROOT else path.parent.name
        assert {name.partition(".")[0] for name in imports(path)} <= BELOW[place], path


def test_a_file_can_be_copied():
    for name, others in COPIED_WITH.items():
        assert imports(ROOT / name) <= others, name


def test_the_library_has_no_circle():
    graph = {f"nanoorz.{path.stem}": imports(path) for path in (ROOT / "nanoorz").glob("*.py")}
    while graph:
        free = {name for name, needed in graph.items() if not needed & graph.keys()}
        assert free, f"these import each other: {sorted(graph)}"
        graph = {name: needed for name, needed in graph.items() if name not in free}


def test_every_setting_is_read_and_has_advice():
    texts = [path.read_text() for path in FILES if path.parent.name != "tools"]
    # In the recipe `self` is the config.
    recipe = inspect.getsource(train.ppo.Recipe).replace("self.", "cfg.")
    read = set(re.findall(r"\bcfg\.(\w+)", "\n".join([*texts, recipe])))
    fields = dataclasses.fields(train.Config)
    assert {field.name for field in fields} <= read
    assert all(field.metadata["help"] for field in fields)
