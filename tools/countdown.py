"""Makes the laboratory's base model and its problems: a small Qwen2 that searches, mostly badly.

The task is miniature Countdown (tasks/countdown.py): reach a target with two of four numbers. The
model writes a try in each line, with its value and a verdict, and decides after each whether to go
on. Every whole number is one token, so arithmetic is a table that a small model can learn. The base
tries at random, gives up after three misses in ten, goes on after two hits in ten, and at times
miscalculates. Reinforcement learning can teach it to stop at a hit and only there, to go on
otherwise, not to repeat itself, to start with likely tries, and to stay within the limit.

    python tools/countdown.py FOLDER --seed 1      then train.py with the flags of FOLDER/flags.txt
"""

import argparse
import itertools
import json
import operator
import os
import random
import shlex
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

# An idle thread of OpenMP must sleep: spinning ones get five times slower beside other work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer, logging

sys.path.insert(0, str(Path(__file__).parent.parent))
from lib.common import UserError  # noqa: E402

# The settings of the laboratory's baseline as flags of train.py, after the paths and the seed.
FLAGS = """\
--task countdown
--template mini
--rollout_batch_size 16
--n_samples_per_prompt 16
--max_steps 40
--num_episodes 100
--eval_interval 10
--eval_n 4
--stop ''
--prompt_max_len 16
--generate_max_len 63
--max_len 80
--packing_max_len 80
--micro_train_batch_size 64
--micro_rollout_batch_size 1024
--actor_learning_rate 2e-4
--critic_learning_rate 1e-3
--warmup_updates 3
--zero_stage 0
--bf16 false
--gradient_checkpointing false
--log_samples 64
--save_interval 1000
"""
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
LARGEST_VALUE = 99  # each whole number up to it is a token
LEAST_TARGET = 10


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what is made. It is kept beside the model as recipe.json."""

    seed: int
    # Raise the version when the code below changes what is made.
    version: int = 1
    # Numbers are 1 to this, all different.
    largest: int = 9
    given: int = 4
    # Evaluation problems, which are never trained on.
    held_out: int = 256
    # In every example; the model's own length is decided by where it stops.
    tries: int = 9
    # The chances to stop behind a miss and behind a hit.
    stop_at_miss: float = 0.3
    stop_at_hit: float = 0.8
    # The chance that a value is off by 1 to 3.
    slip: float = 0.02
    # The share of tries that are hits put there. What follows them is learnt, but not to choose
    # them, since their choice has no weight.
    shown: float = 0.2
    # Weight of what can be known, values and verdicts, against choices.
    known_weight: float = 3.0
    updates: int = 800
    batch: int = 16
    lr: float = 3e-3
    warmup: int = 30


def all_tries(numbers) -> list[tuple]:
    """Every (a, sign, b, value) of two different numbers, where the value is a token."""
    tries = []
    for a, b in itertools.permutations(numbers, 2):
        for sign, operation in OPERATIONS.items():
            value = operation(a, b)
            if 0 <= value <= LARGEST_VALUE:
                tries.append((a, sign, b, value))
    return tries


def all_problems(recipe: Recipe) -> list[tuple]:
    """Every (numbers, target) that can be solved."""
    problems = []
    for numbers in itertools.combinations(range(1, recipe.largest + 1), recipe.given):
        values = {value for *_, value in all_tries(numbers)}
        problems += [(numbers, value) for value in sorted(values) if value >= LEAST_TARGET]
    return problems


def make_tokenizer() -> Qwen2Tokenizer:
    """A token for each whole number and for each sign."""
    # Qwen2 writes a newline as Ċ.
    signs = ["<|endoftext|>", *"+-*=,:<>!Ċ"]
    tokenizer = Qwen2Tokenizer({token: number for number, token in enumerate(signs)}, [])
    tokenizer.add_tokens([str(number) for number in range(LARGEST_VALUE + 1)])
    return tokenizer


def make_model(tokenizer, seed: int) -> Qwen2ForCausalLM:
    """The untrained model, a function of the seed."""
    end_id = tokenizer.eos_token_id
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        # Heads of 32 are the smallest that vLLM's CPU attention takes.
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=end_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


@dataclass
class Corpus:
    """Examples of equal length L. Each target token has a weight, and at some may be the end."""

    ids: torch.Tensor  # (N, L)
    weights: torch.Tensor  # (N, L)
    # The probability with which the text is to end instead of this token.
    stops: torch.Tensor  # (N, L)


def make_corpus(tokenizer, problems, recipe: Recipe, rng: random.Random) -> Corpus:
    """Random searches. The end is no token of theirs but a probability at each newline."""
    tries_of = {numbers: all_tries(numbers) for numbers, _ in problems}
    texts = []
    weights = []
    stops = []
    for _ in range(recipe.updates * recipe.batch):
        numbers, target = rng.choice(problems)
        shuffled = rng.sample(numbers, len(numbers))
        text = ",".join(map(str, shuffled)) + f"={target}:"
        prompt_length = 2 * len(numbers) + 2
        text_weights = [0.0] * prompt_length
        text_stops = [0.0] * prompt_length
        for line in random_search(tries_of[numbers], target, recipe, rng):
            text += line.text
            text_weights += [line.choice_weight] * 3
            text_weights += [1.0, recipe.known_weight, recipe.known_weight, 1.0]
            text_stops += [0.0] * 6 + [line.stop]
        texts.append(text)
        weights.append(text_weights)
        stops.append(text_stops)
    ids = tokenizer(texts)["input_ids"]
    return Corpus(torch.tensor(ids), torch.tensor(weights), torch.tensor(stops))


@dataclass(frozen=True)
class Line:
    """A try as text, 7 tokens with its newline."""

    text: str
    choice_weight: float  # of the two numbers and the sign
    stop: float  # the chance to end behind it


def random_search(tries, target, recipe: Recipe, rng: random.Random):
    """Yields the lines of one example."""
    hits = [candidate for candidate in tries if candidate[-1] == target]
    for candidate in rng.choices(tries, k=recipe.tries):
        is_shown = rng.random() < recipe.shown
        if is_shown:
            candidate = rng.choice(hits)
        a, sign, b, value = candidate
        if rng.random() < recipe.slip:
            error = rng.choice((-3, -2, -1, 1, 2, 3))
            value = min(LARGEST_VALUE, max(0, value + error))
        stop = recipe.stop_at_miss
        if value == target:
            stop = recipe.stop_at_hit
        text = f"{a}{sign}{b}={value}{verdict(value, target)}\n"
        yield Line(text, float(not is_shown), stop)


def verdict(value: int, target: int) -> str:
    if value == target:
        return "!"
    return "<" if value < target else ">"


def pretrain(model, corpus: Corpus, end_id: int, recipe: Recipe) -> None:
    """Trains in place to predict the next token, each example once.

    Where the text may end, the end and the token that goes on are both targets, at their shares.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    progress = tqdm(range(recipe.updates), "the lab's base model", leave=False, disable=None)
    for update in progress:
        warmup = (update + 1) / recipe.warmup
        decay = 1 - update / recipe.updates
        optimizer.param_groups[0]["lr"] = recipe.lr * min(warmup, decay)
        span = slice(update * recipe.batch, (update + 1) * recipe.batch)
        ids = corpus.ids[span]  # (B, L)
        stop = corpus.stops[span, 1:]  # (B, L - 1)
        weight = corpus.weights[span, 1:]  # (B, L - 1)
        logits = model(ids, use_cache=False).logits[:, :-1]  # (B, L - 1, V)
        log_p = logits.log_softmax(-1)  # (B, L - 1, V)
        goes_on = log_p.gather(-1, ids[:, 1:, None])[..., 0]  # (B, L - 1)
        likelihood = (1 - stop) * goes_on + stop * log_p[..., end_id]  # (B, L - 1)
        loss = -(likelihood * weight).sum() / weight.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def write_problems(path: Path, problems, rng: random.Random) -> None:
    records = []
    for numbers, target in problems:
        shuffled = rng.sample(numbers, len(numbers))
        records.append({"nums": shuffled, "target": target, "pick": 2})
    path.write_text(json.dumps(records))


