"""Makes the small models and the problems of this project.

    python tools/base_model.py addition FOLDER [--seed N]    the model of the demo
    python tools/base_model.py countdown FOLDER [--seed N]   the model of the laboratory
    python tools/base_model.py chain FOLDER [--seed N]       the model of the chains
    python tools/base_model.py words FOLDER [--seed N]       word problems, without a model

The first three make a Qwen2 of half a million parameters, or of 130,000 for the chains. The model
is trained on texts that reason, because reinforcement learning needs a base model that is right in
some of its samples. FOLDER gets the model, train.json, eval.json, and flags.txt with flags of
train.py. This takes one or two minutes on two CPU cores. The result depends on the seed and, in its
last bits, on the number of threads. `words` writes train.jsonl and eval.jsonl in the form of GSM8K.
If FOLDER exists, the command changes its flags.txt alone.

countdown: the base model tries at random, in the form that tasks/countdown.py shows.
chain: the base model looks letters up as tasks/chain.py shows. One in six is a random letter.
addition: three in four answers are guesses, and one guess in fifteen is right. The other answers
work column by column and are nearly always right:

    guess:  47+85<think></think><answer>\\boxed{129}</answer>
    worked: 47+85<think>\\n7+5=12\\n4+8+1=13</think><answer>\\boxed{132}</answer>
"""

import itertools
import json
import operator
import os
import random
import shlex
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

# The import of environment.py sets variables that torch reads.
from nanoorz import environment  # noqa: F401  # isort: skip
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

END = "<|endoftext|>"
# flags.txt has the paths and then these flags of train.py.
SHARED_FLAGS = """
--n_samples_per_prompt 16 --prompt_max_len 16 --stop= --micro_train_batch_size 64
--micro_rollout_batch_size 1024 --kv_cache_gb 0.5 --critic_learning_rate 1e-3
--zero_stage 0 --bf16 false --gradient_checkpointing false"""
FLAGS = {
    "addition": f"""--seed {{seed}} --template demo
--rollout_batch_size 64 --max_steps 14 --eval_interval 4
--generate_max_len 48 --max_len 64 --packing_max_len 64
--actor_learning_rate 3e-4 --warmup_updates 5 {SHARED_FLAGS}
""",
    "countdown": f"""--task countdown --template mini
--rollout_batch_size 16 --max_steps 40 --num_episodes 100 --eval_interval 4 --eval_n 4
--generate_max_len 63 --max_len 80 --packing_max_len 80
--actor_learning_rate 2e-4 --warmup_updates 3 --log_samples 64 --save_interval 1000 {SHARED_FLAGS}
""",
    "chain": """--task chain --template mini
--rollout_batch_size 4 --n_samples_per_prompt 4 --max_steps 60 --eval_interval 15
--prompt_max_len 31 --generate_max_len 24 --max_len 55 --packing_max_len 220
--actor_learning_rate 4e-4 --warmup_updates 3
--critic_learning_rate 3e-3 --critic_updates 8 --value_clip 1e9
--log_samples 16 --save_interval 1000 --micro_train_batch_size 16 --micro_rollout_batch_size 1024
--kv_cache_gb 0.1 --zero_stage 0 --bf16 false --gradient_checkpointing false
""",
}


class Piece(NamedTuple):
    """A part of a pre-training text. A text is a list of pieces."""

    text: str
    weight: float  # of each of its tokens in the loss
    stop: float = 0.0  # the probability that the text ends instead of this piece


def make_tokenizer(characters: str, words: list[str], end: str = END) -> Qwen2Tokenizer:
    """Makes one token for `end` (number 0), for each character, and for each word.

    AutoTokenizer uses Qwen2Tokenizer for every model of type qwen2. This class writes a space as Ġ
    and a newline as Ċ. The words are not "special" tokens, so decoding keeps the words.
    """
    vocabulary = {token: number for number, token in enumerate([end, *characters])}
    tokenizer = Qwen2Tokenizer(vocabulary, [], unk_token=end, eos_token=end, pad_token=end)
    tokenizer.add_tokens(words)
    return tokenizer


