"""nanoORZ: reinforcement learning of reasoning straight on a base model, after Open-Reasoner-Zero.

`accelerate launch train.py --model MODEL --data FILE` trains. Without --model it is the demo:
tools/demo.py makes a tiny base model and a file of flags. train.py prints these flags; yours
override them.

Owns the flags, the set-up, the loop and evaluation. A process per GPU (a rank) holds a shard of
policy and critic (DeepSpeed) and a sampler (vLLM), which take turns on the device.
"""

import contextlib
import dataclasses
import importlib.util
import os
import sys
import traceback
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path

from lib.launcher import follow_launcher, leave_on_signals

if __name__ == "__main__":
    # A variant that imports train gets this module.
    sys.modules["train"] = sys.modules["__main__"]
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
import rollout as rollout_stage
from lib import check, metrics, models
from lib.common import (
    Signals,
    Stopped,
    UserError,
    gather,
    hash64,
    one_line,
    print0,
    share_errors,
    start_distributed,
    tell_once,
)
from lib.report import RunLog, redirect_libraries

# The base model would go on with the conversation behind its answer.
ORZ_STOP = ["User:", "Human:", "Assistant:", "</answer>"]


class NoVariants:
    """Without --variant nothing is wrapped. lib/variants.py has the other class of this form."""

    hashes = []
    added = memory = estimators = {}

    def installed(self, *_):
        return contextlib.nullcontext()

    wrap_task = tell_start = tell_unreached = installed


# The comments behind the fields are what --help prints.
@dataclass
class Learning:
    """The flags that decide what is learnt: a resumed run must keep them. Defaults are ORZ's."""

    model: str | None = None  # A causal LM: a folder or a hub's name. Without it the demo runs.
    template: str = "orz"  # The prompt: orz, demo, plain, chat, or a text with {question}.
    system: str | None = None  # The system message of --template chat.
    answer_form: str = "orz"  # What counts as answer: orz, boxed_anywhere, last_number, hashes.
    task: str = "math"  # Problems and grader: math, a file of tasks/ without .py, or a .py path.
    variant: list[str] = field(default_factory=list)  # Files of variants/ without .py, or paths.
    seed: int = 42  # Every random choice is a hash of the seed and of the choice's purpose.
    # ---- sampling
    rollout_batch_size: int = 128  # Problems in a step: a multiple of the number of ranks.
    n_samples_per_prompt: int = 64  # Responses to a problem. Raise it if all of them are wrong.
    temperature: float = 1.0  # The sampling temperature. Losses use log-probs at it too.
    top_p: float = 1.0  # Sample from the likeliest tokens that have this probability together.
    stop: list[str] = field(default_factory=ORZ_STOP.copy)  # Each ends a response. --stop "": none.
    prompt_max_len: int = 2048  # Tokens. A problem with a longer prompt is left out, with a line.
    generate_max_len: int = 8000  # The most tokens of a response. max_len may leave fewer.
    max_len: int = 8192  # Tokens of prompt and response together.
    rollout_quantization: str | None = None  # fp8_per_channel: smaller weights in the sampler.
    # ---- learning
    estimator: str = "gae"  # How rewards become advantages. gae is PPO with a critic.
    critic: str | None = None  # A folder with body and value head. Default: --model, a new head.
    critic_only_steps: int = 0  # In so many steps at the start only the critic learns.
    loss_mean: str = "token"  # The policy's loss per token, per sequence, or by a constant.
    gamma: float = 1.0  # For gae: the discount per token. Below 1 short responses are favoured.
    lambd: float = 1.0  # GAE's lambda. Below 1 advantages vary less, and are biased.
    critic_lambd: float | None = None  # GAE's lambda for the critic's targets. Default: --lambd.
    advantage_normalization: bool = True  # For gae, reinforce, reinforce_pp: to mean 0, std 1.
    critic_updates: int = 12  # Updates of the critic in a step, in one shuffled pass.
    actor_learning_rate: float = 1e-6  # The policy's rate. 1e-6 suits 0.5B to 32B parameters.
    critic_learning_rate: float = 5e-6  # The critic's rate. It can be higher than the policy's.
    warmup_updates: int = 50  # Each model's rate rises over so many of its updates. 1: no rise.
    lr_end: float | None = None  # The policy's rate falls linearly to it. Without it: no fall.
    value_clip: float = 0.2  # PPO's clip in the critic's loss. 1e9 turns it off; 0 does not.
    max_norm: float = 1.0  # A gradient with a larger norm is scaled down to it. 0: never.
    bf16: bool = True  # Train in bf16 with fp32 masters. It needs --zero_stage 2 or 3.


