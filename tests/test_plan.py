"""Every recipe in runs/ can be planned without a GPU.

The numbers are those of a count by hand, of real engines, and of a real backward whose tensors are
counted and not filled.
"""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import weakref
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny as maker
import torch
from conftest import ROOT, SMALL, clean_environment, stand_in
from ppo_worker import config as worker_config
from ppo_worker import make_batch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen2ForCausalLM

import ppo
import train
from lib import check, models
from lib.common import UserError
from lib.head import ChunkedLogprob
from tools import cost, memory, plan

RECIPES = sorted(path for path in (ROOT / "runs").glob("*.sh") if path.name != "launch.sh")


def config_of(**flags) -> train.Config:
    argv = []
    for name, value in (SMALL | flags).items():
        argv += [f"--{name}", str(value)]
    return train.parse_flags(argv)


def run_recipe(
    recipe: str, tmp_path: Path, *extra: str, **environment
) -> subprocess.CompletedProcess:
    """The recipe's own shell code with stand-ins for `python` and `accelerate` on the PATH.

    They print their arguments as JSON lines, and `python` ends with the exit code $PLAN.
    """
    programs = tmp_path / "bin"
    dump = f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
    stand_in(programs, "python", f'{dump} "$@"\nexit ${{PLAN:-0}}')
    stand_in(programs, "accelerate", f'{dump} "$@"')
    copy = tmp_path / "runs"
    shutil.copytree(ROOT / "runs", copy)
    env = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"} | environment
    command = ["bash", str(copy / recipe), *extra]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def calls(done: subprocess.CompletedProcess) -> list[list[str]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


# ---- memory --------------------------------------------------------------------------------------


LARGE = ["--model", "Qwen/Qwen2.5-7B", "--data", "x"]


def by_hand() -> dict[str, list[float]]:
    """The table of docs/scaling.md: item -> what it is in the four cases, 0 where it is absent."""
    text = (ROOT / "docs" / "scaling.md").read_text()
    section = text.partition("## The memory of a rank, worked by hand")[2].partition("\n## ")[0]
    rows = {}
    for line in section.splitlines():
        cells = [cell.strip().replace("*", "") for cell in line.strip("|").split("|")]
        if len(cells) == 6 and re.fullmatch(r"[0-9.]+|-", cells[2]):
            rows[cells[0]] = [0.0 if cell == "-" else float(cell) for cell in cells[2:]]
    return rows


@pytest.mark.parametrize("column, stage, world", [(0, 3, 8), (1, 3, 32), (2, 2, 8), (3, 2, 32)])
def test_the_plan_of_7b_is_the_sum_by_hand(column, stage, world):
    """The plan left out buckets, copies and what CUDA itself takes, and said of 78 GiB 73."""
    cfg = train.parse_flags([*LARGE, "--zero_stage", str(stage)])
    config = memory.model_config("Qwen/Qwen2.5-7B")
    planned = memory.estimate(cfg, config, world, 80)
    found = planned.always | planned.phases["rollout"] | planned.phases["policy"]
    found["gradients"] = planned.always.get("gradients", 0)
    found["gradients of the policy"] = planned.phases["policy"].get("gradients", 0)
    found["always"] = memory.total(planned.always)
    found["rollout, sync"] = planned.peak("rollout")
    found["policy"] = planned.peak("policy")
    expected = {name: cells[column] for name, cells in by_hand().items()}
    assert set(found) <= set(expected)
    for name, size in expected.items():
        assert found.get(name, 0) == pytest.approx(size, abs=0.006), name
    assert planned.peak("sync") == planned.peak("rollout")
    assert planned.kv_tokens == 404_878
    assert planned.card == pytest.approx(79.1, abs=0.05)


@pytest.mark.parametrize(
    "stage, bf16, world", [(0, False, 2), (1, False, 2), (2, True, 4), (3, True, 4)]
)
def test_static_memory_is_counted_per_parameter(tiny, stage, bf16, world):
    model = AutoModelForCausalLM.from_pretrained(tiny["model"])
    count = sum(p.numel() for p in model.parameters())
    assert check.count_parameters(model.config) == count
    cfg = config_of(**tiny | {"zero_stage": stage, "bf16": str(bf16).lower()})
    planned = memory.estimate(cfg, model.config, world, 80)
    # The model is tied, so its critic has a body of the same size and one more row.
    trained = (2 * count + model.config.hidden_size) / memory.GIB
    width = 2 if bf16 else 4
    pieces = world if stage == 3 else 1
    assert planned.always["weights"] == pytest.approx(trained * width / pieces)
    # Without ZeRO the fp32 weights are their own masters.
    states = 8 if stage == 0 else 12
    pieces = world if stage else 1
    assert planned.always["masters and moments"] == pytest.approx(trained * states / pieces)
    if stage == 3:
        assert planned.always["gradients"] == pytest.approx(trained * 4 / world)
    else:
        pieces = world if stage == 2 else 1
        gradients = planned.phases["policy"]["gradients"]
        assert gradients == pytest.approx(4 * count / memory.GIB / pieces)


def test_an_offloaded_optimizer_is_not_on_the_card(tiny):
    """Nor are its gradient sums at stage 3, but at stage 2 those of bf16 weights are: the plan
    left them out."""
    config = memory.model_config("Qwen/Qwen2.5-0.5B")
    cases = ((1, "false", True), (2, "false", False), (2, "true", True), (3, "true", False))
    for stage, bf16, gradients in cases:
        settings = {"zero_stage": stage, "bf16": bf16, "offload": "optimizer"}
        cfg = config_of(**tiny | settings)
        planned = memory.estimate(cfg, config, 2, 80)
        assert "masters and moments" not in planned.always
        assert ("gradients" in planned.always | planned.phases["policy"]) == gradients


def test_a_reference_is_counted(tiny):
    config = memory.model_config("Qwen/Qwen2.5-0.5B")
    plain = memory.estimate(config_of(**tiny), config, 1, 80)
    watched = memory.estimate(config_of(**tiny | {"log_kl": "true"}), config, 1, 80)
    more = (watched.peak("policy") - plain.peak("policy")) * memory.GIB
    assert more == pytest.approx(4 * check.count_parameters(config))


def test_a_given_cache_is_what_the_sampler_takes():
    """vLLM does not look at its share then; the plan did."""
    cfg = train.parse_flags([*LARGE, "--kv_cache_gb", "4"])
    config = memory.model_config("Qwen/Qwen2.5-7B")
    planned = memory.estimate(cfg, config, 32, 80)
    assert planned.kv_tokens == int(4 * memory.GIB / 57_344)
    assert planned.phases["rollout"]["sampler awake"] == pytest.approx(4 + 14.19 + 3.75, abs=0.01)


def test_quantized_weights_leave_room_but_embeddings_do_not():
    """They stay in bf16. The plan counted a byte for them too."""
    config = memory.model_config("Qwen/Qwen2.5-7B")
    sizes = memory.Sizes(config)
    cfg = train.parse_flags(LARGE)
    whole = memory.sampler_weights(cfg, sizes)
    cfg.rollout_quantization = "fp8_per_channel"
    saved = whole - memory.sampler_weights(cfg, sizes)
    assert saved == sizes.policy - 2 * config.vocab_size * config.hidden_size


def live_storages() -> dict[int, int]:
    """Address and bytes of every storage that a tensor of this process holds."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.engine
def test_what_stays_is_what_real_engines_hold(stage, process_group, tmp_path):
    """ZeRO-3 keeps its gradient sums and a bucket an engine for ever; ZeRO-2 neither of them."""
    sizes = {"hidden": 256, "layers": 4, "vocab": 2048}
    cfg = worker_config(
        maker.make_model(tmp_path, tied=False, **sizes), zero_stage=stage, bf16=True
    )
    cfg.log_kl = False
    before = live_storages()
    batch = make_batch()
    ppo.compute_advantages(batch, cfg)
    engines = [models.make_policy(cfg), models.make_critic(cfg)]
    # The moments are made by the first step.
    for engine, loss in zip(engines, (ppo.policy_loss, ppo.critic_loss)):
        ppo.update(engine, loss, batch, batch.all_samples(), 1e-3, cfg)
    held = sum(size for key, size in live_storages().items() if key not in before)
    planned = memory.resident_bytes(cfg, memory.Sizes(memory.model_config(cfg.model)), world=1)
    expected = memory.total(planned) - memory.CONTEXT
    assert held == pytest.approx(expected, rel=0.02)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors held at once. The tensors may be fake."""

    def __init__(self):
        super().__init__()
        self.sizes = {}
        self.now = 0
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return output

    def add(self, storage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.remove, key)

    def remove(self, key) -> None:
        self.now -= self.sizes.pop(key)

    def above(self, function) -> int:
        """The peak of a call above what was there before."""
        start = self.now
        self.most = start
        function()
        return self.most - start


class KeptAttention(torch.autograd.Function):
    """What FlashAttention keeps and makes: its inputs, its output, a number a head and token."""

    @staticmethod
    def forward(ctx, query, key, value):
        output = torch.empty_like(query)  # (T, heads, d)
        ctx.save_for_backward(query, key, value, output, torch.empty(query.shape[:2]))
        return output

    @staticmethod
    def backward(ctx, gradient):
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def kept_attention(module, query, key, value, attention_mask, **options):
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    return KeptAttention.apply(*flat).unflatten(0, (query.shape[0], -1)), None


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize(
    "name, changes",
    [("7B", {}), ("0.5B", {}), ("7B", {"intermediate_size": 9000, "vocab_size": 999})],
)
def test_activations_are_those_of_a_real_backward(name, changes, checkpointing, monkeypatch):
    """The plan counted a third of a layer's fp32 copies. Its weights' gradients are let go at once,
    as by DeepSpeed."""
    AttentionInterface.register("kept", kept_attention)
    config = memory.model_config(f"Qwen/Qwen2.5-{name}", num_hidden_layers=3, **changes)
    config._attn_implementation = "kept"
    tokens = 4096
    default = torch.get_default_dtype()
    with FakeTensorMode(), LiveBytes() as live:
        torch.set_default_dtype(torch.bfloat16)
        try:
            body = Qwen2ForCausalLM(config).base_model.train()
        finally:
            torch.set_default_dtype(default)
        if checkpointing:
            body.gradient_checkpointing_enable({"use_reentrant": False})
        for parameter in body.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        ids = torch.zeros((1, tokens), dtype=torch.long)

        def learn() -> None:
            output = body(ids, position_ids=ids, use_cache=False)
            output.last_hidden_state.sum().backward()

        found = live.above(learn)
    cfg = train.parse_flags([*LARGE, "--packing_max_len", str(tokens)])
    cfg.gradient_checkpointing = checkpointing
    sizes = memory.Sizes(config)
    planned = memory.kept_bytes(cfg, sizes) + memory.layer_bytes(cfg, sizes)
    # Some matrix's own gradient is there too, and the last norm's copies have gone by then.
    assert found == pytest.approx(planned, rel=0.1)


@pytest.mark.parametrize("name", ["0.5B", "7B"])
def test_the_heads_peak_is_within_the_plan(name):
    sizes = memory.Sizes(memory.model_config(f"Qwen/Qwen2.5-{name}"))
    with FakeTensorMode(), LiveBytes() as live:
        options = {"dtype": torch.bfloat16, "requires_grad": True}
        hidden = torch.empty((16384, sizes.hidden), **options)
        weight = torch.empty((sizes.vocab, sizes.hidden), **options)
        token_ids = torch.zeros(16384, dtype=torch.long)
        chunk = memory.CHUNK // 4 // sizes.vocab

        def learn() -> None:
            ChunkedLogprob.apply(hidden, weight, token_ids, 1.0, chunk)[0].sum().backward()

        found = live.above(learn)
    assert 0.6 * memory.head_bytes(sizes) < found < 1.05 * memory.head_bytes(sizes)


# ---- time and money ------------------------------------------------------------------------------


GSM8K = ["--model", "Qwen/Qwen2.5-0.5B-Instruct", "--data", "x", "--estimator", "grpo"]
GSM8K += ["--zero_stage", "2", "--rollout_batch_size", "16", "--n_samples_per_prompt", "16"]
GSM8K += ["--generate_max_len", "512", "--prompt_max_len", "512", "--max_len", "1024"]


def times_of(flags: list[str], world: int, name="H100") -> tuple[cost.Times, int]:
    """And how many tokens the cache holds."""
    cfg = train.parse_flags(flags)
    config = memory.model_config(cfg.model)
    card = cost.find_card(name)
    planned = memory.estimate(cfg, config, world, card.gb)
    return cost.Times(cfg, config, world, card, 0.5), planned.kv_tokens


def test_the_time_of_half_a_billion_on_one_card_is_the_sum_by_hand():
    """GSM8K: 16 x 16 samples of at most 512 tokens, which have 256 on average."""
    times, kv_tokens = times_of(GSM8K, 1)
    seconds = times.of_step(kv_tokens)
    parameters = 494_032_768  # tied: all of them multiply
    read = 2 * parameters + 256 * (200 + 128) * 24 * 2 * 128 * 2  # bytes
    assert seconds["rollout"] == pytest.approx(512 * (0.005 + read / (0.6 * 3350e9)))
    flops = 256 * (200 + 256) * (2 * parameters + 4 * 24 * 896 * 228)
    update = 4 * flops / (0.3 * 989e12) + 30 * parameters / 3350e9
    assert seconds["policy"] == pytest.approx(update)
    assert seconds["sync"] == pytest.approx(2 + 2 * parameters / 20e9)
    assert set(seconds) == {"rollout", "policy", "sync"}


def test_the_time_of_7b_on_32_cards_is_the_sum_by_hand():
    """128 x 64 samples of at most 7,992 tokens behind a prompt of 200; 256 samples a rank."""
    times, kv_tokens = times_of([*LARGE, "--gpu_memory_utilization", "0.7"], 32)
    assert kv_tokens == 701_176
    seconds = times.of_step(kv_tokens)
    in_flight = 701_176 / (200 + 3996)
    read = 2 * 7_615_616_512 + in_flight * (200 + 1998) * 57_344  # bytes
    decodings = 256 / in_flight * 3996 + 3996
    assert seconds["rollout"] == pytest.approx(decodings * (0.005 + read / (0.6 * 3350e9)))
    # The embedding is looked up, and the critic has no head.
    policy = 7_615_616_512 - 152_064 * 3584
    body = policy - 152_064 * 3584
    attention = 4 * 28 * 3584 * 2098
    tokens = 256 * (200 + 3996)
    flops = 4 * tokens * (2 * policy + attention)
    step = 30 * 7_615_616_512 / 32 / 3350e9
    assert seconds["policy"] == pytest.approx(flops / (0.3 * 989e12) + step)
    flops = 5 * tokens * (2 * body + attention)
    step = 30 * (7_615_616_512 - 152_064 * 3584 + 3584) / 32 / 3350e9
    assert seconds["critic"] == pytest.approx(flops / (0.3 * 989e12) + 12 * step)
    assert seconds["sync"] == pytest.approx(2 + 2 * 7_615_616_512 / 20e9)


@pytest.mark.parametrize("column", [0, 1])
def test_the_table_of_times_is_what_is_planned(column):
    text = (ROOT / "docs" / "scaling.md").read_text()
    section = text.partition("## The time of a step, worked by hand")[2].partition("\n## ")[0]
    found = {}
    for line in section.splitlines():
        cells = line.strip("|").replace("*", "").replace(",", "").split("|")
        if len(cells) == 4 and re.fullmatch(r" [0-9.]+ | - ", cells[2]):
            found[cells[0].strip()] = cells[2 + column].strip()
    large = [*LARGE, "--gpu_memory_utilization", "0.7"]
    times, kv_tokens = times_of((GSM8K, large)[column], (1, 32)[column])
    seconds = times.of_step(kv_tokens)
    in_flight = min(256, kv_tokens / (200 + times.response))
    expected = {f"{phase} s": x for phase, x in seconds.items()}
    expected |= {"a step s": sum(seconds.values()), "sequences in flight": in_flight}
    expected |= {"milliseconds of one": 1000 * times.decoding(in_flight)}
    expected |= {"forward of the policy s": times.forward(times.multiplied())}
    assert len(found) == 13 and expected.keys() <= found.keys()
    for name, number in expected.items():
        digits = len(found[name].partition(".")[2])
        assert f"{number:.{digits}f}" == found[name], name


def test_what_a_step_has_more_of_takes_longer():
    flags = GSM8K
    times, kv_tokens = times_of(flags, 1)
    plain = times.of_step(kv_tokens)
    watched, _ = times_of([*flags, "--log_kl", "true"], 1)
    assert watched.policy() - plain["policy"] == pytest.approx(times.forward(times.multiplied()))
    kept, _ = times_of([*flags, "--gradient_checkpointing", "false"], 1)
    assert plain["policy"] - kept.policy() == pytest.approx(times.forward(times.multiplied()))
    # Masters and moments cross the link; at stage 3 each of 8 micro-batches moves its sums too.
    count = 494_032_768
    slower = 30 * count * (1 / 20e9 - 1 / 3350e9)
    offloaded, _ = times_of([*flags, "--offload", "optimizer"], 1)
    assert offloaded.policy() - plain["policy"] == pytest.approx(slower)
    third, _ = times_of([*flags, "--offload", "optimizer", "--zero_stage", "3"], 1)
    assert third.policy() - offloaded.policy() == pytest.approx(8 * 8 * count / 20e9)
    # A small cache makes waves, and a shared engine has half of the weights to read on each card.
    assert times.rollout(256 * 456) == pytest.approx(plain["rollout"])
    assert times.rollout(128 * 456) > 1.3 * plain["rollout"]
    shared, _ = times_of([*flags, "--tensor_parallel", "2"], 2)
    assert shared.decoding(256) - 0.005 == pytest.approx((times.decoding(256) - 0.005) / 2)
    # Many sequences on a card with little arithmetic: the products decide.
    slow, _ = times_of(flags, 1, "A4000")
    assert slow.decoding(256) == pytest.approx(0.005 + 2 * count * 256 / (0.3 * 76.7e12))


def test_adapters_alone_are_learnt(tiny):
    """With --variant lora, whose flag is a field of the config."""
    cfg = config_of(**tiny | {"zero_stage": 2, "bf16": "true", "estimator": "grpo"})
    config = memory.model_config("Qwen/Qwen2.5-3B")
    whole = memory.estimate(cfg, config, 1, 80)
    cfg.lora_rank = 32
    planned = memory.estimate(cfg, config, 1, 80)
    # q and o, k and v, and the three matrices of the MLP, of 36 layers.
    sides = 2 * (2048 + 2048) + 2 * (2048 + 256) + 3 * (2048 + 11008)
    adapters = 32 * 36 * sides / memory.GIB
    assert planned.always["masters and moments"] == pytest.approx(12 * adapters)
    assert planned.phases["policy"]["gradients"] == pytest.approx(4 * adapters)
    more = planned.always["weights"] - whole.always["weights"]
    assert more == pytest.approx(2 * adapters)
    assert planned.peak("policy") < whole.peak("policy") - 40


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--card", "T4"], "--card T4 has no bf16, so take one of Ampere or newer; .*4090"),
        (["--card", "2080Ti"], "--card 2080Ti has no bf16"),
        (["--card", "B52"], "--card B52 is not known: .*A100, .*H100, .*L4, .*4090.* --card_gb"),
        (["--card", "H100", "--price", "-1"], "--price -1.0: must be a number above 0"),
        (["--card", "H100", "--price", "nan"], "--price nan: must be a number above 0"),
        (["--card", "H100", "--price", "much"], "--price: invalid float value: 'much'"),
        (["--card", "H100", "--length_share", "2"], "--length_share 2.0: at most 1"),
        (["--price", "2.5"], "--price: a --card must say"),
        (["--card_gb", "0"], "--card_gb 0.0: must be"),
    ],
)
def test_a_card_or_price_that_cannot_be_is_one_line(flags, words):
    with pytest.raises(UserError, match=words) as error:
        plan.main([*GSM8K, *flags])
    assert "\n" not in str(error.value)


