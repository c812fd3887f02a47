"""Makes the demo's base model and its problems: a small Qwen2 that adds two numbers, mostly badly.

ORZ starts from base models that already reason in some of their samples, and this miniature of
half a million parameters is given the same start. Three in four of its answers are guesses, of
which one in fifteen is right. One in four works column by column and is nearly always right:

    guess:  47+85<think></think><answer>\\boxed{129}</answer>
    worked: 47+85<think>\\n7+5=12\\n4+8+1=13</think><answer>\\boxed{132}</answer>

Learning which of the two pays makes reward and response length rise together. train.py runs this
file where no --model is given, and takes its settings from FOLDER/flags.txt. To run it alone:

    python tools/demo.py FOLDER --seed 1
"""

import argparse
import ctypes
import json
import os
import random
import shlex
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path

if __name__ == "__main__":
    # Ctrl-C reaches the trainer and this process; here it ends without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "--end_with_parent" in sys.argv:
        # PR_SET_PDEATHSIG: the kernel ends this process when the trainer is gone.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer, logging

sys.path.insert(0, str(Path(__file__).parent.parent))
from lib.common import UserError  # noqa: E402

# The training settings of the demo as flags of train.py, after the paths and the seed.
FLAGS = """\
--template demo
--rollout_batch_size 64
--n_samples_per_prompt 16
--max_steps 14
--eval_interval 4
--stop ''
--prompt_max_len 16
--generate_max_len 48
--max_len 64
--packing_max_len 64
--micro_train_batch_size 64
--micro_rollout_batch_size 1024
--actor_learning_rate 3e-4
--critic_learning_rate 1e-3
--warmup_updates 5
--zero_stage 0
--bf16 false
--gradient_checkpointing false
"""
Pair = tuple[int, int]  # the two numbers of a problem


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what is made. It is kept beside the model as recipe.json."""

    seed: int
    # Raise the version when the code below changes what is made.
    version: int = 3
    # Evaluation problems. Neither order of their numbers is ever trained on.
    held_out: int = 256
    # The share of worked answers in the base model, which reinforcement learning starts from.
    steps_share: float = 0.25
    # Their share in the pre-training examples, because they take the longest to learn.
    steps_drawn: float = 0.75
    # A guess is off by -3 to 3, uniformly, so it is mostly wrong but not silly.
    guess_error: int = 3
    updates: int = 400
    batch: int = 48
    lr: float = 4e-3
    warmup: int = 30


@dataclass(frozen=True)
class Example:
    """One text of pre-training; the choice is the first token of its response."""

    prompt: str
    response: str
    choice_weight: float


def make_tokenizer() -> Qwen2Tokenizer:
    """A token for each character, and whole tokens for the tags.

    The tags are not "special" tokens, so decoding keeps them. The class is Qwen2's own, because
    AutoTokenizer takes it for every model of type qwen2, whatever the folder says.
    """
    # Qwen2 writes a newline as Ċ.
    characters = ["<|endoftext|>", *"0123456789+=}Ċ"]
    vocabulary = {token: number for number, token in enumerate(characters)}
    tokenizer = Qwen2Tokenizer(vocabulary, [])
    tokenizer.add_tokens(["<think>", "</think>", "<answer>", "</answer>", "\\boxed{"])
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


def split_problems(recipe: Recipe, rng: random.Random) -> tuple[list[Pair], list[Pair]]:
    """All additions of two two-digit numbers as (train, held out), two shuffled lists."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    held_out = rng.sample([(a, b) for a, b in pairs if a <= b], recipe.held_out)
    # 58+31 helps someone who is asked 31+58, so both orders are kept from training.
    kept_out = set(held_out)
    train = [pair for pair in pairs if (min(pair), max(pair)) not in kept_out]
    rng.shuffle(train)
    return train, held_out


