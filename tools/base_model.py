"""Makes the small models and the problems of this project.

    python tools/base_model.py addition FOLDER [--seed N]    the model of the demo
    python tools/base_model.py countdown FOLDER [--seed N]   the model of the laboratory
    python tools/base_model.py chain FOLDER [--seed N]       the model of the chains
    python tools/base_model.py words FOLDER [--seed N]       word problems, without a model

The first three make a base model that already reasons in some of its samples, as ORZ's do: a Qwen2
of half a million parameters, or of 130,000 for the chains. FOLDER gets the model, train.json,
eval.json, and flags.txt with flags of train.py. It takes one or two minutes on two CPU cores. The
result depends on the seed and, in its last bits, on the number of threads. `words` writes
train.jsonl and eval.jsonl in the form of GSM8K.

countdown: the base model tries at random, in the form that tasks/countdown.py shows.
chain: the base model looks letters up as tasks/chain.py shows. One in six is a random letter.
addition: three in four answers are guesses, and one guess in fifteen is right. The other answers
work column by column and are nearly always right:

    guess:  47+85<think></think><answer>\\boxed{129}</answer>
    worked: 47+85<think>\\n7+5=12\\n4+8+1=13</think><answer>\\boxed{132}</answer>
"""

import errno
import fcntl
import itertools
import json
import operator
import os
import random
import shlex
import signal
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    # Ctrl-C reaches the trainer and this process. This process then ends without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Idle threads of OpenMP must sleep. Otherwise they slow down every other process.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # transformers imports DeepSpeed, which would look for a GPU and log a warning.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer, logging

END = "<|endoftext|>"
# flags.txt has these flags of train.py behind the paths. No value needs quotes: `$(cat flags.txt)`.
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
        losses = recipe.losses(logits, ids[span, 1:], stops[span, 1:])  # (B, L - 1)
        # The weights of a batch add up to a whole number, and only float64 shows this number.
        loss = (losses * weight).sum() / weight.sum(dtype=torch.float64).float()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@dataclass(frozen=True)
class Addition:
    """The model of the demo. These fields decide what is made, and recipe.json keeps them."""

    seed: int
    version: int = 3  # raise the version when the code below changes what is made
    held_out: int = 256  # the number of evaluation problems
    steps_share: float = 0.25  # the share of worked answers that the base model gives
    steps_drawn: float = 0.75  # the share of worked answers in the texts
    guess_error: int = 3  # a guess is wrong by -3 to 3, uniformly
    updates: int = 400
    batch: int = 48
    lr: float = 4e-3
    warmup: int = 30
    # These are no fields, because they have no types.
    model_size = {}  # fields of Qwen2Config
    characters = "0123456789+=}Ċ"
    words = ["<think>", "</think>", "<answer>", "</answer>", "\\boxed{"]

    def split_problems(self, rng: random.Random) -> tuple[list, list]:
        """Returns all additions of two two-digit numbers as (train, held out), both shuffled."""
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        held_out = rng.sample([(a, b) for a, b in pairs if a <= b], self.held_out)
        # Training on 58+31 would help with 31+58, so both orders are left out.
        left_out = set(held_out)
        train = [pair for pair in pairs if (min(pair), max(pair)) not in left_out]
        rng.shuffle(train)
        return train, held_out

    def draw_texts(self, train: list, rng: random.Random) -> list[list[Piece]]:
        """Returns all pre-training texts in order.

        The first token of a response decides between working and guessing. The weight of this token
        is the wanted share / the drawn share, so the base model works at the wanted share.
        """
        drawn = self.steps_drawn
        worked_weight = self.steps_share / drawn
        guess_weight = (1 - self.steps_share) / (1 - drawn)
        texts = []
        for number in range(self.updates * self.batch):
            a, b = rng.choice(train)
            # The two kinds alternate evenly. Random kinds made a biased share.
            if number * drawn % 1 < drawn:
                error = 0
                choice = Piece("\n", worked_weight)
                # 7+5=12 and 4+8+1=13, in two lines, for 47 and 85.
                ones = a % 10 + b % 10
                work = f"{a % 10}+{b % 10}={ones}\n"
                work += f"{a // 10}+{b // 10}+{ones // 10}={(a + b) // 10}</think>"
            else:
                error = rng.randint(-self.guess_error, self.guess_error)
                choice = Piece("</think>", guess_weight)
                work = ""
            answer = Piece(f"{work}<answer>\\boxed{{{a + b + error}}}</answer>{END}", 1.0)
            texts.append([Piece(f"{a}+{b}<think>", 0.0), choice, answer])
        return texts

    def losses(self, logits, targets, stops):
        """Returns the loss of each token (B, L - 1). The end is a token of the text here."""
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")

    def record(self, problem, rng: random.Random) -> dict:
        a, b = problem
        return {"question": f"{a}+{b}", "answer": str(a + b)}


OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
LARGEST_VALUE = 99  # each whole number up to it is a token
LEAST_TARGET = 10


