"""Each family of docs/models.md: a tiny random model is trained, and its samples are kept apart.

Most of these tests are slow.
"""

import json
import re

import families
import naive
import pytest
import tiny as maker
import torch
from conftest import ROOT, jsonl, launch, run_python, run_ranks
from ppo_worker import cell, config, make_batch, reader
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ckpt
import ppo
from nanoorz import families as library
from nanoorz import models
from nanoorz.models import load_model, make_policy, named_weights
from nanoorz.ranks import UserError

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(name) is the family's model, which is made once."""
    made = {}

    def folder_of(name):
        if name not in made:
            made[name] = families.make_model(name, tmp_path_factory.mktemp("model"))
        return made[name]

    return folder_of


def filled_in(folder, **flags):
    cfg = config(folder, attention="auto", **flags)
    library.replace_auto(cfg)
    return cfg


WITH_EXPERTS = ("Qwen3-MoE", "Qwen3-Next", "Llama 4 text")


# ---- the trainer ---------------------------------------------------------------------------------


def naive_model(name, folder):
    """The whole model as transformers makes it, in float64."""
    auto_class = AutoModelForCausalLM if families.is_text(name) else AutoModelForImageTextToText
    model = naive.load(folder, auto_class)
    if name in WITH_EXPERTS:
        # The other code is not for float64.
        model.set_experts_implementation("eager")
    if name == "Gemma 2":
        # sdpa would leave out the soft cap of attention.
        model.set_attn_implementation("eager")
    return model


def gradient_of(parameters):
    return torch.cat([p.grad.flatten().double() for p in parameters if p.grad is not None])


@pytest.mark.slow
@pytest.mark.parametrize("name", families.FAMILIES)
def test_rows_equal_single_samples(name, folder_of, process_group):
    """Log-probs, entropies and gradients are those of full logits, a sample at a time, in float64.
    With gradient checkpointing they are the same. Each sample has its own temperature."""
    folder = folder_of(name)
    batch = make_batch()
    temperatures = torch.linspace(0.5, 1.5, len(batch.prompt_ids))  # (N,)
    of_tokens = batch.spread(temperatures)  # (T,)
    slow = naive_model(name, folder)
    logprobs, entropy = naive.logprobs(slow, batch, temperatures)
    weights = torch.linspace(-1, 1, len(logprobs), dtype=torch.float64)  # (T,)
    ((weights * logprobs).sum() + 0.1 * entropy.sum()).backward()
    # The text part's weights are the only ones with a gradient.
    expected = gradient_of(slow.parameters())
    for checkpointing in (False, True):
        cfg = filled_in(folder, gradient_checkpointing=checkpointing, packing_max_len=100)
        family = library.find_family(folder)
        policy = models.Policy(load_model(cfg, family, AutoModelForCausalLM), family)
        policy.device = torch.device("cpu")
        # A pass without gradients.

        def forward(micro, policy=policy):
            return policy(micro, of_tokens[micro.flat_index])[0]  # (M,)

        got = ppo.forward_pass(batch, cfg, forward)
        torch.testing.assert_close(got.double(), logprobs.detach(), rtol=0, atol=2e-5)
        micros = [micro for micro, _ in ppo.micro_batches(batch, batch.all_indices(), cfg)]
        assert len(micros) < len(batch.sample_lengths)
        got = torch.zeros_like(logprobs.detach())  # (T,)
        for micro in micros:
            ours, entropies = policy(micro, of_tokens[micro.flat_index])
            ((weights[micro.flat_index] * ours).sum() + 0.1 * entropies.sum()).backward()
            got[micro.flat_index] = ours.detach().double()
        torch.testing.assert_close(got, logprobs.detach(), rtol=0, atol=2e-5)
        named = dict(policy.model.named_parameters())
        found = gradient_of(named[text] for text in text_names(slow) if text in named)
        assert (found - expected).norm() < 1e-5 * expected.norm(), cfg.packing


ALL = {"packing": "auto", "attention": "auto", "gradient_checkpointing": True}
# Without gradient checkpointing nobody but load_model asks for gradients of the embedding's output.
FROZEN = "a frozen embedding"
ONCE = ALL | {"gradient_checkpointing": False}


