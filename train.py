"""nanoORZ: reinforcement learning of reasoning straight on a base model, after Open-Reasoner-Zero.

`python train.py --model MODEL --data FILE` trains in one process. `accelerate launch train.py ...`
starts a process for each GPU. On a CPU it needs --use_deepspeed, or it starts one process. Without
the flag --model the demo runs: tools/base_model.py makes a tiny base model and a file of flags. The
run prints the flags of this file and uses them. A flag that is also on the command line has the
value of the command line.

This file has the flags, the set-up, the loop and the evaluation. Words that all files use:
- rank: one process of the run. Each GPU has one.
- collective: a function that all ranks must call together, because they wait for each other in it.
- stage: one of the five files of the root. Each stage does one part of a step.
- sampler: vLLM, which draws responses. In each step it uses the GPU first, then the learners do.
- engine: DeepSpeed's object around a model. It shards the model over the ranks and updates it.
- learner: a model with its engine: the policy, and with --estimator gae also the critic.
- variant: a file that changes decisions of a run: it has a subclass of the class Recipe of ppo.py.
- task: a file that has problems and grades answers. The default task is reward.py.
- family: the models of one architecture, such as qwen2.

A step has nine phases: 1 prompts, 2 rollout, 3 reward, 4 batch, 5 values, 6 advantages, 7 learn,
8 sync, 9 report. The loop of `main` has a line for each of them.

What an error does:
- What the user can mend is a UserError. The run prints one line and ends with exit code 2.
- An exception in phase 2 or 3, or in an evaluation, such as one of the task: its rank prints the
  traceback, and all ranks save the last finished step. The exit code is 1.
- Any other error ends its rank with a traceback. The launcher ends the other ranks, and the last
  checkpoint stays.
- A signal, such as Ctrl-C, during the loop: all ranks save the last finished step. The exit code is
  0.
"""

import dataclasses
import importlib.util
import math
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

# The import of environment.py sets variables that torch reads.
from nanoorz import environment

if __name__ == "__main__":
    # A variant may import train. Without this line Python would load this file a second time.
    sys.modules["train"] = sys.modules["__main__"]
    # Until the models are loaded, Ctrl-C ends this process at once, as other signals do. There is
    # nothing to save. Python's own handler would wait while a rank waits for another rank.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # If the launcher ends, this process gets a signal.
    environment.follow_launcher()

import torch
from transformers import AutoConfig, AutoTokenizer, HfArgumentParser

import ckpt
import ppo
from nanoorz import chat, families, flags, memory, models
from nanoorz.demo import demo_flags
from nanoorz.flags import flag, flags_of, require
from nanoorz.hashes import hash_inputs, hash_problems
from nanoorz.log import Clock, RunLog, redirect_libraries
from nanoorz.ranks import (
    Stopped,
    UserError,
    gather,
    hash64,
    one_line,
    print0,
    require_same,
    start_distributed,
)
from nanoorz.records import split_path
from nanoorz.variants import extend, take_variants
from rollout import Rollout, make_requests, problem_seeds, requests_of_step

# ---- flags ---------------------------------------------------------------------------------------

# The stop texts of a task that names none. A response ends behind its answer. Without the other
# three strings a base model would go on and invent the user's next question.
ORZ_STOP = ["User:", "Human:", "Assistant:", "</answer>"]


# ppo.Recipe has the decisions of a run as methods, and flags as fields. The two classes below add
# flags. So the config of a run, `cfg`, has all flags and all methods. A variant can change both.


