"""nanoORZ: reinforcement learning of reasoning straight on a base model, after Open-Reasoner-Zero.

`accelerate launch train.py --model MODEL --data FILE` trains. Without --model it is the demo: a
tiny base model is made on the spot by tools/demo.py, whose flags are printed and come before yours.

Owns the flags, the set-up, the loop and evaluation. A process per GPU (a rank) holds a shard of
policy and critic (DeepSpeed) and a sampler (vLLM), which take turns on the device.
"""

import dataclasses
import difflib
import importlib.util
import os
import shlex
import subprocess
import sys
import traceback
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path

from lib.launcher import follow_launcher, leave_on_signals

if __name__ == "__main__":
    # The imports below take 8 s. A signal, or the launcher's end, must end this process meanwhile.
    leave_on_signals()
    follow_launcher()
# An idle thread of OpenMP must sleep: spinning ones get five times slower beside other work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from transformers import AutoTokenizer, HfArgumentParser

# DeepSpeed logs a warning if it has to find out.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import ckpt
import ppo
from lib import check, metrics, models
from lib.attention import has_varlen
from lib.common import (
    Signals,
    Stopped,
    UserError,
    gather,
    hash64,
    one_line,
    print0,
    start_distributed,
    tell_once,
)
from lib.report import RunLog, redirect_libraries
from rollout import Rollout, make_requests, requests_of_step

# The base model would go on with the conversation behind its answer.
ORZ_STOP = ["User:", "Human:", "Assistant:", "</answer>"]


@dataclass
class Learning:
    """The flags that decide what is learnt: a resumed run must keep them. Defaults are ORZ's."""

    model: str | None = None  # a causal LM of Hugging Face, folder or name; absent: the demo
    template: str = "orz"  # orz, demo, plain, chat (the tokenizer's own), or a text with {question}
    system: str | None = None  # what a chat begins with; absent: what its template says
    answer: str = "orz"  # orz (boxed in <answer>), boxed_anywhere, last_number, hashes (GSM8K)
    reward: str = "math"  # reward.py; another name is tasks/NAME.py, or give a file: my_task.py
    seed: int = 42  # all randomness is a hash of it and of what it is for
    # ---- sampling
    rollout_batch_size: int = 128  # problems a step; a multiple of the ranks
    n_samples_per_prompt: int = 64  # responses to each; 2 or more if they are compared
    temperature: float = 1.0  # log-probs and losses are taken at it too
    top_p: float = 1.0  # below 1 the trainer's log-probs are not the sampler's
    stop: list[str] = field(default_factory=ORZ_STOP.copy)  # they stay in the text
    prompt_max_len: int = 2048  # tokens; longer prompts are left out, aloud
    generate_max_len: int = 8000  # tokens; a response gets min(this, max_len - prompt)
    max_len: int = 8192  # tokens of prompt and response
    first_stage: int = 0  # samples before a problem is judged worth the others; 0 is off
    adaptive_len: bool = False  # a problem's cap follows what its finished responses needed
    rollout_quantization: str | None = None  # fp8_per_channel: the sampler's weights are smaller
    # ---- learning
    estimator: str = "gae"  # gae (PPO with critic) or one of ppo.ESTIMATORS without, as grpo
    pass_k: int = 4  # of pass_at_k: the responses of which one should be right
    critic: str | None = None  # a folder of body and value head to start from; absent: the model
    critic_warmup_steps: int = 0  # steps at the start in which the critic learns alone
    loss_mean: str = "token"  # which weigh alike; sequence: samples; constant: / generate_max_len
    gamma: float = 1.0  # with lambd 1 the advantage is R - V; a gamma below 1 favours short answers
    lambd: float = 1.0  # GAE's lambda; below 1 advantages are calmer, and biased
    critic_lambd: float | None = None  # of the critic's target; absent: lambd; VAPO: 1, lambd 0.95
    advantage_normalization: bool = True  # over all tokens; gae, reinforce, reinforce_pp
    critic_update_steps: int = 12  # optimizer steps over one shuffled pass
    actor_learning_rate: float = 1e-6  # the policy's; 1e-6 suits 0.5B to 32B
    critic_learning_rate: float = 5e-6  # the critic can learn faster than the policy
    num_warmup_steps: int = 50  # optimizer steps in which the rate rises from lr / n
    lr_end: float | None = None  # the policy's rate falls linearly to it; absent: it is constant
    value_clip: float = 0.2  # around the value before the update
    tis_cap: float | None = None  # weigh a token by its trainer/sampler ratio, at most this; try 2
    max_norm: float = 1.0  # gradient clip
    bf16: bool = True  # with fp32 masters and gradient sums; needs ZeRO 2 or 3


