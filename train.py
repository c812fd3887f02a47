"""nanoORZ: reinforcement learning of reasoning straight on a base model, after Open-Reasoner-Zero.

`python train.py --model MODEL --data FILE` trains in one process. `accelerate launch` starts
several. Without --model train.py runs the demo: tools/base_model.py makes a tiny base model and a
file of flags, and train.py prints these flags. The flags on the command line override them.

Owns the flags, the set-up, the loop and evaluation. Each GPU has one process, which is called a
rank. A rank holds a shard of the policy and of the critic (DeepSpeed), and a sampler (vLLM).
Trainer and sampler take turns on the GPU. docs/walkthrough.md has a glossary.
"""

import dataclasses
import importlib.util
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from lib.signals import Signals, follow_launcher, leave_on_signals

if __name__ == "__main__":
    # A variant may import train. Without this line Python would load this file a second time.
    sys.modules["train"] = sys.modules["__main__"]
    # The imports below take 8 s. During them a signal must end this process.
    leave_on_signals()
    follow_launcher()
# Idle threads of OpenMP must sleep. Threads that spin take the cores from the other ranks.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# torch asks the kernel for large pages. On a CPU an update takes up to a third less time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# The hub's client prints two lines for each of its retries.
os.environ.setdefault("HF_HUB_VERBOSITY", "error")

import torch
from transformers import AutoConfig, AutoTokenizer, HfArgumentParser

# Without this DeepSpeed looks for the device by itself, and logs a warning.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import ckpt
import ppo
import rollout as rollout_stage
from lib import check, metrics, models
from lib.common import (
    Stopped,
    UserError,
    gather,
    hash64,
    one_line,
    print0,
    raise_together,
    start_distributed,
    stop_together,
    tell_once,
)
from lib.flags import flag, flags_of
from lib.report import RunLog, redirect_libraries
from lib.variant_files import take_variants

# Without stop strings a base model answers and then invents the user's next question.
ORZ_STOP = ["User:", "Human:", "Assistant:", "</answer>"]


@dataclass
class Learning(ppo.Recipe):
    """Flags that decide what is learnt, beside those of ppo.Recipe. A resume refuses other values.
    Defaults are ORZ's."""

    model: str | None = flag(
        None, "A causal LM: a folder or a name on the hub. Default: the demo's."
    )
    template: str = flag(
        "orz", "orz, demo, plain, chat, chat?SWITCH=VALUE, or a text with {question}."
    )
    system: str | None = flag(None, "The system message of --template chat.")
    answer_form: str = flag(
        "orz", "Where the answer stands: orz, boxed_anywhere, last_number, hashes."
    )
    task: str = flag(
        "math", "Problems and grader: math, a file of tasks/ without .py, or a .py path."
    )
    variant: list[str] = flag([], "Files of variants/ without .py, or paths.")
    # ---- sampling
    rollout_batch_size: int = flag(128, "Problems in a step: a multiple of the number of ranks.")
    n_samples_per_prompt: int = flag(64, "Responses to each problem. Raise it if all are wrong.")
    top_p: float = flag(1.0, "Draw from the likeliest tokens whose probabilities add up to this.")
    stop: list[str] = flag(ORZ_STOP, 'Texts that end a response. "": none.')
    prompt_max_len: int = flag(2048, "Tokens. A problem with a longer prompt is left out.")
    generate_max_len: int = flag(8000, "The limit of a response, in tokens. max_len may lower it.")
    max_len: int = flag(8192, "The limit of prompt and response together, in tokens.")
    # ---- learning
    critic: str | None = flag(None, "A folder with a critic. Default: --model with a new head.")
    max_norm: float = flag(1.0, "A gradient of a larger norm is scaled down to this. 0: never.")
    bf16: bool = flag(True, "Train in bf16, with masters and gradient sums in fp32.")


