"""Makes word problems of one line for a small real model: FOLDER/train.jsonl and FOLDER/eval.jsonl.

    python tools/word_problems.py FOLDER --seed 1

A problem takes one or two steps of arithmetic, and its answer is a whole number. The form is that
of GSM8K:

    {"question": "Mia has 7 pens and buys 5 more. How many pens are there now?", "answer": "12"}

What is made is a function of the seed. No question of eval.jsonl is in train.jsonl.
"""

import argparse
import json
import random
from pathlib import Path

NAMES = ("Mia", "Tom", "Ana", "Ben", "Lea", "Sam", "Eva", "Max", "Ida", "Leo")
THINGS = ("apples", "books", "coins", "cards", "stamps", "shells", "pens", "marbles", "eggs")


def draw_problem(rng: random.Random) -> dict:
    """One of five kinds, of which two take a second step."""
    name = rng.choice(NAMES)
    thing = rng.choice(THINGS)
    has = rng.randint(6, 40)
    change = rng.randint(2, has - 2)
    count = rng.randint(2, 6)
    each = rng.randint(2, 9)
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


def draw_problems(seed: int, train: int, held_out: int) -> tuple[list[dict], list[dict]]:
    """Returns different problems, so many to train on and so many to evaluate on."""
    rng = random.Random(seed)
    drawn = {}
    while len(drawn) < train + held_out:
        problem = draw_problem(rng)
        drawn[problem["question"]] = problem
    problems = list(drawn.values())
    return problems[:train], problems[train:]


def write(path: Path, problems: list[dict]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(problem) + "\n" for problem in problems)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train", type=int, default=4000)
    parser.add_argument("--held_out", type=int, default=200)
    args = parser.parse_args()
    # There are some hundred thousand questions, so more are looked for in vain.
    if not (args.train > 0 and args.held_out > 0 and args.train + args.held_out <= 50_000):
        parser.exit(2, "error: --train, --held_out: at least 1 each, at most 50000 together\n")
    train, held_out = draw_problems(args.seed, args.train, args.held_out)
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        write(args.folder / "train.jsonl", train)
        write(args.folder / "eval.jsonl", held_out)
    except OSError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