def is_made(folder: Path, recipe: Recipe) -> bool:
    """Is it in the folder already? Raises UserError where something else is."""
    if not folder.exists():
        return False
    try:
        stored = json.loads((folder / "recipe.json").read_text())
    except (OSError, ValueError):
        stored = None
    if stored == asdict(recipe):
        return True
    raise UserError(f"{folder} holds something else than this base model: choose another folder")


def build(folder, recipe: Recipe) -> float:
    """Makes the model folder with train.json and eval.json unless it is there.

    Returns the seconds it took, 0 where nothing was to do. The result is a function of the recipe
    and, in the last bits, of the number of threads. It appears complete or not at all. Raises
    UserError where the folder holds something else, which is never overwritten.
    """
    begin = time.time()
    target = Path(folder)
    if is_made(target, recipe):
        return 0.0
    unfinished = target.with_name(target.name + ".making")
    shutil.rmtree(unfinished, ignore_errors=True)
    rng = random.Random(recipe.seed)
    problems = all_problems(recipe)
    rng.shuffle(problems)
    held_out = problems[: recipe.held_out]
    train = problems[recipe.held_out :]
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, recipe.seed)
    corpus = make_corpus(tokenizer, train, recipe, rng)
    pretrain(model, corpus, tokenizer.eos_token_id, recipe)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    write_problems(unfinished / "train.json", train, rng)
    write_problems(unfinished / "eval.json", held_out, rng)
    (unfinished / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1))
    os.rename(unfinished, target)
    return time.time() - begin


def write_flags(folder: Path) -> None:
    """Writes flags.txt: train.py's flags for the baseline, one on each line, quoted as for a shell.

    It is written anew each time, because the paths change when a base model is copied.
    """
    lines = [
        shlex.join(["--model", str(folder)]),
        shlex.join(["--data", str(folder / "train.json")]),
        shlex.join(["--eval_data", str(folder / "eval.json")]),
    ]
    unfinished = folder / "flags.txt.making"
    unfinished.write_text("\n".join(lines) + "\n" + FLAGS)
    unfinished.replace(folder / "flags.txt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    # accelerate launch gives every process one OpenMP thread, and nothing else runs meanwhile.
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    logging.disable_progress_bar()
    try:
        seconds = build(args.folder, Recipe(args.seed))
        write_flags(Path(args.folder).resolve())
    except (UserError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    if seconds > 0:
        print(f"made in {seconds:.1f} s")


if __name__ == "__main__":
    main()