@dataclass
class Config(Learning):
    """All flags. The fields below decide how long a run is, what it logs, and on which hardware.

    A resumed run may change these fields, with two limits. The files of --data may move, but their
    problems must stay the same. Another --zero_stage needs `tools/convert.py reshard`.
    """

    data: list[str] = flag([], "Files, FILE?columns=A,B, or data sets.")
    run_dir: str = flag("out/run", "The folder of the run. All machines must share it.")
    resume: str = flag("auto", "auto: the newest checkpoint. none: step 0. Or one of RUN/step_*.")
    # ---- when
    num_episodes: int = flag(20, "An episode is one pass over all problems.")
    max_steps: int | None = flag(None, "Stop after this step, if --num_episodes has more steps.")
    save_interval: int = flag(50, "Steps between checkpoints. 0: save only the last step.")
    keep_last: int = flag(2, "The number of newest checkpoints to keep. 0: keep all.")
    eval_data: list[str] = flag([], "Files or data sets of held-out problems.")
    eval_interval: int = flag(10, "Steps between evaluations. 0: only at the start and the end.")
    eval_n: int = flag(1, "Samples of each problem in an evaluation. ORZ's paper has 16.")
    eval_temperature: float | None = flag(
        None, "In evaluations. Default: --temperature. 0: greedy."
    )
    eval_top_p: float | None = flag(None, "In evaluations. Default: --top_p.")
    # ---- what is written down
    log_with: str = flag("none", "Curves elsewhere: tensorboard, or wandb (log in to it before).")
    log_samples: int = flag(256, "Training samples of a step in samples.jsonl. 0: all.")
    log_tokens: int = flag(16, "Samples of a step to write token by token, in whole groups.")
    # ---- where and how fast
    zero_stage: int = flag(
        3, "What ZeRO shards. 1: optimizer. 2: + gradients. 3: + weights. 0: nothing."
    )
    offload: str = flag("none", "optimizer: its states stay in CPU memory. Updates are slower.")
    packing: str = flag(
        "auto", "packed: several samples a row. alone: one. auto: as the family allows."
    )
    packing_max_len: int = flag(
        16384, "Length of a row of packed samples, in tokens. At least max_len."
    )
    micro_train_batch_size: int = flag(1, "Rows in a forward pass. Raise it for short rows.")
    gradient_checkpointing: bool = flag(
        True, "Saves most activation memory, costs a third more compute."
    )
    attention: str = flag(
        "auto", "auto: varlen on a GPU with --bf16 true, else sdpa. Gemma 2: eager."
    )
    micro_rollout_batch_size: int = flag(
        256, "Samples drawn at the same time. More need more memory."
    )
    tensor_parallel: int = flag(1, "Ranks that share one sampler. Raise it for large models.")
    gpu_memory_utilization: float = flag(0.5, "The sampler's share of a GPU while it is awake.")
    kv_cache_gb: float | None = flag(
        None, "GiB of KV cache. Default: the rest of the share; CPU: 1."
    )
    enforce_eager: bool = flag(False, "Run the sampler without CUDA graphs: slower, less memory.")

    variant_texts = {}  # {name of a variant: its text}. lib/variants.py sets it.

    @property
    def variant_hashes(self) -> list:
        """[name, hash of its text] of each variant, in the order of --variant."""
        return [[name, f"{hash64(text):016x}"] for name, text in self.variant_texts.items()]


def parse_flags(argv):
    """Makes a Config of a command line.

    Raises UserError for an unknown flag, a value of the wrong type, or a wrong variant.
    """
    flags_class = Config
    variant_names, argv = take_variants(argv)
    if variant_names:
        from lib import variants

        flags_class = variants.extend(Config, variant_names)
    parser = HfArgumentParser(flags_class, allow_abbrev=False)
    # The parser calls `error` for a wrong value. Its own `error` would print all flags and exit.
    parser.error = refuse_flag
    if wants_help(argv):
        from lib.advice import finish_help

        # The parser prints the help, and exits, in the next statement.
        finish_help(parser, check.CHOICES | {"estimator": flags_class.estimators})
    cfg, unknown = parser.parse_args_into_dataclasses(
        argv, return_remaining_strings=True, look_for_args_file=False
    )
    cfg.variant = variant_names
    if unknown:
        from lib.advice import explain_unknown

        raise UserError(explain_unknown(unknown[0], flags_of(cfg)))
    # `--stop ""` means no stop string.
    cfg.stop = [text for text in cfg.stop if text]
    check.require(cfg.run_dir, "--run_dir: name a folder")
    # config.json must show the values that the run uses, so defaults are filled in here.
    if cfg.eval_temperature is None:
        cfg.eval_temperature = cfg.temperature
    if cfg.eval_top_p is None:
        cfg.eval_top_p = cfg.top_p
    return cfg


def wants_help(argv):
    return "-h" in argv or "--help" in argv


