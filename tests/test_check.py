"""Flags and models that cannot work: each is refused in one line that says what to do."""

import dataclasses
import json
from importlib.util import find_spec

import kernels
import pytest
import tiny as maker
import torch
from conftest import SMALL, arguments
from transformers import AutoModelForCausalLM, GPT2Config, MistralConfig, PhiConfig, T5Config

import ppo
import train
from lib import check
from lib.common import UserError

TABLE = ppo.ESTIMATORS


def config(tiny, **flags) -> train.Config:
    """Of SMALL's flags and these; None leaves one out."""
    given = SMALL | tiny | flags
    given = {name: value for name, value in given.items() if value is not None}
    return train.parse_flags(arguments(given))


# ---- check_config --------------------------------------------------------------------------------


def test_a_good_config_is_accepted(tiny):
    check.check_config(config(tiny), 2, TABLE)
    check.check_config(config(tiny, top_p=0.9, eval_top_p=0.5, eval_temperature=0), 2, TABLE)
    check.check_config(config(tiny, offload="optimizer", zero_stage=1), 1, TABLE)
    check.check_config(config(tiny, lambd=0.95, critic_lambd=1, loss_mean="constant"), 2, TABLE)
    check.check_config(config(tiny, estimator="reinforce", n_samples_per_prompt=1), 2, TABLE)
    check.check_config(config(tiny, critic="x", critic_only_steps=3), 2, TABLE)
    check.check_config(config(tiny, template="chat", system="Be brief."), 2, TABLE)
    check.check_config(config(tiny, keep_last=0, max_steps=0, log_samples=0, gamma=0), 4, TABLE)


WITHOUT_WANDB = pytest.mark.skipif(find_spec("wandb") is not None, reason="here it is installed")
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="here it may work")

REFUSED = [
    # a choice
    ({"zero_stage": 4}, ["--zero_stage 4", "0 or 1 or 2 or 3"]),
    ({"offload": "all"}, ["--offload all", "optimizer"]),
    ({"attention": "magic"}, ["--attention magic", "sdpa"]),
    ({"log_with": "paper"}, ["--log_with paper", "wandb"]),
    ({"estimator": "ppo"}, ["--estimator ppo", "gae"]),
    ({"loss_mean": "batch"}, ["--loss_mean batch", "token or sequence or constant"]),
    # a number
    ({"tensor_parallel": 0}, ["--tensor_parallel 0", "at least 1"]),
    ({"critic_updates": 0}, ["--critic_updates 0", "at least 1"]),
    ({"critic_lambd": -0.5}, ["--critic_lambd -0.5", "at least 0"]),
    ({"keep_last": -1}, ["--keep_last -1", "at least 0"]),
    ({"max_steps": -1}, ["--max_steps -1", "at least 0"]),
    ({"log_samples": -1}, ["--log_samples -1", "at least 0"]),
    ({"gamma": "nan"}, ["--gamma nan", "a number"]),
    ({"kv_cache_gb": "inf"}, ["--kv_cache_gb inf", "a number"]),
    ({"seed": 10**20}, ["--seed", "a number"]),
    # a batch
    ({"rollout_batch_size": 3}, ["--rollout_batch_size 3", "multiple of 2"]),
    (
        {"estimator": "grpo", "n_samples_per_prompt": 1},
        ["--n_samples_per_prompt 1", "at least 2"],
    ),
    (
        {"estimator": "rloo", "n_samples_per_prompt": 1},
        ["--n_samples_per_prompt 1", "at least 2"],
    ),
    ({"estimator": "grpo", "critic_lambd": 1}, ["--critic_lambd 1", "grpo has no critic"]),
    ({"estimator": "grpo", "critic": "x"}, ["--critic x", "grpo has no critic"]),
    (
        {"estimator": "rloo", "critic_only_steps": 2},
        ["--critic_only_steps 2", "rloo has no critic"],
    ),
    ({"critic_only_steps": -1}, ["--critic_only_steps -1", "at least 0"]),
    # lengths
    ({"prompt_max_len": 64}, ["--prompt_max_len 64", "--max_len 64"]),
    ({"packing_max_len": 32}, ["--packing_max_len 32", "--max_len 64"]),
    # sampling
    ({"temperature": 0}, ["--temperature 0", "0.01 to 2"]),
    ({"temperature": 2.5}, ["--temperature 2.5", "0.01 to 2"]),
    ({"eval_temperature": 2.5}, ["--eval_temperature 2.5", "0.01 to 2"]),
    ({"top_p": 0}, ["--top_p 0", "above 0"]),
    ({"eval_top_p": 1.5}, ["--eval_top_p 1.5", "up to 1"]),
    ({"gpu_memory_utilization": 1.5}, ["--gpu_memory_utilization 1.5", "up to 1"]),
    ({"system": "Be brief."}, ["--system Be brief.", "--template chat"]),
    ({"log_ratio": "true", "top_p": 0.9}, ["--top_p 0.9", "--log_ratio", "choose 1"]),
    # engines
    ({"bf16": "true", "zero_stage": 1}, ["--bf16", "stage 2"]),
    ({"attention": "varlen"}, ["--attention varlen", "GPU, --bf16 true", "or choose sdpa"]),
    ({"tensor_parallel": 3}, ["--tensor_parallel 3", "2 ranks"]),
    ({"offload": "optimizer", "zero_stage": 0}, ["--offload optimizer", "--zero_stage 1"]),
    pytest.param(
        {"rollout_quantization": "fp8_per_channel"},
        ["--rollout_quantization fp8_per_channel", "GPU"],
        marks=WITHOUT_GPU,
    ),
    pytest.param({"log_with": "wandb"}, ["--log_with wandb", "pip install"], marks=WITHOUT_WANDB),
    # data
    ({"data": None}, ["--data", "at least one file"]),
    ({"eval_data": ""}, ["--eval_data", "empty"]),
]


