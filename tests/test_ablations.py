"""The patches of ablations/: each applies to a copy of the files and does there what it says.

A check of ablation_checks.py runs in a process of its own inside the patched copy, and so imports
the patched files.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL, clean_environment, jsonl

PATCHES = sorted(path.stem for path in (ROOT / "ablations").glob("*.patch"))
PAGE = (ROOT / "ablations" / "README.md").read_text()
PRODUCT = ("train.py", "rollout.py", "reward.py", "ppo.py", "ckpt.py", "lib", "tasks", "tools")


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """patched(name): a copy of the product with that patch, made once."""
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
            patch = ROOT / "ablations" / f"{name}.patch"
            # Outside of any repository git would apply nothing, and say nothing.
            subprocess.run(["git", "init", "-q", str(copy)], check=True)
            done = subprocess.run(
                ["git", "apply", "--verbose", str(patch)], cwd=copy, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{patch.name} no longer applies: {done.stderr}"
            copies[name] = copy
        return copies[name]

    return make


def skip_without_extras(name: str):
    if name == "lora":
        pytest.importorskip("peft", reason="pip install -r requirements-extras.txt")


def run_check(name: str, copy: Path, launcher=()):
    """The check of ablation_checks.py, with the files of that folder; what is not there is ours."""
    script = shutil.copy(ROOT / "tests" / "ablation_checks.py", copy)
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    return subprocess.run(
        [sys.executable, *launcher, script, name],
        capture_output=True,
        text=True,
        env=clean_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        timeout=800,
    )


def test_there_are_four_and_the_page_has_a_line_for_each():
    assert {"kl_loss", "updates_8", "overlong_drop", "fuse_values"} <= set(PATCHES)
    for name in PATCHES:
        assert f"]({name}.patch)" in PAGE, f"ablations/README.md says nothing of {name}"


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_is_at_most_40_changed_lines(name):
    lines = (ROOT / "ablations" / f"{name}.patch").read_text().splitlines()
    changed = [x for x in lines if x[:1] in ("+", "-") and x[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= 40


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_does_what_it_says(name, patched):
    skip_without_extras(name)
    copy = patched(name)
    done = run_check(name, copy)
    assert done.stdout.strip().endswith("held"), done.stderr[-3000:]


def test_fused_values_reach_both_of_two_ranks(patched):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = run_check("fuse_values_on_two_ranks", patched("fuse_values"), launcher)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split().count("held") == 2


@pytest.mark.parametrize("name", PATCHES)
def test_without_its_patch_a_check_fails(name, tmp_path):
    """Else the check would prove nothing."""
    done = run_check(name, tmp_path)
    assert done.returncode != 0 and "held" not in done.stdout


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
    if name == "updates_8":
        flags |= {"policy_update_steps": 4}
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
    names |= {name: "paid" for name in PATCHES if name.endswith("_reward")}
    names |= {"majority_vote": "paid"}
    assert all(names.get(name, "reward") in line for line in lines), json.dumps(lines[0])
