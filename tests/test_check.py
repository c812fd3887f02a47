"""Flags and models that cannot work: each is refused in one line that says what to do."""

import dataclasses

import pytest
import tiny as maker
import torch
import transformers
from conftest import SMALL, arguments, config

import train
from nanoorz import families
from nanoorz.ranks import UserError


@pytest.mark.parametrize(
    "line",
    [
        "--top_p 0.9 --eval_top_p 0.5 --temperature 2 --eval_temperature 0.01",
        "--eval_temperature 0 --lambd 0.95 --gamma 0",
        "--offload optimizer --zero_stage 1 --bf16 false --temperature 0.01",
        "--estimator reinforce --n_samples_per_prompt 1",
        "--critic x --eval_n 16 --keep_last 0 --max_steps 1 --log_samples 0",
        "--template chat --system x --chat_template_kwargs {} --prompt_max_len 63",
        # An evaluation reads no problems for training, and makes no rows and no equal parts.
        "--eval_only --eval_data a --data= --packing_max_len 1 --rollout_batch_size 3",
    ],
)
def test_flags_that_can_work_are_accepted(line):
    train.check_flags(train.parse_flags([*GOOD, *line.split()]), 2)


GOOD = arguments(SMALL | {"model": "-", "data": "-"})
# What follows "error: ". Each line names the first flag of the command line.
REFUSED = {
    "--actor_learning 1": "--actor_learning is no flag; the nearest is --actor_learning_rate; ",
    "--wet_walk": "--wet_walk is no flag; `python train.py --help` has all flags",
    "--seed 1 2": "2 is no flag",
    "--seed many": "argument --seed: invalid int value: 'many'",
    "--bf16 maybe": "argument --bf16: invalid boolean value: 'maybe'",
    "--packing none": "argument --packing: invalid choice: 'none' (choose from ",
    "--zero_stage 4": "argument --zero_stage: invalid choice: 4 (choose from 0, 1, 2, 3)",
    "--estimator ppo": "--estimator ppo: choose gae or grpo or ",
    "--critic_updates 0": "--critic_updates 0: give a number from 1 to 1e+18",
    "--max_steps 0": "--max_steps 0: give a number from 1 to 1e+18",
    "--lambd -0.5": "--lambd -0.5: give a number from 0 to 1",
    "--gamma nan": "--gamma nan: give a number from 0 to 1",
    "--kv_cache_gb inf": "--kv_cache_gb inf: give a number from 0 to 1e+18",
    "--data": "--data []: name files of problems",
    "--eval_only": "--eval_data []: name files of held-out problems",
    "--eval_only --eval_data x --resume a/step_000002": "--resume a/step_000002: --eval_only ev",
    "--rollout_batch_size 3": "--rollout_batch_size 3: choose a multiple of 2",
    "--n_samples_per_prompt 1 --estimator grpo": "--n_samples_per_prompt 1: --estimator grpo ",
    "--critic x --estimator grpo": "--critic x: --estimator grpo has no critic",
    "--prompt_max_len 64": "--prompt_max_len 64: choose less than --max_len 64, ",
    "--generate_max_len 64": "--generate_max_len 64: choose less than --max_len 64, ",
    "--packing_max_len 63": "--packing_max_len 63: a row must hold one sample of --max_len 64 ",
    "--temperature 0": "--temperature 0.0: give a number from 0.01 to 2",
    "--eval_temperature 2.5": "--eval_temperature 2.5: give a number from 0 to 2",
    "--top_p 0": "--top_p 0.0: give a number from 1e-06 to 1",
    "--eval_top_p 1.5": "--eval_top_p 1.5: give a number from 1e-06 to 1",
    "--eval_n 16 --eval_temperature 0": "--eval_n 16: at --eval_temperature 0 all ",
    "--system x": "--template demo: --system and --chat_template_kwargs need ",
    "--chat_template_kwargs {1}": "--template demo: --system and --chat_template_kwargs need ",
    "--bf16 true --zero_stage 1": "--bf16 True: needs --zero_stage 2 or 3",
    "--offload optimizer": "--offload optimizer: needs --zero_stage 1, 2 or 3",
    "--tensor_parallel 3": "--tensor_parallel 3: does not divide 2 ranks",
    "--compile_layers": "--compile_layers True: needs a GPU",
    "--log_with wandb": "--log_with wandb: `pip install wandb` first",
}


