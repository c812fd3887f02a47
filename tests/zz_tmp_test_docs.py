"""Every command on a page can be given as it stands: its files, targets and flags exist, and its settings fit together.

Runs that take minutes or GPUs are not made here at their sizes: ablations run at small ones (`-m long`); the tools' own
tests run the tools, and `--dry_run` every recipe."""
import re
import shlex
import subprocess

import pytest
from conftest import ROOT, jsonl, launch

import train
import ppo
from lib import check
from tools import demo

PAGES = ["README.md", "README.zh.md", "CONTRIBUTING.md",
         *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
STARTS = ("accelerate launch --", "accelerate launch train.py", "make ", "bash runs/", "sbatch ", "sed ", "python ",
          ".venv/bin/python ")


def commands(page: str) -> list[str]:
    """Commands in ```sh blocks (continued lines joined, comments cut) and in `code` that looks like one."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    parts = [re.sub(r"\s#\s.*", "", part).strip() for line in lines for part in line.split(" && ")]
    return [part for part in parts if re.sub(r"^(\w+=\S+ )+", "", part).startswith(STARTS)]


FOUND = sorted({(page, command) for page in PAGES for command in commands(page)})


def test_pages_have_commands():
    assert len(FOUND) > 30
    assert {page for page, _ in FOUND} >= {"README.md", "README.zh.md", "CONTRIBUTING.md", "docs/scaling.md"}


@pytest.mark.parametrize("page, command", FOUND, ids=lambda x: x)
def test_command(page, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # away from runs that are here
    words = shlex.split(re.sub(r"^(\w+=\S+ )+", "", command))
    if words[0] == "sed":  # a change to a file: it must still match, and leave a program
        *_, name = words
        copy = tmp_path / name
        copy.write_text((ROOT / name).read_text())
        subprocess.run([*words[:-1], str(copy)], check=True)
        assert copy.read_text() != (ROOT / name).read_text()
        compile(copy.read_text(), name, "exec")
    elif "train.py" in words:
        at = words.index("train.py")
        world = int(words[words.index("--num_processes") + 1]) if "--num_processes" in words else 1
        argv = [word for word in words[at + 1:] if word != "..."]
        if "--model" not in argv:
            argv = [*shlex.split(demo.FLAGS), "--data", "x", *argv]
        check.check_config(train.parse_flags(argv), world, {"estimator": ppo.ESTIMATORS})
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] in ("bash", "sbatch"):
        scripts = [word for word in words if word.startswith("runs/")]
        assert scripts and all((ROOT / script).is_file() for script in scripts)
        assert set(words[1:]) - set(scripts) <= {"--dry_run", "--run_dir", "/shared/runs/7b", "--nodes=2"}
    elif words[1:3] == ["-m", "pytest"]:
        paths = [word for word in words[3:] if word.endswith(".py")]
        assert all((ROOT / path).is_file() for path in paths)
        assert paths or words[-1] in ("slow", "long")
    else:
        script = ROOT / words[1]
        assert script.is_file()
        options = {word for word in words[2:] if word.startswith("--")}
        assert all(f'"{option}"' in script.read_text() for option in options)


@pytest.mark.long
@pytest.mark.parametrize("command", sorted({command for page, command in FOUND if "train.py --" in command
                                            and "--num_processes" not in command}))
def test_ablation_runs(command, tiny, tmp_path):
    words = shlex.split(command)
    flags = words[words.index("train.py") + 1:]
    flags = {name[2:]: value for name, value in zip(flags[::2], flags[1::2])} | {"run_dir": tmp_path / "run"}
    launch(**tiny | {"n_samples_per_prompt": 8, "max_steps": 1} | flags)
    assert len(jsonl(tmp_path / "run" / "metrics.jsonl")) == 1