@dataclass
class Learning(ppo.Recipe):
    """Flags that decide what is learnt, beside those of ppo.Recipe. Defaults are ORZ's.

    A resume refuses other values than those of the checkpoint.
    """

    model: str | None = flag(
        None, "A causal LM: a folder or a name on the hub. Without it the demo runs."
    )
    template: str = flag(
        "orz", "orz, demo, plain, chat, chat?SWITCH=VALUE (chat.py), or a text with {question}."
    )
    system: str | None = flag(None, "The system message of --template chat.")
    answer_form: str = flag(
        "orz", "Where a response has its answer: orz, boxed_anywhere, last_number, hashes (####)."
    )
    task: str = flag(
        "math", "Problems and grader: math, the name of a file of tasks/, or a path to a .py file."
    )
    variant: list[str] = flag(
        [],
        "Names of files of variants/, or paths to .py files. super() of a later one calls the "
        "earlier ones.",
    )
    # ---- sampling
    rollout_batch_size: int = flag(128, "Problems in a step: a multiple of the number of ranks.")
    n_samples_per_prompt: int = flag(64, "Responses to each problem. Raise it if none is right.")
    top_p: float = flag(1.0, "Draw from the likeliest tokens whose probabilities add up to this.")
    stop: list[str] | None = flag(
        None, 'Texts that end a response or turn. "": none. Default: STOP of the task, or ORZ\'s.'
    )
    prompt_max_len: int = flag(2048, "Tokens. A problem with a longer prompt is left out.")
    generate_max_len: int = flag(8000, "The limit of a response, in tokens. max_len may lower it.")
    max_len: int = flag(8192, "The limit of prompt and response together, in tokens.")
    max_turns: int = flag(16, "The limit of turns, if a tool replies (docs/turns.md).")
    # ---- learning
    critic: str | None = flag(None, "A folder with a critic. Default: --model with a new head.")
    max_norm: float = flag(1.0, "A gradient of a larger norm is scaled down to this. 0: never.")
    bf16: bool = flag(True, "Train in bf16, with master weights and gradient sums in fp32.")


@dataclass
class Config(Learning):
    """All flags. The fields below decide how long a run is, what it logs, and on which hardware.

    A resumed run may change these fields, with two limits. The files of --data may move, but their
    problems must stay the same. Another --zero_stage needs `tools/convert.py reshard`.
    """

    data: list[str] = flag([], "Files or data sets. FILE?columns=A,B names two columns.")
    run_dir: str = flag("out/run", "The folder of the run. All machines must share it.")
    resume: str = flag("auto", "auto: the newest checkpoint. none: step 0. Or one of RUN/step_*.")
    # ---- when
    num_episodes: int = flag(20, "An episode is one pass over all problems.")
    max_steps: int | None = flag(None, "The most steps, whatever --num_episodes says.")
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
    log_tokens: int = flag(16, "Training samples of a step to write token by token.")
    # ---- where and how fast
    zero_stage: int = flag(
        3, "What ZeRO shards. 1: optimizer. 2: + gradients. 3: + weights. 0: nothing."
    )
    offload: str = flag("none", "optimizer: its states stay in CPU memory. Updates are slower.")
    packing: str = flag(
        "auto", "packed: several samples a row. alone: one. auto: packed if the family allows it."
    )
    packing_max_len: int = flag(
        16384,
        "Length of a row of packed samples, in tokens. At least max_len. auto: the longest with "
        "which an update takes at most 70 % of the GPU (docs/scaling.md).",
    )
    micro_train_batch_size: int = flag(1, "Rows in a forward pass. Raise it for short rows.")
    gradient_checkpointing: bool = flag(
        True,
        "Saves most activation memory, costs a third more compute. auto: false if an update takes "
        "at most 70 % of the GPU without it (docs/scaling.md).",
    )
    compile_layers: bool = flag(
        False, "torch compiles the layers: less work for CPU and GPU. The start takes longer."
    )
    attention: str = flag(
        "auto", "auto: on a GPU in bf16 varlen (FlashAttention), else sdpa; for Gemma 2 eager."
    )
    micro_rollout_batch_size: int = flag(
        256, "Samples that a sampler draws at the same time. More samples need more memory."
    )
    tensor_parallel: int = flag(1, "Ranks that share one sampler. Raise it for large models.")
    gpu_memory_utilization: float = flag(0.5, "The sampler's share of a GPU while it is awake.")
    kv_cache_gb: float | None = flag(
        None, "GiB of KV cache. Default: on a GPU the rest of the sampler's share, on a CPU 1."
    )
    enforce_eager: bool = flag(False, "Run the sampler without CUDA graphs: slower, less memory.")

    # {name of a variant: its text}. It has no type, so it is no flag. In a run with variants
    # `extend` of variants.py makes a subclass with their texts.
    variant_texts = {}

    @property
    def variant_hashes(self) -> list:
        """[name, hash of its text] of each variant, in the order of --variant."""
        return [[name, f"{hash64(text):016x}"] for name, text in self.variant_texts.items()]


