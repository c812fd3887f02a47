"""The task countdown: reach a target with given numbers and + - * /.

A record has `nums` and `target`, as in TinyZero's data sets. The answer is an expression in
<answer> tags that uses each number exactly once. A record with a third field, `pick`, is a
miniature: the answer uses exactly `pick` of the numbers, and the last line of the response is the
answer. The laboratory trains a base model for this miniature:

    python tools/base_model.py countdown out/lab/base
    python train.py $(xargs < out/lab/base/flags.txt)

    question  5,9,8,4=17:
    response  8+5=13<      each line is a try, its value, and a comparison with the target
              9+8=17!      the model decides where to stop

If a value is claimed behind the expression, it must be right. The code parses an answer and walks
through the tree. It never evaluates an answer as code. ORZ has no such task.
"""

import ast
import operator
import re
from collections import Counter
from fractions import Fraction
from functools import partial

from nanoorz.records import Unusable, read_file
from reward import last_block, make_problems

TEMPLATES = {
    "mini": "{question}:",
    "orz": "{bos}A conversation between User and Assistant. The user asks a question, and the "
    "Assistant solves it. The assistant first thinks about the reasoning process in the mind and "
    "then provides the user with the answer.\nUser: {question} Show your work in <think> </think> "
    "tags, and return the final expression in <answer> </answer> tags, for example "
    "<answer> (1 + 2) / 3 </answer>.\nAssistant: <think>",
    "plain": "{question}",
    "chat": "{question} Return the final expression in <answer> </answer> tags, for example "
    "<answer> (1 + 2) / 3 </answer>.",
}
SENTENCE = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use + - * / and "
    "must use each number exactly once."
)
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
# A longer expression is wrong. A shorter expression cannot be so deep that the parser fails.
MAX_TEXT = 200  # characters
ARITHMETIC = re.compile(r"[0-9+\-*/() ]+")
# A number has at most 20 digits here, because Python refuses to read very long numbers.
TRY = re.compile(r"(?P<expression>[^=\n]+)=(?P<claim>-?[0-9]{1,20})(?P<verdict>[<>!]?)")


def load_problems(path, template, bos="", columns=("nums", "target"), split="train"):
    """The problems of a file or a data set (nanoorz/records.py).

    columns: the names of the columns with the numbers and with the target.

    A label is {"numbers": whole numbers, "target": a whole number, "pick": how many are used, or
    None}. `template` is a key of TEMPLATES or a text with {question}. Raises UserError.
    """
    records = read_file(path, partial(parse_record, columns=columns), split)
    return make_problems(records, template, TEMPLATES, bos)


def parse_record(record, columns):
    """The question and the label of a record. Raises Unusable."""
    try:
        numbers = record[columns[0]]
        if isinstance(numbers, str):
            # A .csv file has texts, such as "[3, 5]" or "3 5".
            numbers = re.findall(r"[^\s\[\],'\"]+", numbers)
        numbers = [to_integer(number) for number in numbers]
        target = to_integer(record[columns[1]])
        pick = to_integer(record["pick"]) if record.get("pick") else None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise Unusable(f"{type(error).__name__}: {error}") from error
    if len(numbers) < 2 or min(numbers) < 0:
        raise Unusable("fewer than two numbers, or a number below 0")
    if pick is not None and not 2 <= pick <= len(numbers):
        raise Unusable(f"pick {pick} of {len(numbers)} numbers")
    label = {"numbers": numbers, "target": target, "pick": pick}
    if pick is None:
        question = SENTENCE.format(numbers=numbers, target=target)
    else:
        question = ",".join(map(str, numbers)) + f"={target}"
    return {"question": question, "label": label}


def to_integer(value):
    """Raises ValueError if the value is no whole number."""
    number = Fraction(str(value))
    if number.denominator != 1:
        raise ValueError(f"{value} is no whole number")
    return int(number)


def extract_answer(text, label):
    """The text in the last answer tags, or the last line of a response to a miniature, or None."""
    if label["pick"]:
        return text.strip().split("\n")[-1]
    return last_block(text)


def solves(text, label):
    """Is the answer at the end of a finished response right?"""
    answer = extract_answer(text, label)
    if answer is None:
        return False
    expression, _, claim = answer.strip().partition("=")
    value, used = read_expression(expression)
    # Each number is used no more often than it is given.
    if value != label["target"] or not Counter(used) <= Counter(label["numbers"]):
        return False
    if len(used) != (label["pick"] or len(label["numbers"])):
        return False
    return claim.strip().rstrip("<>!").strip() in ("", str(label["target"]))


def read_expression(text):
    """Returns the exact value of an expression and its whole numbers, or (None, [])."""
    if len(text) > MAX_TEXT or not ARITHMETIC.fullmatch(text):
        return None, []
    used = []
    try:
        tree = ast.parse(text.strip(), mode="eval")
        value = read_node(tree.body, used)
    # The text is no expression, has another operation such as **, or divides by zero.
    except (SyntaxError, KeyError, ZeroDivisionError):
        return None, []
    return value, used


def read_node(node, used):
    """Returns the value of a node of the tree, and appends its numbers to `used`."""
    if isinstance(node, ast.Constant):
        used.append(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        raise KeyError(type(node))
    operation = OPERATIONS[type(node.op)]
    left = read_node(node.left, used)
    return operation(left, read_node(node.right, used))


TASKS = ("countdown", "countdown_short", "calculator")  # some variants ask for one of these


class Grader:
    """The interface of reward.Grader. A reward is computed at once, so no reward is ever lost."""

    lost = 0

    def __init__(self, workers=1, answer_form="orz"):
        # There is only one form of answers. train.load_task checks --answer_form.
        self.rewards = {}

    def submit(self, key, text, finish_reason, label):
        """Returns the value of the answer, or None. So 8+9 and 9+8 are the same answer.

        The reward is 1.0 if the response stopped by itself with a right answer, else 0.0.
        """
        stopped = finish_reason == "stop"
        self.rewards[key] = float(stopped and solves(text, label))
        expression = (extract_answer(text, label) or "").partition("=")[0]
        value, _ = read_expression(expression.strip())
        return str(value) if stopped and value is not None else None

    def pending(self, seconds):
        return 0

    def results(self):
        rewards = self.rewards
        self.rewards = {}
        return rewards

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def text_metrics(text):
    """Returns metrics of a response as a search.

    tries: the number of lines with a value. backtracking: 1.0 if there are two tries or more.
    checked: 1.0 if the last try is the only try marked as a hit. slips: the share of tries with a
    wrong value. repetition: the share of tries that stand in the response before.
    """
    tries = [match for match in map(TRY.fullmatch, text.split("\n")) if match]
    verdicts = [match["verdict"] for match in tries]
    slips = 0
    for match in tries:
        value, _ = read_expression(match["expression"])
        slips += value != int(match["claim"])
    count = max(1, len(tries))
    made = {match["expression"] for match in tries}
    is_checked = verdicts[-1:] == ["!"] and verdicts.count("!") == 1
    shares = {"slips": slips / count, "repetition": (len(tries) - len(made)) / count}
    shares |= {"backtracking": float(len(tries) > 1), "checked": float(is_checked)}
    return {"tries": float(len(tries)), **shares}