@dataclass
class Config(Learning):
    """Every flag. Those below decide when and where: a resumed run may change them.

    The files of --data may move, but must hold the same problems then.
    """

    data: list[str] = field(default_factory=list)  # JSON, JSONL (ORZ, GSM8K) or names of data sets
    run_dir: str = "out/run"  # all that the run writes; on several machines a shared folder
    resume: str = "auto"  # auto: newest checkpoint of run_dir; none; or a checkpoint's path
    # ---- when
    num_episodes: int = 20  # passes over the problems
    max_steps: int | None = None  # stop earlier than num_episodes say
    save_interval: int = 50  # steps between checkpoints; one more at the end and on a signal
    keep_last: int = 2  # newest checkpoints that are kept; 0: all
    eval_data: list[str] = field(default_factory=list)  # problems held out, any number of files
    eval_interval: int = 10  # steps between evaluations; 0: only before and after
    eval_n: int = 1  # responses to a problem; ORZ's paper averages 16
    eval_temperature: float | None = None  # absent: the training's; 0 is greedy
    eval_top_p: float | None = None  # absent: the training's
    # ---- what is written down
    log_with: str = "tensorboard"  # tensorboard, wandb (installed, logged in), none
    log_samples: int = 256  # training samples of a step in samples.jsonl; 0: all
    log_tokens: int = 16  # of those, samples written token by token
    log_kl: bool = False  # KL to the base model: a third model and a forward pass
    log_ratio: bool = False  # trainer against sampler, token by token
    # ---- where and how fast
    zero_stage: int = 3  # what is sharded: 1 optimizer, 2 gradients, 3 parameters too
    offload: str = "none"  # optimizer: DeepSpeed keeps its states in CPU memory
    packing_max_len: int = 16384  # tokens a row, at least max_len; with sdpa short rows win
    micro_train_batch_size: int = 1  # rows a forward pass
    gradient_checkpointing: bool = True  # a third more compute, far less memory
    attention: str = "auto"  # auto: varlen for bf16 on a GPU whose PyTorch has it, otherwise sdpa
    micro_rollout_batch_size: int = 256  # sequences in flight: speed against KV cache
    tensor_parallel: int = 1  # ranks that share a sampler, for large models
    gpu_memory_utilization: float = 0.5  # vLLM's share of a GPU while it is awake
    kv_cache_gb: float | None = None  # absent: the rest of vLLM's share; 1 on a CPU
    enforce_eager: bool = False  # vLLM without CUDA graphs: slower, less memory


def parse_flags(argv):
    """Raises UserError for an unknown flag, or a value of the wrong kind."""
    parser = HfArgumentParser(Config, allow_abbrev=False)
    parser.error = refuse_flag
    cfg, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        nearest = difflib.get_close_matches(unknown[0].lstrip("-"), vars(cfg), n=1, cutoff=0)
        raise UserError(f"unknown flag {unknown[0]}: did you mean --{nearest[0]}?")
    # An empty list is written as --stop "".
    cfg.stop = [text for text in cfg.stop if text]
    # What is logged is what is used, so absent values are filled in here.
    if cfg.eval_temperature is None:
        cfg.eval_temperature = cfg.temperature
    if cfg.eval_top_p is None:
        cfg.eval_top_p = cfg.top_p
    if cfg.attention == "auto":
        has_kernel = cfg.bf16 and torch.cuda.is_available() and has_varlen()
        cfg.attention = "varlen" if has_kernel else "sdpa"
    return cfg


def refuse_flag(message):
    raise UserError(f"{message}; the fields of Config in train.py are the flags")


def demo_flags(cfg, argv):
    """Makes the demo's base model in run_dir, and puts the demo's flags before the given ones."""
    folder = (Path(cfg.run_dir) / "base").resolve()
    tool = f"{Path(__file__).parent}/tools/demo.py"
    command = [sys.executable, tool, str(folder), "--seed", str(cfg.seed), "--end_with_parent"]
    error = ckpt.on_rank0(subprocess.check_call, command)
    check.require(not error, "the demo's base model was not made, see above")
    flags = (folder / "flags.txt").read_text()
    print0("the demo is train.py", *flags.splitlines())
    return parse_flags([*shlex.split(flags), *argv])


