"""Whole runs with variants: interrupted, on two ranks, and each variant in at least one."""

import json
import math
import signal
from importlib.util import find_spec
from pathlib import Path

import conftest
import pytest
import torch
from conftest import ROOT, SMALL, arguments, equal_runs, jsonl, launch
from forks import Fork
from safetensors.torch import load_file

from nanoorz.variants import VARIANTS

NAMES = ["distill", "curriculum", "first_stage", "adaptive_len", "tis_cap", "lr_end"]
# `pip install --no-deps -r requirements-extras.txt`
NAMES += ["lora"] * bool(find_spec("peft"))
MINE = """
import os
import signal

import ppo
import train


class Mine(ppo.Recipe):
    def draw_step(self, rollout, requests, problems, step, clock):
        memory = self.memory.setdefault("Mine", {"steps": 0})
        assert memory["steps"] == step and train.main.__module__ == "__main__"
        samples = super().draw_step(rollout, requests, problems, step, clock)
        memory["steps"] += 1
        if os.environ.get("KILLED") and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return samples

    def metrics(self, line, samples, batch):
        return super().metrics(line, samples, batch) | {"of_mine": len(samples)}
"""


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """A run on four problems that a random model never solves, and one that is killed in step 3."""
    folder = tmp_path_factory.mktemp("variants")
    problems = json.loads(Path(tiny["data"]).read_text())
    (folder / "few.json").write_text(json.dumps(problems[:4]))
    (folder / "mine.py").write_text(MINE)
    flags = tiny | {"data": folder / "few.json", "save_interval": 1, "keep_last": 0}
    flags |= {"variant": [*NAMES, folder / "mine.py"], "first_stage": 2, "lr_end": 2e-4}
    # Most responses end early, so that limits are below --generate_max_len and can be seen.
    flags |= {"eval_interval": 1, "stop": list("0123456789abcdef")}
    flags |= {"teacher": tiny["model"], "teacher_weight": 0.5, "estimator": "gae"}
    flags |= {"lora_rank": 4} if "lora" in NAMES else {}
    launch(folder / "whole", **flags)
    launch(folder / "parts", code=-signal.SIGKILL, env={"KILLED": "1"}, **flags)
    assert "from step 2," in launch(folder / "parts", **flags).stdout
    return folder, flags


def memory_of(run: Path, step: int) -> dict:
    return json.loads((run / f"step_{step:06d}" / "state.json").read_text())["memory"]


def test_variants_work_together_in_a_whole_run(runs):
    whole = runs[0] / "whole"
    lines = jsonl(whole / "metrics.jsonl")
    samples = jsonl(whole / "samples.jsonl")
    assert [sum(s["step"] == step for s in samples) for step in (1, 2, 3)] == [16, 8, 8]
    assert [line["prompts_expanded"] for line in lines] == [1, 0, 0], "hopeless once seen"
    assert [line["reward"] for line in lines] == [0, 0, 0]
    assert all(line["approx_kl"] < 1e-6 for line in lines), "the sampler has the policy's weights"
    assert [line["policy_lr"] for line in lines] == [5e-4, 1e-3, pytest.approx(2e-4)]
    # A step asks for no more than the limits of the step before.
    for step in (1, 2):
        limits = memory_of(whole, step)["AdaptiveLen"]
        assert limits.keys() == {"", *"0123"} and min(limits.values()) < 32
        for drawn in [s for s in samples if s["step"] == step + 1]:
            limit = limits[str(drawn["problem"])]
            assert drawn["length"] == limit or drawn["finish_reason"] == "stop"
            assert drawn["length"] <= limit
    assert [line["of_mine"] for line in lines] == [16, 8, 8]
    kept = json.loads((whole / "config.json").read_text())["variants"]
    assert [name for name, _ in kept if name != "log_ratio"] == [*NAMES, "mine"]


def test_a_run_with_variants_resumes_exactly(runs):
    """Without their memory the resumed run would sample other numbers of other lengths."""
    equal_runs(runs[0] / "whole", runs[0] / "parts")


