"""lib/head.py and lib/models.py against full logits and padded batches, in the order of their
functions.

What needs engines runs in ppo_worker.py on real DeepSpeed (cells.py).
"""

import copy
import functools
import json
from importlib.util import module_from_spec, spec_from_file_location

import kernels
import naive
import numpy as np
import pytest
import tiny as maker
import torch
from cells import cell, launch, make_models
from conftest import ROOT, jsonl
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from ppo_worker import CPU, config, make_batch
from safetensors.torch import load_file, save_file
from test_resume import resume_cell
from transformers import (
    AttentionInterface,
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
    StableLmConfig,
    StableLmForCausalLM,
)
from transformers import modeling_flash_attention_utils as flash_utils

import ckpt
import lib.models
import ppo
from lib.attention import has_varlen, packed_attention
from lib.common import UserError
from lib.head import ChunkedHead, ChunkedLogprob
from lib.models import Critic, Policy, engine_config, load_body, named_weights
from lib.models import make_critic as make_critic_engine
from tools import memory

TINY_ROWS = {"packing_max_len": 26, "micro_train_batch_size": 1}  # one sample each
ONE = [  # ranks: 1
    cell("memory", "memory"),
    cell("fresh zero0", "fresh", tied=False),
    cell("fresh zero1", "fresh", zero_stage=1),
    cell("fresh zero3", "fresh", zero_stage=3),
    cell("calls", "calls"),
    cell("calls, checkpointing", "calls", gradient_checkpointing=True),
    cell("bf16 zero2", "bf16", zero_stage=2, bf16=True, **TINY_ROWS),
    cell("bf16 zero3", "bf16", zero_stage=3, bf16=True, **TINY_ROWS),
]
TWO = [  # ranks: 2
    cell("fresh zero0", "fresh"),
    cell("fresh zero2", "fresh", zero_stage=2),
    cell("fresh zero3", "fresh", zero_stage=3, tied=False),
    cell("fresh zero3, small parameters whole", "fresh", zero_stage=3, whole=True),
    cell("calls, zero3, checkpointing", "calls", zero_stage=3, gradient_checkpointing=True),
    cell("bf16 zero2", "bf16", zero_stage=2, bf16=True, **TINY_ROWS),
    cell("bf16 zero3", "bf16", zero_stage=3, bf16=True, **TINY_ROWS),
]
PRECISIONS = {
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "bf16 zero2": {"zero_stage": 2, "bf16": True},
    "bf16 zero3": {"zero_stage": 3, "bf16": True},
}
ADAM = {"actor_learning_rate": 4e-3, "warmup_updates": 4, "max_norm": 1.0}
TWO.append(cell("adamw zero0 none", "adamw", **ADAM))
for precision, settings in PRECISIONS.items():
    for offload in ("none", "optimizer"):
        name = f"adamw {precision} {offload}"
        TWO.append(cell(name, "adamw", offload=offload, **ADAM, **settings))
FRESH = [(ranks, job) for ranks, cells in ((1, ONE), (2, TWO)) for job in cells]
FRESH = [(ranks, job) for ranks, job in FRESH if job["kind"] == "fresh"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def results(models, tmp_path_factory):
    """results(ranks)(name): a cell's result; launched when the first one is wanted."""
    root = tmp_path_factory.mktemp("cells")
    cells = {1: ONE, 2: TWO}
    return functools.cache(lambda ranks: launch(ranks, cells[ranks], root / str(ranks), models))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---- the chunked head ----------------------------------------------------------------------------


def full_logprobs(hidden, weight, token_ids, temperature: float):
    """Log-probs and entropies, (T,) each, from full logits."""
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)  # (T, V)
    return log_p[range(len(token_ids)), token_ids], -(log_p.exp() * log_p).sum(-1)


def differentiate(function, hidden, weight, upstream) -> list:
    """Both outputs of function(hidden, weight), and the gradients of their product with `upstream`,
    a pair of which None leaves an output out."""
    hidden = hidden.clone().requires_grad_()
    weight = weight.clone().requires_grad_()
    outputs = function(hidden, weight)
    loss = 0
    for output, gradient in zip(outputs, upstream):
        if gradient is not None:
            loss = loss + (output * gradient).sum()
    loss.backward()
    return [*outputs, hidden.grad, weight.grad]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 7, 16, 50, 64])
