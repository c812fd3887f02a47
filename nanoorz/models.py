"""Policy and critic: bodies of Hugging Face, our two heads, and DeepSpeed engines around them.

Shapes: R packed rows, L row length, M response tokens of a micro-batch, H hidden.
"""

import contextlib
import functools
import math
import os
import sys
from collections.abc import Iterable

# DeepSpeed compiles its CPU op at the first start, with ninja. Each virtual environment compiles
# the op with its own ninja (so PATH), into a folder of its own. If environments shared the folder,
# a start in another environment would compile the op again.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))
os.environ["PATH"] = f"{sys.prefix}/bin:{os.environ.get('PATH', os.defpath)}"

import deepspeed
import torch
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from lib import check
from lib.common import UserError, check_result
from lib.head import ChunkedHead

BUCKET = 10**8  # elements of the bucket in which DeepSpeed collects gradients


class Policy(nn.Module):
    """A Hugging Face causal LM whose logits are a linear head without bias over its last state.

    lib/families.py has the heads of some families, which scale or cap these logits.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model
        head = model.get_output_embeddings()
        # From now on the head computes in chunks. This changes the class of the module, because a
        # new module would not share its weight with the embedding, and ZeRO-3 would not gather it.
        if not isinstance(head, ChunkedHead):
            head.__class__ = ChunkedHead

    def forward(self, micro, temperature):
        """Log-probs and entropies of the response tokens, (M,) and (M,).

        temperature: of all tokens, or of each token, (M,). Under torch.no_grad() the entropies are
        None.
        """
        hidden = last_hidden_state(self.model.base_model, micro)  # (M, H)
        return self.model.get_output_embeddings()(hidden, micro.token_ids, temperature)


class Critic(nn.Module):
    """A body of its own and a linear head H -> 1.

    A new head has no bias. Its weights are drawn from N(0, std 1 / (H + 1)), as in ORZ's code.
    ORZ's paper says another distribution.
    """

    def __init__(self, model, seed):
        super().__init__()
        self.model = model
        hidden_size = model.config.hidden_size
        self.value_head = nn.Linear(hidden_size, 1, bias=False, dtype=model.dtype)
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn((1, hidden_size), generator=generator) / (hidden_size + 1)  # (1, H)
        self.value_head.weight.data.copy_(weight)

    def forward(self, micro) -> Tensor:
        """V(s_t) of the response tokens, (M,). It is computed *before* the token is read."""
        hidden = last_hidden_state(self.model, micro)  # (M, H)
        return self.value_head(hidden).squeeze(-1).float()  # (M,)


def last_hidden_state(body, micro) -> Tensor:
    """The body's last state at the positions that predict a response token, (M, H)."""
    return body(**micro.model_inputs()).last_hidden_state[micro.predict]


