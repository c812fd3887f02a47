"""Policy and critic: bodies of Hugging Face, our two heads, and DeepSpeed engines around them.

Shapes: R packed rows, L row length, t response tokens of a micro-batch, H hidden.
"""

import contextlib
import functools
import glob
import math
import os
import sys

# DeepSpeed compiles an op at its first start. It is kept in this environment, and compiled by this
# environment's ninja, since another one would compile it anew.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))
os.environ["PATH"] = f"{sys.prefix}/bin:{os.environ.get('PATH', os.defpath)}"

import deepspeed
import torch
from deepspeed.runtime.zero import GatheredParameters
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from lib.common import UserError, one_line
from lib.head import ChunkedHead

# What a value head is called on disk: by us and by ORZ, and in a token classifier.
HEADS = {"value_head.weight", "value_head.bias", "score.weight", "score.bias"}
ADAMW = functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


class Policy(nn.Module):
    """A Hugging Face causal LM whose logits are a linear head without bias over its last state."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        # The head computes in chunks from now on. It must stay the module whose parameter ZeRO-3
        # gathers, and whose weight may be tied, so its class is changed instead of the module.
        model.get_output_embeddings().__class__ = ChunkedHead

    def forward(self, micro, temperature):
        """Log-probs and entropies of the response tokens, (t,) and (t,), at that temperature.

        Where no gradient is made, there are no entropies.
        """
        hidden = last_hidden_state(self.model.base_model, micro)  # (t, H)
        return self.model.get_output_embeddings()(hidden, micro.token_ids, temperature)


class Critic(nn.Module):
    """A full separate body and a linear head H -> 1, without bias unless --critic has one.

    A new head is drawn from N(0, std 1 / (H + 1)), as in ORZ's code; its paper says otherwise.
    """

    def __init__(self, model, seed, bias=False):
        super().__init__()
        self.model = model
        hidden_size = model.config.hidden_size
        self.value_head = nn.Linear(hidden_size, 1, bias, dtype=model.dtype)
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn((1, hidden_size), generator=generator) / (hidden_size + 1)  # (1, H)
        self.value_head.weight.data.copy_(weight)

    def forward(self, micro) -> Tensor:
        """V(s_t) of the response tokens, (t,), read from the state *before* each token."""
        hidden = last_hidden_state(self.model, micro)  # (t, H)
        return self.value_head(hidden).squeeze(-1).float()  # (t,)


def last_hidden_state(body, micro) -> Tensor:
    """At the positions that predict a response token, (t, H)."""
    output = body(
        micro.input_ids,
        position_ids=micro.position_ids,
        # With a cache the samples of a row would see each other, silently.
        use_cache=False,
        # FlashAttention would look for the borders in every layer, and find those of one row only.
        # sdpa and eager read them off the positions, and ignore these.
        cu_seq_lens_q=micro.borders,
        cu_seq_lens_k=micro.borders,
        max_length_q=micro.longest,
        max_length_k=micro.longest,
    )
    return output.last_hidden_state[micro.predict]


def engine_config(cfg, stage):
    """DeepSpeed's settings. Each overrides a default that would change the mathematics, or one that
    wastes memory or time."""
    hidden_size = AutoConfig.from_pretrained(cfg.model).hidden_size
    zero = {
        "stage": stage,
        # ZeRO-3 holds a bucket of fp32 for each engine all the time: 1.9 GiB by default.
        "reduce_bucket_size": int(1e8),
        # Gradients are reduced while backward goes on. Without this, only ZeRO-3 does so.
        "overlap_comm": stage > 1,
        # True patches F.linear for the whole process, vLLM included.
        "memory_efficient_linear": False,
        # Smaller parameters (norms, biases) stay whole: gathering them costs more than they hold.
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    if cfg.offload == "optimizer" and stage > 0:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        # DeepSpeed asks for this number. Our sizes vary, and losses are divided by token counts.
        "train_micro_batch_size_per_gpu": 1,
        # It clips at 1.0 if nothing is said.
        "gradient_clipping": cfg.max_norm,
        "zero_optimization": zero,
        # At stage 0 there is only a reference, which is bf16 already.
        "bf16": {"enabled": cfg.bf16 and stage > 1},
        # bf16 sums lose a ninth of the norm over 65 micro-batches.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def training_dtype(cfg):
    return torch.bfloat16 if cfg.bf16 else torch.float32


def load_body(cfg, auto_class, folder=None):
    """The weights of a folder, or of --model, in the training dtype, with dropout off."""
    if cfg.zero_stage == 3:
        # While this object lives, from_pretrained shards: no rank holds a whole model.
        sharding = HfDeepSpeedConfig(engine_config(cfg, 3))  # noqa: F841
    source = folder or cfg.model
    if cfg.attention == "varlen":
        from lib.attention import packed_attention

        # transformers makes no mask for a name that it does not know.
        AttentionInterface.register("varlen", packed_attention)
    dtype = training_dtype(cfg)
    model, report = auto_class.from_pretrained(
        source, dtype=dtype, attn_implementation=cfg.attention, output_loading_info=True
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(f"{source} lacks {missing[0]} and {len(missing) - 1} more of its weights")
    if cfg.attention == "varlen" and not model._supports_attention_backend:
        raise UserError(f"--model {source} brings its own attention: add --attention sdpa")
    # A dropped unit would break ratio = 1. Attention layers hold a number that they pass on.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if "attention_dropout" in vars(module):
            module.attention_dropout = 0.0
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # from_pretrained leaves the model in eval mode, where checkpointing is silently off.
    return model.train()


class Learner:
    """Makes a learner, as ppo.py describes it, of a DeepSpeed engine."""

    def __init__(self, name, module, cfg, lr, optimizer_class=ADAMW):
        """A reference has no lr. It gets no optimizer, and only ZeRO-3 shards it."""
        stage = cfg.zero_stage
        optimizer = None
        if lr is not None:
            optimizer = optimizer_class(trainable(module), lr=lr)
        elif stage < 3:
            stage = 0
        settings = engine_config(cfg, stage)
        # It prints what it builds. That belongs to run.log, to which the real stdout leads by now.
        with contextlib.redirect_stdout(sys.__stdout__):
            engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
        self.deepspeed = engine
        self.name = name
        self.module = engine.module
        self.device = engine.device
        self.stage = stage
        self.updates = 0  # made by this process

    def __call__(self, *inputs):
        return self.deepspeed(*inputs)

    def backward(self, loss: Tensor, is_last):
        """Adds the gradient of a micro-batch; after the last one the ranks' mean is there."""
        self.deepspeed.set_gradient_accumulation_boundary(is_last)
        self.deepspeed.backward(loss, scale_wrt_gas=False)
        if not is_last:
            # This only counts the micro-batch.
            self.deepspeed.step()

    def apply_update(self, lr):
        self.updates += 1
        return take_update(self, lr)