@pytest.mark.parametrize("through", ["logprobs", "entropy", "both"])
def test_chunked_logprobs_equal_full_ones(temperature, chunk, through):
    """Forward and backward, with respect to hidden states and head, for chunks that do and do not
    divide T."""
    rng = torch.Generator().manual_seed(2)
    hidden = torch.randn((50, 24), generator=rng) / 24**0.25
    weight = torch.randn((97, 24), generator=rng) / 24**0.25
    ids = torch.randint(97, (50,), generator=rng)
    upstream = list(torch.randn((2, 50), generator=rng))
    if through == "logprobs":
        upstream[1] = None
    elif through == "entropy":
        upstream[0] = None

    def full(hidden, weight):
        return full_logprobs(hidden, weight, ids, temperature)

    def chunked(hidden, weight):
        return ChunkedLogprob.apply(hidden, weight, ids, temperature, chunk)

    want = differentiate(full, hidden.double(), weight.double(), upstream)
    for x, y in zip(differentiate(chunked, hidden, weight, upstream), want, strict=True):
        assert (x.double() - y).norm() < 1e-5 * y.norm()


@pytest.mark.slow
def test_scores_too_large_to_keep_are_made_again():
    """Above 2^26 scores backward makes them from the hidden states, at the same temperature: other
    code than above."""
    rng = torch.Generator().manual_seed(3)
    tokens = 700
    vocabulary = 100_000
    assert tokens * vocabulary > 2**26
    hidden = torch.randn((tokens, 4), generator=rng)
    weight = torch.randn((vocabulary, 4), generator=rng)
    ids = torch.randint(vocabulary, (tokens,), generator=rng)
    upstream = list(torch.randn((2, tokens), generator=rng))

    def full(hidden, weight):
        return full_logprobs(hidden, weight, ids, 1.3)

    def chunked(hidden, weight):
        return ChunkedLogprob.apply(hidden, weight, ids, 1.3, 256)

    want = differentiate(full, hidden.double(), weight.double(), upstream)[2:]
    got = differentiate(chunked, hidden, weight, upstream)[2:]
    for x, y in zip(got, want, strict=True):
        assert (x.double() - y).norm() < 1e-4 * y.norm(), "full logits in fp32 are 3e-5 off here"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_an_entropy_that_nobody_logs_is_not_computed(temperature):
    """A pass without a gradient, as the reference's, needs none. Its log-probs are those of an
    update to the bit."""
    rng = torch.Generator().manual_seed(2)
    head = ChunkedHead(24, 97, bias=False)
    hidden = torch.randn((50, 24), generator=rng)
    ids = torch.randint(97, (50,), generator=rng)
    logged, _ = head(hidden, ids, temperature)
    with torch.no_grad():
        logprobs, entropy = head(hidden, ids, temperature)
    assert entropy is None
    assert torch.equal(logprobs, logged)


def test_chunked_head_sums_bf16_gradients_in_fp32():
    """The head's gradient is a sum over chunks: in bf16 it would lose small terms, the more the
    smaller the chunks are."""
    rng = torch.Generator().manual_seed(2)
    hidden = torch.randn((2048, 8), generator=rng).bfloat16()
    weight = torch.randn((40, 8), generator=rng).bfloat16()
    ids = torch.randint(40, (2048,), generator=rng)
    gradients = []
    for chunk in (4, 2048):
        leaf = weight.clone().requires_grad_()
        ChunkedLogprob.apply(hidden, leaf, ids, 1.0, chunk)[0].sum().backward()
        gradients.append(leaf.grad.double())
    small, whole = gradients
    assert (small - whole).norm() < 3e-3 * whole.norm()


def test_memory_does_not_grow_with_vocabulary_times_tokens(results):
    """Full logits of 2,048 tokens at V = 151,936 are 1.2 GB; ORZ held four of them (fault 7)."""
    result = results(1)("memory")
    start, small, large = result["peaks"]
    more = (large - small) / 2**20
    assert large - small < 0.05 * result["logits"], f"2,048 tokens cost {more:.0f} MB more than 256"
    assert large - start < 0.5 * result["logits"]


