"""Reads programming problems and their tests. This file never runs a test.

The problems may have the columns of MBPP, HumanEval, APPS or LiveCodeBench, or two columns:
question and tests. An assert must have one of these forms: value == literal,
math.isclose(value, literal), abs(value - literal) < c, f(x), not f(x). From these forms alone the
expected value can be separated. This value must stay outside of the program's process
(tasks/code.py). Other asserts are left out, and a warning says how many. ORZ has no such task.
"""

import ast
import base64
import builtins
import io
import json
import pickle
import re
import sys
import zlib
from dataclasses import dataclass

from nanoorz import records
from nanoorz.ranks import UserError

TEMPLATES: dict[str, str] = {
    "orz": "{bos}A conversation between User and Assistant. The Assistant first thinks about the "
    "reasoning process and then provides the User with the answer: <think> reasoning process here "
    "</think> <answer> answer here </answer>. User: The answer must be a Python program, or the "
    "function asked for, in one ```python block.\nThis is the problem:\n{question}\n\n"
    "Assistant: <think>",
    "plain": "{question}",
    "chat": "{question}\n\nThe answer must be a Python program, or the function asked for, in one "
    "```python block inside <answer> </answer> tags.",
}
# In APPS and LiveCodeBench the value of these columns may be a text that holds JSON.
PACKED_COLUMNS = ("input_output", "metadata", "public_test_cases", "private_test_cases")


@dataclass(frozen=True)
class Problem:
    index: int  # position among the problems that are kept
    question: str
    # The label is the JSON of a dict with these keys.
    # "setup": code that runs before the program
    # "calls": a bool: are the tests expressions?
    # "json": a bool: were the expected values JSON?
    # "tests": a list of [input or expression, expected output or literal, tolerance]
    label: str
    prompt: str  # the template with the question in it
    # train.py fills in the tokens of the prompt.
    prompt_ids: list[int] | None = None


def load_problems(
    path: str, template: str, bos: str = "", columns=("question", "tests"), split: str = "train"
) -> list[Problem]:
    """Returns the problems with usable tests, from a file or a data set (see reward.py).

    `template` is a key of TEMPLATES or a text with {question}. Raises UserError, which names the
    file, the item (counted from 1) and what is missing or wrong in this item.
    """
    template = TEMPLATES.get(template, template).replace("{bos}", bos)
    if "{question}" not in template:
        names = ", ".join(TEMPLATES)
        raise UserError(f"template {template!r}: give one of {names}, or a text with {{question}}")
    problems = []
    item = 0
    lost_tests = 0
    try:
        for record in load_rows(path, split):
            item += 1
            question, label, test_count = parse_record(record, columns)
            lost_tests += test_count - len(label["tests"])
            if label["tests"]:
                prompt = template.replace("{question}", question)
                problem = Problem(len(problems), question, json.dumps(label), prompt)
                problems.append(problem)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    # Many errors are possible: the datasets library alone has a dozen classes for "not found".
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        hint = f"give items of MBPP, HumanEval, APPS or LiveCodeBench, or columns {columns}"
        raise UserError(f"{path}: item {item}: {reason}; {hint}") from None
    if not problems:
        raise UserError(f"{path}: holds no problem with tests that can be used; give another file")
    if lost_tests:
        lost = f"{lost_tests} tests cannot be used and are left out"
        lost += f"; {item - len(problems)} of {item} problems have no usable test and are left out"
        print(f"warning: {path}: {lost}", file=sys.stderr)
    return problems


def load_rows(path: str, split: str):
    """Returns the records of a file or of a data set. Raises UserError if the file is absent."""
    unit, rows = records.load_rows(path, split)
    if unit == "line":
        return [json.loads(row) for row in rows if row.strip()]
    return rows


def parse_record(record: dict, columns) -> tuple[str, dict, int]:
    """Returns (question, label, number of tests before any test was left out) of an item."""
    names = (columns[0], "question_content", "text", "prompt")
    question = next((record[name] for name in names if name in record), None)
    # encode() raises an error if a text has half of a surrogate pair.
    if not isinstance(question, str) or not question.encode().strip():
        raise ValueError(f"the question is not a text: {question!r:.99}")
    label, hint, test_count = parse_tests(record, columns[1])
    return question + hint, label, test_count


def parse_tests(record: dict, column: str) -> tuple[dict, str, int]:
    """Returns (label, hint, number of tests) of an item.

    The hint is a text that names the function. It is added to the question. A test is a text with
    an assert, or a pair (input, output) of a program.
    """
    fields = unpack_fields(record)
    if "entry_point" in fields:
        return humaneval_tests(fields)
    setup_lines = [*(fields.get("test_imports") or []), fields.get("test_setup_code") or ""]
    setup = "\n".join(setup_lines)
    tests = fields.get("test_list") or fields.get(column) or []
    # In a file that merges data sets, an item has empty columns of the other data sets.
    apps = fields.get("input_output") or {}
    function = apps.get("fn_name") or (fields.get("metadata") or {}).get("func_name")
    if apps:
        tests = apps_tests(apps, function)
    elif "public_test_cases" in fields:
        tests = livecodebench_tests(fields, function)
    elif not tests and "input_output" in fields:
        # Some items of APPS have no tests. Such an item is left out.
        return {"tests": []}, "", 1
    hint = ""
    if function:
        hint = f"\n\n{fields.get('starter_code') or ''}".rstrip()
        if "class Solution" in hint:
            function = f"Solution().{function}"
        tests = [f"assert {function}(*{[*values]!r}) == {result!r}" for values, result in tests]
    if not are_texts(tests):
        raise ValueError(
            "the item has no tests; give a list of [input, output] texts or of asserts"
        )
    if isinstance(tests[0], str):
        label, hint, test_count = label_of_asserts(tests, setup, hint)
        label["json"] = bool(function)
        return label, hint, test_count
    tests = [(*test, 0) for test in tests]
    return {"setup": setup, "calls": False, "json": False, "tests": tests}, "", len(tests)