def refuse_flag(message):
    raise UserError(f"{message}; `python train.py --help` explains each flag")


def check_flags(cfg, world):
    """Raises UserError for the first wrong flag, of the core and then of the variants."""
    # A variant checks the flags that it adds.
    check.check_config(cfg, world, [field.name for field in dataclasses.fields(Config)])
    for name, value in flags_of(cfg).items():
        is_finite = not isinstance(value, float) or math.isfinite(value)
        check.require(is_finite, f"--{name} {value}: give a finite number")
    cfg.check(world)


def find_inputs(cfg):
    """The task and the tokenizer. Raises UserError on all ranks, even if only one rank fails."""
    with raise_together():
        task = find_task(cfg)
        tokenizer = load_tokenizer(cfg, cfg.model)
        if cfg.critic:
            from lib.value_head import check_tokenizer

            check_tokenizer(cfg, load_tokenizer(cfg, cfg.critic), tokenizer)
        check.fill_in(cfg)
    # Two machines may have different files under this name.
    text = Path(task.__file__).read_bytes()
    check.require_same({f"hash of the text of --task {cfg.task}": hash64(text)})
    return task, tokenizer


def load_tokenizer(cfg, folder):
    """The tokenizer of a model's folder. Also checks its number of positions. Raises UserError."""
    config = check.load_config(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} has no tokenizer: {one_line(error)}") from error
    # For a folder without a tokenizer transformers makes one of 1 to 3 special tokens.
    check.require(len(tokenizer) > 3, f"{folder} has no tokenizer; put its tokenizer.json there")
    check.require(
        tokenizer.eos_token_id is not None,
        f"{folder}: its tokenizer has no eos token, so no response could end; set eos_token in "
        "tokenizer_config.json",
    )
    limit = getattr(config, "max_position_embeddings", None)
    check.require(
        not limit or cfg.max_len <= limit,
        f"--max_len {cfg.max_len}: prompt and response exceed the {limit} positions of {folder}; "
        "lower --max_len, and --prompt_max_len below it",
    )
    return tokenizer


def prepare_problems(task, paths, cfg, tokenizer, split="train"):
    """The problems of these files or data sets, with the token ids of their prompts.

    Problems with too long prompts are left out, and a line says how many. Raises UserError on all
    ranks, also if the files of two machines differ.
    """
    problems = []
    template = "chat" if check.is_chat(cfg.template) else cfg.template
    with raise_together():
        for path in paths:
            file, options = parse_path(path)
            options = {"split": split} | options
            problems += task.load_problems(file, template, tokenizer.bos_token or "", **options)
    where = " ".join(paths)
    check.require_same({f"hash of the problems in {where}": problems_hash(problems)})
    texts = [problem.prompt for problem in problems]
    # Only the ids have the chat template. problem.prompt keeps the bare question.
    if template == "chat":
        from lib.chat import as_chat

        texts = [as_chat(text, tokenizer, cfg) for text in texts]
    prompts = tokenizer(texts, add_special_tokens=False)
    # Some tokenizers have more tokens than the model's embedding.
    vocabulary = AutoConfig.from_pretrained(cfg.model).get_text_config().vocab_size
    kept = []
    for index, (problem, ids) in enumerate(zip(problems, prompts["input_ids"])):
        if 0 < len(ids) <= cfg.prompt_max_len and max(ids) < vocabulary:
            kept.append(dataclasses.replace(problem, index=index, prompt_ids=ids))
    if len(kept) < len(problems):
        print0(
            f"{where}: {len(problems) - len(kept)} of {len(problems)} prompts are left out: they "
            f"are empty, exceed --prompt_max_len, or have a token beyond the model's {vocabulary}"
        )
    if not kept:
        from lib.advice import no_prompts

        raise UserError(f"{where}: {no_prompts(prompts['input_ids'])}")
    return kept


def parse_path(path):
    """Splits FILE?split=test&columns=question,answer into FILE and options of load_problems."""
    if "?" not in path:
        return path, {}
    from lib.queries import split_query

    return split_query(path)


def problems_hash(problems):
    return hash64([(problem.prompt, problem.label) for problem in problems])


