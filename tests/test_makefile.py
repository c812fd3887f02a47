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
# Environment and list of packages of an installation.
CPU = (".venv", "requirements-cpu.txt")
CUDA = (".venv", "requirements.txt")
CPU_BESIDE_CUDA = (".venv-cpu", "requirements-cpu.txt")


def make(folder, words: str, path=os.environ["PATH"], **programs) -> list[str]:
    """What make prints in that folder, outside of any other make, with these programs first."""
    for name, script in programs.items():
        stand_in(folder / "bin", name.replace("_", "-"), script)
    command = [shutil.which("make"), "-f", ROOT / "Makefile", *words.split()]
    env = {"PATH": f"{folder / 'bin'}:{path}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
    return (done.stdout + done.stderr).splitlines()


@pytest.mark.parametrize(
    "words, card, there, installed, end",
    [
        ("install", NO_CARD, None, CPU, "touch .venv/.installed"),
        ("test", "exit 127", None, CPU, ".venv/bin/python -m pytest"),
        ("demo", NO_CARD, None, CPU, "tools/compare.py out/run"),
        # With the CUDA stack `make test` fails: two ranks, one GPU, no vLLM for CPUs.
        ("test", CARD, None, CPU_BESIDE_CUDA, ".venv-cpu/bin/python -m pytest"),
        ("test STACK=cpu", CARD, None, CPU, ".venv/bin/python -m pytest"),
        ("test-slow", CARD, None, CPU_BESIDE_CUDA, ".venv-cpu/bin/python -m pytest -m slow"),
        ("install", CARD, None, CUDA, "touch .venv/.installed-cuda"),
        ("bench", CARD, None, CUDA, ".venv/bin/python tools/bench.py"),
        # A login node has no GPU, so nothing looks for one.
        ("install STACK=cuda", NO_CARD, None, CUDA, "touch .venv/.installed-cuda"),
        # The other stack does not stay.
        ("install", CARD, ".installed", CUDA, "touch .venv/.installed-cuda"),
        ("install", NO_CARD, ".installed-cuda", CPU, "touch .venv/.installed"),
        ("install", NO_CARD, ".installed", None, "Nothing to be done for 'install'."),
        ("install STACK=rocm", NO_CARD, None, None, "STACK=rocm: choose cuda or cpu.  Stop."),
    ],
)
def test_make_installs_the_stack_of_the_machine(words, card, there, installed, end, tmp_path):
    for name in ("requirements.txt", "requirements-cpu.txt"):
        (tmp_path / name).touch()
    if there:
        (tmp_path / ".venv").mkdir()
        (tmp_path / ".venv" / there).touch()
    lines = make(tmp_path, f"-n {words}", nvidia_smi=card)
    said = "\n".join(lines)
    found = re.findall(r"^(\S+)/bin/\S+ -m pip .*?(requirements(?:-cpu)?\.txt)", said, re.MULTILINE)
    assert found == ([installed] if installed else [])
    assert lines[-1].endswith(end)
    assert ("--clear" in said) == bool(there and installed)


def test_torch_for_cpus_comes_in_one_of_three_ways(tmp_path):
    """If pip cannot get the CPU build, uv tries, and then pip installs the build for CUDA."""
    (tmp_path / "requirements-cpu.txt").write_text("torch==2.13.0+cpu\n")
    said = "\n".join(make(tmp_path, "-n install STACK=cpu"))
    ways = ['pip install --quiet --no-deps "$(grep', "--torch-backend cpu --no-deps"]
    ways.append("pip install --quiet --no-deps -r requirements-torch.txt")
    places = [said.find(way) for way in ways]
    assert -1 not in places and places == sorted(places)


def test_both_lists_have_the_same_torch():
    """requirements-torch.txt has PyPI's build for CUDA, in the version of the CPU build."""
    version = re.search(r"^torch==(\S+)\+cpu$", (ROOT / "requirements-cpu.txt").read_text(), re.M)[
        1
    ]
    assert f"\ntorch=={version}\n" in (ROOT / "requirements-torch.txt").read_text()


@pytest.mark.parametrize("works", [["python3.13"], ["python3.12", "python3.13"], []])
def test_make_takes_the_first_python_that_runs(works, tmp_path):
    """A shim of pyenv is there and does not run."""
    (tmp_path / "requirements-cpu.txt").touch()
    names = ("python3.11", "python3.12", "python3.13")
    programs = {name: "exit 0" if name in works else "exit 127" for name in names}
    lines = make(tmp_path, "-n install STACK=cpu", **programs)
    if works:
        assert f'"{works[0]}" -m venv  .venv' in lines
    else:
        line, *_ = make(tmp_path, "install STACK=cpu", **programs)
        assert line.startswith("error: no Python 3.11, 3.12 or 3.13 runs here")


def test_make_without_a_target_prints_the_targets(tmp_path):
    lines = make(tmp_path, "")
    assert lines == make(tmp_path, "help")
    assert lines[0].startswith("make demo: train") and lines[-1].startswith("make install: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "lacks, programs",
    [
        # Triton compiles the first kernel with gcc and Python.h.
        ("gcc not found; Triton ", {}),
        ("Python.h not found; Triton ", {"gcc": "exit 0"}),
    ],
)
def test_make_looks_for_a_compiler_first(lacks, programs, tmp_path):
    (tmp_path / "requirements.txt").touch()
    programs = {
        "nvidia_smi": CARD,
        "python3.11": 'case "$2" in *Python.h*) exit 1; esac',
    } | programs
    line, end = make(tmp_path, "install", path="", **programs)
    assert line.startswith(f"error: {lacks}") and "Error 2" in end
    assert not (tmp_path / ".venv").exists()


def test_make_card_measures_after_a_failed_test_and_then_fails(tmp_path):
    (tmp_path / "requirements-cpu.txt").touch()
    (tmp_path / ".venv").mkdir()
    script = 'case "$*" in *pytest*) exit 1; esac; echo measured'
    stand_in(tmp_path / ".venv" / "bin", "python", script)
    (tmp_path / ".venv" / ".installed").touch()
    *_, line, end = make(tmp_path, "card STACK=cpu")
    assert line == "measured" and "Error 1" in end


def test_the_gpu_stack_cannot_be_a_torch_for_cpus():
    """pip takes 2.13.0+cpu where it sees an index of CPU builds, unless the list forbids it."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    [torch] = [Requirement(line) for line in lines if line.startswith("torch")]
    builds = ["2.13.0+cpu", "2.13.0", "2.13.0+cu130"]
    assert list(torch.specifier.filter(builds)) == builds[1:]
