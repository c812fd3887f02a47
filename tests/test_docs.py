"""Every command on a page can be given as it stands: its files, targets and flags exist, and its
settings fit together.

Runs that take minutes or GPUs are not made here at their sizes: ablations run at small ones
(`-m long`); the tools' own tests run the tools, and `--dry_run` every recipe.
"""

import re
import shlex
import subprocess

import pytest
from conftest import ROOT, jsonl, launch

import ppo
import train
from lib import check
from tools import demo

PAGES = ["README.md", "README.zh.md", "CONTRIBUTING.md", "ablations/README.md"]
PAGES += [f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]
STARTS = (
    "accelerate launch --",
    "accelerate launch train.py",
    "make ",
    "bash runs/",
    "sbatch ",
    "sed ",
    "python ",
    ".venv/bin/python ",
)
RECIPE_WORDS = {"--dry_run", "--run_dir", "/shared/runs/7b", "--nodes=2"}


def without_variables(command: str) -> str:
    return re.sub(r"^(\w+=\S+ )+", "", command)


def commands(page: str) -> list[str]:
    """Commands in ```sh blocks (continued lines joined, comments cut) and in `code` that looks
    like one."""
    text = (ROOT / page).read_text()
    lines = []
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines += block.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    found = []
    for line in lines:
        for part in line.split(" && "):
            command = re.sub(r"\s#\s.*", "", part).strip()
            if without_variables(command).startswith(STARTS):
                found.append(command)
    return found


FOUND = sorted({(page, command) for page in PAGES for command in commands(page)})


def test_pages_have_commands():
    assert len(FOUND) > 30
    pages = {page for page, _ in FOUND}
    assert pages >= {"README.md", "README.zh.md", "CONTRIBUTING.md", "docs/scaling.md"}


def check_edit(words, folder):
    """A change to a file: it must still match, and leave a program."""
    name = words[-1]
    before = (ROOT / name).read_text()
    copy = folder / name
    copy.write_text(before)
    subprocess.run([*words[:-1], str(copy)], check=True)
    assert copy.read_text() != before
    compile(copy.read_text(), name, "exec")


def check_run(words):
    world = 1
    if "--num_processes" in words:
        world = int(words[words.index("--num_processes") + 1])
    argv = [word for word in words[words.index("train.py") + 1 :] if word != "..."]
    if "--model" not in argv:
        argv = [*shlex.split(demo.FLAGS), "--data", "train.json", *argv]
    check.check_config(train.parse_flags(argv), world, {"estimator": ppo.ESTIMATORS})


def check_recipe(words):
    scripts = [word for word in words if word.startswith("runs/")]
    assert scripts and all((ROOT / script).is_file() for script in scripts)
    assert set(words[1:]) - set(scripts) <= RECIPE_WORDS


def check_script(words):
    if words[1:3] == ["-m", "pytest"]:
        paths = [word for word in words[3:] if word.endswith(".py")]
        assert all((ROOT / path).is_file() for path in paths)
        assert paths or words[-1] in ("slow", "long")
        return
    script = ROOT / words[1]
    assert script.is_file()
    text = script.read_text()
    for word in words[2:]:
        if word.startswith("--"):
            assert f'"{word}"' in text


@pytest.mark.parametrize("page, command", FOUND, ids=lambda x: x)
def test_command(page, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # away from runs that are here
    words = shlex.split(without_variables(command))
    if words[0] == "sed":
        check_edit(words, tmp_path)
    elif "train.py" in words:
        check_run(words)
    elif words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE)
    elif words[0] in ("bash", "sbatch"):
        check_recipe(words)
    else:
        check_script(words)


ABLATIONS = set()
for _, command in FOUND:
    if "train.py --" in command and "--num_processes" not in command:
        ABLATIONS.add(command)


@pytest.mark.long
@pytest.mark.parametrize("command", sorted(ABLATIONS))
def test_ablation_runs(command, tiny, tmp_path):
    words = shlex.split(command)
    given = words[words.index("train.py") + 1 :]
    flags = dict(zip([name[2:] for name in given[::2]], given[1::2]))
    flags.pop("run_dir")
    launch(tmp_path / "run", **tiny | {"n_samples_per_prompt": 8, "max_steps": 1} | flags)
    assert len(jsonl(tmp_path / "run" / "metrics.jsonl")) == 1
