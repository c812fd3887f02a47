"""Policy and critic: bodies of transformers, our two heads, and a DeepSpeed engine around each.

A learner is a model with its engine: the policy, the critic, or a frozen model of a variant, which
never learns. families.py has what differs between families of models. `cfg` is the recipe of ppo.py
with the flags of a run. A variant may override its methods that are called here: policy_model,
training_dtype, engine_settings and named_weights. `micro` is a MicroBatch of ppo.py.

Shapes: R packed rows, L row length, M response tokens of a micro-batch, V vocabulary, H hidden.
"""

import dataclasses
import glob
import math

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import set_z3_leaf_module
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

# The import of environment.py sets variables that DeepSpeed reads when it starts.
from nanoorz import environment, families  # noqa: F401
from nanoorz.flags import require
from nanoorz.ranks import UserError, one_line

# At its first start on a CPU DeepSpeed would compile deepspeed_shm_comm, which is for inference. If
# the compilation was killed, all later starts would wait for its lock. This dict has the ops that
# DeepSpeed may compile.
deepspeed.ops.__compatible_ops__ = {}

BUCKET = 10**8  # elements of the bucket in which DeepSpeed collects gradients


# ---- modules -------------------------------------------------------------------------------------


class Policy(nn.Module):
    """A causal LM of transformers, whose head computes log-probs in chunks."""

    def __init__(self, model, source):
        """source: the folder of the model, or its name on the hub."""
        super().__init__()
        self.model = model
        self.source = source
        # The new head has the same nn.Parameter as the old one. If the embedding has it, too, the
        # head stays tied to the embedding.
        model.set_output_embeddings(families.make_head(model))

    def forward(self, micro, temperature):
        """Log-probs and entropies of the response tokens, (M,) and (M,).

        temperature: a number. Under torch.no_grad() the entropies are None.
        """
        hidden = last_hidden_state(self.model.base_model, micro)  # (M, H)
        return self.model.get_output_embeddings()(hidden, micro.token_ids, temperature)

    def save(self, folder, weights: dict):
        """Writes these weights as a folder that transformers and vLLM load."""
        if families.has_other_parts(AutoConfig.from_pretrained(self.source)):
            from nanoorz import text_part

            text_part.save(families.folder_of(self.source), folder, weights)
            return
        # transformers stores a tied output head once, under the name of the embedding.
        if self.model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        families.save(self.model, self.source, folder, weights)


class Frozen(Policy):
    """A causal LM that never learns. It has the tokenizer of the policy.

    Two models of one tokenizer may have different numbers of ids, because the last ids may stand
    for no token. Here only the ids that both models have get log-probs. If the policy draws an id
    that this model lacks, the last id of this model takes its place.
    """

    def __init__(self, model, source, policy_ids):
        """policy_ids: the number of the policy's ids."""
        super().__init__(model, source)
        shared = min(policy_ids, model.get_input_embeddings().num_embeddings)
        self.last_id = shared - 1
        model.get_output_embeddings().id_limit = shared

    def forward(self, micro, temperature):
        names = ("input_ids", "token_ids")
        ids = {name: getattr(micro, name).clamp(max=self.last_id) for name in names}
        return super().forward(dataclasses.replace(micro, **ids), temperature)


class Critic(nn.Module):
    """A body of its own and a linear head H -> 1.

    A new head has no bias. Its weights are drawn from N(0, std 1 / (H + 1)), as in ORZ's code.
    """

    def __init__(self, model, source, seed):
        """source: the folder of the body, or its name on the hub."""
        super().__init__()
        self.model = model
        self.source = source
        hidden_size = model.config.hidden_size
        self.value_head = nn.Linear(hidden_size, 1, bias=False, dtype=model.dtype)
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn((1, hidden_size), generator=generator) / (hidden_size + 1)  # (1, H)
        self.value_head.weight.data.copy_(weight)

    def forward(self, micro) -> Tensor:
        """V(s_t) of the response tokens, (M,): what the critic expects before it reads a token."""
        hidden = last_hidden_state(self.model, micro)  # (M, H)
        return self.value_head(hidden).squeeze(-1).float()  # (M,)

    def save(self, folder, weights: dict):
        """Writes these weights of the body as a folder that transformers loads."""
        families.save(self.model, self.source, folder, weights)


