"""Makes tiny base models that have been taught a form: programs, and calls of a tool."""

import json
import random
from types import SimpleNamespace

from tools.base_model import END, Addition, Piece, encode, make_model, make_tokenizer, pretrain

SIGNS = "+-*%"


def teach(folder, texts, words, records, seed=1):
    """Trains a model of half a million parameters on the texts, in less than a minute."""
    tokenizer = make_tokenizer("0123456789n:()}Ċ" + SIGNS, words)
    model = make_model(tokenizer, seed)
    recipe = SimpleNamespace(updates=len(texts) // 48, batch=48, lr=4e-3, warmup=30)
    recipe.losses = lambda *parts: Addition.losses(recipe, *parts)
    pretrain(model, *encode(tokenizer, texts), recipe)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "data.json").write_text(json.dumps(records))
    return {"model": folder, "data": folder / "data.json", "template": "{question}:"}


def teach_programs(folder, seed=1):
    """`n*37:` asks for print(int(input())*37). Four in ten base programs have the right sign."""
    rng = random.Random(seed)
    problems = [(sign, number) for sign in SIGNS for number in range(10, 100)]
    texts = []
    for _ in range(250 * 48):
        sign, number = rng.choice(problems)
        weights = [4 if other == sign else 2 for other in SIGNS]
        (drawn,) = rng.choices(SIGNS, weights)
        program = f"<answer>```\nprint(int(input()){drawn}{number})\n```</answer>{END}"
        texts.append([Piece(f"n{sign}{number}:", 0.0), Piece(program, 1.0)])
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "%": int.__mod__}
    rng.shuffle(problems)
    records = []
    for sign, number in problems:
        tests = [[str(n), str(operations[sign](n, number))] for n in (123, 45)]
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