def test_dollars_are_printed_with_a_price_only(capsys):
    flags = [*GSM8K, "--max_steps", "467"]
    plan.main([*flags, "--card", "h100"])
    out = capsys.readouterr().out
    assert "time: 6.7 s a step, 0.9 h for 467 steps on 1 x H100\n" in out
    assert "$" not in out and "nothing of it was measured" in out
    plan.main([*flags, "--card", "H100", "--price", "2.5"])
    assert "money: 0.9 GPU-hours x $2.50 = $2.18\n" in capsys.readouterr().out
    plan.main([*flags, "--card", "H100", "--price", "2.5", "--gpus", "8"])
    out = capsys.readouterr().out
    step = float(re.search(r"seconds a step on 8 x H100: .* = (.*)", out)[1])
    dollars = float(re.search(r" x \$2.50 = \$(.*)", out)[1])
    assert dollars == pytest.approx(467 * step / 3600 * 8 * 2.5, rel=0.03)


def test_a_card_has_a_size_and_card_gb_another(capsys):
    plan.main([*GSM8K, "--card", "4090", "--gpu_memory_utilization", "0.3"])
    assert "of 24 GiB" in capsys.readouterr().out
    plan.main([*GSM8K, "--card", "4090", "--card_gb", "48"])
    assert "of 47 GiB" in capsys.readouterr().out
    plan.main([*GSM8K, "--card_gb", "48"])
    out = capsys.readouterr().out
    assert "of 47 GiB" in out and "time" not in out


