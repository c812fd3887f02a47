"""nanoorz/head.py and nanoorz/models.py against full logits and padded batches, in the order of
their functions. test_ppo.py has what needs ranks or ZeRO's stages.
"""

import functools

import families
import naive
import pytest
import tiny as maker
import torch
from ppo_worker import CPU, config, gradient_of_update, make_batch, make_models
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
)

import ckpt
import ppo
from nanoorz.head import ChunkedHead, ChunkedLogprob
from nanoorz.models import Critic, Policy, load_model, make_critic, make_policy, named_weights
from nanoorz.ranks import UserError


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    return make_models(tmp_path_factory.mktemp("models"))


# ---- the chunked head ----------------------------------------------------------------------------


def full(hidden, weight, ids, temperature, scale=1.0, cap=None):
    """Log-probs and entropies, (T,) each, from full logits."""
    logits = scale * hidden @ weight.T  # (T, V)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p[range(len(ids)), ids], -(log_p.exp() * log_p).sum(-1)


def differentiate(function, hidden, weight, through) -> list:
    """Both outputs of function(hidden, weight), and the gradients of their weighted sum.

    through: the numbers of the outputs in this sum.
    """
    hidden = hidden.clone().requires_grad_()
    weight = torch.nn.Parameter(weight.clone())
    outputs = function(hidden, weight)
    rng = torch.Generator().manual_seed(3)
    sum((outputs[k] * torch.randn(len(hidden), generator=rng)).sum() for k in through).backward()
    return [*outputs, hidden.grad, weight.grad]


def draw(tokens, hidden, vocabulary):
    """Hidden states (T, H), the weights of a head (V, H), and token ids (T,)."""
    rng = torch.Generator().manual_seed(2)
    states = torch.randn((tokens, hidden), generator=rng) / hidden**0.25
    weight = torch.randn((vocabulary, hidden), generator=rng) / hidden**0.25
    return states, weight, torch.randint(vocabulary - 10, (tokens,), generator=rng)


def check_against_full(function, slow, through):
    """In fp32 outputs and gradients are those of full logits in float64."""
    hidden, weight, _ = draw(50, 24, 97)
    got = differentiate(function, hidden, weight, through)
    want = differentiate(slow, hidden.double(), weight.double(), through)
    for x, y in zip(got, want, strict=True):
        assert (x.double() - y).norm() < 1e-6 * y.norm()


@pytest.mark.parametrize("temperature, cap", [(1, None), (0.6, None), (0.6, 3)])
@pytest.mark.parametrize("chunk", [1, 7, 50, 64])
@pytest.mark.parametrize("through", [(0,), (1,), (0, 1)])  # the log-probs, the entropy, both
@pytest.mark.parametrize("kept", [0, 2**26])
def test_chunked_logprobs_equal_full_ones(temperature, cap, chunk, through, kept, monkeypatch):
    """For chunks that do and do not divide T. Log p is kept for backward, or computed again."""
    monkeypatch.setattr("nanoorz.head.KEPT", kept)
    _, _, ids = draw(50, 24, 97)

    def chunked(hidden, weight):
        return ChunkedLogprob.apply(hidden, weight, ids, temperature, chunk, cap)

    def slow(hidden, weight):
        return full(hidden, weight, ids, temperature, cap=cap)

    check_against_full(chunked, slow, through)


@pytest.mark.parametrize("cap", [None, 3])
@pytest.mark.parametrize("limit", [None, 87])
def test_a_head_has_a_scale_a_cap_and_a_limit_of_ids(cap, limit):
    """Cohere and Granite have the scale, Gemma has the cap, and a smaller teacher has the limit."""
    _, _, ids = draw(50, 24, 97)

    def chunked(hidden, weight):
        head = ChunkedHead(weight, 0.25, cap)
        head.id_limit = limit
        return head(hidden, ids, 0.6)

    def slow(hidden, weight):
        return full(hidden, weight[:limit], ids, 0.6, 0.25, cap)

    check_against_full(chunked, slow, (0, 1))


def test_a_pass_without_gradients_computes_no_entropy():
    """The log-probs of a pass without gradients are those of an update to the bit."""
    hidden, weight, ids = draw(50, 24, 97)
    head = ChunkedHead(torch.nn.Parameter(weight))
    logged, _ = head(hidden, ids, 0.6)
    with torch.no_grad():
        logprobs, entropy = head(hidden, ids, 0.6)
    assert entropy is None
    assert torch.equal(logprobs, logged)


def test_chunked_head_sums_bf16_gradients_in_fp32():
    """The head's gradient is a sum over chunks. In bf16 small chunks would lose small terms."""
    hidden, weight, ids = draw(2048, 8, 40)
    gradients = []
    for chunk in (4, 2048):
        leaf = weight.bfloat16().requires_grad_()
        ChunkedLogprob.apply(hidden.bfloat16(), leaf, ids, 1.0, chunk)[0].sum().backward()
        gradients.append(leaf.grad.double())
    small, whole = gradients
    assert (small - whole).norm() < 3e-3 * whole.norm()