@dataclass
class Config(Learning):
    """Every flag. Those below decide when and where: a resumed run may change them.

    Three exceptions: the files of --data may move, but must hold the same problems; another
    --zero_stage needs `tools/convert.py reshard`; with --lr_end the last step must stay.
    """

    data: list[str] = field(default_factory=list)  # Files or data sets of training problems.
    run_dir: str = "out/run"  # The run writes everything here. All machines must share it.
    resume: str = "auto"  # auto: the newest checkpoint of run_dir. none: start over. Or a path.
    # ---- when
    num_episodes: int = 20  # Passes over the problems.
    max_steps: int | None = None  # Stop after so many steps, if the passes would take more.
    save_interval: int = 50  # Steps between checkpoints. One is saved at the end too. 0: only then.
    keep_last: int = 2  # Keep so many checkpoints, the newest ones. 0: keep all.
    eval_data: list[str] = field(default_factory=list)  # Files or data sets that are held out.
    eval_interval: int = 10  # Steps between evaluations. 0: evaluate only before and after.
    eval_n: int = 1  # Responses to a problem in an evaluation. ORZ's paper averages 16.
    eval_temperature: float | None = None  # Of evaluations. Default: --temperature. 0: greedy.
    eval_top_p: float | None = None  # Of evaluations. Default: --top_p.
    # ---- what is written down
    log_with: str = "tensorboard"  # Where curves go, beside metrics.jsonl. Log in to wandb before.
    log_samples: int = 256  # Training samples of a step in samples.jsonl. 0: all.
    log_tokens: int = 16  # Of --log_samples, so many are written token by token.
    log_kl: bool = False  # Log the KL to the base model. It costs a third model and a pass.
    log_ratio: bool = False  # Compare trainer and sampler token by token.
    # ---- where and how fast
    zero_stage: int = 3  # Shard 1: the optimizer, 2: gradients too, 3: weights too. 0: nothing.
    offload: str = "none"  # optimizer: its states stay in CPU memory, and updates are slower.
    packing_max_len: int = 16384  # Tokens in a row, at least max_len. Short rows suit sdpa.
    micro_train_batch_size: int = 1  # Rows in a forward pass. Raise it for short rows.
    gradient_checkpointing: bool = True  # Far less memory for a third more compute.
    attention: str = "auto"  # auto: varlen for bf16 on a GPU whose PyTorch has it, else sdpa.
    micro_rollout_batch_size: int = 256  # Sequences sampled at once. More need more memory.
    tensor_parallel: int = 1  # Ranks that share one sampler. Raise it for large models.
    gpu_memory_utilization: float = 0.5  # The sampler's share of a GPU while it is awake.
    kv_cache_gb: float | None = None  # GiB of KV cache. Default: the rest of the share; CPU: 1.
    enforce_eager: bool = False  # Run the sampler without CUDA graphs: slower, less memory.

    # It is not a flag. With --variant it is an object of lib/variants.py.
    variants = NoVariants()


def parse_flags(argv):
    """Raises UserError for an unknown flag, a value of the wrong kind, or a wrong variant."""
    config = Config
    words = []
    if "--variant" in [word.partition("=")[0] for word in argv]:
        from lib import variants

        words, argv = variants.take_words(argv)
        config = variants.Variants(words).extend(Config)
    parser = HfArgumentParser(config, allow_abbrev=False)
    parser.error = refuse_flag
    if {"-h", "--help"} & set(argv):
        from lib.advice import explain

        explain(parser, config, [*ppo.ESTIMATORS, *config.variants.estimators])
    cfg, unknown = parser.parse_args_into_dataclasses(
        argv, return_remaining_strings=True, look_for_args_file=False
    )
    cfg.variant = words
    if unknown:
        from lib.advice import explain_unknown

        raise UserError(explain_unknown(unknown[0], vars(cfg)))
    # An empty list is written as --stop "".
    cfg.stop = [text for text in cfg.stop if text]
    # What is logged is what is used, so absent values are filled in here.
    if cfg.eval_temperature is None:
        cfg.eval_temperature = cfg.temperature
    if cfg.eval_top_p is None:
        cfg.eval_top_p = cfg.top_p
    if cfg.attention == "auto":
        has_kernel = cfg.bf16 and torch.cuda.is_available() and check.has_varlen()
        cfg.attention = "varlen" if has_kernel else "sdpa"
    return cfg