@pytest.mark.parametrize("version", kernels.VARLEN)
def test_varlen_of_another_version_is_refused_or_works(version, tiny, monkeypatch):
    """It died with a traceback: PyTorch 2.9 has no such function, 2.10 not the arguments."""
    kernels.use_varlen(monkeypatch, version)
    _, is_usable = kernels.VARLEN[version]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    flags = {"bf16": "true", "zero_stage": 2}
    varlen = config(tiny, attention="varlen", **flags)
    if is_usable:
        check.check_config(varlen, 2, TABLE)
    else:
        with pytest.raises(UserError, match="^--attention varlen: .* PyTorch 2.11 .*choose sdpa$"):
            check.check_config(varlen, 2, TABLE)
    check.check_config(config(tiny, attention="sdpa", **flags), 2, TABLE)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="here it is installed")
def test_flash_attention_needs_its_package(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    flags = {"bf16": "true", "zero_stage": 2}
    with pytest.raises(UserError, match="^--attention flash_attention_2: .*`pip install flash"):
        check.check_config(config(tiny, attention="flash_attention_2", **flags), 2, TABLE)


def name_of(value) -> str:
    return " ".join(map(str, value.items())) if isinstance(value, dict) else ""


@pytest.mark.parametrize("flags, words", REFUSED, ids=name_of)
def test_flags_that_cannot_work_are_refused_in_one_line(tiny, flags, words):
    with pytest.raises(UserError) as error:
        check.check_config(config(tiny, **flags), 2, TABLE)
    line = str(error.value)
    assert all(word in line for word in words), line
    assert "\n" not in line


# ---- check_same ----------------------------------------------------------------------------------


def test_same_values_pass_and_an_error_is_raised_as_it_is(process_group):
    check.check_same({"--seed": 1})
    with pytest.raises(UserError, match="^no such file$"):
        check.check_same({"--seed": 1}, UserError("no such file"))


@pytest.mark.parametrize(
    "reports, words",
    [
        ([(None, 1), (None, 2)], "machine b, rank 1: --seed: 2, of rank 0: 1; give all the same"),
        ([(None, 1), ("bad line", 1)], "machine b, rank 1: bad line"),
        ([("bad line", 1), ("bad line", 1)], "bad line"),
    ],
)
def test_all_ranks_hear_of_the_one_that_differs(process_group, monkeypatch, reports, words):
    """What two ranks would gather: they must end alike, or one would wait for the other."""

    def gathered(_):
        everyone = []
        for rank, (error, seed) in enumerate(reports):
            place = f"machine {'ab'[rank]}, rank {rank}"
            everyone.append((place, error and UserError(error), {"--seed": repr(seed)}))
        return everyone

    monkeypatch.setattr(check, "gather", gathered)
    with pytest.raises(UserError) as error:
        check.check_same({"--seed": 1})
    assert str(error.value) == words


# ---- models --------------------------------------------------------------------------------------

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


@pytest.mark.parametrize(
    "model, words",
    [
        (T5Config(), "T5Config"),
        (PhiConfig(**SIZES), "head has a bias"),
        (MistralConfig(**SIZES, sliding_window=8), "sliding_window=8"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_that_cannot_be_trained_are_refused_before_their_weights(tmp_path, model, words):
    """They are no causal LM, have a head with a bias, or a window over the keys."""
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"--model, --critic: {tmp_path}.*{words}"):
        check.load_config(str(tmp_path))


def test_a_layer_that_is_not_full_attention_is_refused(tmp_path):
    folder = maker.make_model(tmp_path / "window")
    edited = json.loads((folder / "config.json").read_text())
    edited["layer_types"] = ["full_attention", "sliding_attention"]
    (folder / "config.json").write_text(json.dumps(edited))
    with pytest.raises(UserError, match="kind sliding_attention cannot be packed"):
        check.load_config(str(folder))


def test_a_model_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="--model, --critic: .*nowhere"):
        check.load_config(str(tmp_path / "nowhere"))


def test_full_attention_passes(tmp_path):
    GPT2Config(n_embd=32, n_layer=1, n_head=2).save_pretrained(tmp_path)
    assert check.load_config(str(tmp_path)).model_type == "gpt2"


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_without_memory(tmp_path, tied):
    model = AutoModelForCausalLM.from_pretrained(maker.make_model(tmp_path, tied=tied))
    # parameters() has a tied weight once.
    assert check.count_parameters(model.config) == sum(p.numel() for p in model.parameters())
    assert all(p.is_meta for p in check.skeleton(model.config).parameters())


def test_room_is_for_all_checkpoints_to_come(tiny, other_critic):
    cfg = train.Config(model=tiny["model"], keep_last=1)
    one = check.needed_bytes(dataclasses.replace(cfg, keep_last=0), True, 5)
    parameters = check.count_parameters(check.load_config(tiny["model"]))
    assert one == 2 * 16 * parameters, "all are kept: there is no bound, and it is one"
    assert check.needed_bytes(cfg, True, 0) == 2 * one, "one is kept and one is written"
    assert check.needed_bytes(cfg, True, 1) == one, "the first of them is there"
    assert check.needed_bytes(dataclasses.replace(cfg, keep_last=2), True, 1) == 2 * one
    smaller = dataclasses.replace(cfg, critic=other_critic, keep_last=0)
    theirs = check.count_parameters(check.load_config(other_critic))
    assert 0 < theirs < parameters
    assert check.needed_bytes(smaller, True, 0) == 16 * (parameters + theirs)
    again = dataclasses.replace(cfg, resume="none")
    assert check.needed_bytes(again, True, 1) == 2 * one, "it is set aside, and stays"
    assert check.needed_bytes(cfg, False, 1) == one / 2