# ---- policy and critic ---------------------------------------------------------------------------


def load(auto_class, folder, attention: str):
    """Without an engine, in float32. The package flash-attn need not be installed."""
    model = auto_class.from_pretrained(folder, dtype=torch.float32)
    model.config._attn_implementation = attention
    return model


def make_policy(folder, attention: str = "sdpa") -> Policy:
    return Policy(load(AutoModelForCausalLM, folder, attention))


def make_critic(folder, attention: str = "sdpa") -> Critic:
    return Critic(load(AutoModel, folder, attention), seed=5)


@pytest.fixture
def alone(monkeypatch):
    """ppo.py's collectives in a group of one, without a group."""

    class Alone:
        ReduceOp = torch.distributed.ReduceOp
        get_rank = staticmethod(lambda: 0)
        get_world_size = staticmethod(lambda: 1)
        all_reduce = staticmethod(lambda tensor, op=None: None)

    monkeypatch.setattr(ppo, "dist", Alone)


def forward(module, batch, cfg) -> torch.Tensor:
    """Packed log-probs or values of all response tokens, (T,)."""
    if isinstance(module, Policy):
        return ppo.compute_logprobs(module, batch, cfg)
    return ppo.compute_values(module, batch, cfg)


@pytest.mark.parametrize("tied", [True, False])
def test_policy_swaps_the_head_but_not_its_parameter(tied, models):
    """The head stays one parameter under its Hugging Face name, tied or not: a second name would be
    synced and saved."""
    policy = make_policy(models[tied])
    names = [name for name, _ in policy.named_parameters()]
    assert names == ["model." + name for name, _ in naive.load(models[tied]).named_parameters()]
    assert isinstance(policy.model.get_output_embeddings(), ChunkedHead)


@pytest.fixture(autouse=True)
def loops(monkeypatch):
    """On a CPU both kernels are a loop. All between them and the rows is what runs on a GPU."""
    kernels.use_varlen(monkeypatch, "2.13")
    # As load_body does; here some models are loaded without it.
    AttentionInterface.register("varlen", packed_attention)
    reader = flash_utils._lazy_define_process_function(kernels.flash_attn)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", "flash_attention_2")
    monkeypatch.setattr(flash_utils, "_flash_varlen_fn", kernels.flash_attn)
    monkeypatch.setattr(flash_utils, "_process_flash_kwargs_fn", reader)


ATTENTIONS = ["sdpa", "eager", "varlen", "flash_attention_2"]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("row_len, rows", [(48, 1), (100, 2), (640, 1), (64, 99)])
def test_packed_equals_unpacked(attention, row_len, rows, models, alone):
    """Segments of a row must not see each other. Without use_cache=False they do, silently (ORZ's
    fault 8), and under FlashAttention with several rows, without their borders."""
    batch = make_batch()
    cfg = config(packing_max_len=row_len, micro_train_batch_size=rows, attention=attention)
    critic = make_critic(models[True], attention)
    with torch.no_grad():
        logprobs, _ = naive.logprobs(naive.load(models[False]), batch, cfg.temperature)
        head = critic.value_head.weight.double()
        values = naive.values(naive.load(models[True], AutoModel), head, batch)
    got = forward(make_policy(models[False], attention), batch, cfg)
    torch.testing.assert_close(got.double(), logprobs, rtol=0, atol=2e-5)
    got = forward(critic, batch, cfg)
    torch.testing.assert_close(got.double(), values, rtol=0, atol=2e-5)