@dataclass(frozen=True)
class Countdown:
    """The model of the laboratory."""

    seed: int
    version: int = 1
    largest: int = 9  # the numbers of a problem are different, from 1 to this
    given: int = 4
    held_out: int = 256  # the number of evaluation problems
    tries: int = 9  # the number of tries in each pre-training text
    stop_at_miss: float = 0.3  # the probability that the text ends after a miss
    stop_at_hit: float = 0.8
    slip: float = 0.02  # the probability that a value is wrong by 1 to 3
    # The share of tries that are replaced by a hit. The choice of such a try has no weight, because
    # the base model shall learn what follows a hit, and shall not learn to choose hits.
    shown: float = 0.2
    known_weight: float = 3.0  # of values and verdicts, which can be computed
    updates: int = 800
    batch: int = 16
    lr: float = 3e-3
    warmup: int = 30
    model_size = {}
    characters = "+-*=,:<>!Ċ"
    words = [str(number) for number in range(LARGEST_VALUE + 1)]

    def all_tries(self, numbers) -> list[tuple]:
        """Returns (a, sign, b, value) for all pairs of numbers whose value is a token."""
        tries = []
        for (a, b), sign in itertools.product(itertools.permutations(numbers, 2), OPERATIONS):
            value = OPERATIONS[sign](a, b)
            if 0 <= value <= LARGEST_VALUE:
                tries.append((a, sign, b, value))
        return tries

    def split_problems(self, rng: random.Random) -> tuple[list, list]:
        """Returns all problems (numbers, target) that have a solution, as (train, held out)."""
        problems = []
        for numbers in itertools.combinations(range(1, self.largest + 1), self.given):
            values = {value for *_, value in self.all_tries(numbers)}
            problems += [(numbers, value) for value in sorted(values) if value >= LEAST_TARGET]
        rng.shuffle(problems)
        return problems[self.held_out :], problems[: self.held_out]

    def draw_texts(self, train: list, rng: random.Random) -> list[list[Piece]]:
        """Returns all pre-training texts, which are random searches."""
        tries_of = {numbers: self.all_tries(numbers) for numbers, _ in train}
        texts = []
        for _ in range(self.updates * self.batch):
            numbers, target = rng.choice(train)
            shuffled = rng.sample(numbers, len(numbers))
            prompt = Piece(",".join(map(str, shuffled)) + f"={target}:", 0.0)
            texts.append([prompt, *self.draw_search(tries_of[numbers], target, rng)])
        return texts

    def draw_search(self, tries: list, target: int, rng: random.Random) -> list[Piece]:
        """Returns four pieces for each try: choice, equals sign, value with verdict, newline."""
        hits = [candidate for candidate in tries if candidate[-1] == target]
        pieces = []
        for candidate in rng.choices(tries, k=self.tries):
            is_shown = rng.random() < self.shown
            a, sign, b, value = rng.choice(hits) if is_shown else candidate
            if rng.random() < self.slip:
                error = rng.choice((-3, -2, -1, 1, 2, 3))
                value = min(LARGEST_VALUE, max(0, value + error))
            verdict = "<" if value < target else ">" if value > target else "!"
            stop = self.stop_at_hit if value == target else self.stop_at_miss
            pieces += [Piece(f"{a}{sign}{b}", float(not is_shown)), Piece("=", 1.0)]
            pieces += [Piece(f"{value}{verdict}", self.known_weight), Piece("\n", 1.0, stop)]
        return pieces

    def losses(self, logits, targets, stops):
        """Returns the loss of each token. The end is a second target where the text may end."""
        logprobs = logits.log_softmax(-1)  # (B, L - 1, V)
        goes_on = logprobs.gather(-1, targets[..., None])[..., 0]  # (B, L - 1)
        # The end is token 0.
        return -((1 - stops) * goes_on + stops * logprobs[..., 0])

    def record(self, problem, rng: random.Random) -> dict:
        numbers, target = problem
        return {"nums": rng.sample(numbers, len(numbers)), "target": target, "pick": 2}


LETTERS = "abcdefghij"


