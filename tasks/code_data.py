"""Reads programming problems and their tests. This file never runs a test.

A record has the columns of HumanEval, MBPP or APPS, or `question` and `tests`. A test is a pair of
input and expected output, or an assert of one of these forms: value == literal, math.isclose(value,
literal), abs(value - literal) < c, f(x), not f(x). From these forms alone the expected value can be
separated. This value must stay outside of the jail (tasks/code.py). Other asserts are left out, and
a warning says how many.
"""

import ast
import builtins
import json
import re
from functools import partial

from nanoorz.ranks import one_line
from nanoorz.records import Unusable, parse_question, read_file, warn
from reward import make_problems

TEMPLATES = {
    "orz": "{bos}A conversation between User and Assistant. The Assistant first thinks about the "
    "reasoning process and then provides the User with the answer: <think> reasoning process here "
    "</think> <answer> answer here </answer>. User: The answer must be a Python program, or the "
    "function asked for, in one ```python block.\nThis is the problem:\n{question}\n\n"
    "Assistant: <think>",
    "plain": "{question}",
    "chat": "{question}\n\nThe answer must be a Python program, or the function asked for, in one "
    "```python block inside <answer> </answer> tags.",
}


def load_problems(path, template, bos="", columns=("question", "tests"), split="train"):
    """The problems with usable tests, from a file or a data set (nanoorz/records.py).

    A label is a dict. before, after: code that runs around the program. calls: are the tests calls?
    json: were the expected values JSON? listed: is each of them a list of one value? tests: a list
    of (input or expression, expected output or literal, tolerance). `template` is a key of
    TEMPLATES or a text with {question}. Raises UserError.
    """
    records = read_file(path, partial(parse_record, columns=columns), split)
    lost = sum(record["lost_tests"] for record in records)
    if lost:
        warn(f"{path}: {lost} tests cannot be used and are left out")
    return make_problems(records, template, TEMPLATES, bos)


def parse_record(record, columns):
    """The question and the label of a record, and how many tests are left out. Raises Unusable."""
    try:
        # HumanEval and MBPP's `sanitized` have a prompt, and MBPP's `full` has a text.
        names = (columns[0], "text", "prompt")
        question = next((record[name] for name in names if record.get(name)), None)
        question, _ = parse_question(question)
        label, hint = parse_tests(record, columns[1])
        usable = [test for test in label["tests"] if test and is_short(test)]
    except Unusable:
        raise
    # A test that is no Python, a missing column: json and ast have many classes of errors.
    except Exception as error:
        raise Unusable(f"{type(error).__name__}: {one_line(error)}") from error
    if not usable:
        raise Unusable("no usable test")
    lost_tests = len(label["tests"]) - len(usable)
    label["tests"] = usable
    if hint is None:
        hint = f"\n\nIt is called as in {usable[0][0].removeprefix('not ')}"
    return {"question": question + hint, "label": label, "lost_tests": lost_tests}


def is_short(test):
    """In the jail no file, and so no input and no output, is longer than 8 MB."""
    return max(len(test[0].encode()), len(test[1].encode())) < 8 << 20


def parse_tests(record, column):
    """(label, hint). A test that cannot be used is None in the label. The hint is a text to add to
    the question, or None: then the first test says how the function is called.
    """
    tests = record.get(column) or record.get("test_list")
    # In a file that merges data sets, the columns of the other data sets are empty.
    if not tests and record.get("entry_point"):
        # HumanEval. The question is the start of the program, so it needs no hint.
        test = re.sub(r"\bcandidate\b", record["entry_point"], record["test"])
        return label_of_asserts([test], before=record["prompt"]), "\n"
    if not tests and record.get("input_output"):
        return parse_apps(record)
    if isinstance(tests, str):
        tests = json.loads(tests)  # In a table a list is a text.
    match tests:
        case [str(), *_]:
            # MBPP. Some records have code to run behind the program, whose classes it uses.
            before = "\n".join(record.get("test_imports") or [])
            after = record.get("test_setup_code") or ""
            return label_of_asserts(tests, before, after), None
        case [[str(), str()], *_]:
            return label_of_pairs(tests), ""
    raise Unusable("no tests of a known form")


def parse_apps(record):
    """The same as parse_tests, of a record of APPS."""
    apps = record["input_output"]
    if isinstance(apps, str):
        apps = json.loads(apps)
    pairs = list(zip(apps["inputs"], apps["outputs"], strict=True))
    function = apps.get("fn_name")
    if not function:
        # Some items have a text as a list of lines.
        return label_of_pairs([[join_lines(text) for text in pair] for pair in pairs]), ""
    start = record.get("starter_code") or ""
    if "class Solution" in start:
        function = f"Solution().{function}"
    if not all(isinstance(values, list) for values, _ in pairs):
        raise Unusable("arguments that are no list")
    tests = [(f"{function}(*{values!r})", repr(result), 0) for values, result in pairs]
    # The judge of APPS then takes the value without its list, too.
    is_listed = all(isinstance(result, list) and len(result) == 1 for _, result in pairs)
    label = make_label(tests, calls=True, json=True, listed=is_listed)
    return label, f"\n\n{start.rstrip()}" if start else None


