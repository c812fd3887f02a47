"""Stages are copied into an empty folder, with what they need of nanoorz/, and work there.

test_structure.py tells which file needs which. test_resume.py has a copy of rollout.py.
"""

import shutil

from conftest import ROOT, run_python
from test_contributing import EXAMPLES
from tiny import make_model

FILES = ("ranks", "records", "flags", "equal", "algebra", "reshard", "variants")
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
state = ckpt.RunState(step=1, total_steps=2, config={"zero_stage": 1})
assert ckpt.save(run_dir, state, engines={}, hf=[], keep_last=1) is None
path = ckpt.pick_checkpoint(run_dir, "auto")
assert (path.name, ckpt.load_state(path)) == ("step_000001", state)
"""


# Behind the example: each sample alone, without packing.
COMPARE = """
alone = []
for prompt, response in zip(prompts, responses):
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        log_p = policy.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    alone += log_p[range(len(response)), response].tolist()
packed = ppo.compute_logprobs(policy, batch, recipe)
assert (packed - torch.tensor(alone)).abs().max() < 1e-4
assert len([*ppo.micro_batches(batch, batch.all_indices(), recipe)]) == 1
"""


def test_the_page_s_loop_around_ppo_learns_from_samples_that_do_not_see_each_other(tmp_path):
    (tmp_path / "nanoorz").mkdir()
    for name in ("ppo.py", "nanoorz/ranks.py", "nanoorz/flags.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    make_model(tmp_path / "out" / "run" / "policy")
    done = run_python("-c", EXAMPLES["copy"] + COMPARE, cwd=tmp_path, env={"PYTHONPATH": ""})
    assert "'policy_grad_norm': " in done.stdout


def test_stages_work_in_a_folder_of_their_own(tmp_path):
    (tmp_path / "nanoorz").mkdir()
    for name in ("reward.py", "ckpt.py", *(f"nanoorz/{file}.py" for file in FILES)):
        shutil.copy(ROOT / name, tmp_path / name)
    done = run_python("-c", USE, cwd=tmp_path, env={"PYTHONPATH": ""})
    # A thread of gloo that is left can abort the process at its end.
    assert "'python\\n'" in done.stdout and "gloo" not in done.stdout
