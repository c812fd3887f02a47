"""Refuses flags and models that cannot work, in one line, before any weight is read."""

from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from lib.common import UserError, gather, here, one_line, print0

CHOICES = {
    "zero_stage": (0, 1, 2, 3),
    "offload": ("none", "optimizer"),
    "attention": ("auto", "sdpa", "eager", "varlen"),
    "packing": ("auto", "packed", "alone"),
    "log_with": ("tensorboard", "wandb", "none"),
}
# These numbers must be at least 1, all others at least 0. Functions below limit some further.
COUNTS = (
    "rollout_batch_size",
    "n_samples_per_prompt",
    "eval_n",
    "num_episodes",
    "generate_max_len",
    "prompt_max_len",
    "micro_train_batch_size",
    "micro_rollout_batch_size",
    "warmup_updates",
    "critic_updates",
    "tensor_parallel",
)

# The families (model_type of a config) with full attention or sliding windows in all layers, and a
# linear head without bias. lib/families.py looks at all other models.
PLAIN = ("llama", "mistral", "phi3", "qwen2", "qwen3")


def require(holds, message):
    if not holds:
        raise UserError(message)


def require_all(cfg, table):
    """table: {flag: (is its value right, what to do if not)}. Raises UserError."""
    for name, (holds, advice) in table.items():
        require(holds, f"--{name} {getattr(cfg, name)}: {advice}")


def check_config(cfg, world, names):
    """Raises UserError for the first wrong flag of these names: those of train.Config."""
    for name, allowed in {**CHOICES, "estimator": cfg.estimators}.items():
        advice = f"choose {' or '.join(map(str, allowed))}"
        require_all(cfg, {name: (getattr(cfg, name) in allowed, advice)})
    for name in names:
        value = getattr(cfg, name)
        least = 1 if name in COUNTS else 0
        if type(value) in (int, float):
            # Infinite numbers are refused, and NaN, because each comparison with NaN is false.
            advice = f"must be a number, at least {least}"
            require_all(cfg, {name: (least <= value < 2**63, advice)})
    check_batch(cfg, world)
    check_estimator(cfg)
    check_sampling(cfg)
    check_hardware(cfg, world)


def check_batch(cfg, world):
    table = {
        "rollout_batch_size": (
            cfg.rollout_batch_size % world == 0,
            f"use a multiple of {world}, the number of ranks",
        ),
        "prompt_max_len": (
            cfg.prompt_max_len < cfg.max_len,
            f"leaves no room for a response in --max_len {cfg.max_len}: lower --prompt_max_len or "
            "raise --max_len",
        ),
        "packing_max_len": (
            cfg.packing_max_len >= cfg.max_len,
            f"a row must hold one sample of --max_len {cfg.max_len} tokens; raise it",
        ),
    }
    require_all(cfg, table)


def check_estimator(cfg):
    check_samples(cfg, "n_samples_per_prompt")
    is_right = not cfg.critic or cfg.estimators[cfg.estimator].needs_critic
    require_all(cfg, {"critic": (is_right, f"--estimator {cfg.estimator} has no critic")})
    for name in ("gamma", "lambd"):
        require_all(cfg, {name: (getattr(cfg, name) <= 1, "choose 0 to 1")})


def check_samples(cfg, flag):
    """Is the value of this flag enough samples for the estimator? Variants call this too."""
    least = cfg.estimators[cfg.estimator].least_samples
    advice = f"--estimator {cfg.estimator} compares samples of a problem: use at least {least}"
    require_all(cfg, {flag: (getattr(cfg, flag) >= least, advice)})


def is_chat(template):
    """chat may have switches: chat?enable_thinking=false. A text of one's own has {question}."""
    return template.partition("?")[0] == "chat" and "{" not in template


def check_sampling(cfg):
    limits = "choose 0.01 to 2, the range of vLLM"
    table = {
        "temperature": (0.01 <= cfg.temperature <= 2, limits),
        "eval_temperature": (
            cfg.eval_temperature == 0 or 0.01 <= cfg.eval_temperature <= 2,
            f"{limits}, or 0 for greedy answers",
        ),
        "system": (cfg.system is None or is_chat(cfg.template), "needs --template chat"),
    }
    require_all(cfg, table)
    for name in ("top_p", "eval_top_p", "gpu_memory_utilization"):
        require_all(cfg, {name: (0 < getattr(cfg, name) <= 1, "choose above 0, up to 1")})


def has_varlen(cfg):
    return cfg.bf16 and torch.cuda.is_available() and cfg.packing != "alone"


