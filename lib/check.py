"""Flags that cannot work, refused in one line before a model is read."""

import importlib.util
import socket

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from lib.common import UserError, gather, one_line

CHOICES = {
    "zero_stage": (0, 1, 2, 3),
    "offload": ("none", "optimizer"),
    "attention": ("sdpa", "eager", "flash_attention_2"),
    "log_with": ("tensorboard", "wandb", "none"),
}
# These count something that must be there; all other numbers may be 0.
COUNTS = (
    "rollout_batch_size",
    "n_samples_per_prompt",
    "eval_n",
    "num_episodes",
    "generate_max_len",
    "prompt_max_len",
    "micro_train_batch_size",
    "micro_rollout_batch_size",
    "num_warmup_steps",
    "tensor_parallel",
)
GROUPED = ("grpo", "rloo")  # they compare the samples of a problem


def require(holds, message):
    if not holds:
        raise UserError(message)


def check_config(cfg, world, choices):
    """Raises UserError. choices: allowed values of some flags, beside CHOICES."""
    for name, allowed in {**CHOICES, **choices}.items():
        value = getattr(cfg, name)
        names = " or ".join(map(str, allowed))
        require(value in allowed, f"--{name} {value}: choose {names}")
    check_ranges(cfg)
    check_batch(cfg, world)
    check_lengths(cfg)
    check_sampling(cfg)
    check_engines(cfg, world)


def check_ranges(cfg):
    """No number is negative, infinite or NaN."""
    for name, value in vars(cfg).items():
        if type(value) not in (int, float):
            continue
        least = 0
        if name in COUNTS:
            least = 1
        message = f"--{name} {value}: must be a number, at least {least}"
        require(least <= value < 2**63, message)


def check_batch(cfg, world):
    prompts = cfg.rollout_batch_size
    samples = cfg.n_samples_per_prompt
    is_grouped = cfg.estimator in GROUPED
    require(
        prompts % world == 0,
        f"--rollout_batch_size {prompts}: use a multiple of {world}, the number of ranks",
    )
    require(
        samples > 1 or not is_grouped,
        f"--n_samples_per_prompt {samples}: --estimator {cfg.estimator} compares at least 2",
    )
    require(
        1 <= cfg.critic_update_steps <= prompts * samples,
        f"--critic_update_steps {cfg.critic_update_steps}: choose 1 to {prompts * samples}, the "
        "samples of a step",
    )
    require(
        cfg.first_stage < samples,
        f"--first_stage {cfg.first_stage}: choose less than --n_samples_per_prompt {samples}",
    )
    require(
        cfg.first_stage != 1 or not is_grouped,
        f"--first_stage 1: --estimator {cfg.estimator} compares at least 2 samples",
    )


def check_lengths(cfg):
    require(
        cfg.prompt_max_len < cfg.max_len,
        f"--prompt_max_len {cfg.prompt_max_len} leaves no room for a response in --max_len "
        f"{cfg.max_len}: lower the one or raise the other",
    )
    require(
        cfg.packing_max_len >= cfg.max_len,
        f"--packing_max_len {cfg.packing_max_len}: a row must hold one sample of --max_len "
        f"{cfg.max_len} tokens; raise it",
    )


def check_sampling(cfg):
    for name in ("temperature", "eval_temperature"):
        value = getattr(cfg, name)
        is_greedy = name == "eval_temperature" and value == 0
        require(
            value is None or is_greedy or 0.01 <= value <= 2,
            f"--{name} {value}: choose 0.01 to 2, what vLLM takes (greedy evaluation: 0)",
        )
    for name in ("top_p", "eval_top_p", "gpu_memory_utilization"):
        value = getattr(cfg, name)
        require(value is None or 0 < value <= 1, f"--{name} {value}: choose above 0, up to 1")
    require(cfg.tis_cap is None or cfg.tis_cap >= 1, f"--tis_cap {cfg.tis_cap}: choose at least 1")
    compares = cfg.log_ratio or cfg.tis_cap is not None
    require(
        cfg.top_p == 1 or not compares,
        f"--top_p {cfg.top_p}: choose 1 with --tis_cap or --log_ratio, since log-probs of a cut "
        "distribution are not the trainer's",
    )