def engine_config(cfg, stage, largest=0):
    """DeepSpeed's settings. The defaults would change the results, or waste memory or time.

    largest: elements of the largest parameter.
    """
    hidden_size = AutoConfig.from_pretrained(cfg.model).get_text_config().hidden_size
    zero = {
        "stage": stage,
        # ZeRO-3 always holds a bucket of fp32 for each engine. The default size is 1.9 GiB. ZeRO-2
        # needs a bucket that holds each parameter. A larger gradient is not copied into a bucket,
        # and DeepSpeed may free it while another stream still reads it.
        "reduce_bucket_size": max(BUCKET, largest) if stage == 2 else BUCKET,
        # Reduce gradients during backward. By default only ZeRO-3 does that.
        "overlap_comm": stage > 1,
        # True would replace F.linear in the whole process, in vLLM too.
        "memory_efficient_linear": False,
        # Parameters smaller than this (norms, biases) are not sharded: their gathers cost time and
        # save little memory.
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    if cfg.offload == "optimizer" and stage > 0:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    settings = {
        # DeepSpeed requires this number. It has no effect: `update` divides by token counts.
        "train_micro_batch_size_per_gpu": 1,
        # Without this setting DeepSpeed clips at 1.0.
        "gradient_clipping": cfg.max_norm,
        "zero_optimization": zero,
        # check.py allows --bf16 with stages 2 and 3 only. Stage 0 is then a variant's model that
        # never learns (see Learner). The weights of such a model are bf16 already.
        "bf16": {"enabled": cfg.bf16 and stage > 1},
        # In bf16 the sum of 65 micro-batches lost a ninth of its norm.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    settings = cfg.engine_settings(settings)
    check_result(cfg, "engine_settings", isinstance(settings, dict), "a dict", settings)
    return settings


def load_model(cfg, auto_class, folder=None):
    """The text part of a folder, or of --model, in the training dtype and without dropout."""
    if cfg.zero_stage == 3:
        # As long as this object exists, from_pretrained shards the model while it loads.
        sharding = HfDeepSpeedConfig(engine_config(cfg, 3))  # noqa: F841
    source = folder or cfg.model
    if cfg.attention == "varlen":
        from lib import attention

        attention.register()
    load = auto_class.from_pretrained
    if not check.is_plain(source):
        from lib import families

        load = functools.partial(families.load, auto_class)
    dtype = cfg.training_dtype(torch.bfloat16 if cfg.bf16 else torch.float32)
    model, report = load(
        source, dtype=dtype, attn_implementation=cfg.attention, output_loading_info=True
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(f"{source} lacks {len(missing)} of its weights, such as {missing[0]}")
    if cfg.attention == "varlen":
        attention.check_model(model, source)
    # With dropout trainer and sampler would differ. Attention keeps its dropout as a number.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if "attention_dropout" in vars(module):
            module.attention_dropout = 0.0
    if cfg.gradient_checkpointing:
        # Without dropout a layer that is computed again needs no state of the random generators.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    # from_pretrained returns the model in eval mode. There gradient checkpointing does nothing.
    return model.train()


class Learner:
    """A model and its DeepSpeed engine, in the form that ppo.py calls a learner."""

    def __init__(self, name, module, cfg, lr):
        """lr: the learning rate, or None for a reference: a model of a variant that never learns.

        A reference has no optimizer. Only ZeRO-3 shards its weights.
        """
        stage = cfg.zero_stage
        optimizer = None
        if lr is not None:
            optimizer = make_optimizer(trainable(module), lr)
        elif stage < 3:
            stage = 0
        largest = max((p.numel() for p in trainable(module)), default=0)
        settings = engine_config(cfg, stage, largest)
        # DeepSpeed prints its settings. sys.__stdout__ leads to run.log (lib/report.py).
        with contextlib.redirect_stdout(sys.__stdout__):
            engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
        self.cfg = cfg
        self.deepspeed = engine
        self.name = name
        self.module = engine.module
        self.device = engine.device
        self.stage = stage

    def __call__(self, *inputs):
        return self.deepspeed(*inputs)

    def backward(self, loss: Tensor, is_last):
        """Adds the gradient of a micro-batch. After the last one the ranks' mean is taken."""
        self.deepspeed.set_gradient_accumulation_boundary(is_last)
        # gas means gradient accumulation steps. `update` has scaled the loss before.
        self.deepspeed.backward(loss, scale_wrt_gas=False)
        if not is_last:
            # Here DeepSpeed only counts the micro-batch. `optimizer_step` makes the update.
            self.deepspeed.step()

    def apply_update(self, lr):
        return optimizer_step(self, lr)


def trainable(module) -> list:
    """The parameters that the optimizer changes."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def make_optimizer(parameters, lr):
    return torch.optim.AdamW(parameters, lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def optimizer_step(learner, lr):
    """Makes one update. Returns the gradient's norm before clipping, or 0 if fp16 overflows.

    If the norm is not finite, no weight is changed, and all ranks raise FloatingPointError.
    """
    engine = learner.deepspeed
    engine.optimizer.param_groups[0]["lr"] = lr
    skipped = engine.skipped_steps
    if learner.stage == 0:
        # ZeRO 0 would apply a NaN. The ranks' mean is in p.grad, so look at it before.
        gradients = [p.grad for p in learner.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        if math.isfinite(norm):
            engine.step()
    else:
        engine.step()
        norm = float(engine.get_global_grad_norm())
    if engine.fp16_enabled() and engine.skipped_steps > skipped:
        # DeepSpeed multiplies the loss by a factor in fp16. It was too large, and is halved now.
        # If it is 1 already, DeepSpeed raises an error.
        return 0.0
    # After a NaN, ZeRO 1 to 3 skip the update without an error.
    if engine.skipped_steps > skipped or not math.isfinite(norm):
        raise FloatingPointError(f"{learner.name}: the gradient is not finite, its norm is {norm}")
    return norm


def make_policy(cfg) -> Learner:
    model = cfg.policy_model(load_model(cfg, AutoModelForCausalLM))
    check_result(cfg, "policy_model", isinstance(model, nn.Module), "a model", model)
    return Learner("policy", Policy(model), cfg, cfg.actor_learning_rate)


def make_critic(cfg) -> Learner:
    """Without --critic: the body of the base model with a new head. Raises UserError."""
    critic = Critic(load_model(cfg, AutoModel, cfg.critic), cfg.seed)
    if cfg.critic:
        from lib.value_head import load_value_head

        load_value_head(critic, cfg.critic)
    return Learner("critic", critic, cfg, cfg.critic_learning_rate)


def named_weights(learner):
    """(name in the files, full tensor) pairs, on every rank. One parameter is gathered at a time.

    Copy a tensor to keep it. A tied head is yielded too: without it vLLM on a CPU keeps the old
    head.
    """
    named = learner.cfg.named_weights(learner, gather_weights(learner))
    wanted = "an iterator of (name, tensor)"
    check_result(learner.cfg, "named_weights", isinstance(named, Iterable), wanted, named)
    return named


def gather_weights(learner):
    named = list(learner.module.named_parameters())
    model = learner.module.model
    if hasattr(model, "saved_buffers"):
        named += model.saved_buffers()
    if isinstance(learner.module, Policy) and model.config.tie_word_embeddings:
        named.append(("lm_head.weight", model.get_input_embeddings().weight))
    for name, parameter in named:
        # A parameter that ZeRO-3 shards has a ds_id.
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            weights = {name.removeprefix("model."): parameter.data}
            if hasattr(model, "in_files"):
                weights = model.in_files(weights)
            yield from weights.items()