def parse_flags(argv):
    """Makes a Config of a command line.

    Raises UserError for an unknown flag, a value of the wrong type, or a wrong variant.
    """
    config_class = Config
    # Variants have flags. So they are loaded before the parser is made.
    variant_names, argv = take_variants(argv)
    if variant_names:
        config_class = extend(Config, variant_names)
    parser = HfArgumentParser(config_class, allow_abbrev=False)
    flags.allow_auto(parser)
    # The parser calls `error` for a wrong value. Its own `error` would print all flags and exit.
    parser.error = refuse_flag
    if wants_help(argv):
        flags.finish_help(parser, flags.CHOICES | {"estimator": config_class.estimators})
    # If the command line asks for help, the next call prints the help and exits.
    cfg, unknown = parser.parse_args_into_dataclasses(
        argv, return_remaining_strings=True, look_for_args_file=False
    )
    cfg.variant = variant_names
    if unknown:
        raise UserError(flags.explain_unknown(unknown[0], flags_of(cfg)))
    # `--stop ""` means no stop string.
    if cfg.stop is not None:
        cfg.stop = [text for text in cfg.stop if text]
    require(cfg.run_dir, "--run_dir: name a folder")
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
    # The fields of Config are the flags of the core. `cfg` may also have flags of variants.
    flags.check_core(cfg, world, [field.name for field in dataclasses.fields(Config)])
    for name, value in flags_of(cfg).items():
        is_finite = not isinstance(value, float) or math.isfinite(value)
        require(is_finite, f"--{name} {value}: give a finite number")
    cfg.check(world)


# ---- inputs: task, tokenizer, problems -----------------------------------------------------------


def find_inputs(cfg):
    """Returns the task and the tokenizer. Replaces `auto` in --packing and --attention and the
    default of --stop, and adds the date to a --template that has one. All models must have the
    tokenizer of --model. Raises UserError.
    """
    task = find_task(cfg)
    if cfg.stop is None:
        cfg.stop = list(getattr(task, "STOP", ORZ_STOP))
    tokenizer = load_tokenizer(cfg, cfg.model)
    for name, source in families.models_of(cfg).items():
        # If the embeddings are tied, the body of a critic could be loaded as a policy.
        is_critic = Path(source, "value_head.safetensors").exists()
        fault = f"--{name} {source} is a critic; name the folder policy/ beside it"
        require(name == "critic" or not is_critic, fault)
        other = load_tokenizer(cfg, source) if name != "model" else tokenizer
        found = find_difference(other.get_vocab(), tokenizer.get_vocab())
        fault = f"--{name} {source}: its tokenizer is not that of {cfg.model}: {found}"
        require(not found, fault)
    families.replace_auto(cfg)
    if flags.is_chat(cfg.template):
        cfg.template = chat.fix_date(cfg, tokenizer)
    return task, tokenizer


def find_difference(vocabulary, other) -> str:
    """A sentence about the first id with another text, or "". Both vocabularies are {text: id}."""
    texts = {id: text for text, id in vocabulary.items()}
    others = {id: text for text, id in other.items()}
    for id in sorted({*texts, *others}):
        if texts.get(id) != others.get(id):
            return f"its token {id} is {texts.get(id)!r:.99} in place of {others.get(id)!r:.99}"
    return ""