def last_hidden_state(body, micro) -> Tensor:
    """The body's last state at the positions that predict a response token, (M, H)."""
    return micro.select(body(**micro.model_inputs()).last_hidden_state)


# ---- loading -------------------------------------------------------------------------------------


def make_policy(cfg):
    return Learner("policy", policy_module(cfg), cfg, cfg.actor_learning_rate)


def make_critic(cfg):
    return Learner("critic", critic_module(cfg), cfg, cfg.critic_learning_rate)


def policy_module(cfg) -> Policy:
    model = load_model(cfg, cfg.model, AutoModelForCausalLM)
    return Policy(cfg.policy_model(model), cfg.model)


def critic_module(cfg) -> Critic:
    """The model of --critic or, without this flag, the base model with a new value head. Raises
    UserError."""
    if not cfg.critic:
        return Critic(load_model(cfg, cfg.model, AutoModel), cfg.model, cfg.seed)
    critic = Critic(load_model(cfg, cfg.critic, AutoModel, "--critic"), cfg.critic, cfg.seed)
    load_value_head(critic, cfg.critic)
    return critic


def make_frozen(cfg, name, source):
    """A model with an engine and without an optimizer. Variants compare the policy with it.

    name: of the engine. source: a folder, or a name on the hub. The model must allow the --packing
    and the --attention of the run, which is not checked here.
    """
    flag = "--model" if source == cfg.model else f"--{name}"
    model = load_model(cfg, source, AutoModelForCausalLM, flag)
    policy_ids = AutoConfig.from_pretrained(cfg.model).get_text_config().vocab_size
    return Learner(name, Frozen(model, source, policy_ids), cfg, lr=None)


def load_model(cfg, source, auto_class, flag="--model"):
    """A model's text part, in the training dtype and without dropout. Raises UserError.

    source: a folder, or a name on the hub. flag: the one that names it.
    """
    if cfg.zero_stage == 3:
        # A side effect: as long as this object exists, from_pretrained shards the model while it
        # loads. Only the settings of the sharding matter here.
        sharding = HfDeepSpeedConfig(engine_config(cfg, 3))  # noqa: F841
    if cfg.attention == "varlen":
        # transformers makes attention masks only for its own kinds of attention. varlen needs none.
        AttentionInterface.register("varlen", packed_attention)
    dtype = cfg.training_dtype(torch.bfloat16 if cfg.bf16 else torch.float32)
    settings = {"dtype": dtype, "attn_implementation": cfg.attention}
    try:
        model, report = families.load(source, auto_class, **settings)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{flag} {source}: {one_line(error)}") from error
    # transformers draws weights that it does not find.
    missing = sorted(report["missing_keys"])
    told = f"{flag} {source} lacks {len(missing)} of its weights, such as {missing[:1]}"
    require(not missing, told)
    if auto_class is AutoModelForCausalLM:
        # transformers unties a head that has other numbers than the embedding. vLLM does not.
        is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        told = f"{flag} {source}: config.json says that the head is tied, and its weights differ"
        require(is_tied or not model.config.tie_word_embeddings, told)
    if cfg.zero_stage == 3:
        # DeepSpeed gathers and reduces the weights of a layer together. By default each module in
        # the layer has hooks of its own, and they take half of the CPU's time.
        for layer in layers_of(model):
            set_z3_leaf_module(layer, True)
        # DeepSpeed takes a layer's gradients when the gradient of the layer's input is there. If
        # the embedding is frozen (LoRA), the input of the first layer would have no gradient.
        model.enable_input_require_grads()
    if cfg.compile_layers:
        # With fullgraph torch raises an error in the first pass if it cannot compile a layer, and
        # later if there are too many graphs. Without it the layers would run uncompiled, and
        # nobody would be told. The limit is 8 graphs by default. With the second setting torch
        # also calls hooks that are set after the first pass.
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        for layer in layers_of(model):
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=True)
    if cfg.gradient_checkpointing:
        # A layer is computed again in the backward pass. Without dropout it draws nothing, so no
        # state of the random generators has to be kept for it.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    # from_pretrained returns the model in eval mode, in which gradient checkpointing does nothing.
    return model.train()