def find_inputs(cfg):
    """The task and the tokenizer. Raises UserError on all ranks, if a file is wrong on one."""
    task = tokenizer = wrong = None
    try:
        task = find_task(cfg)
        tokenizer = read_tokenizer(cfg, "model", cfg.model)
        if cfg.critic:
            check.require(
                read_tokenizer(cfg, "critic", cfg.critic).get_vocab() == tokenizer.get_vocab(),
                f"--critic {cfg.critic}: its tokenizer is not that of {cfg.model}",
            )
    except UserError as error:
        # Perhaps it is on this machine alone, and the other ranks must hear of it.
        wrong = error
    check.check_same({}, wrong)
    return task, tokenizer


def read_tokenizer(cfg, flag, folder):
    """The tokenizer of a folder, once its config has passed. Raises UserError."""
    config = check.read_config(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"--{flag} {folder} has no tokenizer: {one_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"--{flag} {folder}: its tokenizer has no eos token, so no response could end; set "
            "eos_token in tokenizer_config.json"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest and cfg.max_len > longest:
        raise UserError(
            f"--max_len {cfg.max_len}: prompt and response exceed the {flag}'s {longest} positions"
        )
    return tokenizer


def read_problems(task, paths, cfg, tokenizer, split="train"):
    """Problems with the token ids of their prompts; too long ones are left out aloud.

    A path may end in ?split=test&columns=problem,answer: part and columns of a data set. Raises
    UserError on all ranks, also where their files differ.
    """
    problems = []
    wrong = None
    try:
        for path in paths:
            name, options = parse_path(path, split)
            problems += task.load_problems(name, cfg.template, tokenizer.bos_token or "", **options)
    except UserError as error:
        # Perhaps it is in this machine's file alone, and the other ranks must hear of it.
        wrong = error
    where = " ".join(paths)
    check.check_same({f"hash of the problems in {where}": problems_hash(problems)}, wrong)
    texts = [problem.prompt for problem in problems]
    if cfg.template == "chat":
        texts = [as_chat(text, tokenizer, cfg) for text in texts]
    prompts = tokenizer(texts, add_special_tokens=False)
    kept = []
    for index, (problem, ids) in enumerate(zip(problems, prompts["input_ids"])):
        if 0 < len(ids) <= cfg.prompt_max_len:
            kept.append(dataclasses.replace(problem, index=index, prompt_ids=ids))
    if len(kept) < len(problems):
        print0(
            f"{where}: {len(problems) - len(kept)} of {len(problems)} prompts are empty or exceed "
            "--prompt_max_len, and are left out"
        )
    check.require(kept, f"{where}: no prompt is left; raise --prompt_max_len")
    return kept


def as_chat(text, tokenizer, cfg):
    """The text as a user's turn in the tokenizer's own chat template. Raises UserError."""
    turns = [{"role": "user", "content": text}]
    if cfg.system:
        turns = [{"role": "system", "content": cfg.system}, *turns]
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    # A chat template is a program of the model's author.
    except Exception as error:
        raise UserError(
            f"--template chat: {cfg.model}: {one_line(error)}; give another --template"
        ) from error


def parse_path(path, split):
    """The name before a `?`, and the options of load_problems behind it."""
    name, _, query = path.partition("?")
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    unknown = set(options) - {"split", "columns"}
    check.require(not unknown, f"{path}: {', '.join(unknown)} is neither split nor columns")
    if "columns" in options:
        options["columns"] = tuple(options["columns"].split(","))
    return name, {"split": split, **options}


def problems_hash(problems):
    return hash64([(problem.prompt, problem.label) for problem in problems])


def read_eval_sets(task, cfg, tokenizer):
    """Returns {name: problems}. A set is called like its file, and its split if one is named."""
    sets = {}
    for path in cfg.eval_data:
        file, options = parse_path(path, split="")
        name = "-".join(filter(None, (Path(file).stem, options["split"])))
        is_free = name not in ("train", *sets)
        check.require(is_free, f"--eval_data {path}: the name {name} is taken; rename the file")
        sets[name] = read_problems(task, [path], cfg, tokenizer, "test")
    return sets


def find_task(cfg):
    """The module of --reward: load_problems, Grader and text_metrics. Raises UserError."""
    path = cfg.reward
    if path == "math":
        path = f"{Path(__file__).parent}/reward.py"
    elif not path.endswith(".py"):
        path = f"{Path(__file__).parent}/tasks/{path}.py"
    spec = importlib.util.spec_from_file_location("task", path)
    task = importlib.util.module_from_spec(spec)
    # Dataclasses look for their module there.
    sys.modules["task"] = task
    try:
        spec.loader.exec_module(task)
    # A script may end itself.
    except (Exception, SystemExit) as error:
        raise UserError(
            f"--reward {cfg.reward}: {path} cannot be used: {type(error).__name__}: "
            f"{one_line(error)}; give math, the name of a file in tasks/ or a file of your own"
        ) from error
    for name in ("load_problems", "Grader", "text_metrics"):
        check.require(hasattr(task, name), f"--reward {cfg.reward}: {path} has no {name}")
    forms = getattr(task, "ANSWERS", ["orz"])
    check.require(cfg.answer in forms, f"--answer {cfg.answer}: choose {' or '.join(forms)}")
    return task


def count_steps(cfg, problems):
    steps = max(1, cfg.num_episodes * problems // cfg.rollout_batch_size)
    if cfg.max_steps is not None:
        steps = min(steps, cfg.max_steps)
    alone = cfg.critic_warmup_steps
    check.require(
        alone == 0 or alone < steps,
        f"--critic_warmup_steps {alone}: the policy would learn in none of {steps} steps",
    )
    return steps


def check_sampler(sampler, policy, problems, cfg):
    """Says how far the sampler is from the trainer; raises UserError where that is too far.

    A stale or wrong model shows in the log-probs of a few responses: in their mean |difference|
    over all tokens, and over the tokens of the worst response.
    """
    requests = make_requests(problems[:8], 4, (cfg.seed, 0, "check"), (32, cfg.temperature, 1.0))
    mine = [sample for _, sample in sampler.generate(requests, logprobs=True)]
    batch = ppo.Batch.of(sum(gather(mine), []), policy.device)
    apart = (ppo.logprobs(policy, batch, cfg) - batch.tokens["logprobs"]).abs()  # (T,)
    means = torch.stack([part.mean() for part in batch.split(apart)])  # (N,)
    mean = apart.mean().item()
    # torch's max, unlike Python's, lets NaN win.
    worst = means.max().item()
    mean_limit, worst_limit = allowed_gap(cfg, sampler.gpu)
    found = f"sampler and trainer differ by {mean:.0e} a token, {worst:.0e} in the worst response"
    if not (mean < mean_limit and worst < worst_limit):
        raise UserError(
            f"--model {cfg.model}: {found}; allowed are {mean_limit} "
            f"and {worst_limit}; lib/models.py does not compute this architecture's logits"
        )
    return found


def allowed_gap(cfg, is_gpu):
    """Returns the largest mean over all tokens, and over those of the worst response."""
    if cfg.rollout_quantization:
        # fp8 has never run here, so this is a guess.
        return 0.2, 1.0
    if cfg.bf16:
        # Of a model of 135 M parameters the rounding alone makes 0.04 and 0.07.
        return 0.1, 0.5
    if is_gpu:
        return 1e-2, 5e-2
    return 1e-4, 1e-3


def evaluate(rollout, eval_sets, step, log):
    """eval_n samples of every problem of every set. A collective; raises Stopped."""
    cfg = rollout.cfg
    distribution = (cfg.generate_max_len, cfg.eval_temperature, cfg.eval_top_p)
    for name, problems in eval_sets.items():
        requests = make_requests(
            problems, cfg.eval_n, (cfg.seed, step, f"eval {name}"), distribution
        )
        log.evaluation(name, rollout.sample(requests, metrics.Clock(step)), step)


def is_due(step, interval):
    """It is every `interval` steps, and never if that is 0."""
    return interval > 0 and step % interval == 0


def choose_sampling(rollout, cfg, state: ckpt.RunState):
    """Returns Rollout.sample, or the levers' if --first_stage or --adaptive_len is pulled."""
    if not (cfg.first_stage or cfg.adaptive_len):
        return rollout.sample
    from lib.levers import Levers

    return Levers(rollout, cfg, state.levers).sample


def open_run_dir(cfg):
    """Locks the folder, and sends what libraries print to its run.log.

    The lock holds as long as the object that is returned beside the path lives.
    """
    run_dir = Path(cfg.run_dir).absolute()
    lock = ckpt.claim(run_dir, check.needed_bytes(cfg, len(ckpt.checkpoints(run_dir))))
    redirect_libraries(run_dir / "run.log")
    return run_dir, lock


def export(trained, run_dir, tokenizer):
    """Writes the Hugging Face folders of policy and critic."""
    for engine in trained:
        folder = run_dir / engine.name
        ckpt.export(folder, engine.module.model, models.named_weights(engine), tokenizer)


def main(cfg, world, device, store):
    """One rank of a run: set up, then sample, score, learn and sync until the last step."""
    task, tokenizer = find_inputs(cfg)
    run_dir, lock = open_run_dir(cfg)

    # ---- data: a problem carries the token ids of its prompt
    problems = read_problems(task, cfg.data, cfg, tokenizer)
    eval_sets = read_eval_sets(task, cfg, tokenizer)
    total_steps = count_steps(cfg, len(problems))

    # ---- resume: from the newest complete checkpoint of run_dir, else from step 0
    new = ckpt.RunState(0, total_steps, world, vars(cfg), problems_hash(problems))
    source, state = ckpt.find_start(run_dir, cfg.resume, new, vars(Learning()))
    if state.step >= total_steps and (run_dir / "result.json").exists():
        return print0(f"{run_dir} is complete: raise --max_steps, or --resume none starts over")

    # ---- models: the sampler first, while the GPU is empty
    rollout = Rollout(task, Signals(store), cfg)
    rollout.sampler.sleep()
    policy = models.make_policy(cfg)
    critic = models.make_critic(cfg) if cfg.estimator == "gae" else None
    reference = models.make_reference(cfg) if cfg.log_kl else None
    trained = [engine for engine in (policy, critic) if engine]
    engines = {engine.name: engine.deepspeed for engine in trained}
    hf = [tokenizer, policy.module.model.config]
    ckpt.restore(run_dir, source, engines, state)
    rollout.sampler.sync(models.named_weights(policy))
    sample = choose_sampling(rollout, cfg, state)
    log = RunLog(run_dir, cfg, tokenizer)
    log.start(state, check_sampler(rollout.sampler, policy, problems, cfg))

    save_error = None
    try:
        for step in range(state.step, total_steps):
            if step == 0 or is_due(step, cfg.eval_interval):
                evaluate(rollout, eval_sets, step, log)
            clock = metrics.Clock(step + 1)

            # 1. Prompts: a function of seed and step, so a resumed run draws the same ones.
            requests = requests_of_step(problems, cfg, step)

            # 2. Rollout, 3. reward: a response is scored while the others are still sampled.
            samples = sample(requests, clock)

            # 4. Pack: one flat batch, the same on every rank. The GPU is the trainer's from here.
            rollout.sampler.sleep()
            batch = ppo.Batch.of(samples, device)

            # 5. Values V(s_t), from the critic before its update.
            with clock("values"):
                if critic:
                    batch.tokens["values"] = ppo.values(critic, batch, cfg)
                if reference:  # it is only logged
                    batch.tokens["ref_logprobs"] = ppo.logprobs(reference, batch, cfg)

            # 6. Advantages, by one of ppo.ESTIMATORS. HACK HERE.
            with clock("advantage"):
                stats = ppo.compute_advantages(batch, cfg)

            # 7. Learn: the critic in several optimizer steps, then the policy in one.
            with clock("critic"):
                if critic:
                    stats |= ppo.train_critic(critic, batch, cfg, step)
            with clock("policy"):
                stats |= ppo.train_policy(policy, batch, cfg, step, total_steps)

            # 8. Sync: the sampler wakes up with the weights that were just learnt.
            with clock("sync"):
                rollout.sampler.sync(models.named_weights(policy))

            # 9. Report and save. A save that failed is tried again at the next step.
            log.step(step + 1, samples, batch, stats, clock)
            state.finish_step(run_dir)
            if save_error or state.step == total_steps or is_due(state.step, cfg.save_interval):
                save_error = ckpt.save(run_dir, state, engines, hf, cfg.keep_last)
        evaluate(rollout, eval_sets, total_steps, log)
    except Stopped as stop:
        if state.step > 0:
            save_error = ckpt.save(run_dir, state, engines, hf, cfg.keep_last)
        check.require(not save_error, f"step {state.step} is NOT saved: {save_error} {stop}")
        check.require(not str(stop), f"{stop}; --resume auto goes on from step {state.step}")
        return print0(f"stopped at step {state.step}; --resume auto goes on from there")
    finally:
        rollout.grader.close()
        log.close()

    export(trained, run_dir, tokenizer)
    check.require(not save_error, f"step {total_steps} is NOT saved; the same command tries again")
    return log.result(total_steps)


def run(argv):
    """Runs from the flags to an exit code: 0, or 2 for what the user can mend."""
    store = None
    try:
        cfg = parse_flags(argv)
        _, world, device, store = start_distributed()
        if cfg.model is None:
            cfg = demo_flags(cfg, argv)
        # Machines may mount the folder under different names.
        check.check_same({f"--{name}": x for name, x in vars(cfg).items() if name != "run_dir"})
        check.check_config(cfg, world, {"estimator": ppo.ESTIMATORS})
        main(cfg, world, device, store)
    except UserError as error:
        tell_once(store, f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = run(sys.argv[1:])
    except Exception:
        traceback.print_exc()
    # Not sys.exit: gloo's threads can abort a finalising interpreter, and vLLM's takes 2.6 s.
    os._exit(code)