def refuse_flag(message):
    raise UserError(f"{message}; `python train.py --help` explains each flag")


def stages():
    """The modules whose functions a variant can wrap, beside the task."""
    return [sys.modules[__name__], rollout_stage, ppo, ckpt, models, metrics, check]


def find_inputs(cfg):
    """The task and the tokenizer. Raises UserError on all ranks, if a file is wrong on one."""
    task = tokenizer = wrong = None
    try:
        task = find_task(cfg)
        tokenizer = load_tokenizer(cfg, "model", cfg.model)
        if cfg.critic:
            check.require(
                load_tokenizer(cfg, "critic", cfg.critic).get_vocab() == tokenizer.get_vocab(),
                f"--critic {cfg.critic}: its tokenizer is not that of {cfg.model}",
            )
    except UserError as error:
        # Perhaps it is on this machine alone, and the other ranks must hear of it.
        wrong = error
    check.check_same({}, wrong)
    return task, tokenizer


def load_tokenizer(cfg, flag, folder):
    """The tokenizer of a folder, once its config has passed. Raises UserError."""
    config = check.load_config(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"--{flag} {folder} has no tokenizer: {one_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"--{flag} {folder}: its tokenizer has no eos token, so no response could end; set "
            "eos_token in tokenizer_config.json"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit and cfg.max_len > limit:
        raise UserError(
            f"--max_len {cfg.max_len}: prompt and response exceed the {flag}'s {limit} positions"
        )
    return tokenizer


def prepare_problems(task, paths, cfg, tokenizer, split="train"):
    """Problems with the token ids of their prompts; too long ones are left out aloud.

    A path may end in ?split=test&columns=problem,answer: part and columns of a data set. Raises
    UserError on all ranks, also where their files differ.
    """
    problems = []
    wrong = None
    try:
        for path in paths:
            name, options = parse_path(path)
            options = {"split": split} | options
            problems += task.load_problems(name, cfg.template, tokenizer.bos_token or "", **options)
    except UserError as error:
        # Perhaps it is in this machine's file alone, and the other ranks must hear of it.
        wrong = error
    where = " ".join(paths)
    check.check_same({f"hash of the problems in {where}": problems_hash(problems)}, wrong)
    texts = [problem.prompt for problem in problems]
    if cfg.template == "chat":
        from lib.chat import as_chat

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


def parse_path(path):
    """The name before a `?`, and the options of load_problems that stand behind it."""
    name, _, query = path.partition("?")
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    unknown = set(options) - {"split", "columns"}
    check.require(not unknown, f"{path}: {', '.join(unknown)} is neither split nor columns")
    if "columns" in options:
        options["columns"] = tuple(options["columns"].split(","))
    return name, options


def problems_hash(problems):
    return hash64([(problem.prompt, problem.label) for problem in problems])


def prepare_eval_sets(task, cfg, tokenizer):
    """Returns {name: problems}. A set is called like its file, and its split if one is named."""
    sets = {}
    for path in cfg.eval_data:
        file, options = parse_path(path)
        name = Path(file).stem
        if options.get("split"):
            name += f"-{options['split']}"
        is_free = name not in ("train", *sets)
        check.require(is_free, f"--eval_data {path}: the name {name} is taken; rename the file")
        sets[name] = prepare_problems(task, [path], cfg, tokenizer, "test")
    return sets


def find_task(cfg):
    """The module of --task: load_problems, Grader and text_metrics. Raises UserError."""
    path = cfg.task
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
            f"--task {cfg.task}: {path} cannot be used: {type(error).__name__}: "
            f"{one_line(error)}; give math, the name of a file in tasks/ or a file of your own"
        ) from error
    for name in ("load_problems", "Grader", "text_metrics"):
        check.require(hasattr(task, name), f"--task {cfg.task}: {path} has no {name}")
    cfg.variants.wrap_task(task, stages())
    forms = getattr(task, "ANSWER_FORMS", ["orz"])
    check.require(
        cfg.answer_form in forms, f"--answer_form {cfg.answer_form}: choose {' or '.join(forms)}"
    )
    return task