def layers_of(module) -> list:
    """The layers of a model. transformers marks them by this class."""
    return [x for x in module.modules() if isinstance(x, GradientCheckpointingLayer)]


# The names of a value head on disk: ours and ORZ's, and those of a token classifier.
VALUE_HEADS = {"value_head.weight", "value_head.bias", "score.weight", "score.bias"}


def load_value_head(critic, folder):
    """Replaces the new head of a critic by the folder's head, which may have a bias.

    The head is in a file of its own (a critic that train.py exported) or beside the body's weights
    (critics that others published). Raises UserError if no head fits the body.
    """
    head = {}
    for path in glob.glob(f"{folder}/*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in VALUE_HEADS.intersection(file.keys()):
                kind = name.split(".")[1]  # weight or bias
                head[kind] = file.get_tensor(name)
    if "bias" in head:
        critic.value_head = nn.Linear(critic.value_head.in_features, 1, dtype=critic.model.dtype)
    try:
        # If the folder has no head, this raises too, because the weight is missing.
        critic.value_head.load_state_dict(head)
    except RuntimeError as error:
        raise UserError(
            f"--critic {folder} has no value head with one output that fits its body, in "
            f"value_head.safetensors or beside the body: {one_line(error)}"
        ) from error


# ---- attention -----------------------------------------------------------------------------------


def packed_attention(module, query, key, value, mask, **options):
    """--attention varlen: causal attention within each sample of a row, by PyTorch's kernel.

    transformers calls this function in each layer. query: (R, heads, L, D). key and value may have
    fewer heads. `mask` is not used. Returns (R, L, heads, D) and None.
    """
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # (R * L, heads, D)
    borders = options["cu_seq_lens_q"]  # (parts + 1,)
    longest = options["max_length_q"]  # tokens
    # A sliding window of w tokens has the token itself and w - 1 tokens before it. Without a window
    # a token sees all tokens before it, which the kernel calls -1.
    window = options.get("sliding_window")
    before = window - 1 if window else -1
    after = 0
    settings = {"window_size": (before, after), "scale": options["scaling"], "enable_gqa": True}
    out = varlen_attn(*flat, borders, borders, longest, longest, **settings)  # (R * L, heads, D)
    return out.unflatten(0, (len(query), -1)), None


# ---- engines -------------------------------------------------------------------------------------


class Learner:
    """A model and its DeepSpeed engine, in the form that ppo.py calls a learner."""

    def __init__(self, name, module, cfg, lr):
        """lr: the learning rate. None: the model never learns.

        A model that never learns has no optimizer. Only ZeRO-3 shards its weights.
        """
        stage = cfg.zero_stage
        optimizer = None
        if lr is not None:
            optimizer = make_optimizer(trainable(module), lr)
        elif stage < 3:
            stage = 0
        largest = max((p.numel() for p in trainable(module)), default=0)
        # ds_numel is the size of a parameter that ZeRO-3 shards.
        layers = [
            sum(getattr(p, "ds_numel", p.numel()) for p in layer.parameters())
            for layer in layers_of(module)
        ]
        settings = engine_config(cfg, stage, largest, max(layers, default=0))
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
        # gas means gradient accumulation steps. `update` of ppo.py has scaled the loss before.
        self.deepspeed.backward(loss, scale_wrt_gas=False)
        if not is_last:
            # Here `step` only counts the micro-batch. After the last micro-batch `apply_update`
            # calls `step`, which then changes the weights.
            self.deepspeed.step()

    def apply_update(self, lr):
        """Changes the weights. Returns the gradient's norm before clipping.

        If the norm is not finite, no weight is changed, and all ranks raise FloatingPointError. In
        fp16 (a variant) the norm may be too large for fp16, and then this returns 0.
        """
        engine = self.deepspeed
        engine.optimizer.param_groups[0]["lr"] = lr
        skipped = engine.skipped_steps
        if self.stage == 0:
            # ZeRO 0 would apply a NaN. The ranks' mean is in p.grad, so look at it before.
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients).item()
            if math.isfinite(norm):
                engine.step()
        else:
            engine.step()
            norm = float(engine.get_global_grad_norm())
        if engine.fp16_enabled() and engine.skipped_steps > skipped:
            # In fp16 DeepSpeed multiplies the loss by a factor. The factor was too large, so
            # DeepSpeed has halved it now. If it was 1 already, DeepSpeed raises an error.
            return 0.0
        # After a NaN, ZeRO 1 to 3 skip the update without an error.
        if engine.skipped_steps > skipped or not math.isfinite(norm):
            raise FloatingPointError(f"{self.name}: the gradient is not finite, its norm is {norm}")
        return norm