@pytest.mark.parametrize("line", REFUSED)
def test_flags_that_cannot_work_are_refused_in_one_line(line, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        train.check_flags(train.parse_flags([*GOOD, *line.split()]), 2)
    assert str(error.value).startswith(REFUSED[line]) and "\n" not in str(error.value)


@pytest.mark.parametrize("flag, name", [("model", ""), ("model", "policy"), ("critic", "critic")])
def test_a_run_does_not_write_over_its_own_model(flag, name, tmp_path):
    """The config.json of a model that was also the run folder was lost once."""
    cfg = config(**{flag: tmp_path / name, "run_dir": tmp_path})
    with pytest.raises(UserError, match="^--run_dir .*: a run would write over its model; choose"):
        train.check_flags(cfg, 1)


def test_a_number_without_limits_is_accepted(monkeypatch):
    """A user may add a plain field to the recipe in place."""
    plain = dataclasses.make_dataclass("Config", [("offset", float, -0.5)], bases=(train.Config,))
    monkeypatch.setattr(train, "Config", plain)
    cfg = config(offset=-1)
    train.check_flags(cfg, 1)
    assert cfg.offset == -1


# ---- models --------------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
WHISPER = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64}
FALCON = SIZES | {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16}
FP8 = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    "model, words",
    [
        # A head with a bias, no causal language model, an encoder, other logits, random experts.
        (transformers.PhiConfig(**SIZES), "models of the family phi cannot be trained"),
        (transformers.ViTConfig(**SIZES), "models of the family vit cannot be trained"),
        (transformers.WhisperConfig(**WHISPER), "models of the family whisper cannot be trained"),
        (transformers.FalconH1Config(**FALCON), "models of the family falcon_h1 cannot be"),
        (transformers.PhimoeConfig(**SIZES), "models of the family phimoe cannot be trained"),
        (transformers.LlamaConfig(**SIZES, **FP8), "its weights are quantized"),
        (transformers.Gemma3Config(text_config=SIZES, **FP8), "its weights are quantized"),
    ],
    ids=lambda x: getattr(x, "model_type", ""),
)
def test_models_that_would_train_wrongly_are_refused(tmp_path, model, words):
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"^--model {tmp_path}: {words}"):
        families.load_config(str(tmp_path))


def test_a_wrong_folder_is_told_in_one_line_with_its_flag(tmp_path):
    """The reason is the libraries' own: no folder, no model, a copy that was interrupted."""
    cut = maker.make_model(tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:1000])
    (tmp_path / "empty").mkdir()
    for name, words in [
        ("nowhere", ": there is no such folder, and the hub lacks it: Repo id must be"),
        ("empty", ": Unrecognized model in"),
        ("cut", "/model.safetensors: Error while deserializing header"),
    ]:
        with pytest.raises(UserError) as error:
            families.load_config(str(tmp_path / name), "--critic")
        assert str(error.value).startswith(f"--critic {tmp_path / name}{words}")
        assert "\n" not in str(error.value)


def test_longrope_is_trained_up_to_its_short_positions():
    """Beyond them a long sample would change the log-probs of the samples of its micro-batch."""
    plain = transformers.Phi3Config(**SIZES, pad_token_id=0, max_position_embeddings=80)
    assert families.max_positions(plain) == 80
    # As published.
    rope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    fields = plain.to_dict() | {"rope_scaling": rope, "original_max_position_embeddings": 40}
    assert families.max_positions(transformers.Phi3Config(**fields)) == 40


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_without_memory(tmp_path, tied):
    model = transformers.AutoModelForCausalLM.from_pretrained(maker.make_model(tmp_path, tied=tied))
    # parameters() has a tied weight once.
    assert families.count_parameters(model.config) == sum(p.numel() for p in model.parameters())
    assert all(p.is_meta for p in families.skeleton(model.config).parameters())