def join_lines(text):
    return "\n".join(text) if isinstance(text, list) else text


def make_label(tests, **changes):
    """The label that `load_problems` describes."""
    label = {"before": "", "after": "", "calls": False, "json": False, "listed": False}
    return label | changes | {"tests": tests}


def label_of_pairs(pairs):
    """The label of pairs of an input and an expected output."""
    tests = []
    for text, output in pairs:
        if not isinstance(text, str) or not isinstance(output, str):
            raise Unusable("a test that is no pair of texts")
        tests.append((text, output, 0))
    return make_label(tests)


def label_of_asserts(tests, before="", after=""):
    """The label of asserts. before, after: code that runs around the program."""
    trees = [ast.parse(test) for test in tests]
    asserts = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    # The asserts alone run in the jail. So they cannot use a name that a test defines.
    own_names = {name for tree in trees for name in find_names(tree)}
    known = {*dir(builtins), *find_names(ast.parse(f"{before}\n{after}"))} - own_names
    tests = [split_assert(node.test, known, own_names) for node in asserts]
    return make_label(tests, before=before, after=after, calls=True)


def split_assert(condition, known, unknown):
    """(expression, literal, tolerance) of an assert's condition, or None.

    The result is None in these cases: the expected value is not a literal; the expression has no
    call; it needs a name that is not known; it could show the expected value to the program,
    because it calls two functions of the program, as in same(f(2), [4]), or because an operator or
    a comparison follows the call, as in f(2) - 4.
    """
    try:
        parts = match_condition(condition)
        if parts is None:
            return None
        value, expected, tolerance = parts
        literal = read_literal(expected)
    except (ValueError, TypeError):
        return None
    nodes = list(ast.walk(value))
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    functions = [getattr(call, "id", None) or getattr(call, "attr", "") for call in calls]
    functions = [name for name in functions if name not in dir(builtins)]  # of the program
    # A comprehension and a lambda define their own names.
    own = find_names(value) | {node.arg for node in nodes if isinstance(node, ast.arg)}
    defined = known | own | ({*functions} - unknown)
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    shows = any(isinstance(node, ast.Compare | ast.BinOp) and has_call(node) for node in nodes)
    if not calls or len(functions) > 1 or shows or not names <= defined:
        return None
    return ast.unparse(value), literal, tolerance


def has_call(tree):
    return any(isinstance(node, ast.Call) for node in ast.walk(tree))


def read_literal(node) -> str:
    """The text of a literal, or of set(literal), which MBPP has often.

    The text is the same in each process, which the repr of a set is not. Raises ValueError or
    TypeError.
    """
    match node:
        case ast.Call(ast.Name("set"), [members], []):
            texts = sorted(repr(member) for member in set(ast.literal_eval(members)))
            return f"{{{', '.join(texts)}}}" if texts else "set()"
    ast.literal_eval(node)
    return ast.unparse(node)


def find_names(tree):
    """The names that this code defines or imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def match_condition(condition):
    """(value, expected, tolerance), two AST nodes and a number, or None if no form fits.

    Raises ValueError or TypeError if a tolerance is not a literal.
    """
    match condition:
        case ast.Compare(value, [ast.Eq() | ast.Is()], [expected]):
            return value, expected, 0
        case ast.Compare(
            ast.Call(ast.Name("abs"), [ast.BinOp(value, ast.Sub(), expected)]), [ast.Lt()], [limit]
        ):
            return value, expected, ast.literal_eval(limit)
        case ast.Call(
            ast.Attribute(attr="isclose") | ast.Name("isclose"), [value, expected], options
        ):
            given = {option.arg: ast.literal_eval(option.value) for option in options}
            relative = given.get("rel_tol", 1e-9) * abs(ast.literal_eval(expected))
            return value, expected, max(given.get("abs_tol", 0), relative)
        # `assert f(x)` accepts each true value. So the test compares `not f(x)` with False. With
        # True it is the test of `assert not f(x)`: the expression does not tell the answer.
        case ast.Call(ast.Name()):
            return ast.UnaryOp(ast.Not(), condition), ast.Constant(False), 0
        case ast.UnaryOp(ast.Not(), ast.Call(ast.Name())):
            return condition, ast.Constant(True), 0
    return None
