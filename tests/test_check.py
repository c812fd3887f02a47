"""Flags and models that cannot work: each is refused in one line that says what to do."""

import json
import os
import subprocess
import sys

import pytest
import tiny as maker
import torch
import transformers
from conftest import config
from safetensors.torch import load_file, save_file

import ckpt
import train
from nanoorz import families
from nanoorz import flags as flags_file
from nanoorz.ranks import UserError
from reward import Problem

ON_GPU = {"bf16": True, "zero_stage": 2}


def check_config(ranks=2, **flags):
    train.check_flags(config(**flags), ranks)


def test_a_good_config_is_accepted():
    check_config()
    check_config(top_p=0.9, eval_top_p=0.5, eval_temperature=0, temperature=2)
    check_config(ranks=1, offload="optimizer", zero_stage=1, temperature=0.01)
    check_config(lambd=0.95, eval_temperature=0.01)
    check_config(estimator="reinforce", n_samples_per_prompt=1)
    check_config(critic="x", eval_temperature=2)
    check_config(template="chat", system="Be brief.", prompt_max_len=63)
    check_config(ranks=4, keep_last=0, max_steps=1, log_samples=0, gamma=0)


# (flags, what the line says): the line names the first flag and its value.
REFUSED = [
    ({"zero_stage": 4}, "0 or 1 or 2 or 3"),
    ({"estimator": "ppo"}, "gae"),
    ({"critic_updates": 0}, "at least 1"),
    ({"lambd": -0.5}, "at least 0"),
    ({"gamma": "nan"}, "a number"),
    ({"gamma": 1.5}, "choose 0 to 1"),
    ({"lambd": 2}, "choose 0 to 1"),
    ({"kv_cache_gb": "inf"}, "a number"),
    ({"seed": 2**63}, "a number"),
    ({"rollout_batch_size": 3}, "multiple of 2"),
    ({"n_samples_per_prompt": 1, "estimator": "grpo"}, "at least 2"),
    ({"n_samples_per_prompt": 1, "estimator": "rloo"}, "at least 2"),
    ({"critic": "x", "estimator": "grpo"}, "grpo has no critic"),
    ({"prompt_max_len": 64}, "--max_len 64"),
    ({"packing_max_len": 63}, "--max_len 64"),
    ({"temperature": 0}, "0.01 to 2"),
    ({"temperature": 2.5}, "0.01 to 2"),
    ({"eval_temperature": 2.5}, "0.01 to 2"),
    ({"top_p": 0}, "above 0"),
    ({"eval_top_p": 1.5}, "up to 1"),
    ({"gpu_memory_utilization": 1.5}, "up to 1"),
    ({"system": "Be brief."}, "--template chat"),
    ({"bf16": True, "zero_stage": 1}, "stage 2"),
    ({"attention": "varlen"}, "needs a GPU, --bf16 true and packed rows; or choose sdpa"),
    ({"packing": "none"}, "auto or packed or alone"),
    ({"compile_layers": True}, "needs a GPU"),
    ({"tensor_parallel": 3}, "2 ranks"),
    ({"offload": "optimizer", "zero_stage": 0}, "--zero_stage 1"),
    ({"log_with": "wandb"}, "pip install"),
    ({"max_steps": 0}, "tools/evaluate.py evaluates a model"),
]


