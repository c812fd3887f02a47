"""Programming problems with their tests, in the forms of MBPP, HumanEval, APPS and LiveCodeBench: read, never run.

An assert must be value == literal, isclose(value, literal), abs(value - literal) < c, f(x) or not f(x), so that its
expected value can stay outside of the program's process (tools/sandbox.py); others are left out, aloud.
"""
import ast
import base64
import builtins
import contextlib
import io
import json
import os
import pickle
import re
import sys
import zlib
from dataclasses import dataclass

TEMPLATES: dict[str, str] = {
    "orz": "{bos}A conversation between User and Assistant. The Assistant first thinks about the reasoning process and "
    "then provides the User with the answer: <think> reasoning process here </think> <answer> answer here </answer>. "
    "User: The answer must be a Python program, or the function asked for, in one ```python block.\n"
    "This is the problem:\n{question}\n\nAssistant: <think>", "plain": "{question}"}


class RewardError(ValueError):
    """Bad input by the user, in one line: what, where, what to do."""


@dataclass(frozen=True)
class Problem:
    index: int  # position in its file, not counting items left out
    question: str
    label: str  # JSON: {"setup": code before the program, "calls": bool, "tests": [[input, expected, tolerance], ...]}
    prompt: str  # the template with the question in it


def load_problems(path: str, template: str, bos="", columns=("question", "tests"), split="train") -> list[Problem]:
    """Problems of a JSON or JSONL file or a dataset, in the form of MBPP, HumanEval, APPS, LiveCodeBench or columns."""
    template, problems, items, unusable = TEMPLATES.get(template, template).replace("{bos}", bos), [], 0, 0
    try:
        if os.path.isfile(path):
            with open(path, encoding="utf-8-sig", newline="\n") as file:
                rows = [json.loads(x) for x in file if x.strip()] if path.endswith("l") else json.load(file)
        else:
            import datasets  # slow to import, and only needed here
            rows = datasets.load_from_disk(path) if os.path.isdir(path) else datasets.load_dataset(*path.split(":", 1))
            rows = rows[split] if isinstance(rows, dict) else rows
        for record in rows:
            items += 1
            names = (columns[0], "question_content", "text", "prompt")
            question = next((record[name] for name in names if name in record), None)
            if not isinstance(question, str) or not question.encode().strip():  # encode: no lone surrogates
                raise ValueError(f"its question is no text: {question!r:.99}")
            label, hint, asserts = read_tests(record, columns[1])
            question, unusable = question + hint, unusable + asserts - len(label["tests"])
            prompt = template.replace("{question}", question)
            problems += [Problem(len(problems), question, json.dumps(label), prompt)] if label["tests"] else []
        assert "{question}" in template, f"no {{question}} in the template {template!r:.99}"
        assert problems, "holds no problem with tests that can be used"
    except Exception as error:  # files, JSON, forms; the datasets library alone has a dozen kinds for "not found"
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise RewardError(f"{path}: item {items}: {reason}; give items of MBPP, ... or columns {columns}") from None
    if unusable:
        print(f"warning: {path}: {unusable} tests cannot be used and are left out, and with them "
              f"{items - len(problems)} of {items} problems", file=sys.stderr)
    return problems