def prepare_eval_sets(task, cfg, tokenizer):
    """Returns {name: problems}. A set has the name of its file: gsm8k, or gsm8k-test if the path
    names a split."""
    sets = {}
    for path in cfg.eval_data:
        file, options = parse_path(path)
        name = Path(file).stem
        if options.get("split"):
            name += f"-{options['split']}"
        # In the logs "train" is the name of the training problems.
        is_free = name not in ("train", *sets)
        check.require(is_free, f"--eval_data {path}: the name {name} is taken; rename the file")
        sets[name] = prepare_problems(task, [path], cfg, tokenizer, "test")
    return sets


def find_task(cfg):
    """The module of --task. It has load_problems, Grader and text_metrics. Raises UserError."""
    path = cfg.task
    if path == "math":
        path = f"{Path(__file__).parent}/reward.py"
    elif not path.endswith(".py"):
        path = f"{Path(__file__).parent}/tasks/{path}.py"
    check.require(
        Path(path).is_file(),
        f"--task {cfg.task}: no file {path}; choose math, code, countdown or a path to a .py file",
    )
    spec = importlib.util.spec_from_file_location("task", path)
    task = importlib.util.module_from_spec(spec)
    # A dataclass looks for its module in sys.modules.
    sys.modules["task"] = task
    try:
        spec.loader.exec_module(task)
    # The file may call sys.exit.
    except (Exception, SystemExit) as error:
        raise UserError(
            f"--task {cfg.task}: {path} cannot be used: {type(error).__name__}: {one_line(error)}"
        ) from error
    for name in ("load_problems", "Grader", "text_metrics"):
        check.require(hasattr(task, name), f"--task {cfg.task}: {path} has no {name}")
    # For a task without ANSWER_FORMS, --answer_form must stay at its default.
    forms = getattr(task, "ANSWER_FORMS", ["orz"])
    check.require(
        cfg.answer_form in forms,
        f"--answer_form {cfg.answer_form}: {path} has {' or '.join(forms)}; if its Grader is a "
        "subclass of reward.Grader, add `from reward import ANSWER_FORMS`",
    )
    return task


