"""nanoORZ: reinforcement learning of reasoning straight on a base model, after Open-Reasoner-Zero.

`python train.py --model MODEL --data FILE` trains in one process. `accelerate launch train.py ...`
starts a process for each GPU. On a CPU it needs --use_deepspeed, or it starts one process. Without
the flag --model the demo runs: tools/base_model.py makes a tiny base model and a file of flags.

This file has the flags, the loop, the set-up and the evaluation. Words that all files use:
- rank: one process of the run. Each GPU has one.
- collective: a function that all ranks must call together, because they wait for each other in it.
- stage: one of the five files of the root: train, rollout, reward, ppo and ckpt.
- sampler: vLLM, which draws responses. In each step it uses the GPU first, then the learners do.
- engine: DeepSpeed's object around a model. It shards the model over the ranks and updates it.
- learner: a model with its engine: the policy, and with --estimator gae also the critic.
- variant: a file that changes decisions of a run: it has a subclass of the class Recipe of ppo.py.
- task: a file that has problems and grades answers. The default task is reward.py.
- family: the models of one architecture, such as qwen2.

What an error does:
- What the user can mend is a UserError. The run prints one line and ends with exit code 2.
- An exception of the task during the loop: its rank prints the traceback, and all ranks save the
  last finished step. The exit code is 1.
- Any other error ends its rank with a traceback. The launcher ends the other ranks, and the last
  checkpoint stays.
- A signal, such as Ctrl-C, during the loop: all ranks save the last finished step. The exit code is
  0, or 1 if the save fails.
"""

import dataclasses
import datetime
import difflib
import functools
import importlib.util
import json
import re
import shlex
import signal
import subprocess
import sys
import traceback
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# The import of environment.py sets variables that torch reads.
from nanoorz import environment

if __name__ == "__main__":
    # A variant may import train. Without this line Python would load this file a second time.
    sys.modules["train"] = sys.modules["__main__"]
    # Until `main` makes its Signals, Ctrl-C ends this process at once, as other signals do. There
    # is nothing to save. Python's own handler would wait while a rank waits for another rank.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # If the launcher ends, this process gets a signal.
    environment.follow_launcher()

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import ppo
from nanoorz.flags import flag, flags_of, make_parser, require
from nanoorz.log import Clock, RunLog, since_start
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

# DeepSpeed and transformers take seconds to import. So the functions that need them import them,
# and --help and a wrong flag do not wait.

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

    # ---- prompts and answers
    template: str = flag("orz", "orz, demo, plain, chat, or a text with {question}.")
    system: str | None = flag(None, "The system message of --template chat.")
    chat_template_kwargs: str = flag(
        "{}", 'Switches of the chat template, as JSON: {"enable_thinking": false}.'
    )
    answer_form: str = flag(
        "orz", "Where a response has its answer: orz, boxed_anywhere, last_number, hashes (####)."
    )
    # ---- sampling
    rollout_batch_size: int = flag(
        128, "Problems in a step: a multiple of the number of ranks.", least=1
    )
    n_samples_per_prompt: int = flag(
        64, "Responses to each problem. Raise it if none is right.", least=1
    )
    top_p: float = flag(
        1.0,
        "Draw from the likeliest tokens whose probabilities add up to this.",
        least=1e-6,
        most=1,
    )
    stop: list[str] | None = flag(
        None, 'Texts that end a response or turn. "": none. Default: STOP of the task, or ORZ\'s.'
    )
    prompt_max_len: int = flag(2048, "Tokens. A problem with a longer prompt is left out.", least=1)
    generate_max_len: int = flag(
        8000, "The limit of a response, in tokens. Behind a long prompt max_len lowers it.", least=1
    )
    max_len: int = flag(8192, "The limit of prompt and response together, in tokens.")
    max_turns: int = flag(16, "The limit of turns, if a tool replies (docs/change.md).", least=1)
    # ---- updates
    max_norm: float = flag(1.0, "A gradient of a larger norm is scaled down to this. 0: never.")
    bf16: bool = flag(True, "Train in bf16, with master weights and gradient sums in fp32.")