def worked_response(a: int, b: int) -> str:
    """A response that adds column by column, without its end token."""
    a_tens, a_ones = divmod(a, 10)
    b_tens, b_ones = divmod(b, 10)
    ones = a_ones + b_ones
    carry = ones // 10
    tens = a_tens + b_tens + carry
    columns = f"\n{a_ones}+{b_ones}={ones}\n{a_tens}+{b_tens}+{carry}={tens}"
    return f"{columns}</think><answer>\\boxed{{{a + b}}}</answer>"


def guessed_response(a: int, b: int, recipe: Recipe, rng: random.Random) -> str:
    """A response without reasoning, without its end token."""
    error = rng.randint(-recipe.guess_error, recipe.guess_error)
    return f"</think><answer>\\boxed{{{a + b + error}}}</answer>"


def draw_examples(train: list[Pair], recipe: Recipe, rng: random.Random) -> list[Example]:
    """Every pre-training example in order.

    Worked answers are drawn more often than the base model shall use them. The first token of a
    response is where the model chooses. Its weight, wanted share / drawn share, corrects for
    that, so one training gives well-learnt steps and the wanted share of them.
    """
    drawn = recipe.steps_drawn
    worked_weight = recipe.steps_share / drawn
    guess_weight = (1 - recipe.steps_share) / (1 - drawn)
    examples = []
    for number in range(recipe.updates * recipe.batch):
        a, b = rng.choice(train)
        prompt = f"{a}+{b}<think>"
        # They alternate evenly, because the share came out biased when it was drawn at random.
        if number * drawn % 1 < drawn:
            examples.append(Example(prompt, worked_response(a, b), worked_weight))
        else:
            guess = guessed_response(a, b, recipe, rng)
            examples.append(Example(prompt, guess, guess_weight))
    return examples


def encode(tokenizer, examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (N, L), padded right, and the weight of each token as a target (N, L)."""
    # One call for all texts is twice as fast as a call for each.
    prompts = tokenizer([example.prompt for example in examples])["input_ids"]
    responses = tokenizer([example.response for example in examples])["input_ids"]
    ids = []
    weights = []
    for example, prompt_ids, response_ids in zip(examples, prompts, responses):
        ids.append(torch.tensor(prompt_ids + response_ids + [tokenizer.eos_token_id]))  # (L,)
        prompt_weights = [0.0] * len(prompt_ids)
        # The other tokens of the response and the end token are as many as the response has.
        other_weights = [1.0] * len(response_ids)
        token_weights = prompt_weights + [example.choice_weight] + other_weights
        weights.append(torch.tensor(token_weights))  # (L,)
    padded = pad_sequence(ids, batch_first=True, padding_value=tokenizer.eos_token_id)  # (N, L)
    return padded, pad_sequence(weights, batch_first=True)  # (N, L), (N, L)


def pretrain(model, ids: torch.Tensor, weights: torch.Tensor, recipe: Recipe) -> None:
    """Trains in place to predict the next token of ids (N, L), each example once."""
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    progress = tqdm(range(recipe.updates), "the demo's base model", leave=False, disable=None)
    for update in progress:
        warmup = (update + 1) / recipe.warmup
        decay = 1 - update / recipe.updates
        optimizer.param_groups[0]["lr"] = recipe.lr * min(warmup, decay)
        span = slice(update * recipe.batch, (update + 1) * recipe.batch)
        # The padding needs no mask: it stands behind the text, where causal attention cannot see.
        logits = model(ids[span], use_cache=False).logits[:, :-1]  # (B, L - 1, V)
        targets = ids[span, 1:]  # (B, L - 1)
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")  # (B, L - 1)
        loss = (losses * weights[span, 1:]).sum() / (weights[span] > 0).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def write_problems(folder: Path, train: list[Pair], held_out: list[Pair]) -> None:
    """Writes train.json and eval.json in ORZ's forms for the two."""
    answered = []
    for a, b in train:
        truth = {"value": str(a + b)}
        question = {"from": "human", "value": f"{a}+{b}"}
        answered.append([question, {"from": "assistant", "ground_truth": truth}])
    asked = []
    for a, b in held_out:
        question = {"from": "user", "value": f"{a}+{b}"}
        asked.append({"prompt": [question], "final_answer": str(a + b)})
    (folder / "train.json").write_text(json.dumps(answered))
    (folder / "eval.json").write_text(json.dumps(asked))


def is_made(folder: Path, recipe: Recipe) -> bool:
    """Is it in the folder already? Raises UserError where something else is."""
    if not folder.exists():
        return False
    try:
        stored = json.loads((folder / "recipe.json").read_text())
        seed = stored["seed"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{folder} is no base model of the demo: choose another --run_dir, or remove it"
        ) from None
    if stored == asdict(recipe):
        return True
    found = "the demo of another Recipe"
    if seed != recipe.seed:
        found = f"the demo of --seed {seed}, not {recipe.seed}"
    raise UserError(f"{folder} holds {found}: choose another --run_dir, or remove it")


def build(folder: str, seed: int) -> float:
    """Makes the model folder with train.json and eval.json unless it is there.

    Returns the seconds it took, 0 where nothing was to do. The result is a function of the seed
    and, in the last bits, of the number of threads. It appears complete or not at all. Raises
    UserError where the folder holds something else, which is never overwritten.
    """
    begin = time.time()
    recipe = Recipe(seed)
    target = Path(folder)
    if is_made(target, recipe):
        return 0.0
    unfinished = target.with_name(target.name + ".making")
    shutil.rmtree(unfinished, ignore_errors=True)
    rng = random.Random(seed)
    tokenizer = make_tokenizer()
    train, held_out = split_problems(recipe, rng)
    model = make_model(tokenizer, seed)
    ids, weights = encode(tokenizer, draw_examples(train, recipe, rng))
    pretrain(model, ids, weights, recipe)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    write_problems(unfinished, train, held_out)
    (unfinished / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1))
    seconds = time.time() - begin
    (unfinished / "seconds.txt").write_text(f"{seconds:.1f}\n")
    os.rename(unfinished, target)
    return seconds


