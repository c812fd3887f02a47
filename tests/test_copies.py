"""Stages are copied into an empty folder, with what they need of nanoorz/, and work there.

test_structure.py tells which file needs which. test_resume.py has a copy of rollout.py.
"""

import re
import shutil

from conftest import ROOT, run_python

FILES = ("ranks", "records", "flags", "equal", "algebra", "variants")
USE = """
import atexit
from pathlib import Path

# This comes behind all other functions of atexit.
tasks = Path("/proc/self/task")
atexit.register(lambda: print([path.read_text() for path in tasks.glob("*/comm")]))

import ckpt
import reward
from nanoorz.ranks import start_distributed

start_distributed()
assert reward.is_equiv("1/2", "0.5") and reward.is_equiv("2x", "x+x")

run_dir = Path("run").absolute()
lock = ckpt.claim(run_dir, needed_bytes=1000)
state = ckpt.RunState(step=1, config={"seed": 1})
assert ckpt.save(run_dir, state, engines={}, keep_last=1) is None
path, again = ckpt.find_start(run_dir, "auto", state, may_change=[])
assert (path.name, ckpt.load_state(path), again) == ("step_000001", state, state)
"""


def test_grpo_py_learns_beside_a_copy_of_ppo(tmp_path):
    (tmp_path / "nanoorz").mkdir()
    for name in ("ppo.py", "nanoorz/ranks.py", "nanoorz/flags.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "docs" / "grpo.py", tmp_path / "mine.py")
    # Without this policy idle threads spin, and take the cores of other tests.
    env = {"PYTHONPATH": "", "OMP_WAIT_POLICY": "passive"}
    told = run_python("mine.py", cwd=tmp_path, env=env).stdout
    rewards = [float(number) for number in re.findall(r"reward (\S+)", told)]
    assert len(rewards) == 20 and rewards[0] < 0.6 and rewards[-1] > 0.9


def test_stages_work_in_a_folder_of_their_own(tmp_path):
    (tmp_path / "nanoorz").mkdir()
    for name in ("reward.py", "ckpt.py", *(f"nanoorz/{file}.py" for file in FILES)):
        shutil.copy(ROOT / name, tmp_path / name)
    done = run_python("-c", USE, cwd=tmp_path, env={"PYTHONPATH": ""})
    # A thread of gloo that is left can abort the process at its end.
    assert "'python\\n'" in done.stdout and "gloo" not in done.stdout