def trainable(module) -> list:
    """The parameters that are learnt."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def take_update(learner, lr):
    """Makes one update; returns the gradient's norm before clipping.

    Raises FloatingPointError on all ranks, with the weights unchanged, if it is not finite.
    """
    engine = learner.deepspeed
    engine.optimizer.param_groups[0]["lr"] = lr
    skipped = engine.skipped_steps
    if learner.stage == 0:
        # ZeRO 0 would apply a NaN. Its reduced gradients are in plain sight.
        gradients = [p.grad for p in learner.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        if math.isfinite(norm):
            engine.step()
    else:
        engine.step()
        norm = float(engine.get_global_grad_norm())
    # ZeRO 1 to 3 skip the step silently.
    if engine.skipped_steps > skipped or not math.isfinite(norm):
        raise FloatingPointError(f"{learner.name}: the gradient is not finite, its norm is {norm}")
    return norm


def policy_body(cfg):
    """The causal LM that is trained."""
    return load_body(cfg, AutoModelForCausalLM)


def make_policy(cfg, **options) -> Learner:
    return Learner("policy", Policy(policy_body(cfg)), cfg, cfg.actor_learning_rate, **options)


def make_critic(cfg, **options) -> Learner:
    """The critic starts from the base model's body and a new head, or whole from --critic.

    Raises UserError where no head in that folder fits its body.
    """
    head = load_head(cfg.critic)
    critic = Critic(load_body(cfg, AutoModel, cfg.critic), cfg.seed, "bias" in head)
    if cfg.critic:
        try:
            critic.value_head.load_state_dict(head)
        except RuntimeError as error:
            raise UserError(
                f"--critic {cfg.critic} has no value head of one number that fits its body, in "
                f"value_head.safetensors or beside the body: {one_line(error)}"
            ) from error
    return Learner("critic", critic, cfg, cfg.critic_learning_rate, **options)


def load_head(folder):
    """The tensors of a critic's value head: `weight`, and perhaps `bias`.

    They have a file of their own (ours), or lie beside the body (those that others published).
    """
    head = {}
    for path in glob.glob(f"{folder}/*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in HEADS.intersection(file.keys()):
                head[name.rpartition(".")[2]] = file.get_tensor(name)
    return head


def make_reference(cfg) -> Learner:
    """The base model, for --log_kl."""
    return Learner("reference", Policy(load_body(cfg, AutoModelForCausalLM)), cfg, lr=None)


def named_weights(learner):
    """Yields (Hugging Face name, full tensor) on every rank, one parameter gathered at a time.

    The tensors must not be kept. A tied head is named too: vLLM on a CPU would silently keep the
    old one.
    """
    named = list(learner.module.named_parameters())
    model = learner.module.model
    if isinstance(learner.module, Policy) and model.config.tie_word_embeddings:
        named.append(("lm_head.weight", model.get_input_embeddings().weight))
    for name, parameter in named:
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            yield name.removeprefix("model."), parameter.data