def trainable(module) -> list:
    """The parameters that the optimizer changes."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def make_optimizer(parameters, lr):
    return torch.optim.AdamW(parameters, lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def engine_config(cfg, stage, largest=0, layer=0):
    """DeepSpeed's settings. The defaults would change the results, or waste memory or time.

    stage: of ZeRO. largest: elements of the largest parameter. layer: those of the largest layer.
    """
    hidden_size = AutoConfig.from_pretrained(cfg.model).get_text_config().hidden_size
    zero = {
        "stage": stage,
        # ZeRO-3 always holds a bucket of fp32 for each engine. Its default size is 1.9 GiB. In
        # ZeRO-2 the largest parameter must fit into the bucket. Otherwise its gradient is not
        # copied, and DeepSpeed may free it while another stream still reads it.
        "reduce_bucket_size": max(BUCKET, largest) if stage == 2 else BUCKET,
        # Reduce gradients during backward. A rank alone has nobody to wait for, and the overlap
        # takes a second bucket.
        "overlap_comm": stage > 1 and dist.get_world_size() > 1,
        # True would replace F.linear in the whole process, in vLLM too.
        "memory_efficient_linear": False,
        # Parameters smaller than this (norms, biases) are not sharded: their gathers cost time and
        # save little memory.
        "stage3_param_persistence_threshold": 10 * hidden_size,
        # While a layer computes, about one layer is gathered ahead. The last parameter may exceed
        # this limit. By default ZeRO-3 holds up to 10^9 weights.
        "stage3_prefetch_bucket_size": layer,
        "stage3_max_live_parameters": 2 * layer,
        "stage3_max_reuse_distance": 0,
    }
    # The other way, DeepSpeed's offload_states, refuses every optimizer but FusedAdam.
    if cfg.offload == "optimizer" and stage > 0:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    settings = {
        # DeepSpeed requires this number. It has no effect: `update` divides by token counts.
        "train_micro_batch_size_per_gpu": 1,
        # Without this setting DeepSpeed clips at 1.0.
        "gradient_clipping": cfg.max_norm,
        "zero_optimization": zero,
        # --bf16 true needs stage 2 or 3 (train.py). So at stage 0 or 1 the run is in fp32, or the
        # model is a frozen one, whose weights are in bf16 already.
        "bf16": {"enabled": cfg.bf16 and stage > 1},
        # Sum the gradients of micro-batches and ranks in fp32. In bf16 a sum of 65 micro-batches
        # lost a ninth of its norm. The setting coalesce_grad_reduction would sum in bf16 again.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        # This timer waits for the GPU twice a micro-batch.
        "timers": {"throughput": {"enabled": False}},
        # The optimizer is torch's, and not one of DeepSpeed's own.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return cfg.engine_settings(settings)


# ---- weights, for the sampler and the export -----------------------------------------------------


def named_weights(learner):
    """(name in the files, full tensor) pairs, on every rank. One parameter is gathered at a time.

    Each rank must take all pairs. Copy a tensor to keep it. Its dtype is that of the passes. A tied
    head is yielded too: without it vLLM on a CPU keeps the old head.
    """
    return learner.cfg.named_weights(learner, gather_weights(learner))


def gather_weights(learner):
    if learner.stage == 3:
        # After a pass without gradients DeepSpeed is still gathering weights for a backward pass.
        learner.deepspeed.optimizer.empty_partition_cache()
    module = learner.module
    # This names a tied head, too, and the buffers that the files have.
    for name, tensor in module.state_dict(keep_vars=True).items():
        # A parameter that ZeRO-3 shards has a ds_id.
        with GatheredParameters([tensor], enabled=hasattr(tensor, "ds_id")):
            # The module holds the model under the name `model`. The files do not have that name.
            weights = {name.removeprefix("model."): tensor.data}
            if isinstance(module, Policy):
                weights = families.to_files(module.model, weights)
            yield from weights.items()