def count_steps(cfg, problems):
    steps = max(1, cfg.num_episodes * problems // cfg.rollout_batch_size)
    if cfg.max_steps is not None:
        steps = min(steps, cfg.max_steps)
    alone = cfg.critic_only_steps
    check.require(
        alone == 0 or alone < steps,
        f"--critic_only_steps {alone}: the policy would learn in none of {steps} steps",
    )
    return steps


def check_sampler(sampler, policy, problems, cfg):
    """Says how far the sampler is from the trainer; raises UserError where that is too far.

    A stale or wrong model shows in the log-probs of a few responses: in their mean |difference|
    over all tokens, and over the tokens of the worst response.
    """
    seeds = rollout_stage.problem_seeds(cfg.seed, 0, "check", 8)
    requests = rollout_stage.make_requests(problems[:8], seeds, 4, 32, cfg.temperature, top_p=1.0)
    mine = [sample for _, sample in sampler.generate(requests, with_logprobs=True)]
    samples = sum(gather(mine), [])
    # Nobody has graded them.
    batch = ppo.make_batch(samples, policy.device, cfg, rewards=[0.0] * len(samples))
    apart = (ppo.compute_logprobs(policy, batch, cfg) - batch.per_token["logprobs"]).abs()  # (T,)
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
    for name, problems in eval_sets.items():
        seeds = rollout_stage.problem_seeds(cfg.seed, step, f"eval {name}", len(problems))
        requests = rollout_stage.make_requests(
            problems, seeds, cfg.eval_n, cfg.generate_max_len, cfg.eval_temperature, cfg.eval_top_p
        )
        clock = metrics.Clock(step)
        with share_errors():
            log.evaluation(name, rollout_stage.draw(rollout, requests, clock), step)
        lost = clock.numbers.get("reward_lost", 0)
        if lost > 0:
            print0(f"WARNING: {name}: {lost} checks ended without a verdict and counted as wrong")


def is_due(step, interval):
    """It is every `interval` steps, and never if that is 0."""
    return interval > 0 and step % interval == 0


def open_run_dir(cfg):
    """Locks the folder, and sends what libraries print to its run.log.

    The lock holds as long as the object that is returned beside the path lives.
    """
    run_dir = Path(cfg.run_dir).absolute()
    has_critic = ppo.ESTIMATORS[cfg.estimator].needs_critic
    present = len(ckpt.checkpoints(run_dir))
    lock = ckpt.claim(run_dir, check.needed_bytes(cfg, has_critic, present))
    redirect_libraries(run_dir / "run.log")
    return run_dir, lock


def count_updates(learners):
    return sum(learner.updates for learner in learners)


def export_all(learners, run_dir, tokenizer):
    """Writes the Hugging Face folders of policy and critic."""
    for learner in learners:
        folder = run_dir / learner.name
        ckpt.export(folder, learner.module.model, models.named_weights(learner), tokenizer)


def main(cfg, world, device, store):
    """One rank of a run: set up, then sample, score, learn and sync until the last step."""
    task, tokenizer = find_inputs(cfg)
    run_dir, lock = open_run_dir(cfg)

    # ---- data: a problem carries the token ids of its prompt
    problems = prepare_problems(task, cfg.data, cfg, tokenizer)
    eval_sets = prepare_eval_sets(task, cfg, tokenizer)
    total_steps = count_steps(cfg, len(problems))

    # ---- resume: from the newest complete checkpoint of run_dir, else from step 0
    new = ckpt.RunState(0, total_steps, world, vars(cfg), problems_hash(problems))
    new.variants = cfg.variants.hashes
    fixed = vars(Learning()) | cfg.variants.added
    # Of a variant the text is compared, because its file may move.
    del fixed["variant"]
    source, state = ckpt.find_start(run_dir, cfg.resume, new, fixed)
    if state.step >= total_steps and (run_dir / "result.json").exists():
        return print0(f"{run_dir} is complete: raise --max_steps, or --resume none starts over")

    # ---- models: the sampler first, while the GPU is empty
    rollout = rollout_stage.Rollout(task, Signals(store), cfg)
    rollout.sampler.sleep()
    policy = models.make_policy(cfg)
    critic = models.make_critic(cfg) if ppo.ESTIMATORS[cfg.estimator].needs_critic else None
    reference = models.make_reference(cfg) if cfg.log_kl else None
    learners = [learner for learner in (policy, critic) if learner]
    engines = {learner.name: learner.deepspeed for learner in learners}
    hf = [tokenizer, policy.module.model.config]
    ckpt.restore(run_dir, source, engines, state)
    rollout.sampler.sync(models.named_weights(policy))
    for name, memory in cfg.variants.memory.items():
        memory |= state.memory.get(name, {})
    log = RunLog(run_dir, cfg, tokenizer)
    log.start(state, check_sampler(rollout.sampler, policy, problems, cfg))

    save_error = None
    updates = count_updates(learners)
    try:
        for step in range(state.step, total_steps):
            if step == 0 or is_due(step, cfg.eval_interval):
                evaluate(rollout, eval_sets, step, log)
            clock = metrics.Clock(step + 1)

            # Up to phase 6 an error on one rank stops all ranks, and the step before is saved.
            with share_errors():
                # 1. Prompts: a function of seed and step, so a resumed run draws the same ones.
                requests = rollout_stage.requests_of_step(problems, cfg, step)

                # 2. Rollout, 3. reward: a response is scored while the others are still sampled.
                samples = rollout_stage.draw_step(rollout, requests, problems, cfg, step, clock)

                # 4. Pack: one flat batch, the same on every rank. The trainer has the GPU now.
                rollout.sampler.sleep()
                batch = ppo.make_batch(samples, device, cfg)

            # 5. Values V(s_t), from the critic before its update.
            with rollout.signals.share_same_error(), clock("values"):
                ppo.token_passes(policy, critic, reference, batch, cfg, step)

            # 6. Advantages, by one of ppo.ESTIMATORS. HACK HERE.
            with share_errors(), clock("advantage"):
                stats = ppo.compute_advantages(batch, cfg)

            # 7. Learn: the critic in several updates, then the policy in one.
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
            state.finish_step(run_dir, cfg.variants.memory)
            updates = count_updates(learners)
            if save_error or state.step == total_steps or is_due(state.step, cfg.save_interval):
                save_error = ckpt.save(run_dir, state, engines, hf, cfg.keep_last)
        evaluate(rollout, eval_sets, total_steps, log)
    except Stopped as stop:
        if count_updates(learners) > updates:
            save_error = "a variant has learnt before the error"
        elif state.step > 0:
            save_error = ckpt.save(run_dir, state, engines, hf, cfg.keep_last)
        why = stop.fault or "stopped"
        check.require(not save_error, f"{why}; step {state.step} is NOT saved: {save_error}")
        check.require(not stop.fault, f"{why}; --resume auto goes on from step {state.step}")
        return print0(f"stopped at step {state.step}; --resume auto goes on from there")
    finally:
        rollout.grader.close()
        log.close()

    export_all(learners, run_dir, tokenizer)
    check.require(not save_error, f"step {total_steps} is NOT saved; the same command tries again")
    return log.result(total_steps)


def run(argv):
    """Runs from the flags to an exit code: 0, or 2 for what the user can mend."""
    store = cfg = wrong = None
    try:
        try:
            cfg = parse_flags(argv)
        except UserError as error:
            # Perhaps a variant is absent on this machine alone, and the others must hear of it.
            if "--variant" not in " ".join(argv):
                raise
            wrong = error
        _, world, device, store = start_distributed()
        check.check_same({}, wrong)
        if cfg.model is None:
            from lib.demo import demo_flags

            cfg = parse_flags([*demo_flags(cfg), *argv])
        # Machines may mount the folders under different names.
        values = {f"--{name}": value for name, value in vars(cfg).items()}
        check.check_same(values | {"--run_dir": None, "--variant": cfg.variants.hashes})
        with cfg.variants.installed(stages()):
            check.check_config(cfg, world, ppo.ESTIMATORS)
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