# ---- policy and critic ---------------------------------------------------------------------------


@functools.cache
def unpacked(folder) -> tuple[torch.Tensor, torch.Tensor]:
    """Naive log-probs and values, (T,) each."""
    batch = make_batch()
    head = Critic(naive.load(folder, AutoModel), folder, seed=5).value_head.weight.detach()
    with torch.no_grad():
        logprobs, _ = naive.logprobs(naive.load(folder), batch, config().temperature)
        return logprobs, naive.values(naive.load(folder, AutoModel), head, batch)


def load(folder, auto_class, attention: str, **settings):
    cfg = config(folder, attention=attention, **settings)
    return load_model(cfg, folder, auto_class)


# varlen comes first: nobody has registered it before load_model does.
@pytest.mark.parametrize("attention", ["varlen", "sdpa", "eager"])
@pytest.mark.parametrize("row_len, rows", [(48, 1), (100, 2), (640, 1)])
def test_packed_equals_unpacked(attention, row_len, rows, models, process_group):
    """Samples of a row do not see each other. Without use_cache=False they would, as in ORZ,
    and without borders under varlen. A value is read before its token,
    because a baseline that knew the token would teach nothing."""
    cfg = config(packing_max_len=row_len, micro_train_batch_size=rows)
    policy = Policy(load(models[False], AutoModelForCausalLM, attention), models[False])
    critic = Critic(load(models[False], AutoModel, attention), models[False], seed=5)
    logprobs, values = unpacked(models[False])
    got = ppo.compute_logprobs(policy, make_batch(), cfg)
    torch.testing.assert_close(got.double(), logprobs, rtol=0, atol=2e-5)
    got = ppo.forward_pass(make_batch(), cfg, critic)
    torch.testing.assert_close(got.double(), values, rtol=0, atol=2e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_varlen_equals_sdpa(checkpointing, tmp_path, process_group, monkeypatch):
    """The log-probs and the gradients are equal. Rows have padding, and the last micro-batch is a
    filler. There are four query heads to two keys. The first of two layers has a sliding window.
    Gradient checkpointing calls the attention again in backward."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setattr(families, "SIZES", families.SIZES | heads)
    folder = families.make_model("OLMo 3", tmp_path)
    cfg = config(packing_max_len=100)
    batch = make_batch()
    micros = [micro for micro, _ in ppo.micro_batches(batch, batch.all_indices(), cfg)]
    micros.append(ppo.filler(CPU))
    results = []
    for attention in ("sdpa", "varlen"):
        model = load(folder, AutoModelForCausalLM, attention, gradient_checkpointing=checkpointing)
        policy = Policy(model, folder)
        for layer in model.base_model.layers:
            # Not the usual one over the root of D: some models have their own.
            layer.self_attn.scaling = 0.3
        logprobs = torch.cat([policy(micro, cfg.temperature)[0] for micro in micros])  # (T + 1,)
        logprobs.sum().backward()
        results.append((logprobs, torch.cat([p.grad.flatten() for p in policy.parameters()])))
    (expected, expected_gradient), (found, gradient) = results
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert (gradient - expected_gradient).norm() < 1e-5 * expected_gradient.norm()


@pytest.mark.parametrize("form", ["ours", "orz", "classifier"])
def test_a_critic_starts_from_a_folder(form, models, tmp_path, process_group):
    """The values are those of a plain pass. From an export the next run's critic starts alike.

    ours: what a run exports. orz: OpenRLHF's, the head in the file of the body. classifier: of
    tokens, as Transformers has it.
    """
    model = AutoModel.from_pretrained(maker.make_model(tmp_path / "lm", hidden=32, layers=1))
    weights = model.state_dict()
    head = torch.linspace(-1, 1, 32)[None]  # (1, H)
    bias = 0.0
    folder = tmp_path / "critic"
    folder.mkdir()
    if form == "ours":
        weights["value_head.weight"] = head
        base = Critic(model, tmp_path / "lm", seed=5)
        ckpt.write_export(folder, base.save, weights, "")
    elif form == "orz":
        model.save_pretrained(folder)
        weights = {f"model.{name}": tensor for name, tensor in weights.items()}
        weights["value_head.weight"] = head
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    else:
        bias = 0.25
        model.config.num_labels = 1
        classifier = Qwen2ForTokenClassification(model.config)
        classifier.model.load_state_dict(weights)
        classifier.score.load_state_dict({"weight": head, "bias": torch.tensor([bias])})
        classifier.save_pretrained(folder)
    batch = make_batch()
    cfg = config(models[True], critic=str(folder))
    engine = make_critic(cfg)
    with torch.no_grad():
        want = naive.values(naive.load(tmp_path / "lm", AutoModel), head.double(), batch) + bias
    got = ppo.forward_pass(batch, cfg, engine)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)

    out = tmp_path / "exported"
    ckpt.export(out, engine.module.save, named_weights(engine), "")
    names = {"value_head.weight", "value_head.bias"} if bias else {"value_head.weight"}
    assert load_file(out / "value_head.safetensors").keys() == names
    assert not names & load_file(out / "model.safetensors").keys()
    again = make_critic(config(models[True], critic=str(out)))
    assert torch.equal(ppo.forward_pass(batch, cfg, again), got)
    assert AutoModel.from_pretrained(out).config.hidden_size == 32


@pytest.mark.parametrize("fault", ["no head", "three labels", "another size"])
def test_a_folder_without_a_head_that_fits_is_refused(fault, models, tmp_path, process_group):
    """The error is one line. The critic would else start from a random head without a word."""
    model = Qwen2ForCausalLM.from_pretrained(models[True])
    model.save_pretrained(tmp_path)
    if fault == "three labels":
        model.config.num_labels = 3
        Qwen2ForTokenClassification(model.config).save_pretrained(tmp_path)
    elif fault == "another size":
        head = {"value_head.weight": torch.ones(1, 32)}
        save_file(head, tmp_path / "value_head.safetensors")
    words = "Missing key" if fault == "no head" else "size mismatch"
    told = f"^--critic {tmp_path} has no value head with one output .*{words}"
    with pytest.raises(UserError, match=told) as error:
        make_critic(config(models[True], critic=str(tmp_path)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_folder_whose_weights_have_other_names_is_refused(stage, models, tmp_path, process_group):
    """transformers draws what it does not find, and says so in the log of a run alone."""
    model = Qwen2ForCausalLM.from_pretrained(models[True])
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {f"critic.{name}": weight for name, weight in weights.items()}
    renamed["value_head.weight"] = torch.ones(1, model.config.hidden_size)
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    cfg = config(models[True], critic=str(tmp_path), zero_stage=stage)
    told = f"^--critic {tmp_path} lacks [0-9]+ of its weights, such as .*$"
    with pytest.raises(UserError, match=told):
        make_critic(cfg)


def test_a_tied_head_with_other_weights_is_refused(models, tmp_path, process_group):
    """The export would have no head, and the run would have trained one."""
    model = Qwen2ForCausalLM.from_pretrained(models[False])
    model.save_pretrained(tmp_path)
    model.config.tie_word_embeddings = True
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"^--model {tmp_path}: .* head is tied, and its weights"):
        make_policy(config(tmp_path))


def test_the_bucket_of_zero_2_holds_each_gradient(models, process_group, monkeypatch):
    """DeepSpeed reduced a larger gradient where it lay, and could free it too early on a GPU."""
    monkeypatch.setattr("nanoorz.models.BUCKET", 100)
    learner = make_policy(config(models[False], zero_stage=2))
    largest = max(parameter.numel() for parameter in learner.module.parameters())
    assert learner.deepspeed.optimizer.reduce_bucket_size == largest > 100


# ---- load_model ----------------------------------------------------------------------------------


def test_dropout_is_off(tmp_path):
    """A dropped unit would break ratio = 1. GPT-2 has dropout modules. Qwen2's attention holds a
    number that it passes on: all models of test_ppo.py have one."""
    shape = {"vocab_size": 64, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(tmp_path)
    ids = torch.arange(1, 21)[None]
    dropping = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").train()
    assert not torch.equal(dropping(ids).logits, dropping(ids).logits), "there is none to turn off"
    model = load_model(config(tmp_path), tmp_path, AutoModelForCausalLM)
    first, second = (model.base_model(ids).last_hidden_state for _ in range(2))
    assert model.training and torch.equal(first, second)


# ---- --compile_layers ----------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_layers_are_eager_ones(models, process_group):
    """Gradients of both. A user's hook on a part of a layer that is compiled already is called."""
    batch = make_batch()
    ppo.compute_advantages(batch, config(models[True]))
    gradients = []
    for is_compiled in (False, True):
        flags = {"compile_layers": is_compiled, "gradient_checkpointing": True}
        cfg = config(models[True], packing_max_len=64, **flags)
        # A sampler on a CPU turns the compiler off in its process.
        with torch.compiler.set_stance("default"):
            policy = make_policy(cfg)
            gradients.append(gradient_of_update(policy, batch, cfg))
            ppo.compute_logprobs(policy, batch, cfg)
            layer = policy.module.model.base_model.layers[1]
            layer.mlp.register_forward_hook(lambda module, inputs, output: 2 * output)
            gradients.append(gradient_of_update(policy, batch, cfg))
    eager, eager_hook, ours, ours_hook = gradients
    assert 0 < (ours - eager).norm() < 1e-6 * eager.norm()
    assert (ours_hook - eager_hook).norm() < 1e-6 * eager_hook.norm()
    assert (eager_hook - eager).norm() > 0.01 * eager.norm()