def check_engines(cfg, world):
    require(
        not cfg.bf16 or cfg.zero_stage >= 2,
        f"--bf16 with --zero_stage {cfg.zero_stage}: its fp32 gradient sums need stage 2 or 3; add "
        "--zero_stage 2 or --bf16 false",
    )
    require(
        world % cfg.tensor_parallel == 0,
        f"--tensor_parallel {cfg.tensor_parallel}: does not divide {world} ranks",
    )
    require(
        cfg.offload == "none" or cfg.zero_stage > 0,
        "--offload optimizer: is ZeRO's own; add --zero_stage 1, 2 or 3",
    )
    require(
        not cfg.rollout_quantization or torch.cuda.is_available(),
        f"--rollout_quantization {cfg.rollout_quantization}: needs a GPU that vLLM can quantize on "
        "(fp8: compute capability 8.9 or more)",
    )
    require(
        cfg.log_with != "wandb" or importlib.util.find_spec("wandb") is not None,
        "--log_with wandb: `pip install wandb` first",
    )
    require("" not in [*cfg.data, *cfg.eval_data], "--data, --eval_data: a name is empty")
    require(len(cfg.data) > 0, "--data: name at least one file of training problems")


def check_same(values, error=None):
    """Raises UserError on all ranks where one has an error, or another value than rank 0.

    Ranks that differ would train on samples behind each other's prompts, or wait for each other
    for ever.
    """
    shown = {name: repr(value) for name, value in values.items()}
    if not dist.is_initialized():
        reports = [("", error, shown)]
    else:
        reports = gather((f"machine {socket.gethostname()}", error, shown))
    for rank, (host, why, found) in enumerate(reports):
        if why and all(report[1] for report in reports):
            raise why
        if why:
            raise UserError(f"{host}, rank {rank}: {why}")
        for name, ours in reports[0][2].items():
            if found[name] != ours:
                text = f"{name}: {found[name]}, of rank 0: {ours}; give all the same"
                raise UserError(f"{host}, rank {rank}: {text}")


def read_config(model):
    """The config of a model. Raises UserError where it is absent or ppo.py cannot train it."""
    try:
        config = AutoConfig.from_pretrained(model)
        check_architecture(config)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {model} cannot be used: {one_line(error)}") from error
    return config


def check_architecture(config):
    """Raises ValueError for what cannot be packed or scored.

    Sliding windows and recurrent states cross the borders of a row's samples; the head computes
    without a bias.
    """
    kinds = set(getattr(config, "layer_types", None) or [])
    kinds.discard("full_attention")
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        kinds.add(f"sliding_window={window}")
    if kinds:
        names = ", ".join(sorted(kinds))
        raise ValueError(f"layers of kind {names} cannot be packed; use full attention")
    if getattr(skeleton(config).get_output_embeddings(), "bias", None) is not None:
        raise ValueError("its head has a bias, which lib/head.py leaves out; use another model")


def skeleton(config):
    """A causal LM without memory for its weights. Raises ValueError where there is no such model."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def count_parameters(config):
    return sum(p.numel() for p in skeleton(config).parameters())


def needed_bytes(cfg, present):
    """What the checkpoints to come need on disk; `present` ones are there already.

    16 bytes a parameter (weight, fp32 master, two moments) of policy and critic: keep_last
    checkpoints beside the one that is written. If all are kept there is no bound, and it is one.
    """
    if cfg.resume == "none":
        # Those are set aside, and stay.
        present = 0
    count = 1
    if cfg.keep_last > 0:
        count = max(1, cfg.keep_last + 1 - present)
    models = 1
    if cfg.estimator == "gae":
        models = 2
    return count * models * 16 * count_parameters(read_config(cfg.model))