def test_a_run_in_fp32_has_no_estimate(capsys):
    plan.main([*GSM8K, "--bf16", "false", "--card", "H100"])
    assert "time: not estimated with --bf16 false" in capsys.readouterr().out


def test_steps_come_from_data_that_are_here(tiny, capsys):
    """40 problems, 20 times, 16 a step: 50 steps. Without data the plan takes 100 and says so."""
    flags = [*GSM8K, "--card", "H100"]
    plan.main([*flags, "--data", tiny["data"]])
    assert " for 50 steps on" in capsys.readouterr().out
    plan.main([*flags, "--data", tiny["data"], "--max_steps", "7"])
    assert " for 7 steps on" in capsys.readouterr().out
    plan.main(flags)
    assert " for 100 steps on 1 x H100; how many there are, --max_steps" in capsys.readouterr().out
    plan.main([*flags, "--steps", "1000"])
    assert " for 1000 steps on 1 x H100\n" in capsys.readouterr().out


# ---- the plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_can_be_planned(recipe, tiny, tmp_path, capsys, monkeypatch):
    if recipe.stem.startswith("lora"):
        # As if it were installed, which the variant asks for.
        peft = SimpleNamespace(__spec__=ModuleSpec("peft", None))
        monkeypatch.setitem(sys.modules, "peft", peft)
    extra = []
    if recipe.stem == "orz_32b_anneal":
        # Its own model is made by a run that is still to come.
        extra = ["--model", "Qwen/Qwen2.5-32B"]
    words = ["--dry_run", *extra]
    if recipe.stem == "smollm2_cpu":
        words = [tiny["model"], "--dry_run"]
    done = run_recipe(recipe.name, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    *before, [script, *flags] = calls(done)
    assert script == "tools/plan.py"
    made = [["tools/word_problems.py", "out/words"]]
    assert before == (made if recipe.stem == "smollm2_cpu" else [])
    plan.main(flags)
    out = capsys.readouterr().out
    text = recipe.read_text()
    planned = re.search(r"^peaks: (.*)", out, re.MULTILINE)
    if recipe.stem == "demo":
        assert "tools/demo.py" in out
    else:
        assert "samples" in out
        assert planned
    said = re.search(r"^# Memory \(planned, never run\): (.*)\.$", text, re.MULTILINE)
    if said:
        assert said[1] == planned[1]
    assert said or recipe.stem in ("demo", "orz_32b_anneal", "smollm2_cpu")
    time = re.search(r"^time: ([^;\n]*)", out, re.MULTILINE)
    said = re.search(r"^# Time \(planned, never run\): (.*)\.$", text, re.MULTILINE)
    if said:
        assert said[1] == time[1]
    assert said or recipe.stem in ("demo", "smollm2_cpu")
    assert "xpect" in text
    assert len(text.splitlines()) <= 12, "a recipe holds only what differs"


@pytest.mark.parametrize(
    "flags, phases, advice",
    [
        (["--gpus", "1"], "rollout critic policy sync", "use more GPUs; --offload optimizer"),
        (["--gpus", "8", "--gpu_memory_utilization", "0.6"], "rollout sync", "lower --gpu_memory_"),
        (["--gpus", "8", "--micro_train_batch_size", "8"], "critic policy", "--packing_max_len"),
        (["--gpus", "4", "--estimator", "grpo", "--zero_stage", "2"], "rollout sync", "more GPUs"),
    ],
)
def test_a_plan_that_does_not_fit_names_the_phase_in_one_line(flags, phases, advice):
    with pytest.raises(UserError, match="the plan does not fit: phase ") as error:
        plan.main([*LARGE[:1], "Qwen/Qwen2.5-7B", "--data", "x", *flags])
    line = str(error.value)
    assert re.findall(r"(rollout|critic|policy|sync) [0-9.]+", line) == phases.split()
    assert advice in line and "\n" not in line


@pytest.mark.parametrize("name, value", [("rollout_quantization", "fp8"), ("attention", "varlen")])
def test_a_plan_is_of_another_machine_than_this_one(name, value, capsys):
    """It was refused for want of a GPU here."""
    plan.main([*LARGE, "--gpus", "8", f"--{name}", value])
    assert "memory per rank" in capsys.readouterr().out


def test_a_cache_without_room_for_one_sequence_names_the_phase():
    flags = ["--gpus", "8", "--gpu_memory_utilization", "0.23"]
    with pytest.raises(
        UserError, match="phase rollout: the KV cache holds .* --max_len 8192: raise"
    ):
        plan.main([*LARGE, *flags])


def test_a_plan_checks_the_flags():
    flags = ["--model", "Qwen/Qwen2.5-0.5B", "--data", "x", "--gpus", "3"]
    with pytest.raises(UserError, match="--rollout_batch_size 128: use a multiple of 3"):
        plan.main(flags)
    with pytest.raises(UserError, match="--estimator ppo: choose .*gae"):
        plan.main([*flags, "--estimator", "ppo"])


def test_a_variant_can_be_planned(capsys):
    """Its flags and its estimators are known while the plan is made."""
    flags = [*GSM8K, "--variant", "pass_at_k", "--estimator", "pass_at_k"]
    plan.main([*flags, "--n_samples_per_prompt", "8", "--pass_k", "4"])
    assert "memory per rank" in capsys.readouterr().out
    with pytest.raises(UserError, match="--n_samples_per_prompt 4: .* at least 5"):
        plan.main([*flags, "--n_samples_per_prompt", "4", "--pass_k", "4"])
    assert "pass_at_k" not in train.ppo.ESTIMATORS


def test_slurm_gives_the_step_its_cores(tmp_path):
    """Without them all ranks of a machine shared one core: srun does not inherit their number."""
    stand_in(tmp_path, "srun", 'echo "$@"')
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "96"}
    script = ROOT / "runs" / "slurm.sbatch"
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, env=env)
    assert done.stdout.split()[:2] == ["--cpus-per-task=96", "--kill-on-bad-exit=1"]
    options = re.findall("^#SBATCH (.*)$", script.read_text(), re.MULTILINE)
    assert {"--exclusive", "--mem=0", "--ntasks-per-node=1"} <= set(options)