@pytest.mark.parametrize("attention", ["varlen", "flash_attention_2"])
def test_gradients_do_not_depend_on_the_attention(attention, models, alone):
    """With checkpoints, which call it again in backward; and of a filler, which is one token."""
    cfg = config(packing_max_len=100, micro_train_batch_size=2)
    batch = make_batch()
    micros = ppo.micro_batches(batch, batch.all_samples(), cfg)
    gradients = []
    for name in ("sdpa", attention):
        # Asked for flash-attn, transformers would look for the package.
        asked = config(models[True], gradient_checkpointing=True)
        if name == "varlen":
            asked.attention = name
        policy = Policy(load_body(asked, AutoModelForCausalLM))
        policy.model.config._attn_implementation = name
        for layer in policy.model.base_model.layers:
            # Not the usual one over the root of D: some models have their own.
            layer.self_attn.scaling = 0.3
        for micro in (*micros, ppo.filler(CPU)):
            logprobs, _ = policy(micro, cfg.temperature)
            logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    ours, expected = gradients
    assert (ours - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("version", ["2.11", "2.13"])
def test_varlen_is_called_with_what_its_version_takes(version, monkeypatch):
    """PyTorch 2.11 has no enable_gqa, which every bf16 run on a GPU gave to it."""
    kernels.use_varlen(monkeypatch, version)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn((2, 4, 16, 8), generator=generator)  # (R, heads, L, D)
    key, value = torch.randn((2, 2, 2, 16, 8), generator=generator)
    borders = torch.tensor([0, 5, 16, 32], dtype=torch.int32)
    options = {"cu_seq_lens_q": borders, "max_length_q": 16, "scaling": 0.3}
    found, _ = packed_attention(None, query, key, value, None, **options)
    position = torch.arange(16)
    sample = torch.stack([(position >= 5).int(), torch.full((16,), 2)])  # (R, L)
    mask = (sample[:, :, None] == sample[:, None]).tril()[:, None]  # (R, 1, L, L)
    wide = (key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))
    scores = (query @ wide[0].transpose(2, 3) * 0.3).masked_fill(~mask, float("-inf"))
    expected = scores.softmax(-1) @ wide[1]  # (R, heads, L, D)
    torch.testing.assert_close(found, expected.transpose(1, 2))


@pytest.mark.parametrize("version", kernels.VARLEN)
def test_models_load_with_any_version_of_varlen(version, models, monkeypatch):
    """With PyTorch 2.9 every run died at the import of lib/models.py, with sdpa too."""
    kernels.use_varlen(monkeypatch, version)
    _, is_usable = kernels.VARLEN[version]
    assert has_varlen() == is_usable
    spec = spec_from_file_location("older", lib.models.__file__)
    spec.loader.exec_module(module_from_spec(spec))