def read_tests(record, column):
    """(a label, what the question must add to name a function, the number of tests before any is left out)."""
    fields = {k: unpack(v) if k in ("input_output", "metadata", "public_test_cases", "private_test_cases")
              and isinstance(v, str) and v else v for k, v in record.items()}
    setup, hint = "\n".join([*(fields.get("test_imports") or []), fields.get("test_setup_code") or ""]), ""
    tests, apps = fields.get("test_list") or fields.get(column), fields.get("input_output") or {}
    name = apps.get("fn_name") or (fields.get("metadata") or {}).get("func_name")
    if "entry_point" in fields:  # HumanEval, whose question names the function
        setup, tests, hint = fields["prompt"], [re.sub(r"\bcandidate\b", fields["entry_point"], fields["test"])], "\n"
    elif apps:  # in some items of APPS each result is the one element of a list
        wrapped = name and all(isinstance(o, list) and len(o) == 1 for o in apps["outputs"])
        tests = [(i, o[0] if wrapped else o) for i, o in zip(apps["inputs"], apps["outputs"], strict=True)]
        tests = tests if name else [["\n".join(text) if isinstance(text, list) else text for text in t] for t in tests]
    elif "public_test_cases" in fields:  # LiveCodeBench
        tests = [(t["input"], t["output"]) for k in ("public", "private") for t in fields[f"{k}_test_cases"]]
        tests = [(map(json.loads, i.split("\n")), json.loads(o)) for i, o in tests] if name else tests
    elif not tests and "input_output" in fields:  # empty, as in some items of APPS, which are of no use
        return {"tests": []}, "", 1
    if name:
        hint = f"\n\n{fields.get('starter_code') or ''}".rstrip()
        name = f"Solution().{name}" if "class Solution" in hint else name
        tests = [f"assert {name}(*{[*i]!r}) == {o!r}" for i, o in tests]
    calls = bool(tests) and isinstance(tests[0], str)
    if not tests or not all(isinstance(text, str) for test in tests for text in ([test] if calls else test)):
        raise ValueError("lacks tests: a list of [input, output] texts, or of asserts")
    if not calls:
        return {"setup": setup, "calls": False, "tests": [(*test, 0) for test in tests]}, "", len(tests)
    asserts = [node.test for test in tests for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Assert)]
    usable = [*filter(None, (split_assert(node, setup) for node in asserts))]
    hint = hint or "".join(f"\n\nIt is called as in {text.removeprefix('not ')}" for text, *_ in usable[:1])
    return {"setup": setup, "calls": True, "tests": usable}, hint, len(asserts)


class OnlyText(pickle.Unpickler):
    """A pickle is a program, unless it may look nothing up: then it is plain data, or refused."""

    def find_class(self, module, name):
        raise ValueError(f"its pickle holds a {module}.{name}, not only text")


def unpack(text):
    """JSON; LiveCodeBench's private tests are a pickle of it as a text, by zlib, in base64."""
    if text.lstrip()[:1] in ("{", "["):
        return json.loads(text)
    return json.loads(OnlyText(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load())


def split_assert(node, setup):
    """(expression, literal, tolerance) of an assert's condition; None where it would need more, or tell the result."""
    tolerance, names = 0, {*dir(builtins), *re.findall(r"\w+", setup)}
    with contextlib.suppress(ValueError, TypeError):
        match node:
            case ast.Compare(value, [ast.Eq() | ast.Is()], [expected]):
                pass
            case ast.Compare(ast.Call(ast.Name("abs"), [ast.BinOp(value, ast.Sub(), expected)]), [ast.Lt()], [limit]):
                tolerance = ast.literal_eval(limit)
            case ast.Call(ast.Attribute(attr="isclose"), [value, expected], options):
                given = {"rel_tol": 1e-9, "abs_tol": 0} | {k.arg: ast.literal_eval(k.value) for k in options}
                tolerance = max(given["abs_tol"], given["rel_tol"] * abs(ast.literal_eval(expected)))
            case ast.Call(ast.Name()):
                value, expected = ast.UnaryOp(ast.Not(), node), ast.Constant(False)  # any true value will do
            case ast.UnaryOp(ast.Not(), ast.Call(ast.Name())):
                value, expected = node, ast.Constant(True)
            case _:
                return None
        names |= {n.func.id for n in ast.walk(value) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        known = all(n.id in names for n in ast.walk(value) if isinstance(n, ast.Name))
        if known and "(" in ast.unparse(value) and not any(isinstance(n, ast.Compare) for n in ast.walk(value)):
            return ast.unparse(value), repr(ast.literal_eval(expected)), tolerance