@dataclass
class Config(Learning):
    """All flags. The fields below say where the files are, how long a run is, what it logs, and on
    which hardware it runs.

    A resumed run may change these fields, and the number of ranks. The files of model, critic,
    task, variants and data may move, but a resume refuses other prompts, labels or texts of
    variants.
    """

    # ---- files
    model: str | None = flag(
        None, "A causal LM: a folder or a name on the hub. Without it the demo runs."
    )
    critic: str | None = flag(None, "A folder with a critic. Default: --model with a new head.")
    task: str = flag(
        "math", "Problems and grader: math, the name of a file of tasks/, or a path to a .py file."
    )
    variant: list[str] = flag(
        [],
        "Names of files of variants/, or paths to .py files. super() of a later one calls the "
        "earlier ones.",
    )
    data: list[str] = flag([], "Files or data sets. FILE?columns=A,B names two columns.")
    run_dir: str = flag("out/run", "The folder of the run. All machines must share it.")
    resume: str = flag("auto", "auto: the newest checkpoint. none: step 0. Or one of RUN/step_*.")
    # ---- when
    num_episodes: int = flag(20, "An episode is one pass over all problems.", least=1)
    max_steps: int | None = flag(None, "The most steps, whatever --num_episodes says.", least=1)
    save_interval: int = flag(50, "Steps between checkpoints. 0: save only the last step.")
    keep_last: int = flag(2, "The number of newest checkpoints to keep. 0: keep all.")
    eval_data: list[str] = flag([], "Files or data sets of held-out problems.")
    eval_interval: int = flag(10, "Steps between evaluations. 0: only at the start and the end.")
    eval_n: int = flag(1, "Samples of each problem in an evaluation. ORZ's paper has 16.", least=1)
    eval_temperature: float | None = flag(
        None, "In evaluations. Default: --temperature. 0: greedy.", most=2
    )
    eval_top_p: float | None = flag(None, "In evaluations. Default: --top_p.", least=1e-6, most=1)
    eval_only: bool = flag(False, "Evaluate --model on --eval_data, without training, and end.")
    # ---- what is written down
    log_with: Literal["none", "tensorboard", "wandb"] = flag(
        "none", "Curves elsewhere: none, tensorboard, or wandb (log in to it before)."
    )
    log_samples: int = flag(256, "Training samples of a step in samples.jsonl. 0: all.")
    log_tokens: int = flag(16, "Training samples of a step to write token by token.")
    # ---- where and how fast
    zero_stage: Literal[0, 1, 2, 3] = flag(
        3, "What ZeRO shards. 1: optimizer. 2: + gradients. 3: + weights. 0: nothing."
    )
    offload: Literal["none", "optimizer"] = flag(
        "none", "none, or optimizer: its states stay in CPU memory. Updates are slower."
    )
    packing: Literal["auto", "packed", "alone"] = flag(
        "auto", "packed: several samples a row. alone: one. auto: packed if the family allows it."
    )
    packing_max_len: int = flag(
        16384, "Length of a row of packed samples, in tokens. At least max_len."
    )
    micro_train_batch_size: int = flag(
        1, "Rows in a forward pass. Raise it for short rows.", least=1
    )
    gradient_checkpointing: bool = flag(
        True, "Saves most activation memory, costs a third more compute."
    )
    compile_layers: bool = flag(
        False, "torch compiles the layers: less work for CPU and GPU. The start takes longer."
    )
    attention: Literal["auto", "sdpa", "eager", "varlen"] = flag(
        "auto",
        "varlen (FlashAttention on a GPU in bf16), sdpa or eager. auto: varlen where it works, "
        "else sdpa; for Gemma 2 eager.",
    )
    micro_rollout_batch_size: int = flag(
        256,
        "Samples that a sampler draws at the same time. More samples need more memory.",
        least=1,
    )
    tensor_parallel: int = flag(
        1, "Ranks that share one sampler. Raise it for large models.", least=1
    )
    gpu_memory_utilization: float = flag(
        0.5, "The sampler's share of a GPU while it is awake.", most=1
    )
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


# ---- one rank of a run ---------------------------------------------------------------------------


