"""Which stack `make` installs, and into which environment, told by what `make -n` would do."""

import os
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, stand_in
from packaging.requirements import Requirement

CARD = "echo 'GPU 0: NVIDIA H100 80GB HBM3'"
NO_CARD = "echo 'NVIDIA-SMI has failed'\nexit 9"
# Environment and list of packages of each installation.
CPU = [(".venv", "requirements-cpu.txt")]
CUDA = [(".venv", "requirements.txt")]
CPU_BESIDE_CUDA = [(".venv-cpu", "requirements-cpu.txt")]


def make(folder, words: str, path: str, **programs) -> list[str]:
    """What make says in a folder that has the lists of packages alone, outside of any make."""
    for name, script in programs.items():
        stand_in(folder / "bin", name.replace("_", "-"), script)
    for name in ("requirements.txt", "requirements-cpu.txt"):
        (folder / name).open("a").close()
    command = [shutil.which("make"), "-f", ROOT / "Makefile", *words.split()]
    env = {"PATH": f"{folder / 'bin'}:{path}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
    return (done.stdout + done.stderr).splitlines()


@pytest.mark.parametrize(
    "words, card, installs, end",
    [
        ("install", NO_CARD, CPU, "touch .venv/.installed"),
        ("install", "exit 127", CPU, "touch .venv/.installed"),
        ("test", NO_CARD, CPU, ".venv/bin/python -m pytest"),
        ("demo", NO_CARD, CPU, "tools/demo.py --show out/run"),
        ("lint", NO_CARD, CPU, ".venv/bin/ruff format --check ."),
        ("card PARTS=lab", NO_CARD, CPU, ".venv/bin/python tools/card.py lab"),
        # With the CUDA stack `make test` could not pass: two ranks, one GPU, no vLLM for CPUs.
        ("test", CARD, CPU_BESIDE_CUDA, ".venv-cpu/bin/python -m pytest"),
        ("test STACK=cpu", CARD, CPU, ".venv/bin/python -m pytest"),
        ("install", CARD, CUDA, "touch .venv/.installed-cuda"),
        ("card", CARD, CUDA, ".venv/bin/python tools/card.py "),
        ("test-gpu PARTS=kernels", CARD, CUDA, "tools/card.py kernels --out out/card"),
        # As on a login node: nothing is run there that looks for a GPU.
        ("install STACK=cuda", NO_CARD, CUDA, "touch .venv/.installed-cuda"),
        ("install STACK=rocm", NO_CARD, [], "STACK=rocm: choose cuda or cpu.  Stop."),
    ],
)
def test_what_is_installed_and_run(words, card, installs, end, tmp_path):
    lines = make(tmp_path, f"-n {words}", os.environ["PATH"], nvidia_smi=card)
    found = re.findall(r"^(\S+)/bin/.* -r (\S+)", "\n".join(lines), re.MULTILINE)
    assert found == installs
    assert lines[-1].endswith(end)
    assert any("start_distributed" in line for line in lines) == (found in (CPU, CPU_BESIDE_CUDA))
    assert not any("--clear" in line for line in lines)


@pytest.mark.parametrize(
    "there, same, other", [(".installed", NO_CARD, CARD), (".installed-cuda", CARD, NO_CARD)]
)
def test_a_stack_is_installed_once_and_the_other_one_removed(there, same, other, tmp_path):
    """A stack that a login node installed stayed, and the GPU nodes trained on the CPU."""
    make(tmp_path, "-n install", os.environ["PATH"], nvidia_smi=same)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / there).touch()
    (line,) = make(tmp_path, "-n install", os.environ["PATH"])
    assert line.startswith("make: Nothing to be done")
    lines = make(tmp_path, "-n install", os.environ["PATH"], nvidia_smi=other)
    assert any(line.endswith("-m venv --clear .venv") for line in lines)


@pytest.mark.parametrize(
    "target, lacks, programs",
    [
        # The first kernel on a rented card would have died of it.
        ("install", "gcc not found; Triton ", {"g++": "exit 0"}),
        ("install", "Python.h not found; Triton ", {"g++": "exit 0", "gcc": "exit 0"}),
        ("install", "g++ not found; DeepSpeed ", {}),
        ("test-gpu", "nvidia-smi finds no GPU here", {"nvidia_smi": NO_CARD}),
    ],
)
def test_what_is_needed_is_looked_for_first(target, lacks, programs, tmp_path):
    programs = {"nvidia_smi": CARD, "python3.11": "exit 1"} | programs
    line, end = make(tmp_path, target, "", **programs)
    assert line.startswith(f"error: {lacks}") and "Error 2" in end
    assert not (tmp_path / ".venv").exists()


def test_the_gpu_stack_cannot_be_a_torch_for_cpus():
    """pip took 2.13.0+cpu where it also saw an index of CPU builds."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    [torch] = [Requirement(line) for line in lines if line.startswith("torch")]
    builds = ["2.13.0+cpu", "2.13.0", "2.13.0+cu130"]
    assert list(torch.specifier.filter(builds)) == builds[1:]