def unpack_fields(record: dict) -> dict:
    fields = dict(record)
    for name in PACKED_COLUMNS:
        value = record.get(name)
        if isinstance(value, str) and value:
            fields[name] = unpack(value)
    return fields


def unpack(text: str):
    """Returns the value of a JSON text, or of LiveCodeBench's private tests.

    LiveCodeBench's private tests are JSON in a pickle, compressed by zlib, in base64.
    """
    if text.lstrip().startswith(("{", "[")):
        return json.loads(text)
    data = zlib.decompress(base64.b64decode(text))
    return json.loads(OnlyText(io.BytesIO(data)).load())


class OnlyText(pickle.Unpickler):
    """Reads a pickle of plain data. A pickle that imports a name could run code and is refused."""

    def find_class(self, module, name):
        raise ValueError(f"the pickle holds a {module}.{name}; only text is allowed")


def humaneval_tests(fields: dict) -> tuple[dict, str, int]:
    """Returns the same as parse_tests. The question is the start of the program."""
    test = re.sub(r"\bcandidate\b", fields["entry_point"], fields["test"])
    return label_of_asserts([test], setup=fields["prompt"], hint="\n")


def apps_tests(apps: dict, function: str | None) -> list:
    """Returns pairs: (arguments, result) of calls if a function is given, else (input, output)."""
    inputs = apps["inputs"]
    outputs = apps["outputs"]
    if function:
        # In some items each result is in a list of length 1.
        if all(isinstance(output, list) and len(output) == 1 for output in outputs):
            outputs = [output[0] for output in outputs]
    else:
        inputs = [join_lines(text) for text in inputs]
        outputs = [join_lines(text) for text in outputs]
    return list(zip(inputs, outputs, strict=True))


def join_lines(text):
    return "\n".join(text) if isinstance(text, list) else text


def livecodebench_tests(fields: dict, function: str | None) -> list:
    """Returns the same as apps_tests. A test has one argument as JSON in each line."""
    cases = [*fields["public_test_cases"], *fields["private_test_cases"]]
    tests = [(case["input"], case["output"]) for case in cases]
    if not function:
        return tests
    calls = []
    for text, output in tests:
        arguments = [json.loads(line) for line in text.split("\n")]
        calls.append((arguments, json.loads(output)))
    return calls


def are_texts(tests: list) -> bool:
    """Returns whether there are tests, and all of them are texts or all are pairs of texts."""
    if not tests:
        return False
    if isinstance(tests[0], str):
        return all(isinstance(test, str) for test in tests)
    return all(isinstance(text, str) for test in tests for text in test)


def label_of_asserts(tests: list[str], setup: str, hint: str) -> tuple[dict, str, int]:
    """Returns the same as parse_tests. If the hint is empty, the first call becomes the hint."""
    nodes = [node for test in tests for node in ast.walk(ast.parse(test))]
    asserts = [node for node in nodes if isinstance(node, ast.Assert)]
    parts = [split_assert(node.test, setup) for node in asserts]
    usable = [part for part in parts if part is not None]
    if usable and not hint:
        expression, _, _ = usable[0]
        hint = f"\n\nIt is called as in {expression.removeprefix('not ')}"
    label = {"setup": setup, "calls": True, "json": False, "tests": usable}
    return label, hint, len(asserts)


def split_assert(condition, setup: str) -> tuple[str, str, float] | None:
    """Returns (expression, literal, tolerance) of an assert's condition, or None.

    The result is None in these cases: the expected value is not a literal; the expression has no
    call; the expression needs a name that is defined elsewhere; the expression holds a comparison,
    which could show the expected value to the program.
    """
    try:
        parts = match_condition(condition)
        if parts is None:
            return None
        value, expected, tolerance = parts
        literal = repr(ast.literal_eval(expected))
    except (ValueError, TypeError):
        return None
    expression = ast.unparse(value)
    nodes = list(ast.walk(value))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    functions = {function.id for function in calls if isinstance(function, ast.Name)}
    known = {*dir(builtins), *re.findall(r"\w+", setup), *functions}
    tells = any(isinstance(node, ast.Compare) for node in nodes)
    if names <= known and "(" in expression and not tells:
        return expression, literal, tolerance
    return None


def match_condition(condition) -> tuple | None:
    """Returns (value, expected, tolerance), two AST nodes and a number, or None if no form fits.

    Raises ValueError or TypeError if a tolerance is not a literal.
    """
    match condition:
        case ast.Compare(value, [ast.Eq() | ast.Is()], [expected]):
            return value, expected, 0
        case ast.Compare(
            ast.Call(ast.Name("abs"), [ast.BinOp(value, ast.Sub(), expected)]), [ast.Lt()], [limit]
        ):
            return value, expected, ast.literal_eval(limit)
        case ast.Call(ast.Attribute(attr="isclose"), [value, expected], options):
            given = {option.arg: ast.literal_eval(option.value) for option in options}
            relative = given.get("rel_tol", 1e-9) * abs(ast.literal_eval(expected))
            return value, expected, max(given.get("abs_tol", 0), relative)
        # `assert f(x)` accepts each true value. So the test compares `not f(x)` with False.
        case ast.Call(ast.Name()):
            return ast.UnaryOp(ast.Not(), condition), ast.Constant(False), 0
        case ast.UnaryOp(ast.Not(), ast.Call(ast.Name())):
            return condition, ast.Constant(True), 0
    return None