def find_task(cfg):
    """The module of --task. It has load_problems, Grader and text_metrics, and perhaps `reply` with
    STOP, ANSWER_FORMS, GRADES_REPLIES, PLAIN_REPLIES and REWARDS. Raises UserError.
    """
    path = cfg.task
    if path == "math":
        path = f"{Path(__file__).parent}/reward.py"
    elif not path.endswith(".py"):
        path = f"{Path(__file__).parent}/tasks/{path}.py"
    require(
        Path(path).is_file(),
        f"--task {cfg.task}: no file {path}; choose math, code, python_tool, countdown, "
        "countdown_short, calculator, chain, or a path to a .py file",
    )
    spec = importlib.util.spec_from_file_location("task", path)
    task = importlib.util.module_from_spec(spec)
    # A dataclass looks for its module in sys.modules.
    sys.modules["task"] = task
    spec.loader.exec_module(task)
    for name in ("load_problems", "Grader", "text_metrics"):
        require(hasattr(task, name), f"--task {cfg.task}: {path} has no {name}")
    # A task without ANSWER_FORMS ignores --answer_form. So only its default, orz, is allowed.
    forms = getattr(task, "ANSWER_FORMS", ["orz"])
    require(
        cfg.answer_form in forms,
        f"--answer_form {cfg.answer_form}: {path} has {' or '.join(forms)}; if its Grader is a "
        "subclass of reward.Grader, add `from reward import ANSWER_FORMS`",
    )
    check_reward_names(cfg, getattr(task, "REWARDS", ()))
    require(
        hasattr(task, "STOP") or not hasattr(task, "reply"),
        f"--task {cfg.task}: {path} has `reply` and no STOP; add STOP, a list of the texts that "
        "end a turn, or STOP = [] if turns end with the eos token",
    )
    return task


def check_reward_names(cfg, names):
    """Raises UserError for wrong names of the task's rewards, or wrong --reward_weights."""
    are_texts = isinstance(names, tuple | list) and all(isinstance(x, str) for x in names)
    # metrics.jsonl has reward_NAME of each, and numbers with the names reward_lost, reward_drawn.
    is_right = are_texts and all(x.isidentifier() and x not in ("lost", "drawn") for x in names)
    wanted = 'a tuple of words, each once, as in ("right", "short"), but not lost or drawn'
    is_right = is_right and len(set(names)) == len(names)
    require(is_right, f"--task {cfg.task}: REWARDS is {names!r:.99}; give {wanted}")
    ppo.reward_weights_of(cfg, names)


