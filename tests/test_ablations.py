"""The patches of ablations/: each applies to a copy of the files and does there what it says.

A check of ablation_checks.py runs in a process of its own inside the patched copy, and so imports
the patched files; ablation_forks.py starts it.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from ablation_forks import run_checks
from conftest import ROOT, held_port, jsonl, launch, same_metrics

# An edit of the stages may move the lines that a patch changes, so these are not in `make check`.
pytestmark = pytest.mark.slow
PATCHES = sorted(path.stem for path in (ROOT / "ablations").glob("*.patch"))
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


# These decide what is sampled and what is paid, which all ranks must see alike.
SAMPLED = ["dynamic_sampling", "majority_vote", "random_reward", "curriculum"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PATCHES if name not in ("lora", "fp16")])
def test_a_patch_does_the_same_on_two_ranks(name, patched):
    """A rank samples its share and sees its own samples, and what is learnt is that of all.

    The other two have engines of their own in their checks, which save to a folder of each rank.
    """
    with held_port() as port:
        out, err = run_checks([name], patched(name), 2, port)
    assert out.split().count("held") == 2, err[-3000:]


@pytest.fixture(scope="module")
def trained(patched, tiny, tmp_path_factory):
    """trained(name, ranks, steps): the folder of a run of the tiny model with that patch, made
    once."""
    runs = {}

    def train(name: str, ranks: int, steps: int) -> Path:
        flags = tiny | {"max_steps": steps}
        if "updates_8" in (name, BUILDS_ON.get(name)):
            flags |= {"policy_updates": 4}
        if name == "overlong_penalty":
            flags |= {"overlong_cache": 8}
        if name == "fp16":
            flags |= {"bf16": "true", "zero_stage": 2}
        if (name, ranks) not in runs:
            run = tmp_path_factory.mktemp(f"{name}_{ranks}")
            launch(run, ranks=ranks, timeout=800, script=patched(name) / "train.py", **flags)
            runs[name, ranks] = run
        return runs[name, ranks]

    return train


@pytest.mark.slow
@pytest.mark.parametrize("name", map(mark_training, PATCHES))
def test_three_steps_of_training_with_a_patch(name, trained):
    skip_without_extras(name)
    if name == "fp16" and not torch.cuda.is_available():
        pytest.skip("DeepSpeed trains in fp16 on a GPU alone")
    lines = jsonl(trained(name, ranks=1, steps=3) / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    names = {"kl_loss": "kl", "updates_8": "policy_loss", "fuse_values": "critic_values"}
    names |= {"kl_penalty": "kl", "gspo": "clipped", "overlong_penalty": "overlong_penalty"}
    names |= {"dynamic_sampling": "reward_drawn"}
    names |= {name: "paid" for name in PATCHES if name.endswith("_reward")}
    names |= {"majority_vote": "paid"}
    assert all(names.get(name, "reward") in line for line in lines), json.dumps(lines[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_two_ranks_train_with_a_patch_as_one_does(name, trained):
    """The first step has the same samples, and the same numbers up to rounding.

    Afterwards rounding may change a sample. That the ranks still agree is for the run's own checks.
    """
    runs = [trained(name, ranks=1, steps=3), trained(name, ranks=2, steps=2)]
    assert len(jsonl(runs[1] / "metrics.jsonl")) == 2
    samples = []
    for run in runs:
        lines = jsonl(run / "samples.jsonl")
        keys = ("problem", "index", "response", "reward")
        samples.append([[line[key] for key in keys] for line in lines if line["step"] == 1])
    assert samples[0] == samples[1] and len(samples[0]) == 16
    one, two = (same_metrics(jsonl(run / "metrics.jsonl")[0]) for run in runs)
    assert one.keys() == two.keys()
    for key in one:
        if not key.endswith("micro_batches"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key