@pytest.mark.parametrize("flags, words", REFUSED, ids=str)
def test_flags_that_cannot_work_are_refused_in_one_line(flags, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(flags_file, "find_spec", lambda name: None)
    cfg = config(**flags)
    first = next(iter(flags))
    with pytest.raises(UserError, match=f"^--{first} {getattr(cfg, first)}: .*{words}.*$"):
        train.check_flags(cfg, 2)


@pytest.mark.parametrize("flags", [{"data": None}, {"data": ""}, {"eval_data": ["a", ""]}])
def test_files_of_problems_must_have_names(flags):
    with pytest.raises(UserError, match="^--data.*: (name at least one file|a name is empty).*$"):
        check_config(**flags)


def test_what_is_rarely_meant_is_accepted_with_a_warning(process_group, capsys):
    """A step that repeats problems, known problems in an evaluation, two labels, idle flags."""

    def warnings(questions="abcd", labels="1111", held_out="xy", **flags):
        problems = [Problem(0, q, label, q) for q, label in zip(questions, labels)]
        sets = {"mine": [Problem(0, q, "1", q) for q in held_out]}
        same = {"critic_learning_rate": 5e-6, "critic_updates": 12, "rollout_batch_size": 4}
        cfg = config(**same | flags)
        flags_file.warn(cfg, problems, sets)
        return capsys.readouterr().out.splitlines()

    assert warnings() == warnings(estimator="grpo") == warnings(lambd=0.9) == []
    [line] = warnings(questions="abab", labels="1221")
    assert line == "WARNING: --data: 2 problems have a second label, such as 'a'"
    [line] = warnings(rollout_batch_size=6)
    assert "--rollout_batch_size 6: --data has 4 problems, so each step repeats some" in line
    [line] = warnings(held_out="bx")
    assert line == "WARNING: 1 of 2 problems of mine are also in --data"
    lines = warnings(estimator="grpo", lambd=0.9, critic_learning_rate=1e-3)
    flags = ("--lambd 0.9", "--critic_learning_rate 0.001")
    words = "has no effect: --estimator grpo has no critic"
    assert lines == [f"{flag} {words}" for flag in flags]


# ---- models --------------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
FP8 = {"quantization_config": {"quant_method": "fp8"}}
FALCON = SIZES | {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16}


@pytest.mark.parametrize(
    "model, words",
    [
        (transformers.BartConfig(**BART), "an encoder and a decoder"),
        (transformers.PhiConfig(**SIZES), "its head has a bias"),
        (transformers.ViTConfig(**SIZES), "no causal language model of the kind vit"),
        (transformers.FalconH1Config(**FALCON), "does not compute the logits of falcon_h1"),
        (transformers.LlamaConfig(**SIZES, **FP8), "weights are quantized"),
        (transformers.PhimoeConfig(**SIZES), "draws experts at random"),
    ],
    ids=lambda x: getattr(x, "model_type", ""),
)
def test_models_that_cannot_be_trained_are_refused_before_their_weights(tmp_path, model, words):
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    save_file({}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"^--model, --critic, --teacher: {folder} .*{words}.*$"):
        families.load_config(str(folder))


INDEX = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
CONTENTS = {"index": json.dumps(INDEX), "broken_index": "{}"}
FILES = [
    ("adapter_config.json adapter_model.safetensors", "only an adapter; merge the adapter into"),
    ("model.gguf", "GGUF files, which are quantized; use the model"),
    ("notes.txt", "no config.json, so it is no model"),
    ("config.json pytorch_model.bin", r"not in safetensors files; convert them: python -c '.*\)'$"),
    ("config.json", r"no \*.safetensors file; copy all files of the model"),
    ("config.json model-1.safetensors", "neither model.safetensors nor model.safetensors.i"),
    ("config.json broken_index", "model.safetensors.index.json is damaged; copy the file again"),
    ("policy/config.json", "it is the folder of a run; name .*/policy"),
    ("config.json index model-1.safetensors", "file model-2.safetensors is absent; copy all files"),
]


@pytest.mark.parametrize("names, words", FILES)
def test_folders_that_are_no_model_are_refused_in_one_line(tmp_path, names, words):
    for name in names.split():
        path = tmp_path / ("model.safetensors.index.json" if name in CONTENTS else name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(CONTENTS.get(name, ""))
    with pytest.raises(
        UserError, match=f"^--model, --critic, --teacher: {tmp_path} cannot be .*{words}"
    ):
        families.load_config(str(tmp_path))


def test_the_advice_on_other_weights_works(tmp_path):
    """The command of the refusal converts a folder. A model of two files is taken."""
    folder = maker.make_model(tmp_path / "old")
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError) as refused:
        families.load_config(str(folder))
    command = str(refused.value).partition("convert them: ")[2].replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert families.load_config(str(folder)).model_type == "qwen2"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(model.state_dict()[name], weights[name]) for name in weights)
    model.save_pretrained(tmp_path / "two", max_shard_size="50KB")
    assert len([*(tmp_path / "two").glob("*.safetensors")]) > 1
    assert families.load_config(str(tmp_path / "two")).model_type == "qwen2"


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_without_memory(tmp_path, tied):
    model = transformers.AutoModelForCausalLM.from_pretrained(maker.make_model(tmp_path, tied=tied))
    # parameters() has a tied weight once.
    assert families.count_parameters(model.config) == sum(p.numel() for p in model.parameters())
    assert all(p.is_meta for p in families.skeleton(model.config).parameters())


def test_the_space_needed_counts_the_checkpoints_to_come(tmp_path):
    larger = str(maker.make_model(tmp_path / "larger"))
    smaller = str(maker.make_model(tmp_path / "smaller", hidden=32))
    policy = 16 * families.count_parameters(families.load_config(larger))
    critic = 16 * families.count_parameters(families.load_config(smaller))

    def needed(has_critic, present, **changes):
        run_dir = tmp_path / f"run_{present}"
        for step in range(present):
            (run_dir / f"step_{step:06d}").mkdir(parents=True, exist_ok=True)
        cfg = train.Config(model=larger, run_dir=str(run_dir), **{"keep_last": 1} | changes)
        cfg.estimator = "gae" if has_critic else "grpo"
        return ckpt.needed_bytes(run_dir, cfg, train.count_parameters(cfg))

    assert needed(True, 5, keep_last=0) == 2 * policy, "without a bound it is room for one"
    assert needed(True, 0) == 4 * policy, "one is kept and one is written"
    assert needed(True, 1) == 2 * policy, "the first of them is there"
    assert needed(True, 1, keep_last=2) == 4 * policy
    assert needed(True, 1, resume="none") == 4 * policy, "the old one is set aside, and stays"
    assert needed(True, 5, keep_last=4, resume="run/step_000001") == 6 * policy, "three are later"
    assert needed(True, 0, keep_last=0, critic=smaller) == policy + critic
    assert needed(False, 1) == policy
    # A short run writes fewer.
    assert (
        needed(False, 0, keep_last=2) == needed(False, 0, keep_last=2, max_steps=101) == 3 * policy
    )
    assert needed(False, 0, keep_last=2, max_steps=51) == 2 * policy
    for changes in ({"save_interval": 0}, {"max_steps": 50}, {"max_steps": 1}):
        assert needed(False, 0, keep_last=2, **changes) == policy, changes