@dataclass(frozen=True)
class Chain:
    """The model of the chains."""

    seed: int
    version: int = 1
    steps: int = 8  # of ten letters, so no letter comes twice in a chain
    problems: int = 4000  # for training
    held_out: int = 128  # the number of evaluation problems
    slip: float = 0.16  # the probability that a letter is drawn from all letters
    silent: float = 0.5  # the share of texts whose replies have no verdict
    updates: int = 1000
    batch: int = 48
    lr: float = 3e-3
    warmup: int = 50
    # A smaller model than the others'.
    model_size = {"hidden_size": 64, "intermediate_size": 256}
    model_size |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    characters = f"{LETTERS}{LETTERS.upper()},:+-?"
    words = []

    def draw_problem(self, rng: random.Random) -> dict:
        """Returns a record of tasks/chain.py. All letters are one cycle."""
        cycle = rng.sample(LETTERS, len(LETTERS))
        pairs = [a.upper() + b for a, b in zip(cycle, [*cycle[1:], cycle[0]])]
        rng.shuffle(pairs)
        return {"table": ",".join(pairs), "start": rng.choice(LETTERS), "steps": self.steps}

    def split_problems(self, rng: random.Random) -> tuple[list, list]:
        """Returns problems that are all different, as (train, held out)."""
        drawn = {}
        while len(drawn) < self.problems + self.held_out:
            problem = self.draw_problem(rng)
            drawn[str(problem)] = problem
        problems = list(drawn.values())
        return problems[self.held_out :], problems[: self.held_out]

    def draw_texts(self, train: list, rng: random.Random) -> list[list[Piece]]:
        """Returns all pre-training texts. Each has a table of its own."""
        texts = []
        for _ in range(self.updates * self.batch):
            problem = self.draw_problem(rng)
            after = dict(problem["table"].lower().split(","))
            is_silent = rng.random() < self.silent
            at = problem["start"]
            text = [Piece(f"{problem['table']}:{at.upper()}", 0.0)]
            for _ in range(self.steps):
                right = after[at]
                at = rng.choice(LETTERS) if rng.random() < self.slip else right
                verdict = "?" if is_silent else "+" if at == right else "-"
                text += [Piece(at, 1.0), Piece(verdict + at.upper(), 0.0)]
            texts.append(text)
        return texts

    def losses(self, logits, targets, stops):
        """Returns the loss of each token (B, L - 1)."""
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")

    def record(self, problem, rng: random.Random) -> dict:
        return problem


RECIPES = {"addition": Addition, "countdown": Countdown, "chain": Chain}

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
    rng = random.Random(seed)
    drawn = {}
    while len(drawn) < 4200:
        problem = draw_word_problem(rng)
        drawn[problem["question"]] = json.dumps(problem) + "\n"
    lines = list(drawn.values())
    texts = {"train.jsonl": "".join(lines[:4000]), "eval.jsonl": "".join(lines[4000:])}
    for path in [folder / name for name in texts]:
        if path.exists() and path.read_bytes() != texts[path.name].encode():
            raise FileExistsError(errno.EEXIST, "the file holds other text", str(path))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)


def build(folder: Path, recipe) -> None:
    """Makes the folder, complete or not at all. A folder of the same recipe stays as it is."""
    text = json.dumps(asdict(recipe), indent=1)
    stored = folder / "recipe.json"
    if stored.is_file() and stored.read_bytes() == text.encode():
        return
    if folder.exists():
        told = f"this is not the base model of this command and --seed {recipe.seed}"
        raise FileExistsError(errno.EEXIST, told, str(folder))
    unfinished = folder.with_name(folder.name + ".making")
    # If the folder cannot be made, this is an error before the training.
    unfinished.mkdir(parents=True, exist_ok=True)
    with open(unfinished / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OSError(errno.EAGAIN, "another run makes this model now", str(folder)) from error
        fill(unfinished, recipe)
        (unfinished / "recipe.json").write_text(text)
        os.remove(lock.name)
        unfinished.rename(folder)


def fill(folder: Path, recipe) -> None:
    rng = random.Random(recipe.seed)
    train, held_out = recipe.split_problems(rng)
    tokenizer = make_tokenizer(recipe.characters, recipe.words)
    model = make_model(tokenizer, recipe.seed, **recipe.model_size)
    pretrain(model, *encode(tokenizer, recipe.draw_texts(train, rng)), recipe)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, problems in (("train.json", train), ("eval.json", held_out)):
        records = [recipe.record(problem, rng) for problem in problems]
        (folder / name).write_text(json.dumps(records))


def write_flags(folder: Path, task: str, seed: int) -> None:
    """Writes flags.txt again at each call, because the paths change when a folder is copied."""
    paths = {"model": folder, "data": folder / "train.json", "eval_data": folder / "eval.json"}
    text = "".join(shlex.join([f"--{flag}", str(path)]) + "\n" for flag, path in paths.items())
    (folder / "flags.txt").write_text(text + FLAGS[task].format(seed=seed))


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=[*RECIPES, "words"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    try:
        folder = args.folder.resolve()
        if args.task == "words":
            write_words(folder, args.seed)
        else:
            # accelerate launch gives each process one thread, but no other process works now.
            torch.set_num_threads(len(os.sched_getaffinity(0)))
            logging.disable_progress_bar()
            build(folder, RECIPES[args.task](args.seed))
            write_flags(folder, args.task, args.seed)
    except OSError as error:
        place = error.filename or args.folder
        parser.exit(2, f"error: {place}: {error.strerror}; choose another folder (or --run_dir)\n")
    print(f"{folder} holds {', '.join(sorted(os.listdir(folder)))}")
    if args.task != "words" and shlex.quote(str(folder)) != str(folder):
        print("flags.txt has quotes, because of this path; xargs removes them, $(cat) does not")


if __name__ == "__main__":
    main()