@pytest.mark.slow
def test_dry_run_for_real():
    """One recipe with the real interpreter, and a flag that it does not know."""
    python_folder = Path(sys.executable).parent
    env = clean_environment() | {"PATH": f"{python_folder}:{os.environ['PATH']}"}
    script = ["bash", str(ROOT / "runs" / "orz_7b_4x8.sh"), "--dry_run"]
    command = [*script, "--rollout_batchsize", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert "did you mean --rollout_batch_size" in done.stderr


# ---- runs/launch.sh ------------------------------------------------------------------------------


def test_a_start_is_planned_for_the_smallest_card_of_this_machine(tmp_path):
    stand_in(tmp_path / "bin", "nvidia-smi", "echo 81559\necho 24564\necho 81559")
    done = run_recipe("orz_0p5b_24gb.sh", tmp_path, "--seed", "7")
    assert done.returncode == 0, done.stderr
    planned, launched = calls(done)
    assert planned[:7] == ["tools/plan.py", "--machines", "1", "--gpus", "1", "--card_gb", "24"]
    start = launched.index("train.py")
    assert launched[start + 1 :] == planned[7:], "what is planned is what is run"
    assert planned[-2:] == ["--seed", "7"]


def test_a_start_that_does_not_fit_is_refused(tmp_path):
    """Before a model is read. Only a dry run had the plan once."""
    stand_in(tmp_path / "bin", "nvidia-smi", "echo 8192")
    done = run_recipe("orz_0p5b_24gb.sh", tmp_path, PLAN="2")
    assert done.returncode == 2
    [planned] = calls(done)
    assert planned[5:7] == ["--card_gb", "8"]


@pytest.mark.parametrize("answer", ["exit 9", "echo NVIDIA-SMI has failed\nexit 9", "echo '[N/A]'"])
def test_without_a_gpu_a_run_starts_too(answer, tmp_path):
    stand_in(tmp_path / "bin", "nvidia-smi", answer)
    done = run_recipe("demo.sh", tmp_path)
    assert done.returncode == 0, done.stderr
    planned, launched = calls(done)
    assert planned[5:7] == ["--card_gb", "80"]
    assert launched[-1] == "train.py"


def test_a_dry_run_is_for_the_cards_of_the_recipe(tmp_path):
    stand_in(tmp_path / "bin", "nvidia-smi", "echo 8192")
    done = run_recipe("orz_0p5b_24gb.sh", tmp_path, "--dry_run")
    [planned] = calls(done)
    assert planned[5:7] == ["--card", "4090"]


# ---- the recipe of GSM8K -------------------------------------------------------------------------
