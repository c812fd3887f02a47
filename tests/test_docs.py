"""Every command on a page can be given as it stands.

Its files, targets and flags exist, and its settings fit together. Runs that take minutes or GPUs
are not made here at their sizes: trainings run at small ones (`-m long`), the tools' own tests run
the tools, and `--dry_run` every recipe.
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

PAGES = ["README.md", "README.zh.md", "CONTRIBUTING.md"]
PAGES += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
STARTS = ("accelerate launch --", "accelerate launch train.py", "make ", "bash runs/", "sbatch ")
STARTS += ("sed ", "python ", ".venv/bin/python ")

SETTINGS = r"^(\w+=\S+ )+"  # of the environment, before a command


def commands(page: str) -> list[str]:
    """Commands in ```sh blocks (lines joined, comments cut) and in `code` that looks like one."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = []
    for block in blocks:
        lines += block.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    found = []
    for line in lines:
        for part in line.split(" && "):
            command = re.sub(r"\s#\s.*", "", part).strip()
            if re.sub(SETTINGS, "", command).startswith(STARTS):
                found.append(command)
    return found


FOUND = sorted({(page, command) for page in PAGES for command in commands(page)})


@pytest.mark.parametrize("page, command", FOUND, ids=lambda x: x)
def test_command(page, command, tmp_path, monkeypatch, process_group):
    # Away from runs that are here.
    monkeypatch.chdir(tmp_path)
    words = shlex.split(re.sub(SETTINGS, "", command))
    if words[0] == "sed":
        check_edit(words, tmp_path)
    elif "train.py" in words:
        check_training(words)
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] in ("bash", "sbatch"):
        check_recipe(words)
    elif words[1:3] == ["-m", "pytest"]:
        paths = [word for word in words[3:] if word.endswith(".py")]
        assert all((ROOT / path).is_file() for path in paths)
        assert paths or words[-1] in ("slow", "long")
    else:
        check_script(words)


def check_edit(words: list[str], folder) -> None:
    """A change to a file still matches there, and leaves a program."""
    *edit, name = words
    copy = folder / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text((ROOT / name).read_text())
    subprocess.run([*edit, str(copy)], check=True)
    assert copy.read_text() != (ROOT / name).read_text()
    compile(copy.read_text(), name, "exec")


def check_training(words: list[str]) -> None:
    """Its flags are accepted; those of the demo come before them where it names no model."""
    world = 1
    if "--num_processes" in words:
        world = int(words[words.index("--num_processes") + 1])
    argv = [word for word in words[words.index("train.py") + 1 :] if word not in ("...", "--help")]
    cfg = train.parse_flags(argv)
    if cfg.model is None:
        cfg = train.parse_flags([*shlex.split(demo.FLAGS), "--data", "of the demo", *argv])
    with cfg.variants.installed(train.stages()):
        check.check_config(cfg, world, ppo.ESTIMATORS)
        train.find_task(cfg)


def check_recipe(words: list[str]) -> None:
    scripts = [word for word in words if word.startswith("runs/")]
    assert scripts and all((ROOT / script).is_file() for script in scripts)
    allowed = {f"--{name}" for name in vars(train.Config())}
    allowed |= {"--dry_run", "--card", "--price", "--nodes=2"}
    assert {word for word in words[1:] if word.startswith("--")} <= allowed


def check_script(words: list[str]) -> None:
    """Its options stand in it as text, or it takes those of train.py."""
    script = ROOT / words[1]
    assert script.is_file()
    text = script.read_text()
    options = {word for word in words[2:] if word.startswith("--")}
    if "parse_flags" in text:
        options -= {f"--{name}" for name in vars(train.Config())}
    assert all(f'"{option}"' in text for option in options)


TRAININGS = set()
for _, found in FOUND:
    if "train.py --" in found and "--num_processes" not in found:
        TRAININGS.add(found)


@pytest.mark.long
@pytest.mark.parametrize("command", sorted(TRAININGS))
def test_training_runs(command, tiny, tmp_path):
    words = shlex.split(command)
    flags = {}
    for word in words[words.index("train.py") + 1 :]:
        if word.startswith("--"):
            values = flags[word.removeprefix("--")] = []
        else:
            values.append(word)
    flags = tiny | {"n_samples_per_prompt": 8, "max_steps": 1} | flags
    launch(**flags | {"run_dir": tmp_path / "run"})
    assert len(jsonl(tmp_path / "run" / "metrics.jsonl")) == 1