def count_steps(cfg, problem_count):
    steps = max(1, cfg.num_episodes * problem_count // cfg.rollout_batch_size)
    if cfg.max_steps is not None:
        steps = min(steps, cfg.max_steps)
    return steps


def check_sampler(sampler, policy, problems, cfg):
    """Compares the log-probs of policy and samplers. Returns a sentence for the log.

    Each rank draws 32 samples from its own sampler, so each sampler is checked. The log-probs
    differ if a sampler has old weights, or if lib/models.py computes other logits than vLLM. Raises
    UserError, which names the cause, if the mean |difference| over all tokens, or over the tokens
    of one sample, is too large.
    """
    seeds = rollout_stage.problem_seeds(cfg.seed, step=0, purpose="check", count=8)
    # With a lower top_p the sampler's log-probs would be those of the cut distribution.
    requests = rollout_stage.make_requests(
        problems[:8], seeds, count=4, max_tokens=32, temperature=cfg.temperature, top_p=1.0
    )
    mine = [sample for _, sample in sampler.generate(requests, with_logprobs=True)]
    samples = sum(gather(mine), [])
    # Nothing is learnt from these samples, so they need no rewards.
    batch = ppo.make_batch(samples, policy.device, cfg, rewards=[0.0] * len(samples))
    limits = cfg.allowed_gap(*gap_limits(cfg, sampler.gpu))

    def find_gap(policy, cfg):
        """The two means. Are both small enough?"""
        logprobs = ppo.compute_logprobs(policy, batch, cfg)  # (T,)
        gaps = (logprobs - batch.per_token["logprobs"]).abs()  # (T,)
        means = torch.stack([part.mean() for part in batch.split(gaps)])  # (N,)
        # The maximum of torch is NaN if one number is NaN. Python's max would hide the NaN.
        gap = gaps.mean().item(), means.max().item()
        # With a NaN a comparison is false, and the run ends here.
        return gap, gap[0] < limits[0] and gap[1] < limits[1]

    (mean, worst), is_small = find_gap(policy, cfg)
    found = f"sampler and trainer differ by {mean:.0e} a token, {worst:.0e} in the worst response"
    if not is_small:
        from lib.advice import explain_gap

        found += "; allowed are {} and {}".format(*limits)
        raise UserError(explain_gap(cfg, policy, models.named_weights(policy), find_gap, found))
    return found


def gap_limits(cfg, is_gpu):
    """Two limits: of the mean over all tokens, and of the mean over the worst sample's tokens."""
    if cfg.bf16:
        # The rounding of bf16 alone gave 0.04 and 0.07 with a model of 135 M parameters.
        return 0.1, 0.5
    if is_gpu:
        return 1e-2, 5e-2
    return 1e-4, 1e-3


def evaluate(rollout, eval_sets, step, log):
    """Draws and logs eval_n samples of each problem of each set. A collective. Raises Stopped."""
    cfg = rollout.cfg
    for name, problems in eval_sets.items():
        seeds = rollout_stage.problem_seeds(cfg.seed, step, f"eval {name}", len(problems))
        requests = rollout_stage.make_requests(
            problems, seeds, cfg.eval_n, cfg.generate_max_len, cfg.eval_temperature, cfg.eval_top_p
        )
        clock = metrics.Clock(step)
        with stop_together():
            log.evaluation(name, rollout.draw(requests, clock), step)
        # `draw` has counted the checks without a verdict.
        lost = clock.numbers["reward_lost"]
        if lost:
            print0(f"WARNING: {name}: {lost} checks ended without a verdict and counted as wrong")


def is_due(step, interval):
    """Is `step` a multiple of `interval`? An interval of 0 means never."""
    return interval > 0 and step % interval == 0


def open_run_dir(cfg):
    """Locks the run folder, checks its disk, and sends the output of libraries to its run.log.

    Returns the path and the lock. The folder is locked as long as the lock object exists.
    """
    run_dir = Path(cfg.run_dir).absolute()
    is_own = Path(cfg.model).absolute() == run_dir / "policy"
    check.require(not is_own, f"--model {cfg.model} is in --run_dir; choose another --run_dir")
    has_critic = cfg.estimators[cfg.estimator].needs_critic
    checkpoint_count = len(ckpt.checkpoints(run_dir))
    lock = ckpt.claim(run_dir, check.needed_bytes(cfg, has_critic, checkpoint_count))
    redirect_libraries(run_dir / "run.log")
    return run_dir, lock


def export_all(learners, run_dir, tokenizer):
    """Writes policy and critic as Hugging Face folders."""
    for learner in learners:
        folder = run_dir / learner.name
        ckpt.export(folder, learner.module.model, models.named_weights(learner), tokenizer)


def tell_stop(stop, step, save_error):
    """Prints at which step the run has stopped. Raises UserError for a fault or a failed save."""
    why = stop.fault or "stopped"
    if save_error:
        raise UserError(f"{why}; step {step} is NOT saved: {save_error}")
    why += f"; --resume auto goes on from step {step}" if step else "; no step is saved"
    if stop.fault:
        raise UserError(why)
    print0(why)


def main(cfg, world, device, store):
    """Runs one rank: the set-up, the loop over steps, the export."""
    task, tokenizer = find_inputs(cfg)
    run_dir, lock = open_run_dir(cfg)

    # ---- data: each problem holds the token ids of its prompt
    problems = prepare_problems(task, cfg.data, cfg, tokenizer)
    eval_sets = prepare_eval_sets(task, cfg, tokenizer)
    total_steps = count_steps(cfg, len(problems))
    check.warn(cfg, problems, eval_sets)

    # ---- resume: from the newest complete checkpoint of run_dir, else from step 0
    new = ckpt.RunState(0, total_steps, world, flags_of(cfg), problems_hash(problems))
    new.variants = cfg.variant_hashes
    # {name: default} of the flags that a resumed run must keep: all but those of Config itself. A
    # checkpoint that is older than a flag was made with that flag's default.
    fixed = flags_of(type(cfg)())
    # ckpt.py compares the variants' texts instead of their paths, because a file may move.
    for name in ["variant", *Config.__annotations__]:
        del fixed[name]
    source, state = ckpt.find_start(run_dir, cfg.resume, new, fixed)
    if state.step >= total_steps and (run_dir / "result.json").exists():
        print0(f"{run_dir} is complete; raise --max_steps, or start over with --resume none")
        return

    cfg.memory.update(state.memory)
    with raise_together():
        cfg.check_run(total_steps)

    # ---- models: the sampler first, while the GPU is empty
    print0(f"{len(problems)} problems, {total_steps} steps; the sampler and the learners start")
    # From here a signal ends the run after a save (lib/signals.py).
    signals = Signals(store)
    rollout = rollout_stage.Rollout(task, signals, cfg)
    rollout.sampler.sleep()
    policy = models.make_policy(cfg)
    critic = models.make_critic(cfg) if cfg.estimators[cfg.estimator].needs_critic else None
    learners = [learner for learner in (policy, critic) if learner]
    engines = {learner.name: learner.deepspeed for learner in learners}
    # Each checkpoint has the tokenizer and the config in the Hugging Face form.
    hf = [tokenizer, policy.module.model.config]
    ckpt.resume(run_dir, source, engines, state)
    rollout.sampler.sync(models.named_weights(policy))
    gap = check_sampler(rollout.sampler, policy, problems, cfg)
    log = RunLog(run_dir, cfg, tokenizer)
    log.start(state, gap)

    save_error = None
    try:
        # `step` steps are finished. The step that begins is number step + 1 in the logs.
        for step in range(state.step, total_steps):
            if step == 0 or is_due(step, cfg.eval_interval):
                evaluate(rollout, eval_sets, step, log)
            clock = metrics.Clock(step + 1)

            # An error on one rank inside `stop_together` stops all ranks, and they save the last
            # finished step. After an error elsewhere nothing is saved: the rank ends with a
            # traceback, the launcher ends the other ranks, and the last checkpoint stays.
            with stop_together():
                # 1. Prompts: a function of seed and step, so a resumed run has the same ones.
                requests = rollout_stage.requests_of_step(problems, cfg, step)

                # 2. Rollout, 3. reward: each sample is graded as soon as it ends.
                samples = cfg.draw_step(rollout, requests, problems, step, clock)

                # 4. Batch: all samples, the same on every rank. The sampler leaves the GPU.
                rollout.sampler.sleep()
                batch = ppo.make_batch(samples, device, cfg)

            # 5. Values V(s_t), from the critic before its update.
            with clock("values"):
                cfg.token_passes(policy, critic, batch, step)

            # 6. Advantages, by one of ppo.ESTIMATORS.
            with stop_together(), clock("advantage"):
                stats = ppo.compute_advantages(batch, cfg)

            # 7. Learn: the critic in several updates, then the policy in one.
            with clock("critic"):
                if critic:
                    stats |= cfg.train_critic(critic, batch, step)
            with clock("policy"):
                stats |= cfg.train_policy(policy, batch, step, total_steps)

            # 8. Sync: the sampler wakes up and gets the new weights.
            with clock("sync"):
                rollout.sampler.sync(models.named_weights(policy))

            # 9. Report and save. After a failed save the next step tries again.
            log.step(step + 1, samples, batch, stats, clock)
            state.finish_step(run_dir, cfg.memory)
            if save_error or state.step == total_steps or is_due(state.step, cfg.save_interval):
                save_error = ckpt.save(run_dir, state, engines, hf, cfg.keep_last)
        evaluate(rollout, eval_sets, total_steps, log)
    except Stopped as stop:
        if state.step > 0:
            save_error = ckpt.save(run_dir, state, engines, hf, cfg.keep_last)
        tell_stop(stop, state.step, save_error)
        return
    finally:
        rollout.grader.close()
        log.close()

    export_all(learners, run_dir, tokenizer)
    if save_error:
        raise UserError(f"step {total_steps} is NOT saved; the same command tries again")
    log.result(total_steps)


def run(argv):
    """Runs a command line. Returns the exit code: 0, or 2 after a UserError."""
    store = None
    try:
        if wants_help(argv):
            # Prints the help, and exits. This also works where no run could start.
            parse_flags(argv)
        _, world, device, store = start_distributed()
        # A variant may be absent on one machine alone.
        with raise_together():
            cfg = parse_flags(argv)
        if cfg.model is None:
            from lib.demo import demo_flags

            cfg = parse_flags([*demo_flags(cfg), *argv])
        # The ranks' flags must be the same. --run_dir may differ, because two machines may mount
        # the folder at two places. Variants are compared by their texts and not by their paths.
        values = {f"--{name}": value for name, value in flags_of(cfg).items()}
        check.require_same(values | {"--run_dir": None, "--variant": cfg.variant_hashes})
        check_flags(cfg, world)
        main(cfg, world, device, store)
    except UserError as error:
        tell_once(store, f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = run(sys.argv[1:])
    except Exception as error:
        from lib.advice import print_crash

        print_crash(error)
    # sys.exit would let gloo's threads abort, and would wait 2.6 s for vLLM.
    os._exit(code)
