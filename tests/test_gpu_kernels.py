"""Each part of an update on a GPU, against the CPU and against slow references.

`make test-gpu` runs these tests on a GPU, with models in the shapes of Qwen2.5 and random weights.
If a kernel is absent, the test says why it is skipped. The same tests run on a CPU with tiny
sizes.
"""

import kernels
import pytest
import torch
from conftest import config
from gpu_worker import distance, make_batch, worker
from torch.nn.functional import cosine_similarity, linear
from transformers import AttentionInterface, AutoModelForCausalLM

import ppo
from nanoorz import compiled, memory, models
from nanoorz.families import Plain
from nanoorz.head import ChunkedLogprob
from nanoorz.models import packed_attention
from tools import bench

# ---- attention -----------------------------------------------------------------------------------


def varlen(query, key, value, borders) -> torch.Tensor:
    options = {"cu_seq_lens_q": borders, "max_length_q": int(borders.diff().max())}
    scaling = query.shape[-1] ** -0.5
    return packed_attention(None, query, key, value, None, scaling=scaling, **options)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("heads, keys, size", [(14, 2, 64), (28, 4, 128)])
def test_varlen_is_attention_within_each_sample(heads, keys, size):
    """Forward and backward with the heads of 0.5B and of 7B, and samples of 1 to 8,192 tokens."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    borders = torch.tensor([0, 1, 8, 4103, 12295], dtype=torch.int32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    total = int(borders[-1])
    inputs = [torch.randn((1, n, total, size), **options) for n in (heads, keys, keys)]
    upstream = torch.randn((1, total, heads, size), **options)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output = varlen(*leaves, borders)
    (output * upstream).sum().backward()
    # Memory in float64 suffices for the heads of one key. The last key's heads show the grouping.
    group = heads // keys
    last = [slice(-group, None), slice(-1, None), slice(-1, None)]
    references = [x[:, part].clone().requires_grad_() for x, part in zip(inputs, last)]
    rows = [x[0].transpose(0, 1).double() for x in references]  # (tokens, heads, d)
    expected = kernels.attend_in_parts(*rows, borders, (-1, 0), size**-0.5)[None]
    (expected * upstream[:, :, -group:].double()).sum().backward()
    assert distance(output[:, :, -group:], expected) < 1e-2
    for leaf, part, reference in zip(leaves, last, references):
        assert distance(leaf.grad[:, part], reference.grad) < 2e-2

    changed = [tensor.clone() for tensor in inputs]
    for tensor in changed:
        tensor[:, :, 8:] = torch.randn(tensor[:, :, 8:].shape, **options)
    first = varlen(*inputs, borders)[:, :8]
    assert torch.equal(varlen(*changed, borders)[:, :8], first), (
        "attention sees the samples behind its own"
    )


# ---- log-probs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [True, False])
def test_packed_logprobs_are_those_of_single_rows(bf16, device, folder_of, process_group):
    """Tests each attention of this machine. Only sdpa computes in fp32."""
    longest = 2048 if device.type == "cuda" else 40
    changes = {"model": folder_of(device.type), "bf16": bf16, "micro_train_batch_size": 1}
    cfg = config(**changes, packing_max_len=longest)
    # Here no row has room for a second sample.
    single = config(**changes, packing_max_len=8)
    dtype = torch.bfloat16 if bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=dtype, attn_implementation="sdpa")
    policy = models.Policy(model.to(device), Plain(cfg.model))
    AttentionInterface.register("varlen", packed_attention)
    batch = make_batch(device, 12, longest, 60)
    assert len([*ppo.micro_batches(batch, batch.all_indices(), cfg)]) < len(batch.sample_lengths)
    expected = ppo.compute_logprobs(policy, batch, single)  # (T,)
    for attention in bench.attentions() if bf16 else ["sdpa"]:
        model.set_attn_implementation(attention)
        apart = (ppo.compute_logprobs(policy, batch, cfg) - expected).abs()  # (T,)
        # Another kernel of attention changed 0.009 in a 0.5B shape, as measured on a CPU.
        assert apart.mean() < (0.02 if bf16 else 1e-4), attention
        assert apart.max() < (0.15 if bf16 else 1e-4), attention


# ---- the head ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True])
def test_the_head_is_that_of_full_logits(bf16, device):
    tokens, vocab, hidden_size = 64, 500, 32
    if device.type == "cuda":
        tokens, vocab, hidden_size = 4096, 151_936, 896
    dtype = torch.bfloat16 if bf16 else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device}
    inputs = []
    for rows in (tokens, vocab):
        numbers = torch.randn((rows, hidden_size), **options) / hidden_size**0.25
        inputs.append(numbers.to(dtype))
    ids = torch.randint(vocab, (tokens,), **options)
    upstream = torch.randn(tokens, **options)

    def chunked(hidden, weight):
        return ChunkedLogprob.apply(hidden, weight, ids, 1.0, max(16, 2**27 // vocab // 4))[0]

    def full(hidden, weight):
        scores = linear(hidden, weight).float()  # (T, V)
        return scores.log_softmax(-1).gather(1, ids[:, None])[:, 0]

    results = []
    for function in (chunked, full):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        output = function(*leaves)
        (output * upstream).sum().backward()
        if device.type == "cuda" and function is chunked:
            assert torch.cuda.max_memory_allocated() < 6 * memory.GIB
        results.append([output.detach(), *(leaf.grad.double().flatten() for leaf in leaves)])
    (logprobs, *gradients), (expected, *references) = results
    assert (logprobs - expected).abs().max() < (0.05 if bf16 else 1e-4)
    for found, reference in zip(gradients, references):
        if bf16:
            assert cosine_similarity(found, reference, dim=0) > 0.999
        else:
            assert distance(found, reference) < 1e-4


# ---- compiled layers -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("again", [True, False])
def test_compiled_layers_are_as_exact_as_eager_ones(again, device, folder_of, compiling):
    """Gradients in bf16 against those of eager layers in fp32. On a GPU they need less memory."""
    is_gpu = device.type == "cuda"
    model = folder_of(device.type, num_hidden_layers=4)
    longest = 2048 if is_gpu else 40
    batch = make_batch(device, 8, longest, 60)
    gradients = []
    peaks = []
    for bf16, is_compiled in ((False, False), (True, False), (True, True)):
        cfg = config(model=model, bf16=bf16, packing_max_len=longest, micro_train_batch_size=1)
        cfg.gradient_checkpointing = again
        cfg.compile_layers = is_compiled
        cfg.attention = "varlen" if bf16 and is_gpu else "sdpa"
        family = Plain(model)
        policy = models.Policy(models.load_model(cfg, family, AutoModelForCausalLM), family)
        policy.to(device)
        ppo.compute_advantages(batch, cfg)
        # The first round compiles.
        for _ in range(2):
            policy.zero_grad()
            if is_gpu:
                torch.cuda.reset_peak_memory_stats()
            for micro, _ in ppo.micro_batches(batch, batch.all_indices(), cfg):
                ppo.policy_losses(policy, batch, micro, cfg, {}).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() if is_gpu else 0)
        gradient = torch.cat([p.grad.cpu().double().flatten() for p in policy.parameters()])
        gradients.append(gradient)
        del policy
    truth, eager, ours = gradients
    assert not compiled.run_if_possible.has_failed
    assert distance(ours, truth) < 1.1 * distance(eager, truth)
    assert not is_gpu or peaks[2] < peaks[1]


# ---- an update -----------------------------------------------------------------------------------


def test_a_bf16_update_is_adamw_on_fp32_masters(place, folder_of, tmp_path):
    """ZeRO-3's gathered weights lie elsewhere in memory, where products in bf16 round otherwise."""
    found = worker("step", tmp_path / "found.json", folder_of(place), 512)
    assert found["device"] == place
    for stage in ("2", "3"):
        of_stage = found[stage]
        assert of_stage["policy_micro_batches"] >= 4, stage
        assert of_stage["policy_grad_norm"] == pytest.approx(found["norm by hand"], rel=1e-2), stage
        assert of_stage["distance"] < 3e-2, stage
        assert of_stage["sums"] == "torch.float32", stage
        assert of_stage["unchanged by NaN"], stage


# ---- advantages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", sorted(ppo.ESTIMATORS))
def test_advantages_are_those_of_the_cpu(estimator, device):
    generator = torch.Generator().manual_seed(0)
    length = torch.randint(1, 300, (64,), generator=generator)
    mask = torch.arange(300) < length[:, None]  # (N, S)
    values = torch.randn((64, 300), generator=generator, dtype=torch.float64) * mask
    rewards = torch.randint(2, (64,), generator=generator).double()
    inputs = (rewards, values, mask, torch.arange(64) // 8)
    function = ppo.ESTIMATORS[estimator].function
    for lambd in (1.0, 0.95):
        cfg = config(estimator=estimator, lambd=lambd)
        expected = function(*(tensor.clone() for tensor in inputs), cfg)
        found = function(*(tensor.to(device) for tensor in inputs), cfg)
        assert (found.cpu() - expected).abs().max() < 1e-12