def write_flags(folder: Path, seed: int) -> None:
    """Writes flags.txt: train.py's flags for the demo, one on each line, quoted as for a shell.

    It is written anew each time, because the paths change when a base model is copied.
    """
    lines = [
        shlex.join(["--model", str(folder)]),
        shlex.join(["--data", str(folder / "train.json")]),
        shlex.join(["--eval_data", str(folder / "eval.json")]),
        f"--seed {seed}",
    ]
    unfinished = folder / "flags.txt.making"
    unfinished.write_text("\n".join(lines) + "\n" + FLAGS)
    unfinished.replace(folder / "flags.txt")


def show_run(run: Path) -> None:
    """Prints what a run has learnt: held-out numbers, and one problem answered before and after."""
    lines = [json.loads(line) for line in (run / "eval.jsonl").open()]
    before, *_, after = lines
    for key in ("accuracy", "length"):
        print(f"held out: {key} {before[key]:.3f} -> {after[key]:.3f}")
    answers = [json.loads(line) for line in (run / "eval_samples.jsonl").open()]
    first_step = [answer for answer in answers if answer["step"] == before["step"]]
    # One that was wrong at first says most.
    first_step.sort(key=itemgetter("reward"))
    problem = first_step[0]["problem"]
    of_problem = [answer for answer in answers if answer["problem"] == problem]
    for when, answer in (("before", of_problem[0]), ("after ", of_problem[-1])):
        print(f"{when}: {answer['question']}<think>{answer['response']}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="of the base model; with --show of a run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--end_with_parent", action="store_true", help="so train.py starts it")
    parser.add_argument("--show", action="store_true", help="say what a run has learnt, and leave")
    args = parser.parse_args()
    if args.show:
        return show_run(Path(args.folder))
    # accelerate launch gives every process one OpenMP thread, and nothing else runs meanwhile.
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    logging.disable_progress_bar()
    try:
        seconds = build(args.folder, args.seed)
        write_flags(Path(args.folder), args.seed)
    except (UserError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    if seconds > 0:
        print(f"made in {seconds:.1f} s")


if __name__ == "__main__":
    main()