def make_model(tokenizer, seed: int, **changes) -> Qwen2ForCausalLM:
    """Makes an untrained model from the seed. changes: fields of Qwen2Config."""
    end = tokenizer.eos_token_id
    fields = {"vocab_size": len(tokenizer), "eos_token_id": end, "pad_token_id": end}
    fields |= {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2}
    # vLLM's attention on a CPU needs heads of at least 32.
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}
    fields |= {"max_position_embeddings": 2048, "initializer_range": 0.05, "bos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(**fields | changes))


def encode(tokenizer, texts: list[list[Piece]]) -> list[torch.Tensor]:
    """Returns token ids, weights and stops of all texts, each (N, L), padded on the right."""
    parts = list({piece.text for text in texts for piece in text})
    ids_of = dict(zip(parts, tokenizer(parts)["input_ids"]))
    rows = []
    for text in texts:
        tokens = [(id, piece.weight, piece.stop) for piece in text for id in ids_of[piece.text]]
        rows.append(torch.tensor(tokens))  # (L, 3)
    ids, weights, stops = pad_sequence(rows, batch_first=True).unbind(-1)  # (N, L) each
    return [ids.long(), weights.contiguous(), stops.contiguous()]


def token_losses(logits, targets, stops) -> torch.Tensor:
    """Returns the loss of each token (B, L - 1).

    If a text may stop before a token, the end is a second target with the probability of the stop.
    """
    if not stops.any():
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    logprobs = logits.log_softmax(-1)  # (B, L - 1, V)
    goes_on = logprobs.gather(-1, targets[..., None])[..., 0]  # (B, L - 1)
    # The end is token 0.
    return -((1 - stops) * goes_on + stops * logprobs[..., 0])


def pretrain(model, ids: torch.Tensor, weights: torch.Tensor, stops: torch.Tensor, recipe) -> None:
    """Trains the model on ids (N, L). Each text is used once. Padding has the weight 0."""
    settings = {"betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    for update in tqdm(range(recipe.updates), "base model", leave=False, disable=None):
        factor = min((update + 1) / recipe.warmup, 1 - update / recipe.updates)
        optimizer.param_groups[0]["lr"] = recipe.lr * factor
        span = slice(update * recipe.batch, (update + 1) * recipe.batch)
        weight = weights[span, 1:]  # (B, L - 1)
        logits = model(ids[span], use_cache=False).logits[:, :-1]  # (B, L - 1, V)
        losses = token_losses(logits, ids[span, 1:], stops[span, 1:])  # (B, L - 1)
        # The weights of a batch add up to a whole number, and only float64 shows this number.
        loss = (losses * weight).sum() / weight.sum(dtype=torch.float64).float()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


class Recipe:
    """What makes one base model and its problems. A recipe also has these two methods:

    split_problems(rng) returns all problems as (train, held out).
    draw_text(number, train, rng) returns the pre-training text of this number.
    """

    characters = ""  # the tokens of one character
    words = []  # the longer tokens
    model_size = {}  # fields of Qwen2Config
    updates = 1000
    batch = 48
    lr = 3e-3
    warmup = 30

    def record(self, problem, rng: random.Random) -> dict:
        """Returns what train.json or eval.json has for this problem."""
        return problem


class Addition(Recipe):
    """The model of the demo. The first token of a response decides if the answer is a guess."""

    characters = "0123456789+=}Ċ"
    words = ["<think>", "</think>", "<answer>", "</answer>", "\\boxed{"]
    updates = 400
    lr = 4e-3
    worked_share = 0.25  # the share of worked answers that the base model gives
    worked_drawn = 0.75  # the share of worked answers in the texts

    def split_problems(self, rng: random.Random) -> tuple[list, list]:
        """A problem is (a, b). If a + b is held out, b + a is not in train either."""
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        held_out = rng.sample([(a, b) for a, b in pairs if a <= b], 256)
        left_out = set(held_out)
        train = [pair for pair in pairs if (min(pair), max(pair)) not in left_out]
        rng.shuffle(train)
        return train, held_out

    def draw_text(self, number: int, train: list, rng: random.Random) -> list[Piece]:
        """Returns a worked answer or a guess.

        Most texts are worked. The weight of the first token is the wanted share / the drawn share,
        so the base model has the wanted share.
        """
        a, b = rng.choice(train)
        # The two kinds alternate evenly. Random kinds gave another share than the wanted one.
        if number * self.worked_drawn % 1 < self.worked_drawn:
            first = Piece("\n", self.worked_share / self.worked_drawn)
            # 7+5=12 and 4+8+1=13, in two lines, for 47 and 85.
            ones = a % 10 + b % 10
            work = f"{a % 10}+{b % 10}={ones}\n"
            work += f"{a // 10}+{b // 10}+{ones // 10}={(a + b) // 10}</think>"
            answer = a + b
        else:
            first = Piece("</think>", (1 - self.worked_share) / (1 - self.worked_drawn))
            work = ""
            answer = a + b + rng.randint(-3, 3)
        rest = Piece(f"{work}<answer>\\boxed{{{answer}}}</answer>{END}", 1.0)
        return [Piece(f"{a}+{b}<think>", 0.0), first, rest]

    def record(self, problem: tuple, rng: random.Random) -> dict:
        a, b = problem
        return {"question": f"{a}+{b}", "answer": str(a + b)}


class Countdown(Recipe):
    """The model of the laboratory. Its texts are random searches."""

    operations = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    largest_value = 99  # each whole number up to this one is a token
    characters = "+-*=,:<>!Ċ"
    words = [str(number) for number in range(largest_value + 1)]
    updates = 800
    batch = 16
    tries = 9  # the number of tries in each text
    stop_at_miss = 0.3  # the probability that the text ends after a miss
    stop_at_hit = 0.8
    slip = 0.02  # the probability that a value is wrong by 1 to 3
    # The share of tries that are replaced by a hit. The choice of such a try has no weight, because
    # the base model shall learn what follows a hit, and shall not learn to choose hits.
    shown = 0.2
    known_weight = 3.0  # of values and verdicts, which can be computed

    def all_tries(self, numbers: tuple) -> list[tuple]:
        """Returns (a, sign, b, value) for all pairs of numbers whose value is a token."""
        tries = []
        for (a, b), sign in itertools.product(itertools.permutations(numbers, 2), self.operations):
            value = self.operations[sign](a, b)
            if 0 <= value <= self.largest_value:
                tries.append((a, sign, b, value))
        return tries

    def split_problems(self, rng: random.Random) -> tuple[list, list]:
        """A problem is (numbers, target). All problems have a solution."""
        problems = []
        for numbers in itertools.combinations(range(1, 10), 4):
            values = {value for *_, value in self.all_tries(numbers)}
            problems += [(numbers, value) for value in sorted(values) if value >= 10]
        rng.shuffle(problems)
        return problems[256:], problems[:256]

    def draw_text(self, number: int, train: list, rng: random.Random) -> list[Piece]:
        """Returns a question, and four pieces for each try: choice, equals sign, value, newline."""
        numbers, target = rng.choice(train)
        shuffled = rng.sample(numbers, len(numbers))
        pieces = [Piece(",".join(map(str, shuffled)) + f"={target}:", 0.0)]
        tries = self.all_tries(numbers)
        hits = [candidate for candidate in tries if candidate[-1] == target]
        for candidate in rng.choices(tries, k=self.tries):
            is_shown = rng.random() < self.shown
            a, sign, b, value = rng.choice(hits) if is_shown else candidate
            if rng.random() < self.slip:
                error = rng.choice((-3, -2, -1, 1, 2, 3))
                value = min(self.largest_value, max(0, value + error))
            verdict = "<" if value < target else ">" if value > target else "!"
            stop = self.stop_at_hit if value == target else self.stop_at_miss
            pieces += [Piece(f"{a}{sign}{b}", float(not is_shown)), Piece("=", 1.0)]
            pieces += [Piece(f"{value}{verdict}", self.known_weight), Piece("\n", 1.0, stop)]
        return pieces

    def record(self, problem: tuple, rng: random.Random) -> dict:
        numbers, target = problem
        return {"nums": rng.sample(numbers, len(numbers)), "target": target, "pick": 2}


class Chain(Recipe):
    """The model of the chains."""

    letters = "abcdefghij"
    characters = f"{letters}{letters.upper()},:+-?"
    model_size = {"hidden_size": 64, "intermediate_size": 256}
    model_size |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    warmup = 50
    steps = 8  # of ten letters, so no letter comes twice in a chain
    slip = 0.16  # the probability that a letter is drawn from all letters
    silent = 0.5  # the share of texts whose replies have no verdict

    def draw_problem(self, rng: random.Random) -> dict:
        """Returns a record of tasks/chain.py. All letters are one cycle."""
        cycle = rng.sample(self.letters, len(self.letters))
        pairs = [a.upper() + b for a, b in zip(cycle, [*cycle[1:], cycle[0]])]
        rng.shuffle(pairs)
        return {"table": ",".join(pairs), "start": rng.choice(self.letters), "steps": self.steps}

    def split_problems(self, rng: random.Random) -> tuple[list, list]:
        problems = draw_different(self.draw_problem, 4000 + 128, rng)
        return problems[128:], problems[:128]

    def draw_text(self, number: int, train: list, rng: random.Random) -> list[Piece]:
        """Returns a text with a table of its own."""
        problem = self.draw_problem(rng)
        after = dict(problem["table"].lower().split(","))
        is_silent = rng.random() < self.silent
        at = problem["start"]
        text = [Piece(f"{problem['table']}:{at.upper()}", 0.0)]
        for _ in range(self.steps):
            right = after[at]
            at = rng.choice(self.letters) if rng.random() < self.slip else right
            verdict = "?" if is_silent else "+" if at == right else "-"
            text += [Piece(at, 1.0), Piece(verdict + at.upper(), 0.0)]
        return text


def draw_different(draw, count: int, rng: random.Random) -> list[dict]:
    """Calls draw(rng) until there are `count` different problems."""
    drawn = {}
    while len(drawn) < count:
        problem = draw(rng)
        drawn[str(problem)] = problem
    return list(drawn.values())


RECIPES = {"addition": Addition(), "countdown": Countdown(), "chain": Chain()}

NAMES = ("Mia", "Tom", "Ana", "Ben", "Lea", "Sam", "Eva", "Max", "Ida", "Leo")
THINGS = ("apples", "books", "coins", "cards", "stamps", "shells", "pens", "marbles", "eggs")


def draw_word_problem(rng: random.Random) -> dict:
    """Draws one of five kinds of problems. Two kinds need a second step."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    has = rng.randint(6, 40)
    change = rng.randint(2, has - 2)
    count, each = rng.randint(2, 6), rng.randint(2, 9)
    start = f"{name} has {has} {thing}"
    boxes = f"{name} has {count} boxes of {each} {thing}"
    total = f"How many {thing} are there now?"
    kinds = [
        (f"{start} and buys {change} more. {total}", has + change),
        (f"{start} and loses {change}. {total}", has - change),
        (f"{boxes}. How many {thing} are there?", count * each),
        (f"{boxes} and finds {change} more. {total}", count * each + change),
        (f"{start} and buys {count} boxes of {each}. {total}", has + count * each),
    ]
    question, answer = rng.choice(kinds)
    return {"question": question, "answer": str(answer)}


def write_words(folder: Path, seed: int) -> None:
    """Writes 4,000 problems to train.jsonl and 200 to eval.jsonl. All of them are different."""
    problems = draw_different(draw_word_problem, 4000 + 200, random.Random(seed))
    lines = [json.dumps(problem) + "\n" for problem in problems]
    (folder / "train.jsonl").write_text("".join(lines[:4000]))
    (folder / "eval.jsonl").write_text("".join(lines[4000:]))


def build(folder: Path, recipe: Recipe, seed: int) -> None:
    """Trains a base model, and writes the model and its problems."""
    rng = random.Random(seed)
    train, held_out = recipe.split_problems(rng)
    tokenizer = make_tokenizer(recipe.characters, recipe.words)
    model = make_model(tokenizer, seed, **recipe.model_size)
    count = recipe.updates * recipe.batch
    texts = [recipe.draw_text(number, train, rng) for number in range(count)]
    pretrain(model, *encode(tokenizer, texts), recipe)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, problems in (("train.json", train), ("eval.json", held_out)):
        records = [recipe.record(problem, rng) for problem in problems]
        (folder / name).write_text(json.dumps(records))


def write_flags(folder: Path, task: str, seed: int) -> None:
    """Writes flags.txt. The paths are quoted where a shell and xargs need quotes."""
    paths = {"model": folder, "data": folder / "train.json", "eval_data": folder / "eval.json"}
    text = "".join(shlex.join([f"--{flag}", str(path)]) + "\n" for flag, path in paths.items())
    (folder / "flags.txt").write_text(text + FLAGS[task].format(seed=seed))


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=[*RECIPES, "words"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder = args.folder.resolve()
    made_by = folder / "made_by.txt"
    command = f"base_model.py {args.task} --seed {args.seed}\n"
    if not folder.exists():
        # The folder gets its name at the end, so a folder of this name is always complete.
        unfinished = folder.with_name(folder.name + ".making")
        unfinished.mkdir(parents=True, exist_ok=True)
        if args.task == "words":
            write_words(unfinished, args.seed)
        else:
            # accelerate launch gives each process one thread, but no other process works now.
            torch.set_num_threads(len(os.sched_getaffinity(0)))
            build(unfinished, RECIPES[args.task], args.seed)
        (unfinished / "made_by.txt").write_text(command)
        unfinished.rename(folder)
    elif not made_by.exists() or made_by.read_text() != command:
        told = f"error: {folder} was not made by {command.strip()}"
        parser.exit(2, f"{told}; remove this folder or choose another one\n")
    if args.task != "words":
        # The paths in flags.txt are absolute, and the folder may have been copied.
        write_flags(folder, args.task, args.seed)
    print(f"{folder} holds {', '.join(sorted(os.listdir(folder)))}")


if __name__ == "__main__":
    main()
