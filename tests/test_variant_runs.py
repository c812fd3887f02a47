"""Whole runs with variants: first_stage, adaptive_len and tis_cap together, and interrupted runs.

`pytest -m slow` takes three steps with each variant.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, equal_runs, jsonl, launch, same_metrics

# Most responses end early, so that limits are below --generate_max_len and can be seen.
ENDS_EARLY = {"stop": list("0123456789abcdef")}


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """A run on four problems that a random model never solves, and the same one interrupted."""
    folder = tmp_path_factory.mktemp("variants")
    few = json.loads(Path(tiny["data"]).read_text())[:4]
    (folder / "few.json").write_text(json.dumps(few))
    flags = tiny | {"data": folder / "few.json", "save_interval": 1, "keep_last": 0} | ENDS_EARLY
    flags |= {"variant": ["first_stage", "adaptive_len", "tis_cap"], "first_stage": 2}
    flags |= {"tis_cap": 2.0, "lr_end": 2e-4, "critic_updates": 12}
    launch(folder / "whole", script=ROOT / "tests" / "traced_train.py", **flags)
    # As a power cut in step 3 leaves it.
    shutil.copytree(folder / "whole", folder / "parts")
    shutil.rmtree(folder / "parts" / "step_000003")
    (folder / "parts" / "result.json").unlink()
    launch(folder / "parts", **flags)
    return folder


def memory_of(run: Path, step: int) -> dict:
    return json.loads((run / f"step_{step:06d}" / "state.json").read_text())["memory"]


def test_variants_of_drawing_work_together_in_a_whole_run(runs):
    samples = jsonl(runs / "whole" / "samples.jsonl")
    lengths = {step: [s["length"] for s in samples if s["step"] == step] for step in (1, 2, 3)}
    assert [len(lengths[step]) for step in (1, 2, 3)] == [16, 8, 8], "hopeless once seen"
    lines = jsonl(runs / "whole" / "metrics.jsonl")
    assert all(line["ratio_max"] < 1.001 for line in lines)
    assert [line["prompts_expanded"] for line in lines] == [1, 0, 0]
    saved = [line["tokens_saved"] for line in lines]
    assert saved == [0, sum(lengths[2]), sum(lengths[3])], "two of four: as many again"
    rates = [line["policy_lr"] for line in lines]
    assert rates == [5e-4, 1e-3, pytest.approx(2e-4)], "two steps of warm-up, then to lr_end"
    memory = memory_of(runs / "whole", 3)
    assert memory["first_stage"] == dict.fromkeys("0123", False)
    assert memory["adaptive_len"].keys() == {"", *"0123"}


def test_a_step_asks_for_no_more_than_the_limits_of_the_step_before(runs):
    """In both of its draws. A loop could learn limits and still ask for --generate_max_len."""
    calls = json.loads((runs / "whole" / "calls.json").read_text())
    # The first call is the check at the start, the second the first evaluation, the last the other.
    asked = [what for name, what in calls if name == "generate"][2:-1]
    # A step in which nothing more is worth drawing draws once.
    assert len(asked) == 2 + 1 + 1
    limits = []
    for requests in asked:
        limits.append({(str(problem), limit) for problem, *_, limit in requests})
    assert {limit for _, limit in limits[0] | limits[1]} == {32}, "nothing is known yet"
    for step in (1, 2):
        caps = memory_of(runs / "whole", step)["adaptive_len"]
        assert min(caps.values()) < 32, "a limit is below that of the run"
        assert limits[1 + step] == {(problem, caps[problem]) for problem in "0123"}


def test_a_critic_takes_no_more_updates_than_there_are_samples(runs):
    """--first_stage leaves 8 samples of 16 for 12 updates."""
    for line in jsonl(runs / "whole" / "metrics.jsonl"):
        samples = 16 if line["step"] == 1 else 8
        tokens_of_an_update = line["total_length"] * samples / min(12, samples)
        assert line["critic_tokens"] == pytest.approx(tokens_of_an_update)


def test_a_run_with_variants_resumes_exactly(runs):
    """Without their memory the resumed run would sample other numbers of other lengths."""
    equal_runs(runs / "whole", runs / "parts")


# ---- two ranks -----------------------------------------------------------------------------------

STOPS = '''"""Asks rank 1 to stop at the second draw of step 3, if a file says so."""

from pathlib import Path

import torch.distributed as dist

_DRAWS = []


def draw(original, rollout, requests, clock):
    _DRAWS.append(clock.step)
    marker = Path(rollout.cfg.run_dir).parent / "stop"
    if _DRAWS.count(3) == 2 and dist.get_rank() == 1 and marker.exists():
        rollout.signals.asked = True
    return original(rollout, requests, clock)
'''


def test_a_run_that_stops_between_two_draws_resumes_exactly_on_two_ranks(tiny, tmp_path):
    """first_stage is around adaptive_len, so the first draw of the step has changed the limits when
    the second one stops the run. What is saved is the memory of the step before."""
    (tmp_path / "stops.py").write_text(STOPS)
    marker = tmp_path / "stop"
    names = ["adaptive_len", "first_stage", str(tmp_path / "stops.py")]
    flags = tiny | ENDS_EARLY | {"variant": names, "first_stage": 2, "ranks": 2}
    launch(tmp_path / "whole", **flags)
    marker.touch()
    said = launch(tmp_path / "parts", **flags).stdout
    assert "stopped at step 2" in said and len(jsonl(tmp_path / "parts" / "metrics.jsonl")) == 2
    marker.unlink()
    before = memory_of(tmp_path / "parts", 2)
    launch(tmp_path / "parts", **flags)
    equal_runs(tmp_path / "whole", tmp_path / "parts")
    after = memory_of(tmp_path / "parts", 3)
    assert len(before["first_stage"]) == 8 and len(after["first_stage"]) == 12
    assert len(before["adaptive_len"]) == 1 + 8 and len(after["adaptive_len"]) == 1 + 12
    assert min(after["adaptive_len"].values()) < 32, "a limit is below that of the run"


# ---- each variant --------------------------------------------------------------------------------

# What a run of the tiny model needs, and a number of metrics.jsonl that shows the variant.
TRAINED = dict.fromkeys(
    sorted(path.stem for path in (ROOT / "variants").glob("*.py")), ({}, "paid")
)
for name in ("updates", "cispo", "gspo", "clip_higher"):
    TRAINED[name] = ({"policy_updates": 4}, "clipped" if name == "gspo" else "policy_loss")
TRAINED |= {
    "kl_loss": ({}, "kl"),
    "kl_penalty": ({}, "kl"),
    "entropy_bonus": ({}, "entropy"),
    "fuse_values": ({}, "critic_values"),
    "overlong_penalty": ({"overlong_cache": 8}, "paid"),
    "dynamic_sampling": ({}, "reward_drawn"),
    "first_stage": ({"first_stage": 2}, "prompts_expanded"),
    "adaptive_len": ({}, "response_length"),
    "pass_at_k": ({"pass_k": 2}, "advantage"),
    "tis_cap": ({}, "ratio"),
    "fp16": ({"bf16": "true", "zero_stage": 2}, "policy_loss"),
}
# These decide what is sampled and what is paid, which all ranks must see alike.
SAMPLED = ["dynamic_sampling", "majority_vote", "random_reward", "curriculum"]
SAMPLED += ["first_stage", "adaptive_len"]


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """trained(name, ranks, steps): the folder of a run with that variant, made once.

    warnings.txt there has what it wrote to stderr.
    """
    runs = {}

    def train(name: str, ranks: int, steps: int) -> Path:
        if (name, ranks) not in runs:
            before = ["updates"] if name == "clip_higher" else []
            flags = tiny | {"max_steps": steps, "variant": [*before, name]} | TRAINED[name][0]
            runs[name, ranks] = tmp_path_factory.mktemp(f"{name}_{ranks}")
            said = launch(runs[name, ranks], ranks=ranks, timeout=800, **flags)
            (runs[name, ranks] / "warnings.txt").write_text(said.stderr)
        return runs[name, ranks]

    return train


def mark_training(name: str):
    return pytest.param(name, marks=pytest.mark.gpu) if name == "fp16" else name


@pytest.mark.slow
@pytest.mark.parametrize("name", map(mark_training, TRAINED))
def test_three_steps_of_training_with_a_variant(name, trained):
    """Each of its functions is called, and metrics.jsonl shows it."""
    if name == "lora":
        pytest.importorskip("peft", reason="pip install --no-deps -r requirements-extras.txt")
    if name == "fp16" and not torch.cuda.is_available():
        pytest.skip("DeepSpeed trains in fp16 on a GPU alone")
    run = trained(name, ranks=1, steps=3)
    lines = jsonl(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(TRAINED[name][1] in line for line in lines), lines[0]
    assert "was not called" not in (run / "warnings.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_two_ranks_train_with_a_variant_as_one_does(name, trained):
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
