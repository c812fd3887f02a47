"""Tiny random models of eight families are trained. In packed rows samples do not see each other.

Most of these tests are slow. docs/run.md has the families that were tried by hand.
"""

import json
import re

import families
import kernels  # noqa: F401 (varlen_attn's kernel on a CPU)
import naive
import pytest
import tiny as maker
import torch
from conftest import ROOT, jsonl, launch, run_python
from ppo_worker import cell, config, make_batch, reader
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ckpt
import ppo
from nanoorz import families as library
from nanoorz.models import Policy, load_model, make_policy, named_weights, packed_attention
from nanoorz.ranks import UserError

FILE = "model.safetensors"
AUTO = {"packing": "auto", "attention": "auto"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict:
    return {x: families.make_model(x, tmp_path_factory.mktemp("model")) for x in families.FAMILIES}


def filled_in(folder, **flags):
    cfg = config(folder, **AUTO | flags)
    library.replace_auto(cfg)
    return cfg


# ---- the trainer ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", families.FAMILIES)
def test_rows_equal_single_samples(name, folders, process_group):
    """Log-probs, entropies and gradients are those of transformers' own model with full logits, a
    sample at a time, in float64. With gradient checkpointing they are the same."""
    slow = naive.load(folders[name], families.auto_class_of(name))
    if name == "Qwen3-MoE":
        # The other code is not for float64.
        slow.set_experts_implementation("eager")
    if name == "Gemma 2":
        # sdpa would leave out the cap of attention.
        slow.set_attn_implementation("eager")
    batch = make_batch()
    logprobs, entropy = naive.logprobs(slow, batch, 1.3)
    weights = torch.linspace(-1, 1, len(logprobs), dtype=torch.float64)  # (T,)
    ((weights * logprobs).sum() + 0.1 * entropy.sum()).backward()
    # The text part's weights are the only ones with a gradient.
    expected = {n: p.grad for n, p in slow.named_parameters() if p.grad is not None}
    for checkpointing in (False, True):
        flags = {"gradient_checkpointing": checkpointing, "packing_max_len": 100}
        cfg = filled_in(folders[name], **flags)
        policy = Policy(load_model(cfg, cfg.model, AutoModelForCausalLM), cfg.model)
        micros = [micro for micro, _ in ppo.micro_batches(batch, batch.all_indices(), cfg)]
        assert len(micros) < len(batch.sample_lengths)
        got = torch.zeros_like(logprobs.detach())  # (T,)
        for micro in micros:
            ours, entropies = policy(micro, 1.3)
            ((weights[micro.flat_index] * ours).sum() + 0.1 * entropies.sum()).backward()
            got[micro.flat_index] = ours.detach().double()
        torch.testing.assert_close(got, logprobs.detach(), rtol=0, atol=2e-5)
        ours = dict(policy.model.named_parameters())
        found = [ours[n.replace("model.language_model.", "model.")].grad for n in expected]
        distance = torch.cat([(x - y).flatten() for x, y in zip(found, expected.values())]).norm()
        size = torch.cat([x.flatten() for x in expected.values()]).norm()
        print(f"{name}: the gradient differs by {distance / size:.1e}")
        assert distance < 1e-5 * size, cfg.packing


@pytest.mark.parametrize("name, field", [("Cohere", "logit_scale"), ("Granite", "logits_scaling")])
def test_a_head_has_its_family_s_scale(name, field, tmp_path, process_group, monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "scaled", (f"{name}Config", {field: 0.25}))
    folder = families.make_model("scaled", tmp_path)
    batch = make_batch()
    cfg = filled_in(folder)
    policy = Policy(load_model(cfg, folder, AutoModelForCausalLM), folder)
    with torch.no_grad():
        expected, _ = naive.logprobs(naive.load(folder), batch, cfg.temperature)
    found = ppo.compute_logprobs(policy, batch, cfg).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


# Without gradient checkpointing nobody but load_model asks for gradients of the embedding's output.
FROZEN = "a frozen embedding"


@pytest.fixture(scope="module")
def sharded(folders, tmp_path_factory):
    """result(ranks, name): an update at ZeRO 0 by one rank, and at ZeRO 3 by two."""
    one, two = (
        [
            *(
                cell(x, "family", tied=x, **AUTO, zero_stage=stage, gradient_checkpointing=True)
                for x in folders
            ),
            cell(FROZEN, "family", tied="Qwen2", spec={"frozen": 1}, **AUTO, zero_stage=stage),
        ]
        for stage in (0, 3)
    )
    return reader(one, two, tmp_path_factory.mktemp("cells"), folders)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*families.FAMILIES, FROZEN])