def test_a_model_with_its_own_attention_is_one_line(tmp_path):
    """It would not ask for the one that we register, and would get no mask either."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    StableLmForCausalLM(StableLmConfig(**shape, **heads)).save_pretrained(tmp_path)
    load_body(config(tmp_path), AutoModelForCausalLM)
    with pytest.raises(UserError, match="brings its own attention: add --attention sdpa"):
        load_body(config(tmp_path, attention="varlen"), AutoModelForCausalLM)


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
@pytest.mark.parametrize("make", [make_policy, make_critic])
def test_other_samples_of_a_row_do_not_matter(make, attention, models, alone):
    """Changing any one sample leaves the numbers of all its neighbours in the row alone."""
    module = make(models[True], attention)
    batch = make_batch()
    cfg = config(packing_max_len=640)
    before = naive.per_sample(batch, forward(module, batch, cfg))
    for changed in (0, 1, 7, 15):
        other = copy.deepcopy(batch)
        other.prompt_ids[changed] = [(t + 7) % 55 + 1 for t in batch.prompt_ids[changed]]
        other.response_ids[changed] = [(t + 9) % 55 + 1 for t in batch.response_ids[changed]]
        after = naive.per_sample(batch, forward(module, other, cfg))
        for i in batch.all_samples():
            change = np.abs(np.subtract(before[i], after[i])).max()
            if i == changed:
                assert change > 1e-3
            else:
                assert change < 1e-6


def test_a_tokens_value_is_read_before_it(models, alone):
    """V(s_t) must not know the token whose advantage it is the baseline of; else PPO learns nothing
    from that token."""
    critic = make_critic(models[True])
    batch = make_batch()
    before = naive.per_sample(batch, forward(critic, batch, config()))
    for sample, t in ((1, 39), (1, 20), (3, 0), (2, 1), (0, 0)):
        other = copy.deepcopy(batch)
        other.response_ids[sample][t] = batch.response_ids[sample][t] % 55 + 1
        after = naive.per_sample(batch, forward(critic, other, config()))
        change = np.abs(np.subtract(before[sample], after[sample]))
        assert change[: t + 1].max() < 1e-6
        assert (change[t + 1 :] > 1e-6).all()


def test_value_head_init(models):
    """Normal with *standard deviation* 1 / (H + 1) (ORZ's code, not its paper), a function of the
    seed alone."""
    body = naive.load(models[True], AutoModel)

    def draw(seed: int) -> torch.Tensor:
        return Critic(body, seed).value_head.weight[0].detach().float()  # (H,)

    torch.manual_seed(0)
    heads = torch.stack([draw(seed) for seed in range(300)]) * 65  # (300, H)
    torch.manual_seed(1)
    assert torch.equal(draw(17) * 65, heads[17])
    assert heads.std() == pytest.approx(1, abs=0.03)
    assert heads.mean().abs() < 0.03
    assert len({tuple(head.tolist()) for head in heads}) == 300
    # A normal's tail, no uniform's.
    assert (heads.abs() > 2).double().mean() == pytest.approx(0.0455, abs=0.01)


def test_value_head_is_the_same_everywhere(results):
    """Under ZeRO-3 a plain .normal_() is a no-op, which left a zero head; and each rank must hold
    the same one."""
    head = results(1)("fresh zero1")["critic"]["value_head.weight"]
    assert head.shape == (1, 64)
    assert (head != 0).all()
    others = [
        (1, "fresh zero3"),
        (2, "fresh zero0"),
        (2, "fresh zero3"),
        (2, "fresh zero3, small parameters whole"),
    ]
    for ranks, name in others:
        assert torch.equal(results(ranks)(name)["critic"]["value_head.weight"], head)


def critic_folder(folder, form: str, model) -> tuple[torch.Tensor, float]:
    """Writes a critic in one of the forms in which they are published; its head and its bias.

    ours: what a run exports. orz: OpenRLHF's, the head in the files of the body. classifier: of
    tokens, as Transformers has it.
    """
    weight = torch.linspace(-1, 1, model.config.hidden_size)[None]  # (1, H)
    if form == "ours":
        weights = model.state_dict() | {"value_head.weight": weight}
        ckpt.write_export(folder, model, weights, maker.char_tokenizer())
    elif form == "orz":
        model.save_pretrained(folder)
        weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        names = sorted(weights)
        halves = [names[::2], [*names[1::2], "value_head.weight"]]
        weights["value_head.weight"] = weight
        index = {}
        for k, half in enumerate(halves, start=1):
            file = f"model-0000{k}-of-00002.safetensors"
            save_file({name: weights[name].contiguous() for name in half}, folder / file)
            index |= dict.fromkeys(half, file)
        (folder / "model.safetensors").unlink()
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)
    else:
        model.config.num_labels = 1
        classifier = Qwen2ForTokenClassification(model.config)
        classifier.model.load_state_dict(model.state_dict())
        classifier.score.load_state_dict({"weight": weight, "bias": torch.tensor([0.25])})
        classifier.save_pretrained(folder)
        return weight, 0.25
    return weight, 0.0


@pytest.mark.parametrize("form", ["ours", "orz", "classifier"])
def test_a_critic_starts_from_a_folder(form, models, tmp_path, process_group):
    """Body and head are those of the folder, whose size is not the policy's: its values are those
    of a plain pass. What is exported is a folder from which the next run's critic starts alike."""
    body = AutoModel.from_pretrained(maker.make_model(tmp_path / "lm", hidden=32, layers=1, seed=9))
    folder = tmp_path / "critic"
    folder.mkdir()
    weight, bias = critic_folder(folder, form, body)
    batch = make_batch()
    cfg = config(models[True], critic=str(folder))
    engine = make_critic_engine(cfg)
    with torch.no_grad():
        want = naive.values(naive.load(tmp_path / "lm", AutoModel), weight.double(), batch) + bias
    got = ppo.compute_values(engine, batch, cfg)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)

    out = tmp_path / "exported"
    tokenizer = maker.char_tokenizer()
    ckpt.export(out, engine.module.model, named_weights(engine), tokenizer)
    names = {"value_head.weight", "value_head.bias"} if bias else {"value_head.weight"}
    assert load_file(out / "value_head.safetensors").keys() == names
    assert not names & load_file(out / "model.safetensors").keys()
    again = make_critic_engine(config(models[True], critic=str(out)))
    assert torch.equal(ppo.compute_values(again, batch, cfg), got)
    assert AutoModel.from_pretrained(out).config.hidden_size == 32


