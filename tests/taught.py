"""Makes tiny base models that have been taught a form: programs, and calls of a tool."""

import json
import operator
import random

from tools.base_model import END, Addition, Piece, encode, make_model, make_tokenizer, pretrain

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "%": operator.mod}


def teach(folder, texts, words, records, seed=1):
    """Trains a model of half a million parameters on the texts, in less than a minute."""
    tokenizer = make_tokenizer("".join(["0123456789n:()}Ċ", *OPERATIONS]), words)
    model = make_model(tokenizer, seed)
    recipe = Addition(seed, updates=len(texts) // 48)
    pretrain(model, *encode(tokenizer, texts), recipe)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "data.json").write_text(json.dumps(records))
    return {"model": folder, "data": folder / "data.json", "template": "{question}:"}


def teach_programs(folder, seed=1):
    """`n*37:` asks for print(int(input())*37). Four in ten base programs have the right sign."""
    rng = random.Random(seed)
    problems = [(sign, number) for sign in OPERATIONS for number in range(10, 100)]
    texts = []
    for _ in range(250 * 48):
        sign, number = rng.choice(problems)
        weights = [4 if other == sign else 2 for other in OPERATIONS]
        (drawn,) = rng.choices([*OPERATIONS], weights)
        program = f"<answer>```\nprint(int(input()){drawn}{number})\n```</answer>{END}"
        texts.append([Piece(f"n{sign}{number}:", 0.0), Piece(program, 1.0)])
    rng.shuffle(problems)
    records = []
    for sign, number in problems:
        tests = [[str(n), str(OPERATIONS[sign](n, number))] for n in (123, 45)]
        records.append({"question": f"n{sign}{number}", "tests": tests})
    words = ["<answer>", "</answer>", "```", "print(int(input())"]
    return teach(folder, texts, words, records, seed)


def teach_calls(folder, seed=1):
    r"""`37+45:` is answered by print(37+45), and then by what was printed in \boxed{}."""
    rng = random.Random(seed)
    texts = []
    for _ in range(400 * 48):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        call = f"```python\nprint({a}+{b})\n```\n```output"
        reply = Piece(f"\n{a + b}\n```\n", 0.0)
        answer = f"<answer>\\boxed{{{a + b}}}</answer>{END}"
        texts.append([Piece(f"{a}+{b}:", 0.0), Piece(call, 1.0), reply, Piece(answer, 1.0)])
    pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(64)]
    records = [{"question": f"{a}+{b}", "answer": str(a + b)} for a, b in pairs]
    words = ["<answer>", "</answer>", "```", "```python", "```output", "print(", "\\boxed{"]
    return teach(folder, texts, words, records, seed)