def test_zero_3_gathers_whole_layers_and_changes_no_gradient(name, sharded, process_group):
    """DeepSpeed fills in zeros if it looks for the gradients of a layer before they are there."""
    expected = sharded(1, name)["gradient"]
    found = sharded(2, name)
    assert found["layers"] == families.SIZES["num_hidden_layers"]
    assert found["gradient"].keys() == expected.keys()
    for weight, gradient in found["gradient"].items():
        limit = 1e-4 * expected[weight].norm() + 1e-7
        assert (gradient - expected[weight]).norm() < limit, weight


SMALL = {key: families.SIZES[key] for key in families.SIZES if key != "tie_word_embeddings"}
SMALL |= {"sliding_window": 8, "num_experts_per_tok": 2, "n_positions": 256, "pad_token_id": None}
SMALL |= dict.fromkeys(["num_hidden_layers", "num_attention_heads", "num_experts", "n_layer"], 4)
SMALL |= dict.fromkeys(["num_local_experts", "n_routed_experts", "n_head"], 4)
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32, "n_embd": 64}


@pytest.mark.slow
@pytest.mark.parametrize("family", library.PACKED.split())
def test_families_of_the_list_keep_packed_samples_apart(family):
    """The states of a sample do not depend on the sample before it in the row, with each kind of
    attention that a run may have."""
    config_class = CONFIG_MAPPING[family]
    known = config_class().to_dict().keys()
    shape = config_class(**{key: value for key, value in SMALL.items() if key in known})
    # Two passes of a model in training mode would differ with noise.
    library.turn_noise_off(shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = AutoModelForCausalLM.from_config(shape).base_model.train()
    AttentionInterface.register("varlen", packed_attention)
    ids = torch.randint(3, 60, (50,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(20), torch.arange(30)])
    inputs = {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False}
    lengths = {"cu_seq_lens_q": torch.tensor([0, 20, 50], dtype=torch.int32), "max_length_q": 30}
    with torch.no_grad():
        alone = body(ids[None, 20:], use_cache=False).last_hidden_state
        for attention in ["eager"] if library.needs_eager(shape) else ["sdpa", "varlen"]:
            body.set_attn_implementation(attention)
            row = body(**inputs, **lengths).last_hidden_state
            assert (row[:, 20:] - alone).norm() < 1e-5 * alone.norm(), attention


def test_auto_is_what_the_models_need(folders, tiny, monkeypatch):
    def auto(model, **flags):
        cfg = filled_in(model, **{"bf16": True, "zero_stage": 2} | flags)
        return cfg.packing, cfg.attention

    alone = folders["Qwen3.5"]
    for has_gpu, plain in ((False, "sdpa"), (True, "varlen")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert auto(tiny["model"]) == auto(folders["Gemma 3"]) == ("packed", plain)
        assert auto(alone) == ("alone", "sdpa")
        assert auto(folders["Gemma 2"]) == ("packed", "eager")
        # The critic's family counts too, and what is asked for is taken.
        assert auto(tiny["model"], critic=alone) == ("alone", "sdpa")
        assert auto(tiny["model"], packing="alone") == ("alone", "sdpa")
        assert auto(tiny["model"], bf16=False) == ("packed", "sdpa")
    for model, flags, words in [
        (alone, {"packing": "packed"}, "--packing packed: .* might see each other .*; use alone"),
        (
            folders["Gemma 2"],
            {"attention": "sdpa"},
            "--attention sdpa: .* plain code .* use eager",
        ),
        (alone, {"attention": "varlen"}, "--attention varlen: needs a GPU, .* packed rows; use sd"),
    ]:
        with pytest.raises(UserError, match=f"^{words}"):
            auto(model, **flags)


# ---- whole runs ----------------------------------------------------------------------------------

# What vLLM 0.32's CPU build cannot do: {family: (flags, how the run ends)}. This build packs
# experts at its start, and not at a sync. vLLM's gated delta nets are in bf16 only.
UNSEEN = {
    "Qwen3-MoE": ({}, "differ by .* a token"),
    "Qwen3.5": (
        {"bf16": True, "zero_stage": 2},
        "vLLM cannot start with --model .*failed to be inspected",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_run_of_two_steps(name, folders, tiny, tmp_path):
    """The sampler agrees with the trainer at the start, and after a sync in the second step. The
    export is loaded by transformers with the trained weights, and by vLLM in tools/evaluate.py."""
    run = tmp_path / "run"
    flags = tiny | {"model": folders[name], "max_steps": 2, "variant": "log_ratio"}
    if name in UNSEEN:
        more, words = UNSEEN[name]
        assert re.search(words, launch(run, code=2, **flags | more).stderr)
        return
    done = launch(run, **flags)
    assert float(re.search(r"differ by (\S+) a token", done.stdout)[1]) < 1e-5
    # After an update and a sync.
    line = jsonl(run / "metrics.jsonl")[1]
    assert line["step"] == 2 and line["policy_grad_norm"] > 0
    assert line["approx_kl"] < 1e-6
    check_export(name, folders[name], run / "policy")
    _, report = AutoModel.from_pretrained(run / "critic", output_loading_info=True)
    assert not report["missing_keys"]
    if name == "Gemma 3":
        run_python(ROOT / "ckpt.py", run / "step_000002", tmp_path / "again")
        ours, theirs = (load_file(x / "policy" / FILE) for x in (run, tmp_path / "again"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    run_python(ROOT / "tools" / "evaluate.py", run)
    [evaluation] = jsonl(run / "evaluation" / "eval.jsonl")
    assert evaluation["problems"] == jsonl(run / "eval.jsonl")[-1]["problems"]


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSEEN)
def test_two_updates_and_an_export_without_a_sampler(name, folders, tmp_path, process_group):
    """Of the families that vLLM's CPU build cannot sample from."""
    cfg = filled_in(folders[name])
    policy = make_policy(cfg)
    batch = make_batch()
    ppo.compute_advantages(batch, cfg)
    for step in range(2):
        cfg.train_policy(policy, batch, step, total_steps=2)
    out = tmp_path / "out"
    ckpt.export(out, policy.module.save, named_weights(policy), "")
    check_export(name, folders[name], out)
    # The exported folder is a base model of the same kind.
    again = make_policy(filled_in(out))
    for (key, trained), (other, loaded) in zip(named_weights(policy), named_weights(again)):
        assert key == other and torch.equal(trained, loaded), key


def test_an_export_of_an_image_model_whose_files_have_the_tied_head(tmp_path, process_group):
    """transformers would load an old head in the place of the trained embedding."""
    folder = families.make_model("Gemma 3", tmp_path / "base")
    weights = load_file(folder / FILE)
    [embedding] = [key for key in weights if key.endswith("embed_tokens.weight")]
    weights["lm_head.weight"] = weights[embedding].clone()
    save_file(weights, folder / FILE, {"format": "pt"})
    cfg = filled_in(folder)
    policy = make_policy(cfg)
    batch = make_batch()
    ppo.compute_advantages(batch, cfg)
    cfg.train_policy(policy, batch, step=0, total_steps=1)
    ckpt.export(tmp_path / "out", policy.module.save, named_weights(policy), "")
    after = load_file(tmp_path / "out" / FILE)
    assert torch.equal(after["lm_head.weight"], after[embedding])
    assert not torch.equal(after[embedding], weights[embedding])


def test_an_image_model_whose_experts_cannot_be_exported_is_refused(
    tmp_path, process_group, monkeypatch
):
    """Otherwise the export would fail after the last step."""
    fields = families.DELTA_NET | families.EXPERTS | families.UNTIED
    monkeypatch.setitem(families.FAMILIES, "MoE", ("Qwen3_5MoeConfig", fields))
    monkeypatch.setitem(families.PARTS, "MoE", families.PARTS["Qwen3.5"])
    folder = families.make_model("MoE", tmp_path)
    with pytest.raises(UserError, match=f"^--model {folder}: its files have .*experts.* another"):
        make_policy(filled_in(folder))


def check_export(name, base, out):
    """All parts are there. Those that are not trained are unchanged."""
    _, report = families.auto_class_of(name).from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    before = load_file(base / FILE)
    after = load_file(out / FILE)
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key].to(before[key]))}
    trained = {key for key in before if not re.search("vision|visual|multi_modal", key)}
    # What no token has reached does not change.
    assert changed <= trained and len(changed) > 0.8 * len(trained)
    assert AutoConfig.from_pretrained(out).model_type == AutoConfig.from_pretrained(base).model_type


@pytest.mark.slow
def test_each_end_token_of_generation_config_ends_a_response(tiny, tmp_path):
    """Chat models have two: the end of a turn, and the end of a text."""
    folder = maker.make_model(tmp_path / "model")
    config = {"eos_token_id": [0, 7], "do_sample": True, "top_k": 1, "repetition_penalty": 9.0}
    (folder / "generation_config.json").write_text(json.dumps(config))
    flags = tiny | {"model": folder, "max_steps": 1, "log_samples": 0, "log_tokens": 16}
    launch(tmp_path / "run", **flags)
    ends = set()
    tokens = maker.char_tokenizer().convert_ids_to_tokens(range(56))
    for sample in jsonl(tmp_path / "run" / "samples.jsonl"):
        *before, last = sample["tokens"]
        assert not {tokens[0], tokens[7]} & set(before)
        ends.add((sample["finish_reason"], last))
    assert {("stop", tokens[0]), ("stop", tokens[7])} <= ends
    # The other settings of the file change nothing: top_k 1 would make all samples alike.
    saved = json.loads((tmp_path / "run" / "policy" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [0, 7]