@pytest.mark.skipif("lora" not in NAMES, reason="peft is not installed")
def test_lora_changes_each_linear_layer_by_a_matrix_of_its_rank(runs, tiny):
    """And nothing else. What is exported is a plain model."""
    base = load_file(Path(tiny["model"]) / "model.safetensors")
    learnt = load_file(runs[0] / "whole" / "policy" / "model.safetensors")
    assert learnt.keys() == base.keys()
    for name, tensor in learnt.items():
        change = tensor - base[name]
        most = 4 if name.endswith("proj.weight") else 0
        rank = torch.linalg.matrix_rank(torch.atleast_2d(change), atol=1e-5)
        assert bool(most) <= rank <= most, name


# ---- each variant --------------------------------------------------------------------------------

# All shipped variants but lora, which needs peft, and fp8_rollout, which needs a GPU.
GROUPS = [
    "random_reward textbook_ppo critic_first kl_loss lr_end frozen_embedding",
    "hash_reward clip_higher critic_lambd kl_penalty no_whitening overlong_penalty tis_cap",
    "format_reward cispo zero_values adaptive_len log_kl",
    "lenient_reward gspo loss_mean dr_grpo curriculum",
    "majority_vote dynamic_sampling positive entropy_bonus",
    "inverted_reward first_stage negative overlong_drop",
    "maxrl fp16 log_ratio",
    "reinforce_pp distill",
    "pass_at_k",
    "gdpo",
]
# Flags that suit runs of two steps with short responses.
OWN = {"pass_at_k": {"pass_k": 2, "reward_weights": ["right=0", "even=1"]}}
OWN |= {"overlong_penalty": {"overlong_cache": 8}}
OWN |= {"critic_first": {"critic_only_steps": 1}, "first_stage": {"first_stage": 2}}
# A task with several rewards, which differ in a group.
REWARDED = """
import reward
from reward import ANSWER_FORMS, load_problems, text_metrics

REWARDS = ("right", "even")


class Grader(reward.Grader):
    def results(self):
        return {key: {"right": x, "even": 1 - key % 2} for key, x in super().results().items()}
"""


@pytest.mark.slow
def test_each_variant_trains_in_a_whole_run(tiny, tmp_path):
    shipped = {path.stem for path in VARIANTS.glob("*.py")}
    assert {*" ".join(GROUPS).split()} == shipped - {"lora", "fp8_rollout"}
    (tmp_path / "rewarded.py").write_text(REWARDED)
    task = {"task": tmp_path / "rewarded.py", "reward_weights": ["right=2", "even=1"]}
    processes = []
    for number, group in enumerate(GROUPS):
        flags = {"variant": group.split(), "max_steps": 2, "run_dir": tmp_path / str(number)}
        flags |= task
        for name in OWN.keys() & {*group.split()}:
            flags |= OWN[name]
        if "distill" in group:
            flags |= {"teacher": tiny["model"], "teacher_weight": 0.5}
        words = arguments(SMALL | tiny | flags)
        processes.append(Fork([ROOT / "train.py", *words], conftest.clean_environment(), ROOT))
    try:
        said = ["".join(process.communicate(500)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(GROUPS), said
    for number in range(len(GROUPS)):
        last = jsonl(tmp_path / str(number) / "metrics.jsonl")[-1]
        assert last["step"] == 2 and math.isfinite(last["policy_loss"])


# ---- the loop ------------------------------------------------------------------------------------

NOTHING = """
import ppo


class Nothing(ppo.Recipe):
    def token_passes(self, policy, critic, batch, step):
        self._step = step
        super().token_passes(policy, critic, batch, step)

    def samples_that_count(self, batch):
        return super().samples_that_count(batch) if self._step > 0 else []
"""


def test_a_run_goes_on_after_a_step_in_which_no_sample_counts(tiny, tmp_path):
    """The step has the numbers of its samples, and none of losses and advantages."""
    (tmp_path / "nothing.py").write_text(NOTHING)
    flags = {"variant": tmp_path / "nothing.py", "estimator": "gae", "max_steps": 2}
    launch(tmp_path / "run", **tiny | flags)
    first, second = jsonl(tmp_path / "run" / "metrics.jsonl")
    for name in ("policy", "critic"):
        assert first[f"{name}_micro_batches"] == 0 < second[f"{name}_micro_batches"]
        assert f"{name}_loss" not in first and math.isfinite(second[f"{name}_loss"])
    assert "advantage" not in first and "advantage" in second and "reward" in first