@pytest.mark.parametrize("fault", ["no head", "three labels", "another size"])
def test_a_folder_without_a_head_that_fits_is_one_line(fault, models, tmp_path, process_group):
    """It would start from a random one, silently."""
    model = Qwen2ForCausalLM.from_pretrained(models[True])
    model.save_pretrained(tmp_path)
    if fault == "three labels":
        model.config.num_labels = 3
        Qwen2ForTokenClassification(model.config).save_pretrained(tmp_path)
    elif fault == "another size":
        head = {"value_head.weight": torch.ones(1, 32)}
        save_file(head, tmp_path / "value_head.safetensors")
    match = f"^--critic {tmp_path} has no value head of one number .*{{}}"
    words = "Missing key" if fault == "no head" else "size mismatch"
    with pytest.raises(UserError, match=match.format(words)) as error:
        make_critic_engine(config(models[True], critic=str(tmp_path)))
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
    with pytest.raises(UserError, match=f"^{tmp_path} lacks .* and [0-9]+ more of its weights$"):
        make_critic_engine(cfg)


# ---- engine_config -------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_bf16_gradients_are_summed_in_fp32(stage, results):
    """DeepSpeed's default sums bf16 gradients in bf16: over many micro-batches small terms vanish
    (the norm came out as 8/9 of the right one). 64 copies of a sample in 64 micro-batches have
    exactly the gradient of one."""
    result = results(1)(f"bf16 zero{stage}")
    copies = result["64"]
    single = result["1"]
    assert copies["policy_micro_batches"] == 64
    assert single["policy_micro_batches"] == 1
    error = (copies["gradient"] - single["gradient"]).norm()
    assert error < 1e-5 * single["gradient"].norm()
    assert copies["policy_grad_norm"] == pytest.approx(single["policy_grad_norm"], rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_bf16_gradients_are_communicated_in_fp32(stage, results):
    """Sums over ranks rounded to bf16 would differ from one rank's by 1e-3; the masters would
    show it."""
    alone = results(1)(f"bf16 zero{stage}")["16"]
    shared = results(2)(f"bf16 zero{stage}")["16"]
    assert alone["policy_micro_batches"] == 16
    assert shared["policy_micro_batches"] == 8
    error = (alone["gradient"] - shared["gradient"]).norm()
    assert error < 1e-5 * alone["gradient"].norm()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_offload_steps_equal_those_without(precision, results):
    """--offload optimizer: masters and moments live on the CPU, and AdamW does the same there."""
    plain = results(2)(f"adamw {precision} none")
    offloaded = results(2)(f"adamw {precision} optimizer")
    assert (plain["offloaded"], offloaded["offloaded"]) == (False, True)
    moves = []
    errors = []
    for name, start in plain["start"].items():
        moves.append((plain["policy"][name] - start).flatten().double())
        errors.append((plain["policy"][name] - offloaded["policy"][name]).flatten().double())
        assert moves[-1].any(), f"{name} has not moved"
    assert torch.cat(errors).norm() <= 1e-5 * torch.cat(moves).norm()
    for got, expected in zip(offloaded["stats"], plain["stats"], strict=True):
        assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_with_offload_is_resumed_to_the_bit(stage, tiny, tmp_path):
    """As runs/orz_1p5b_24gb.sh has it: bf16, with masters and moments in CPU memory."""
    flags = {"bf16": "true", "offload": "optimizer", "gradient_checkpointing": "true"}
    train = ROOT / "train.py"
    resume_cell(tiny, tmp_path, "gae", stage, 1, interrupt=1, script=train, **flags)
    for line in jsonl(tmp_path / "whole" / "metrics.jsonl"):
        assert line["policy_grad_norm"] > 0 and line["critic_grad_norm"] > 0


@pytest.mark.parametrize("bf16", [False, True])
def test_offloaded_sums_are_where_the_plan_says(bf16, process_group, models):
    """ZeRO-2 keeps fp32 sums of bf16 gradients on the card until its step, --offload or not."""
    cfg = config(models[True], zero_stage=2, bf16=bf16, offload="optimizer")
    batch = make_batch()
    batch.per_token["advantages"] = torch.ones_like(batch.per_token["values"])  # (T,)
    policy = lib.models.make_policy(cfg)
    optimizer = policy.deepspeed.optimizer
    held = []
    take_step = optimizer.step

    def step():
        group = optimizer.averaged_gradients.get(0)
        held.append(getattr(group, "flat_partition", None))
        return take_step()

    optimizer.step = step
    ppo.update(policy, ppo.policy_loss, batch, batch.all_samples(), 1e-3, cfg)
    (sums,) = held
    assert (sums is not None) == memory.has_sums(cfg) == bf16
    if bf16:
        count = sum(p.numel() for p in policy.module.parameters())
        assert sums.dtype == torch.float32 and sums.numel() == count
        assert sums.device == torch.device(get_accelerator().current_device_name())
    assert optimizer.averaged_gradients.get(0) is None


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_knows_the_settings_of_its_buckets(stage, models):
    """A bucket of the default size held 1.9 GiB a model; ZeRO-2 reduced nothing during backward.
    The cells above have embeddings that do not fit into their buckets, as those of real models."""
    settings = engine_config(config(models[True]), stage)["zero_optimization"]
    zero = DeepSpeedZeroConfig(**settings)
    assert set(settings) <= {field.alias or name for name, field in type(zero).model_fields.items()}
    assert zero.reduce_bucket_size == 10**8
    assert zero.overlap_comm


# ---- load_body -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_dropout_is_off(family, models, tmp_path):
    """A dropped unit would break ratio = 1. Qwen2's attention holds a number that it passes on;
    GPT-2 has dropout modules, too."""
    folder = models[True]
    if family == "gpt2":
        folder = tmp_path
        shape = {"vocab_size": 64, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
        GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(folder)
    ids = torch.arange(1, 21)[None]
    dropping = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    assert not torch.equal(dropping(ids).logits, dropping(ids).logits), "there is none to turn off"
    body = load_body(config(folder), AutoModelForCausalLM)
    assert body.training
    assert torch.equal(body(ids).logits, body(ids).logits)


def test_gradient_checkpointing_recomputes(results):
    """A model from from_pretrained is in eval mode, where Hugging Face silently ignores gradient
    checkpointing: its layers ran once for each micro-batch."""
    for ranks, name in ((1, "calls, checkpointing"), (2, "calls, zero3, checkpointing")):
        result = results(ranks)(name)
        assert result["calls"] == 2 * result["micro_batches"], name
    plain = results(1)("calls")
    assert plain["calls"] == plain["micro_batches"]


# ---- engines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_adam_has_the_recipes_numbers(stage, results):
    """ORZ: betas 0.9 and 0.95, no weight decay. The learning rate is that of the second of four
    steps of warm-up, and not the one with which the engine was made."""
    groups = results(2)(f"adamw zero{stage} none")["groups"]
    assert groups
    for group in groups:
        assert tuple(group["betas"]) == (0.9, 0.95)
        assert group["weight_decay"] == 0
        assert group["lr"] == 2e-3


# ---- named_weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, job", FRESH)
def test_named_weights_are_a_hugging_face_state_dict(ranks, job, results, models):
    """Every name, and whole tensors under ZeRO-3. The tied head is named too: vLLM on a CPU keeps
    the old one otherwise. The critic starts from the base model's body."""
    result = results(ranks)(job["name"])
    folder = models[job["tied"]]
    model = Qwen2ForCausalLM(Qwen2Config.from_pretrained(folder))
    assert set(result["policy"]) == set(model.state_dict())
    for key, tensor in model.state_dict().items():
        assert result["policy"][key].shape == tensor.shape
    model.load_state_dict(result["policy"], strict=True)
    if job["tied"]:
        embedding = result["policy"]["model.embed_tokens.weight"]
        assert torch.equal(result["policy"]["lm_head.weight"], embedding)
    body = AutoModel.from_pretrained(folder)
    assert set(result["critic"]) == set(body.state_dict()) | {"value_head.weight"}
    for key, tensor in body.state_dict().items():
        assert torch.equal(result["critic"][key], tensor)