def check_hardware(cfg, world):
    table = {
        "bf16": (
            not cfg.bf16 or cfg.zero_stage >= 2,
            f"its fp32 gradient sums need stage 2 or 3, not --zero_stage {cfg.zero_stage}; add "
            "--zero_stage 2 or --bf16 false",
        ),
        "attention": (
            cfg.attention != "varlen" or has_varlen(cfg),
            "needs a GPU, --bf16 true and packed rows; or choose sdpa",
        ),
        "tensor_parallel": (world % cfg.tensor_parallel == 0, f"does not divide {world} ranks"),
        "offload": (
            cfg.offload == "none" or cfg.zero_stage > 0,
            "offloading is a part of ZeRO; add --zero_stage 1, 2 or 3",
        ),
        "log_with": (cfg.log_with != "wandb" or find_spec("wandb"), "`pip install wandb` first"),
    }
    require_all(cfg, table)
    require(all([*cfg.data, *cfg.eval_data]), "--data, --eval_data: a name is empty")
    require(cfg.data, "--data: name at least one file of training problems")


def warn(cfg, problems, eval_sets):
    """Prints warnings of settings that are allowed but rarely meant."""
    labels = {problem.question: problem.label for problem in problems}
    doubtful = [x.question for x in problems if x.label != labels[x.question]]
    if doubtful:
        first = f"{len(doubtful)} problems have a second label, such as {doubtful[0]!r:.99}"
        print0(f"WARNING: --data: {first}")
    if cfg.rollout_batch_size > len(problems):
        size = f"--rollout_batch_size {cfg.rollout_batch_size}"
        print0(f"WARNING: {size}: --data has {len(problems)} problems, so each step repeats some")
    for name, held_out in eval_sets.items():
        known = sum(problem.question in labels for problem in held_out)
        if known:
            print0(f"WARNING: {known} of {len(held_out)} problems of {name} are also in --data")
    if not cfg.estimators[cfg.estimator].needs_critic:
        from lib.advice import tell_idle_flags

        tell_idle_flags(cfg)


def require_same(values):
    """Raises UserError on all ranks if a rank has another value than rank 0. A collective.

    values: {name: value}. Ranks with different flags would wait for each other for ever.
    """
    shown = {name: repr(value) for name, value in values.items()}
    reports = gather((here(), shown))
    _, first = reports[0]
    for place, found in reports:
        for name in first:
            require(
                found.get(name) == first[name],
                f"{place}: {name} is {found.get(name)}, but on rank 0 it is {first[name]}; give all"
                " ranks the same",
            )


def load_config(model):
    """The config of a model's text part. Raises UserError if it is absent or cannot be trained."""
    path = Path(model)
    if not (path / "model.safetensors").exists():
        from lib.advice import check_folder

        check_folder(model)
    try:
        for file in sorted(path.glob("*.safetensors")):
            check_weights(file)
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        if getattr(config, "quantization_config", None):
            raise ValueError("its weights are quantized; use the model that it was made from")
        if config.model_type not in PLAIN:
            from lib import families

            config = families.check(config, skeleton)
    # transformers raises errors of many kinds for a wrong config.
    except Exception as error:
        why = "cannot be used" if path.is_dir() else "is no folder here, and the hub lacks it"
        raise UserError(f"--model, --critic: {model} {why}: {one_line(error)}") from error
    return config


def check_weights(file):
    """Raises ValueError for a file that is cut short. Only its header is read."""
    try:
        with safe_open(file, "pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{file.name} is damaged ({error}); copy the file again") from error


def is_plain(model):
    return AutoConfig.from_pretrained(model).model_type in PLAIN


def fill_in(cfg):
    """Replaces `auto` in --packing and --attention by what the models need. Raises UserError."""
    models = [cfg.model, cfg.critic or cfg.model]
    if not all(map(is_plain, models)):
        from lib import families

        families.fill_in(cfg, models)
    if cfg.packing == "auto":
        cfg.packing = "packed"
    if cfg.attention == "auto":
        cfg.attention = "varlen" if has_varlen(cfg) else "sdpa"


def skeleton(config):
    """The causal LM of a config, without memory for its weights. Raises ValueError."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def count_parameters(config):
    return sum(p.numel() for p in skeleton(config).parameters())


def needed_bytes(cfg, has_critic, saved):
    """The bytes that the coming checkpoints need on the disk.

    saved: how many checkpoints the folder has. New checkpoints take the room of those. A checkpoint
    takes at most 16 bytes for each parameter of policy and critic: 4 each for weight, fp32 master
    and two moments. While one is written, keep_last older ones are kept. With --keep_last 0 all are
    kept, and only the next one is counted.
    """
    if cfg.resume == "none":
        # The run sets the checkpoints of the folder aside, and they stay on the disk.
        saved = 0
    count = 1
    if cfg.keep_last > 0:
        count = max(1, cfg.keep_last + 1 - saved)
    parameters = count_parameters(load_config(cfg.model))
    if has_critic:
        parameters += count_parameters(load_config(cfg.critic or cfg.model))
    return count * 16 * parameters