def main(cfg, world, device, store):  # noqa: C901, PLR0912, PLR0915
    """Runs one rank: the set-up, the loop over steps, the export. Returns the exit code.

    world: the number of ranks. store: what all ranks can read and write (start_distributed).
    """
    import ckpt
    from nanoorz import families, models

    print0(f"{world} rank(s) on {device.type}")
    task = load_task(cfg)
    tokenizer = load_tokenizer(cfg)
    families.replace_auto(cfg)
    has_critic = cfg.estimators[cfg.estimator].needs_critic

    # ---- the folder of the run. It is locked as long as `lock` exists.
    run_dir = Path(cfg.run_dir).absolute()
    # A parameter takes 12 bytes of a checkpoint: its fp32 master and two moments.
    parameters = families.count_parameters(families.load_config(cfg.model))
    needed_bytes = 12 * parameters * (2 if has_critic else 1)
    lock = ckpt.claim(run_dir, 0 if cfg.eval_only else needed_bytes)  # noqa: F841
    log = RunLog(run_dir, cfg, tokenizer, getattr(task, "ANSWER_FORMS", {}))

    # ---- problems: each of them holds the token ids of its prompt
    eval_sets = load_eval_sets(task, cfg, tokenizer)
    if cfg.eval_only:
        return evaluate_only(task, cfg, eval_sets, log, store)
    problems = load_problems(task, cfg.data, cfg, tokenizer)
    warn_of_known_problems(problems, eval_sets)
    # The last problems of the last episode are left out, if they do not fill a step. If there are
    # fewer problems than a step needs, the step repeats some.
    total_steps = max(1, cfg.num_episodes * len(problems) // cfg.rollout_batch_size)
    if cfg.max_steps is not None:
        total_steps = min(total_steps, cfg.max_steps)

    # ---- resume: from a checkpoint, or from step 0
    state = ckpt.RunState(
        config=flags_of(cfg),
        variants=cfg.variant_hashes,
        problems_hash=hash_problems(problems),
        first_prompt=tokenizer.decode(problems[0].prompt_ids),
    )
    # Flags in the body of Config may change. All others decide what is learnt, also a variant's.
    source, state = ckpt.find_start(run_dir, cfg.resume, state, Config.__annotations__)
    first_step = state.step
    told = f"--resume {cfg.resume}: step {first_step} is past the {total_steps} steps of this run"
    require(first_step <= total_steps, f"{told}; raise --max_steps or --num_episodes")
    # The end of a run writes result.json.
    result = run_dir / "result.json"
    if result.exists() and json.loads(result.read_text())["steps"] == first_step == total_steps:
        advice = "raise --max_steps or --num_episodes, or start over with --resume none"
        print0(f"{run_dir} is complete; {advice}")
        return 0
    # Give the variants what they remember (ppo.Recipe.memory).
    cfg.memory.update(state.memory)

    # ---- models: the sampler first, because vLLM measures the free memory of the GPU
    print0(f"{len(problems)} problems, {total_steps} steps; the sampler and the learners start")
    # From here on a signal stops the run in a rollout, after a save.
    signals = environment.Signals(store)
    rollout = Rollout(task, signals, cfg)
    rollout.sampler.sleep()
    policy = models.make_policy(cfg)
    critic = models.make_critic(cfg) if has_critic else None
    learners = [learner for learner in (policy, critic) if learner]
    engines = {learner.name: learner.deepspeed for learner in learners}
    # For a new run this moves the results of an earlier run away.
    ckpt.resume(run_dir, source, engines)
    # This also wakes the sampler.
    rollout.sampler.sync(models.named_weights(policy))
    agreement = check_sampler(rollout, policy, problems)
    log.start(state.step, Path(task.__file__))
    size = f"{cfg.rollout_batch_size} prompts x {cfg.n_samples_per_prompt} samples a step"
    ready = f"ready after {since_start():.0f} s"
    print0(f"{size}, {agreement}; from step {state.step}, {ready}")

    save_error = None
    try:
        # `step` steps are finished. The step that begins is number step + 1 in the logs.
        for step in range(state.step, total_steps):
            if step == 0 or is_due(step, cfg.eval_interval):
                evaluate(rollout, eval_sets, step, log)
            clock = Clock()

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

            # 6. Advantages, by --estimator. `batch` keeps them.
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

            # 9. Report and save. After a failed save the run goes on.
            log.step(step + 1, samples, batch, stats, clock)
            if step == first_step:
                # A sync may leave a weight as it was. At the start the check cannot see this,
                # because sampler and policy have loaded the same weights. Now it can see this,
                # unless the first update is too small.
                check_sampler(rollout, policy, problems, f"after step {step + 1}")
            # This sets `state.step` to step + 1.
            state.finish_step(cfg.memory)
            if state.step == total_steps or is_due(state.step, cfg.save_interval):
                save_error = ckpt.save(run_dir, state, engines, cfg.keep_last)
        evaluate(rollout, eval_sets, total_steps, log)
    except Stopped as stop:
        # The ranks stop in a rollout. There the weights are those of the last finished step.
        if state.step > 0:
            save_error = ckpt.save(run_dir, state, engines, cfg.keep_last)
        told = f"--resume auto goes on from step {state.step}" if state.step else "no step is saved"
        if save_error:
            told = "--resume auto goes on from the newest checkpoint"
        print0(f"stopped; {told}")
        return 1 if stop.after_error or save_error else 0
    finally:
        rollout.grader.close()
        log.close()

    # These are the result of the run, so they are written after a failed save, too.
    for learner in learners:
        weights = models.named_weights(learner)
        ckpt.export(run_dir / learner.name, learner.module.save, weights, ckpt.describe(state))
    if save_error:
        print0(f"step {total_steps} is NOT saved; the exported models are in {run_dir}")
        return 1
    log.result(total_steps)
    return 0


def is_due(step, interval):
    """Is `step` a multiple of `interval`? An interval of 0 means never."""
    return interval > 0 and step % interval == 0


# ---- task, tokenizer, problems -------------------------------------------------------------------


def load_task(cfg):
    """The module of --task. It has load_problems, Grader and text_metrics, and perhaps `reply` with
    STOP, ANSWER_FORMS, GRADES_REPLIES, PLAIN_REPLIES and REWARDS. Sets the default of --stop.
    Raises UserError.
    """
    path = Path(cfg.task)
    if cfg.task == "math":
        path = Path(__file__).parent / "reward.py"
    elif path.suffix != ".py":
        path = Path(__file__).parent / "tasks" / f"{cfg.task}.py"
    told = "choose math, the name of a file of tasks/, or a path to a .py file"
    require(path.is_file(), f"--task {cfg.task}: there is no file {path}; {told}")
    spec = importlib.util.spec_from_file_location("task", path)
    task = importlib.util.module_from_spec(spec)
    # A dataclass looks for its module in sys.modules.
    sys.modules["task"] = task
    spec.loader.exec_module(task)
    # A task without ANSWER_FORMS ignores --answer_form. So only its default is allowed.
    forms = getattr(task, "ANSWER_FORMS", ["orz"])
    told = f"--answer_form {cfg.answer_form}: {path} has {' or '.join(forms)}"
    require(cfg.answer_form in forms, told)
    # Wrong --reward_weights raise a UserError here, before the models are loaded.
    ppo.reward_weights_of(cfg, getattr(task, "REWARDS", ()))
    told = f"--task {cfg.task}: {path} has `reply` and no STOP, the list of texts that end a turn"
    require(hasattr(task, "STOP") or not hasattr(task, "reply"), told)
    if cfg.stop is None:
        cfg.stop = list(getattr(task, "STOP", ORZ_STOP))
    return task


def load_tokenizer(cfg):
    """The tokenizer of --model. Raises UserError, also if --critic has another one, and for a model
    that cannot be trained."""
    from transformers import AutoTokenizer

    from nanoorz import families

    # If the embeddings are tied, the body of a critic could be loaded as a policy.
    is_critic = Path(cfg.model, "value_head.safetensors").exists()
    require(not is_critic, f"--model {cfg.model} is a critic; name the folder policy/ beside it")
    tokenizers = {}
    for name in ("model", "critic") if cfg.critic else ("model",):
        source = getattr(cfg, name)
        config = families.load_config(source, f"--{name}")
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise UserError(f"--{name} {source} has no tokenizer: {one_line(error)}") from error
        # If a folder has no tokenizer, transformers makes one, with 1 to 3 special tokens.
        told = f"--{name} {source} has no tokenizer; put its tokenizer.json there"
        require(len(tokenizer) > 3, told)
        positions = families.max_positions(config) or cfg.max_len
        told = f"--max_len {cfg.max_len}: --{name} {source} has {positions} positions"
        require(cfg.max_len <= positions, f"{told}; lower --max_len, and the other limits with it")
        tokenizers[name] = tokenizer
    tokenizer = tokenizers["model"]
    told = f"--model {cfg.model}: its tokenizer has no eos token, so no response could end"
    require(tokenizer.eos_token_id is not None, told)
    if cfg.critic:
        is_same = tokenizers["critic"].get_vocab() == tokenizer.get_vocab()
        require(is_same, f"--critic {cfg.critic}: its tokenizer is not that of {cfg.model}")
    return tokenizer


def load_problems(task, paths, cfg, tokenizer, split="train"):
    """The problems of these files or data sets, with the token ids of their prompts.

    split: the split of a data set, if its path names none. Prompts that are empty, too long, or
    have tokens that the model does not know are left out, and a line says how many. Raises
    UserError.
    """
    from transformers import AutoConfig

    problems = []
    for path in paths:
        file, options = split_path(path)
        options = {"split": split} | options
        # The template orz begins with the tokenizer's bos token.
        problems += task.load_problems(file, cfg.template, tokenizer.bos_token or "", **options)
    where = " ".join(paths)
    # For --template chat problem.prompt stays the bare question. Only its ids have the template.
    prompts = [problem.prompt for problem in problems]
    if cfg.template == "chat":
        prompts = render_chats(problems, cfg, tokenizer)
    # A tokenizer may know more tokens than the embedding of the model.
    vocabulary = AutoConfig.from_pretrained(cfg.model).get_text_config().vocab_size
    all_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"] if prompts else []
    kept = []
    left_out = Counter()  # {reason: number of prompts}
    misread = []  # (prompt, the text of its tokens), where these two differ
    # The index of a problem is its place in the files. So it also counts what is left out.
    for index, (problem, prompt, ids) in enumerate(zip(problems, prompts, all_ids)):
        if not ids:
            left_out["empty"] += 1
        elif len(ids) > cfg.prompt_max_len:
            left_out[f"longer than --prompt_max_len {cfg.prompt_max_len}"] += 1
        elif max(ids) >= vocabulary:
            left_out[f"with a token beyond the model's {vocabulary}"] += 1
        else:
            kept.append(dataclasses.replace(problem, index=index, prompt_ids=ids))
            text = tokenizer.decode(ids)
            if letters_of(text) != letters_of(prompt):
                misread.append((prompt, text))
    if left_out:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        total = f"{left_out.total()} of {len(problems)}"
        print0(f"{where}: {total} prompts are left out: {reasons}")
    require(kept, f"{where}: no problem is left")
    if misread:
        prompt, text = misread[0]
        told = f"in {len(misread)} prompts the tokenizer loses a character, or does not know it"
        print0(f"WARNING: {where}: {told}; it reads {prompt!r:.99} as {text!r:.99}")
    # Two machines may have different files under one name.
    require_same({f"hash of the problems in {where}": hash_problems(kept)})
    return kept


def letters_of(text) -> str:
    """A text without spaces, in small letters. A tokenizer may change these and nothing else."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def render_chats(problems, cfg, tokenizer) -> list[str]:
    """Each question as a user's turn in the tokenizer's own chat template. Raises UserError."""
    prompts = []
    try:
        # Some templates write today's date. Here it is always the same date, so a resume on another
        # day has the same prompts.
        kwargs = {"strftime_now": datetime.date(2025, 1, 1).strftime}
        for name, value in json.loads(cfg.chat_template_kwargs).items():
            # A template ignores what it does not read.
            if not re.search(rf"\b{re.escape(name)}\b", tokenizer.get_chat_template()):
                raise ValueError(f"it does not read {name}")
            kwargs[name] = value
        render = functools.partial(tokenizer.apply_chat_template, tokenize=False, **kwargs)
        for problem in problems:
            turns = [{"role": "user", "content": problem.prompt}]
            # --system replaces the record's own system turn, which another task's Problem may lack.
            system = getattr(problem, "system", "") if cfg.system is None else cfg.system
            if system:
                turns = [{"role": "system", "content": system}, *turns]
            prompt = render(turns, add_generation_prompt=True)
            for turn in turns:
                if turn["content"].strip() not in prompt:
                    told = f"it leaves out the {turn['role']}'s turn: {turn['content']!r:.99}"
                    raise ValueError(told)
            prompts.append(prompt)
            if len(prompts) == 1 and prompt == render(turns):
                # The templates of Mistral and Llama 2 are right so.
                told = "the chat template ignores add_generation_prompt; the first prompt ends with"
                print0(f"{told} {prompt[-40:]!r}")
    # A chat template is a program by the model's author. It may raise anything.
    except Exception as error:
        told = f"--template chat, --chat_template_kwargs {cfg.chat_template_kwargs}"
        raise UserError(f"{told}: the template of {cfg.model}: {one_line(error)}") from error
    return prompts


def load_eval_sets(task, cfg, tokenizer):
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
        sets[name] = load_problems(task, [path], cfg, tokenizer, "test")
    return sets


def hash_problems(problems) -> int:
    """The hash depends on prompts and labels. A label must have the same repr in each process."""
    return hash64([(problem.prompt_ids, problem.label) for problem in problems])


def warn_of_known_problems(problems, eval_sets):
    questions = {problem.question for problem in problems}
    for name, held_out in eval_sets.items():
        known = sum(problem.question in questions for problem in held_out)
        if known:
            print0(f"WARNING: {known} of {len(held_out)} problems of {name} are also in --data")


# ---- do sampler and trainer agree? ---------------------------------------------------------------


def check_sampler(rollout, policy, problems, moment="at the start") -> str:
    """Compares the log-probs of policy and samplers. Returns a sentence.

    Each rank draws 32 samples from its sampler, so each sampler is compared. The log-probs differ
    if a sampler has other weights, or if models.py computes other logits than vLLM. If the
    difference is too large, all ranks raise a UserError. A collective. The sampler sleeps while the
    policy computes, and loses its weights. So it gets them again.
    """
    from nanoorz import models

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
    logprobs = ppo.compute_logprobs(policy, batch, cfg)  # (T,)
    gaps = (logprobs - batch.per_token["logprobs"]).abs()  # (T,)
    mean = gaps.mean().item()
    worst = max(part.mean().item() for part in batch.split(gaps))
    limits = (1e-2, 5e-2) if sampler.gpu else (1e-4, 1e-3)  # of `mean` and of `worst`
    if cfg.bf16:
        # The rounding of bf16 alone gave 0.04 and 0.07 with a model of 135 M parameters. Models of
        # other sizes were not measured, so these limits leave room.
        limits = (0.1, 0.5)
    limits = cfg.allowed_gap(*limits)
    told = f"sampler and trainer differ by {mean:.0e} a token, {worst:.0e} in the worst response"
    # If a log-prob is NaN, `mean` is NaN, and its comparison is false.
    is_close = mean < limits[0] and worst < limits[1]
    allowed = f"allowed are {limits[0]} and {limits[1]}; try --packing alone"
    require(is_close, f"--model {cfg.model}: {moment} {told}; {allowed}")
    sampler.sync(models.named_weights(policy))
    return told


def reply_newline(text, finish_reason, label):
    return "\n"


# ---- evaluation ----------------------------------------------------------------------------------


def evaluate(rollout, eval_sets, step, log):
    """Draws and logs eval_n samples of each problem of each set. A collective. Raises Stopped."""
    cfg = rollout.cfg
    for name, problems in eval_sets.items():
        # A run that goes on may have this evaluation already.
        if gather(log.has_evaluation(name, step))[0]:
            continue
        seeds = problem_seeds(cfg.seed, step, f"eval {name}", len(problems))
        requests = make_requests(
            problems, seeds, cfg.eval_n, cfg.generate_max_len, cfg.eval_temperature, cfg.eval_top_p
        )
        clock = Clock()
        samples = rollout.draw(requests, clock)
        log.evaluation(name, samples, step)
        # `draw` has counted the comparisons that gave no verdict.
        lost = clock.numbers["reward_lost"]
        if lost:
            print0(f"WARNING: {name}: without a verdict, and counted as wrong: {lost} comparisons")


def evaluate_only(task, cfg, eval_sets, log, store) -> int:
    """Draws and logs the evaluation of step 0 with the sampler alone. Returns the exit code."""
    import ckpt

    has_results = any((log.run_dir / f"{name}.jsonl").exists() for name in ("metrics", "eval"))
    require(not has_results, f"--run_dir {cfg.run_dir} has results; choose another --run_dir")
    # An evaluation that was killed may have left samples.
    ckpt.resume(log.run_dir, None, engines={})
    log.start(0, Path(task.__file__))
    signals = environment.Signals(store)
    rollout = Rollout(task, signals, cfg)
    try:
        evaluate(rollout, eval_sets, 0, log)
    except Stopped:
        print0("stopped; the evaluation is not complete")
        return 1
    finally:
        rollout.grader.close()
        log.close()
    return 0


# ---- the command line ----------------------------------------------------------------------------


def parse_flags(argv):
    """Makes a Config of a command line.

    Raises UserError for an unknown flag, a value of the wrong type, or a wrong variant.
    """
    # Variants have flags. So they are loaded before the parser is made.
    variants, argv = take_variants(argv)
    config_class = extend(Config, variants)
    parser = make_parser(config_class)
    # The parser calls `error` for a wrong value. Its own `error` would print all flags.
    parser.error = refuse
    given, unknown = parser.parse_known_args(argv)
    cfg = config_class(**vars(given))
    if unknown:
        name = unknown[0].partition("=")[0].lstrip("-")
        nearest = difflib.get_close_matches(name, flags_of(cfg), n=1)
        refuse(f"{unknown[0]} is no flag" + "".join(f"; the nearest is --{x}" for x in nearest))
    cfg.variant = variants
    # `--stop ""` means no stop string.
    if cfg.stop is not None:
        cfg.stop = [text for text in cfg.stop if text]
    # config.json must show the values that the run uses, so defaults are filled in here.
    if cfg.eval_temperature is None:
        cfg.eval_temperature = cfg.temperature
    if cfg.eval_top_p is None:
        cfg.eval_top_p = cfg.top_p
    return cfg


def refuse(message):
    raise UserError(f"{message}; `python train.py --help` has all flags")


def print_help(argv):
    """Prints each flag with its default and its advice, also the flags of --variant."""
    variants, _ = take_variants(argv)
    cfg = extend(Config, variants)()
    print("python train.py --model MODEL --data FILE ... [--FLAG VALUE ...]\n")
    for field in dataclasses.fields(cfg):
        default = getattr(cfg, field.name)
        words = default if isinstance(default, list) else [default]
        shown = "" if default is None else " ".join(map(str, words))
        print(f"--{field.name} {shown}\n      {field.metadata.get('help', '')}")


def check_flags(cfg, world):
    """Raises UserError for flags that would hang, would be refused an hour later, or would change
    unseen what is learnt. A variant checks its own flags in its method `check`."""
    for field in dataclasses.fields(Config):
        value = getattr(cfg, field.name)
        # A field that `flag` has not made has no limits.
        if isinstance(value, int | float) and field.metadata:
            least, most = field.metadata["least"], field.metadata["most"]
            # NaN is refused, too, because each comparison with NaN is false.
            told = f"--{field.name} {value}: give a number from {least} to {most}"
            require(least <= value <= most, told)
    told = f"--estimator {cfg.estimator}: choose {' or '.join(cfg.estimators)}"
    require(cfg.estimator in cfg.estimators, told)
    estimator = cfg.estimators[cfg.estimator]
    inputs = {Path(source).absolute() for source in (cfg.model, cfg.critic) if source}
    outputs = {Path(cfg.run_dir, name).absolute() for name in ("", "policy", "critic")}
    room = f"choose less than --max_len {cfg.max_len}, the limit of prompt and response together"
    # {flag: (is its value right, what to do if not)}
    table = {
        "data": (cfg.data or cfg.eval_only, "name files of problems"),
        "eval_data": (cfg.eval_data or not cfg.eval_only, "name files of held-out problems"),
        "run_dir": (not inputs & outputs, "a run would write over its model; choose another"),
        "resume": (
            cfg.resume in ("auto", "none") or not cfg.eval_only,
            "--eval_only evaluates --model; export the step with `python ckpt.py`",
        ),
        "prompt_max_len": (cfg.prompt_max_len < cfg.max_len, room),
        "generate_max_len": (cfg.generate_max_len < cfg.max_len, room),
        "packing_max_len": (
            cfg.packing_max_len >= cfg.max_len or cfg.eval_only,
            f"a row must hold one sample of --max_len {cfg.max_len} tokens",
        ),
        "rollout_batch_size": (
            cfg.rollout_batch_size % world == 0 or cfg.eval_only,
            f"choose a multiple of {world}, the number of ranks",
        ),
        "n_samples_per_prompt": (
            cfg.n_samples_per_prompt >= estimator.least_samples,
            f"--estimator {cfg.estimator} compares samples; choose at least "
            f"{estimator.least_samples}",
        ),
        "critic": (
            not cfg.critic or estimator.needs_critic,
            f"--estimator {cfg.estimator} has no critic",
        ),
        "eval_n": (
            cfg.eval_n == 1 or cfg.eval_temperature > 0,
            "at --eval_temperature 0 all responses are alike; choose 1",
        ),
        "template": (
            cfg.template == "chat" or (cfg.system is None and cfg.chat_template_kwargs == "{}"),
            "--system and --chat_template_kwargs need --template chat",
        ),
        "bf16": (not cfg.bf16 or cfg.zero_stage >= 2, "needs --zero_stage 2 or 3"),
        "offload": (cfg.offload == "none" or cfg.zero_stage > 0, "needs --zero_stage 1, 2 or 3"),
        "tensor_parallel": (world % cfg.tensor_parallel == 0, f"does not divide {world} ranks"),
        "compile_layers": (
            not cfg.compile_layers or torch.cuda.is_available(),
            "needs a GPU: on a CPU vLLM turns torch.compile off, for the trainer, too",
        ),
        "log_with": (
            cfg.log_with != "wandb" or importlib.util.find_spec("wandb"),
            "`pip install wandb` first",
        ),
    }
    for name, (is_right, advice) in table.items():
        require(is_right, f"--{name} {getattr(cfg, name)}: {advice}")
    cfg.check(world)


def demo_flags(cfg) -> list[str]:
    """The demo's flags. Makes its base model and its problems beside --run_dir, once for each seed.

    tools/base_model.py makes the model, the problems, and a file of flags. Raises UserError.
    """
    folder = Path(cfg.run_dir).absolute().parent / f"demo_base_{cfg.seed}"
    if dist.get_rank() == 0 and not (folder / "flags.txt").exists():
        print("the demo needs a base model, which takes about a minute", flush=True)
        tool = Path(__file__).parent / "tools" / "base_model.py"
        command = [sys.executable, tool, "addition", folder, "--seed", str(cfg.seed)]
        told = "the demo's base model was not made; its error stands above"
        require(subprocess.call(command) == 0, told)
    dist.barrier()
    text = (folder / "flags.txt").read_text()
    print0("the demo is train.py", *text.splitlines())
    return shlex.split(text)


# If an error ends a rank, a launcher of several ranks prints its traceback last.
@record
def run(argv) -> int:
    """Runs a command line. Returns the exit code of `main`, or 2 after a UserError."""
    try:
        if "-h" in argv or "--help" in argv:
            print_help(argv)
            return 0
        cfg = parse_flags(argv)
        _, world, device, store = start_distributed()
        if cfg.model is None:
            cfg = parse_flags([*demo_flags(cfg), *argv])
        check_flags(cfg, world)
        # The ranks' flags must be the same. --run_dir may differ, because two machines may mount
        # the folder at two places. Variants are compared by their texts and not by their paths.
        values = {f"--{name}": value for name, value in flags_of(cfg).items()}
        require_same(values | {"--run_dir": None, "--variant": cfg.variant_hashes})
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