@pytest.fixture(scope="module")
def sharded(folder_of, tmp_path_factory):
    """result(ranks, name): an update at ZeRO 0 by one rank, and at ZeRO 3 by two."""
    folders = {name: folder_of(name) for name in families.FAMILIES}
    one, two = (
        [
            *(cell(name, "family", tied=name, zero_stage=stage, **ALL) for name in folders),
            cell(FROZEN, "family", tied="Qwen2", spec={"frozen": 1}, zero_stage=stage, **ONCE),
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


def text_names(model):
    """The names of a model's weights that have a gradient, as its text part has them."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name.replace("model.language_model.", "model.")


SMALL = {key: families.SIZES[key] for key in families.SIZES if key != "tie_word_embeddings"}
SMALL |= {"sliding_window": 8, "num_experts_per_tok": 2, "n_positions": 256, "pad_token_id": None}
SMALL |= dict.fromkeys(["num_hidden_layers", "num_attention_heads", "num_experts", "n_layer"], 4)
SMALL |= dict.fromkeys(["num_local_experts", "n_routed_experts", "n_head"], 4)
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32, "n_embd": 64}


@pytest.mark.slow
@pytest.mark.parametrize("family", library.PACKED.split())
def test_families_of_the_list_keep_packed_samples_apart(family):
    """The states of a sample do not depend on the sample before it in the row."""
    config_class = CONFIG_MAPPING[family]
    known = config_class().to_dict().keys()
    shape = config_class(**{key: value for key, value in SMALL.items() if key in known})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = AutoModelForCausalLM.from_config(shape).base_model.eval()
    ids = torch.randint(3, 60, (50,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(20), torch.arange(30)])
    with torch.no_grad():
        row = body(ids[None], position_ids=positions[None], use_cache=False).last_hidden_state
        alone = body(ids[None, 20:], use_cache=False).last_hidden_state
    assert (row[:, 20:] - alone).norm() < 1e-5 * alone.norm()


# On a GPU --attention auto gives these families another attention than varlen.
NOT_VARLEN = dict.fromkeys(["Llama 4 text", "Gemma 4", "Qwen3-Next", "Qwen3.5", "LFM2"], "sdpa")
NOT_VARLEN["Gemma 2"] = "eager"


@pytest.mark.slow
@pytest.mark.parametrize("name", families.FAMILIES)
def test_varlen_gets_the_borders_and_the_window_in_each_layer(name, folder_of, monkeypatch):
    """No layer gets a mask. Gradient checkpointing calls each layer again in backward. PyTorch's
    fake kernels compute shapes and dtypes alone."""
    with monkeypatch.context() as gpu:
        gpu.setattr(torch.cuda, "is_available", lambda: True)
        flags = {"bf16": True, "zero_stage": 2, "gradient_checkpointing": True}
        cfg = filled_in(folder_of(name), **flags)
    assert cfg.attention == NOT_VARLEN.get(name, "varlen")
    if name in NOT_VARLEN:
        return
    micro = ppo.build_rows(make_batch(), [[0, 1], [2, 3, 4]])
    calls = []
    packed_attention = models.packed_attention

    def spy(module, query, key, value, mask, **options):
        assert mask is None
        assert options["cu_seq_lens_q"] is micro.borders
        assert options["max_length_q"] == micro.longest
        assert {x.dtype for x in (query, key, value)} == {torch.bfloat16}
        calls.append((module.layer_idx, options.get("sliding_window")))
        return packed_attention(module, query, key, value, mask, **options)

    monkeypatch.setattr(models, "packed_attention", spy)
    family = library.find_family(cfg.model)
    body = family.body(load_model(cfg, family, AutoModelForCausalLM))
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        models.last_hidden_state(body, micro).sum().backward()
    _, fields = families.FAMILIES[name]
    kinds = fields.get("layer_types", ["sliding_attention"] * 2)
    windows = [fields.get("sliding_window") if "sliding" in kind else None for kind in kinds]
    expected = [*enumerate(windows)]
    assert calls == expected + expected[::-1]


def test_auto_is_what_the_models_need(folder_of, tiny, monkeypatch):
    def auto(model, **flags):
        cfg = filled_in(model, **{"bf16": True, "zero_stage": 2} | flags)
        return cfg.packing, cfg.attention

    for has_gpu, plain in ((False, "sdpa"), (True, "varlen")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert auto(tiny["model"]) == auto(folder_of("Gemma 3")) == ("packed", plain)
        assert auto(folder_of("LFM2")) == auto(folder_of("Qwen3.5")) == ("alone", "sdpa")
        assert auto(folder_of("Gemma 2")) == ("packed", "eager")
        # The critic's family counts too, and what is asked for is taken.
        assert auto(tiny["model"], critic=str(folder_of("LFM2"))) == ("alone", "sdpa")
        assert auto(tiny["model"], packing="alone") == ("alone", "sdpa")
        assert auto(tiny["model"], bf16=False) == ("packed", "sdpa")
    with pytest.raises(UserError, match="^--packing packed: .* kind conv, .*; use alone$"):
        auto(folder_of("LFM2"), packing="packed")
    for name, attention, words in [
        ("Gemma 2", "sdpa", "soft cap of attention.*use eager"),
        ("LFM2", "varlen", "needs a GPU, --bf16 true and packed rows; choose sdpa"),
    ]:
        cfg = config(folder_of(name), attention=attention)
        with pytest.raises(UserError, match=f"^--attention {attention}.*{words}$"):
            library.replace_auto(cfg)


# ---- whole runs ----------------------------------------------------------------------------------

IN_BF16 = {"bf16": True, "zero_stage": 2}
# What vLLM 0.32's CPU build cannot do: {family: (flags, how the run ends)}. This build packs
# experts at its start, and not at a sync. vLLM's gated delta nets are in bf16 only.
TOO_FAR = "differ by .* a token"
UNSEEN = {
    "LFM2": ({}, TOO_FAR),
    "Qwen3-MoE": ({}, TOO_FAR),
    "Qwen3-Next": (IN_BF16, TOO_FAR),
    "Llama 4 text": ({}, TOO_FAR),
    "Qwen3.5": (IN_BF16, "vLLM cannot start with --model .*failed to be inspected"),
}
NUMBERS = r"differ by (\S+) a token"


@pytest.mark.slow
@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_run_of_two_steps(name, folder_of, tiny, tmp_path):
    """The sampler agrees with the trainer at the start, and after a sync in the second step. The
    export is loaded by transformers with the trained weights, and by vLLM in tools/evaluate.py."""
    folder = folder_of(name)
    run = tmp_path / "run"
    flags = tiny | {"model": folder, "max_steps": 2, "variant": "log_ratio"}
    if name in UNSEEN:
        more, words = UNSEEN[name]
        assert re.search(words, launch(run, code=2, **flags | more).stderr)
        return
    done = launch(run, **flags)
    assert float(re.search(NUMBERS, done.stdout)[1]) < 1e-5
    # After an update and a sync.
    line = jsonl(run / "metrics.jsonl")[1]
    assert line["step"] == 2 and line["policy_grad_norm"] > 0
    assert line["approx_kl"] < 1e-6
    check_export(name, folder, run / "policy")
    _, report = AutoModel.from_pretrained(run / "critic", output_loading_info=True)
    assert not report["missing_keys"]
    if name == "Gemma 3":
        run_python(ROOT / "ckpt.py", run / "step_000002", tmp_path / "again")
        ours, theirs = (load_file(x / "policy" / FILE) for x in (run, tmp_path / "again"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    command = [ROOT / "tools" / "evaluate.py", run, "--out", tmp_path / "evaluated"]
    run_ranks(command, 1)
    last = jsonl(run / "eval.jsonl")[-1]
    [again] = json.loads((tmp_path / "evaluated" / "result.json").read_text())["sets"]
    assert again["accuracy"] == last["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSEEN)
def test_two_updates_and_an_export_without_a_sampler(name, folder_of, tmp_path, process_group):
    """Of the families that vLLM's CPU build cannot sample from."""
    folder = folder_of(name)
    cfg = filled_in(folder)
    policy = make_policy(cfg)
    batch = make_batch()
    ppo.compute_advantages(batch, cfg)
    for step in range(2):
        cfg.train_policy(policy, batch, step, total_steps=2)
    ckpt.export(tmp_path, policy.module.save, named_weights(policy), maker.char_tokenizer(), "")
    check_export(name, folder, tmp_path)
    # The exported folder is a base model of the same kind.
    again = make_policy(filled_in(tmp_path))
    for (key, trained), (other, loaded) in zip(named_weights(policy), named_weights(again)):
        assert key == other and torch.equal(trained, loaded), key


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


def check_export(name, base, out):
    """All parts are there. Those that are not trained are unchanged."""
    auto_class = AutoModelForCausalLM if families.is_text(name) else AutoModelForImageTextToText
    _, report = auto_class.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    before = load_file(base / FILE)
    after = load_file(out / FILE)
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key].to(before[key]))}
    trained = {key for key in before if not re.search("vision|visual|multi_modal", key)}
    # What no token has reached does not change. Buffers do not either.
    assert changed <= trained and len(changed) > 0.8 * len(trained)
    assert AutoConfig.from_pretrained(out).model_type == AutoConfig.from_pretrained(base).model_type
