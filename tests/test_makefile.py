"""Which stack `make` installs, and into which environment, told by what `make -n` would do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, stand_in
from packaging.requirements import Requirement

ANSWERS = "echo 'GPU 0: NVIDIA H100 80GB HBM3'"
FAILS = "echo 'NVIDIA-SMI has failed'\nexit 9"


def steps(folder: Path, *words: str, card: str) -> list[str]:
    """The commands of `make -n` in an empty folder, as outside of any make: one that runs within
    another one prints folders too. card: what nvidia-smi does."""
    stand_in(folder / "bin", "nvidia-smi", card)
    for name in ("requirements.txt", "requirements-cpu.txt"):
        if not (folder / name).exists():
            (folder / name).touch()
    env = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "STACK"):
        env.pop(name, None)
    command = ["make", "-n", "-f", str(ROOT / "Makefile"), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
    return (done.stdout + done.stderr).splitlines()


def installs(lines: list[str]) -> list[str]:
    """Environment and list of packages of each installation."""
    found = []
    for line in lines:
        words = line.split()
        if "-r" in words:
            found.append(f"{words[0].partition('/')[0]} {words[words.index('-r') + 1]}")
    return found


@pytest.mark.parametrize("card", [FAILS, "exit 127"])
@pytest.mark.parametrize("target", ["install", "test", "demo", "lint"])
def test_without_a_card_there_is_one_environment(target, card, tmp_path):
    lines = steps(tmp_path, target, card=card)
    assert installs(lines) == [".venv requirements-cpu.txt"]
    assert not any(".venv-cpu" in line or "--clear" in line for line in lines)


def test_what_is_installed_is_not_installed_again(tmp_path):
    steps(tmp_path, "test", card=FAILS)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    assert steps(tmp_path, "test", card=FAILS) == [".venv/bin/python -m pytest"]


@pytest.mark.parametrize(
    "words, expected",
    [
        (["install"], ".venv requirements.txt"),
        (["test-gpu", "PARTS=kernels"], ".venv requirements.txt"),
        (["test"], ".venv-cpu requirements-cpu.txt"),
        (["install", "STACK=cpu"], ".venv requirements-cpu.txt"),
        (["test", "STACK=cpu"], ".venv requirements-cpu.txt"),
    ],
)
def test_beside_a_card_the_tests_have_an_environment_of_their_own(words, expected, tmp_path):
    """With the CUDA stack `make test` could not pass: two ranks, one GPU, and no vLLM for CPUs."""
    lines = steps(tmp_path, *words, card=ANSWERS)
    assert installs(lines) == [expected]
    python = f"{expected.split()[0]}/bin/python"
    if words[0] == "test":
        assert lines[-1] == f"{python} -m pytest"
    if words[0] == "test-gpu":
        assert lines[-1] == f"{python} tools/card.py kernels --out out/card"


def test_the_gpu_stack_can_be_installed_on_a_machine_without_a_card(tmp_path):
    """As on a login node: nothing is run there that looks for a GPU."""
    lines = steps(tmp_path, "install", "STACK=cuda", card=FAILS)
    assert installs(lines) == [".venv requirements.txt"]
    assert not any("start_distributed" in line for line in lines)


@pytest.mark.parametrize("there, card", [(".installed", ANSWERS), (".installed-cuda", FAILS)])
def test_the_other_stack_is_removed(there, card, tmp_path):
    """A stack that a login node installed stayed, and the GPU nodes trained on the CPU."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / there).touch()
    lines = steps(tmp_path, "install", card=card)
    assert any(line.split()[1:] == ["-m", "venv", "--clear", ".venv"] for line in lines)


def test_an_unknown_stack_is_refused(tmp_path):
    [line] = steps(tmp_path, "install", "STACK=rocm", card=FAILS)
    assert line.endswith("STACK=rocm: choose cuda or cpu.  Stop.")


def test_the_gpu_tests_without_a_card_end_before_anything_is_installed(tmp_path):
    lines = steps(tmp_path, "test-gpu", card=FAILS)
    assert "nvidia-smi finds no GPU here" in lines[0]


@pytest.mark.parametrize("words", [["card"], ["card", "PARTS=lab zero2"]])
@pytest.mark.parametrize("card", [ANSWERS, FAILS])
def test_a_page_is_made_with_and_without_a_card(words, card, tmp_path):
    line = steps(tmp_path, *words, card=card)[-1]
    assert line.split() == [".venv/bin/python", "tools/card.py", *" ".join(words[1:])[6:].split()]


# ---- the GPU stack -------------------------------------------------------------------------------


def test_the_gpu_stack_cannot_be_a_torch_for_cpus():
    """pip took 2.13.0+cpu where it also saw an index of CPU builds."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    [torch] = [Requirement(line) for line in lines if line.startswith("torch")]
    assert list(torch.specifier.filter(["2.13.0+cpu", "2.13.0", "2.13.0+cu130"])) == [
        "2.13.0",
        "2.13.0+cu130",
    ]


@pytest.mark.parametrize(
    "programs, lacks",
    [({"g++": "exit 0"}, "gcc"), ({"g++": "exit 0", "gcc": "exit 0"}, "Python.h")],
)
def test_what_triton_compiles_with_is_looked_for_first(programs, lacks, tmp_path):
    """The first kernel on a rented card would have died of it."""
    programs |= {"nvidia-smi": ANSWERS, "python3.11": "exit 1"}
    for name, script in programs.items():
        stand_in(tmp_path / "bin", name, script)
    (tmp_path / "requirements.txt").touch()
    env = {"PATH": str(tmp_path / "bin")}
    command = [shutil.which("make"), "-f", str(ROOT / "Makefile"), "install"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 2
    [line] = done.stdout.splitlines()
    assert line.startswith(f"error: {lacks} not found; Triton ") and "apt install" in line
    assert not (tmp_path / ".venv").exists()
