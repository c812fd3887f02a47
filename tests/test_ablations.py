"""The patches of ablations/: each applies to a copy of the files and does there what it says.

A check of ablation_checks.py runs in a process of its own inside the patched copy, and so imports
the patched files; ablation_forks.py starts it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ablation_forks import run_checks
from conftest import ROOT, SMALL, clean_environment, held_port, jsonl

PATCHES = sorted(path.stem for path in (ROOT / "ablations").glob("*.patch"))
PAGE = (ROOT / "ablations" / "README.md").read_text()
# These change what another patch has written, which is applied before them.
BUILDS_ON = {"clip_higher": "updates_8", "cispo": "updates_8", "gspo": "updates_8"}
PRODUCT = ("train.py", "rollout.py", "reward.py", "ppo.py", "ckpt.py", "lib", "tasks", "tools")


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """patched(name): a copy of the product with that patch and what it builds on, made once."""
    copies = {}

    def make(name: str) -> Path:
        if name not in copies:
            copy = tmp_path_factory.mktemp(name)
            for part in PRODUCT:
                if (ROOT / part).is_dir():
                    shutil.copytree(
                        ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__")
                    )
                else:
                    shutil.copy(ROOT / part, copy / part)
            # Outside of any repository git would apply nothing, and say nothing.
            subprocess.run(["git", "init", "-q", str(copy)], check=True)
            if name in BUILDS_ON:
                apply(BUILDS_ON[name], copy)
            apply(name, copy)
            copies[name] = copy
        return copies[name]

    return make


def apply(name: str, copy: Path):
    patch = ROOT / "ablations" / f"{name}.patch"
    command = ["git", "apply", "--verbose", str(patch)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, f"{patch.name} no longer applies: {done.stderr}"


def skip_without_extras(name: str):
    if name == "lora":
        pytest.importorskip("peft", reason="pip install -r requirements-extras.txt")


def test_there_are_four_and_the_page_has_a_line_for_each():
    assert {"kl_loss", "updates_8", "overlong_drop", "fuse_values"} <= set(PATCHES)
    for name in PATCHES:
        assert f"]({name}.patch)" in PAGE, f"ablations/README.md says nothing of {name}"
    for name, base in BUILDS_ON.items():
        (line,) = [line for line in PAGE.splitlines() if f"]({name}.patch)" in line]
        assert f"builds on `{base}`" in line, (
            f"ablations/README.md does not say what {name} builds on"
        )


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_is_at_most_40_changed_lines(name):
    lines = (ROOT / "ablations" / f"{name}.patch").read_text().splitlines()
    changed = [x for x in lines if x[:1] in ("+", "-") and x[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= 40


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_does_what_it_says(name, patched):
    skip_without_extras(name)
    out, err = run_checks([name], patched(name))
    assert f"{name} held" in out, err[-3000:]


def test_fused_values_reach_both_of_two_ranks(patched):
    with held_port() as port:
        out, err = run_checks(["fuse_values_on_two_ranks"], patched("fuse_values"), 2, port)
    assert out.split().count("held") == 2, err[-3000:]


def test_without_its_patch_no_check_holds(patched, tmp_path):
    """Else the check would prove nothing. Where a patch builds on another, that one is there."""
    by_base = {}
    for name in PATCHES:
        by_base.setdefault(BUILDS_ON.get(name), []).append(name)
    for base, names in by_base.items():
        out, err = run_checks(names, patched(base) if base else tmp_path)
        assert err.count("Traceback") >= len(names)
        assert "held" not in out, out


def mark_training(name: str):
    if name == "fp16":
        return pytest.param(name, marks=pytest.mark.gpu)
    return name


@pytest.mark.slow
@pytest.mark.parametrize("name", map(mark_training, PATCHES))
def test_three_steps_of_training_with_a_patch(name, patched, tiny, tmp_path):
    skip_without_extras(name)
    if name == "fp16" and not torch.cuda.is_available():
        pytest.skip("DeepSpeed trains in fp16 on a GPU alone")
    copy = patched(name)
    flags = SMALL | tiny | {"run_dir": tmp_path / "run"}
    if "updates_8" in (name, BUILDS_ON.get(name)):
        flags |= {"policy_update_steps": 4}
    if name == "overlong_penalty":
        flags |= {"overlong_cache": 8}
    if name == "fp16":
        flags |= {"bf16": "true", "zero_stage": 2}
    argv = []
    for flag, value in flags.items():
        argv += [f"--{flag}", str(value)]
    done = subprocess.run(
        [sys.executable, str(copy / "train.py"), *argv],
        cwd=copy,
        capture_output=True,
        text=True,
        env=clean_environment() | os.environ.copy(),
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    names = {"kl_loss": "kl", "updates_8": "policy_loss", "fuse_values": "critic_values"}
    names |= {"kl_penalty": "kl", "gspo": "clipped", "overlong_penalty": "overlong_penalty"}
    names |= {"dynamic_sampling": "reward_drawn"}
    names |= {name: "paid" for name in PATCHES if name.endswith("_reward")}
    names |= {"majority_vote": "paid"}
    assert all(names.get(name, "reward") in line for line in lines), json.dumps(lines[0])