def load_tokenizer(cfg, source):
    """The tokenizer of a model. source: a folder, or a name on the hub.

    Raises UserError, also if the model cannot be trained, or has fewer positions than --max_len.
    """
    config = families.load_config(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UserError(f"{source} has no tokenizer: {one_line(error)}") from error
    # If a folder has no tokenizer, transformers makes one, with 1 to 3 special tokens.
    require(len(tokenizer) > 3, f"{source} has no tokenizer; put its tokenizer.json there")
    require(
        tokenizer.eos_token_id is not None,
        f"{source}: its tokenizer has no eos token, so no response could end; set eos_token in "
        "tokenizer_config.json",
    )
    positions = getattr(config, "max_position_embeddings", None)
    require(
        not positions or cfg.max_len <= positions,
        f"--max_len {cfg.max_len}: prompt and response exceed the {positions} positions of "
        f"{source}; lower --max_len, and --prompt_max_len below it",
    )
    return tokenizer


def prepare_problems(task, paths, cfg, tokenizer, split="train"):
    """The problems of these files or data sets, with the token ids of their prompts.

    split: the split of a data set, if its path names none. Problems with too long prompts are left
    out, and a line says how many. Raises UserError, also if the files of two machines differ.
    """
    problems = []
    template = "chat" if flags.is_chat(cfg.template) else cfg.template
    for path in paths:
        file, options = split_path(path)
        options = {"split": split} | options
        # The template orz begins with the tokenizer's bos token.
        problems += task.load_problems(file, template, tokenizer.bos_token or "", **options)
    where = " ".join(paths)
    require(problems, f"{where}: load_problems of --task {cfg.task} has returned no problem")
    require_same({f"hash of the problems in {where}": hash_problems(problems)})
    texts = [problem.prompt for problem in problems]
    # For --template chat problem.prompt stays the bare question. Only its ids have the template.
    if template == "chat":
        # The Problem of another task may have no field for a system's turn.
        systems = [getattr(problem, "system", "") for problem in problems]
        pairs = zip(texts, systems)
        texts = [chat.as_chat(text, tokenizer, cfg, system) for text, system in pairs]
    prompts = tokenizer(texts, add_special_tokens=False)
    # A tokenizer may know more tokens than the embedding of the model.
    vocabulary = AutoConfig.from_pretrained(cfg.model).get_text_config().vocab_size
    kept = []
    # The index of a problem is its place in the files. So it also counts what is left out.
    for index, (problem, ids) in enumerate(zip(problems, prompts["input_ids"])):
        if 0 < len(ids) <= cfg.prompt_max_len and max(ids) < vocabulary:
            kept.append(dataclasses.replace(problem, index=index, prompt_ids=ids))
    if len(kept) < len(problems):
        print0(
            f"{where}: {len(problems) - len(kept)} of {len(problems)} prompts are left out: they "
            f"are empty, exceed --prompt_max_len, or have a token beyond the model's {vocabulary}"
        )
    questions = {problem.question for problem in kept}
    if len(questions) < len(kept):
        print0(f"WARNING: {where}: {len(kept)} problems have {len(questions)} different questions")
    if not kept:
        lengths = [len(ids) for ids in prompts["input_ids"]]
        raise UserError(
            f"{where}: no prompt of {min(lengths)} to {max(lengths)} tokens is left; raise "
            "--prompt_max_len or change --template"
        )
    return kept


def prepare_eval_sets(task, cfg, tokenizer):
    """Returns {name: problems}. A set has the name of its file: gsm8k, or gsm8k-test if the path
    names a split."""
    sets = {}
    for path in cfg.eval_data:
        file, options = split_path(path)
        name = Path(file).stem
        if options.get("split"):
            name += f"-{options['split']}"
        # In the logs "train" is the name of the training problems.
        is_free = name not in ("train", *sets)
        require(is_free, f"--eval_data {path}: the name {name} is taken; rename the file")
        sets[name] = prepare_problems(task, [path], cfg, tokenizer, "test")
    return sets


def count_steps(cfg, problem_count):
    # If the last problems do not fill a step, they are left out.
    steps = max(1, cfg.num_episodes * problem_count // cfg.rollout_batch_size)
    if cfg.max_steps is not None:
        steps = min(steps, cfg.max_steps)
    return steps


# ---- do sampler and trainer agree? ---------------------------------------------------------------


def check_sampler(rollout, policy, problems, moment="at the start"):
    """Compares the log-probs of policy and samplers. Returns a sentence.

    Each rank draws 32 samples from its sampler, so each sampler is compared. The log-probs differ
    if a sampler has other weights, or if models.py computes other logits than vLLM. If the
    difference is too large, all ranks raise a UserError. A collective. The sampler sleeps while the
    policy computes, and loses its weights. So it gets them again.
    """
    cfg, sampler = rollout.cfg, rollout.sampler
    seeds = problem_seeds(cfg.seed, step=0, purpose="check", problem_count=8)
    # With a lower top_p the sampler's log-probs would be those of a cut distribution.
    requests = make_requests(
        problems[:8], seeds, samples_each=4, max_tokens=32, temperature=cfg.temperature, top_p=1.0
    )
    # If responses have turns in this run, they have turns here, too. No tool is asked.
    reply = reply_newline if rollout.reply else None
    mine = [sample for _, sample in sampler.generate(requests, with_logprobs=True, reply=reply)]
    samples = sum(gather(mine), [])
    sampler.sleep()
    # Nothing is learnt from these samples, so they need no rewards.
    batch = ppo.make_batch(samples, policy.device, cfg, rewards=[0.0] * len(samples))
    gap = find_gap(policy, batch, cfg)
    sentence = "sampler and trainer differ by {:.0e} a token, {:.0e} in the worst response"
    sentence = sentence.format(*gap)
    limits = cfg.allowed_gap(*default_limits(cfg, sampler.gpu))
    # A comparison with NaN is false, so NaN is refused.
    if not (gap[0] < limits[0] and gap[1] < limits[1]):
        allowed = "allowed are {} and {}".format(*limits)
        told = f"{moment} {sentence}; {allowed}; try --packing alone"
        raise UserError(f"--model {cfg.model}: {told}")
    sampler.sync(models.named_weights(policy))
    return sentence


def reply_newline(text, finish_reason, label):
    return "\n"


def find_gap(policy, batch, cfg) -> tuple[float, float]:
    """How far the log-probs of the policy are from those of the sampler, which the batch has.

    Returns the mean |difference| over all tokens, and over the tokens of the worst sample. A
    collective.
    """
    logprobs = ppo.compute_logprobs(policy, batch, cfg)  # (T,)
    gaps = (logprobs - batch.per_token["logprobs"]).abs()  # (T,)
    means = torch.stack([part.mean() for part in batch.split(gaps)])  # (N,)
    # If a number is NaN, the maximum of torch is NaN. Python's max could hide the NaN.
    return gaps.mean().item(), means.max().item()


def default_limits(cfg, is_gpu):
    """Two limits: of the mean over all tokens, and of the mean over the worst sample's tokens."""
    if cfg.bf16:
        # The rounding of bf16 alone gave 0.04 and 0.07 with a model of 135 M parameters. Models of
        # other sizes were not measured, so the limits leave room.
        return 0.1, 0.5
    if is_gpu:
        return 1e-2, 5e-2
    return 1e-4, 1e-3


# ---- the parts of a run --------------------------------------------------------------------------


def evaluate(rollout, eval_sets, step, log):
    """Draws and logs eval_n samples of each problem of each set. A collective. Raises Stopped."""
    cfg = rollout.cfg
    for name, problems in eval_sets.items():
        seeds = problem_seeds(cfg.seed, step, f"eval {name}", len(problems))
        requests = make_requests(
            problems, seeds, cfg.eval_n, cfg.generate_max_len, cfg.eval_temperature, cfg.eval_top_p
        )
        clock = Clock(step)
        samples = rollout.draw(requests, clock)
        log.evaluation(name, samples, step)
        # `draw` has counted the comparisons that gave no verdict.
        lost = clock.numbers["reward_lost"]
        if lost:
            print0(f"WARNING: {name}: without a verdict, and counted as wrong: {lost} comparisons")


def is_due(step, interval):
    """Is `step` a multiple of `interval`? An interval of 0 means never."""
    return interval > 0 and step % interval == 0


def open_run_dir(cfg):
    """Locks the run folder, checks its disk, and sends the output of libraries to its run.log.

    Returns the path and the lock. The folder is locked as long as the lock object exists.
    """
    run_dir = Path(cfg.run_dir).absolute()
    # The run writes RUN/config.json, RUN/policy and RUN/critic.
    outputs = (run_dir, run_dir / "policy", run_dir / "critic")
    for name, source in families.models_of(cfg).items():
        is_output = Path(source).absolute() in outputs
        require(not is_output, f"--{name} {source} is in --run_dir; choose another --run_dir")
    needed = ckpt.needed_bytes(run_dir, cfg, count_parameters(cfg))
    lock = ckpt.claim(run_dir, needed)
    redirect_libraries(run_dir / "run.log")
    return run_dir, lock


def count_parameters(cfg):
    """The parameters of policy and critic together."""
    count = families.count_parameters(families.load_config(cfg.model))
    if cfg.estimators[cfg.estimator].needs_critic:
        count += families.count_parameters(families.load_config(cfg.critic or cfg.model))
    return count


def fixed_defaults(cfg):
    """{name: default} of the flags that a resumed run must keep: those of ppo.Recipe, of Learning
    and of variants.

    Flags in the body of Config may change, and so may the paths of variants, because ckpt.py
    compares the texts of variants.
    """
    free = {"variant", *Config.__annotations__}
    return {name: x for name, x in flags_of(type(cfg)()).items() if name not in free}


def find_start(run_dir, state, cfg):
    """Returns the checkpoint to resume from, or None, and the state that the run begins with.

    state: of a new run. Replaces `auto` in the flags that the plan of memory chooses. In a resumed
    run `auto` is the value of the checkpoint. A collective. Raises UserError.
    """
    source, state = ckpt.find_start(run_dir, cfg.resume, state, fixed_defaults(cfg))
    names = [name for name in flags.CHOSEN_BY_PLAN if getattr(cfg, name) == "auto"]
    for name in names:
        setattr(cfg, name, state.config[name])
    card = None
    if torch.cuda.is_available():
        card = min(gather(torch.cuda.mem_get_info()[1])) / memory.GIB
    memory.choose_flags(cfg, families.load_config(cfg.model), state.world, card)
    if names:
        print0(f"auto is {flags.as_words(cfg, names)}{', as in the checkpoint' if source else ''}")
    return source, dataclasses.replace(state, config=flags_of(cfg))


def base_files(cfg):
    """{name of a learner: the small files of its base model}."""
    policy = families.BaseFiles(cfg.model)
    return {"policy": policy, "critic": families.BaseFiles(cfg.critic) if cfg.critic else policy}


def export_all(learners, run_dir, files):
    """Writes policy and critic as Hugging Face folders. files: of base_files."""
    for learner in learners:
        weights = models.named_weights(learner)
        ckpt.export(run_dir / learner.name, learner.module.save, weights, files[learner.name])


def main(cfg, world, device, store):
    """Runs one rank: the set-up, the loop over steps, the export. Returns the exit code.

    world: the number of ranks. store: what all ranks can read and write (start_distributed).
    """
    task, tokenizer = find_inputs(cfg)
    task_text = Path(task.__file__).read_bytes()
    # The folder is locked as long as `lock` exists.
    run_dir, lock = open_run_dir(cfg)

    # ---- data: each problem holds the token ids of its prompt
    problems = prepare_problems(task, cfg.data, cfg, tokenizer)
    eval_sets = prepare_eval_sets(task, cfg, tokenizer)
    total_steps = count_steps(cfg, len(problems))
    flags.warn(cfg, problems, eval_sets)

    # ---- resume: from the newest complete checkpoint of run_dir, else from step 0
    new_state = ckpt.RunState(
        step=0,
        total_steps=total_steps,
        world=world,
        config=flags_of(cfg),
        problems_hash=hash_problems(problems),
        inputs=hash_inputs(cfg, task_text, tokenizer, problems),
        variants=cfg.variant_hashes,
    )
    source, state = find_start(run_dir, new_state, cfg)
    first_step = state.step
    # The end of a run writes result.json.
    if state.step >= total_steps and (run_dir / "result.json").exists():
        print0(f"{run_dir} is complete; raise --max_steps, or start over with --resume none")
        return 0

    # Give the variants what they remember (ppo.Recipe.memory).
    cfg.memory.update(state.memory)

    # ---- models: the sampler first, because vLLM measures the free memory of the GPU
    print0(f"{len(problems)} problems, {total_steps} steps; the sampler and the learners start")
    # From here on a signal ends the run after a save.
    rollout = Rollout(task, environment.Signals(store), cfg)
    rollout.sampler.sleep()
    policy = models.make_policy(cfg)
    critic = models.make_critic(cfg) if cfg.estimators[cfg.estimator].needs_critic else None
    learners = [learner for learner in (policy, critic) if learner]
    engines = {learner.name: learner.deepspeed for learner in learners}
    # Each checkpoint has the tokenizer and the config in the Hugging Face form.
    files = base_files(cfg)
    hf = [policy.module.model.config, files["policy"]]
    ckpt.resume(run_dir, source, engines, state)
    # This also wakes the sampler.
    rollout.sampler.sync(models.named_weights(policy))
    agreement = check_sampler(rollout, policy, problems)
    log = RunLog(run_dir, cfg, tokenizer, getattr(task, "ANSWER_FORMS", {}))
    log.start(state, agreement, task_text)

    save_error = None
    try:
        # `step` steps are finished. The step that begins is number step + 1 in the logs.
        for step in range(state.step, total_steps):
            if step == 0 or is_due(step, cfg.eval_interval):
                evaluate(rollout, eval_sets, step, log)
            clock = Clock(step + 1)

            # 1. Prompts: a function of seed and step, so a resumed run has the same ones.
            requests = requests_of_step(problems, cfg, step)

            # 2. Rollout, 3. reward: each sample is graded as soon as it ends (Rollout.draw).
            samples = cfg.draw_step(rollout, requests, problems, step, clock)

            # 4. Batch: all samples, the same on every rank. The sampler leaves the GPU.
            rollout.sampler.sleep()
            batch = ppo.make_batch(samples, device, cfg)

            # 5. Values V(s_t), from the critic before its update. A variant may add other passes.
            with clock("values"):
                cfg.token_passes(policy, critic, batch, step)

            # 6. Advantages, by one of ppo.ESTIMATORS. `batch` keeps them.
            with clock("advantage"):
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
            if step == first_step:
                # A sync may leave a weight as it was. At the start the check cannot see this. Now
                # it can, unless the first update is too small.
                check_sampler(rollout, policy, problems, f"after step {step + 1}")
            # This sets `state.step` to step + 1.
            state.finish_step(run_dir, cfg.memory)
            if save_error or state.step == total_steps or is_due(state.step, cfg.save_interval):
                save_error = ckpt.save(run_dir, state, engines, hf, cfg.keep_last)
        evaluate(rollout, eval_sets, total_steps, log)
    except Stopped as stop:
        # The ranks stop in a rollout. There the weights are those of the last finished step.
        if state.step > 0:
            save_error = ckpt.save(run_dir, state, engines, hf, cfg.keep_last)
        told = f"--resume auto goes on from step {state.step}" if state.step else "no step is saved"
        if save_error:
            told = "--resume auto goes on from the newest checkpoint"
        print0(f"stopped; {told}")
        return 1 if stop.after_error or save_error else 0
    finally:
        rollout.grader.close()
        log.close()

    # Also after a failed save, because the exported models are the result of the run.
    export_all(learners, run_dir, files)
    if save_error:
        raise UserError(
            f"step {total_steps} is NOT saved; --resume auto goes on from the newest checkpoint"
        )
    log.result(total_steps)
    return 0


def run(argv):
    """Runs a command line. Returns the exit code of `main`, or 2 after a UserError."""
    try:
        if wants_help(argv):
            # This prints the help and exits, also on a machine where no run could start.
            parse_flags(argv)
        _, world, device, store = start_distributed()
        cfg = parse_flags(argv)
        if cfg.model is None:
            cfg = parse_flags([*demo_flags(cfg), *argv])
        # The ranks' flags must be the same. --run_dir may differ, because two machines may mount
        # the folder at two places. Variants are compared by their texts and not by their paths.
        values = {f"--{name}": value for name, value in flags_of(cfg).items()}
        require_same(values | {"--run_dir": None, "--variant": cfg.variant_hashes})
        check_flags(cfg, world)
        return main(cfg, world, device, store)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    code = 1
    try:
        code = run(sys.argv[1:])
    except Exception:
        traceback.print_exc()
    environment.end(code)
