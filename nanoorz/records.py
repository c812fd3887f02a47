r"""Reads files of problems: where a record has its question and its label, the right answer.

Public sets lay out their records in many ways. QUESTIONS and LABELS list the known paths, and
docs/data.md names the sets. A record that cannot be used is left out, and a line on stderr says
how many and why. Other tasks have records of other forms, and give `read_file` their own function.
"""

import ast
import contextlib
import csv
import gzip
import io
import json
import os
import re
import sys
import urllib.parse
from decimal import Decimal
from pathlib import Path

from nanoorz.equal import quick_verdict
from nanoorz.ranks import UserError, one_line

# A path leads through objects and lists. The first path that leads to a value is used.
QUESTIONS = (
    "0.value",  # ORZ's training data: a list of two turns
    "question",  # GSM8K
    "problem",  # MATH, MATH-500, DeepScaleR, Big-Math, NuminaMath, OpenR1-Math
    "prompt",  # verl's layout: DAPO-Math, Skywork-OR1; ORZ's evaluation data
    "messages",  # RLVR-MATH
    "conversations",
)
LABELS = (
    "1.ground_truth.value",  # ORZ's training data
    "final_answer",  # ORZ's evaluation data
    "reward_model.ground_truth",  # verl's layout
    "ground_truth",  # RLVR-MATH
    "expected_answer",  # OpenMath
    "answer",  # GSM8K, MATH-500, DeepScaleR, Big-Math, NuminaMath, OpenR1-Math
    "solution",  # MATH
    "messages",
    "conversations",
)
# These hold a solution, in which the label is marked. GSM8K's `answer` holds one too, but other
# sets have the label alone under this name.
SOLUTIONS = ("solution", "messages", "conversations")


class Unusable(Exception):
    """A record cannot be used. The text is the reason, as in "3 with no JSON"."""


class Number(float):
    """A number of a JSON file with a dot or an exponent. Its text stays as written: 1.10 or 1e3."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text


# ---- files ---------------------------------------------------------------------------------------


def split_path(path) -> tuple[str, dict]:
    """Splits FILE?split=test&columns=question,answer into FILE and options of `load_problems`.

    Raises UserError.
    """
    file, _, query = path.partition("?")
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    # A file has no splits. A data set that was saved without splits has a state.json.
    has_none = Path(file).is_file() or Path(file, "state.json").is_file()
    known = {"columns"} if has_none else {"columns", "split"}
    unknown = ", ".join(options.keys() - known)
    if unknown:
        raise UserError(f"{path}: it has no {unknown}; choose {' or '.join(sorted(known))}")
    if "columns" in options:
        options["columns"] = tuple(options["columns"].split(","))
        if len(options["columns"]) != 2:
            raise UserError(f"{path}: name two columns, as in FILE?columns=prompt,solution")
    return file, options


def read_file(path, parse_record, split="train") -> list[dict]:
    """What parse_record returns for each record of a file or a data set.

    path: a JSON, JSONL, CSV or TSV file (also .gz), a Parquet file, a data set's folder, or its
    "name:config" on the hub. parse_record(record) returns a dict with "question" and "label", and
    perhaps "system", or raises Unusable. Raises UserError, also if more records are left out than
    read.
    """
    rows = load_rows(path, split)
    records = []
    left_out = {}  # {reason: numbers of records, counted from 1}
    for number, row in enumerate(rows, start=1):
        try:
            records.append(parse_record(parse_row(row)))
        except Unusable as error:
            left_out.setdefault(str(error), []).append(number)
    if not rows:
        raise UserError(f"{path} holds no problems")
    if left_out:
        reasons = []
        for reason, numbers in sorted(left_out.items(), key=lambda item: -len(item[1]))[:5]:
            reasons.append(f"{len(numbers)} with {reason} (first: record {numbers[0]})")
        if len(left_out) > 5:
            reasons.append("others")
        count = len(rows) - len(records)
        told = f"{path}: {count} of {len(rows)} records are left out: {'; '.join(reasons)}"
        if count > len(records):
            raise UserError(told)
        warn(told)
    return records


def warn(text):
    """Prints a line on stderr, on rank 0 alone. Without a launcher RANK is not set."""
    if os.environ.get("RANK", "0") == "0":
        print(f"WARNING: {text}", file=sys.stderr)


def load_rows(path, split) -> list:
    """The rows of a file or a data set. Raises UserError."""
    try:
        return load_file(path) if os.path.isfile(path) else load_dataset(path, split)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    # The datasets library alone has a dozen classes of errors for "not found".
    except Exception as error:
        told = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{path} cannot be read: {told}") from error


def load_file(path) -> list:
    """The rows of a table, the items of a JSON list, or lines of JSON as texts."""
    suffix = Path(path.lower().removesuffix(".gz")).suffix
    if suffix == ".parquet":
        import pyarrow.parquet  # slow, and seldom needed

        return pyarrow.parquet.ParquetFile(path).read().to_pylist()
    open_file = gzip.open if path.lower().endswith(".gz") else open
    with open_file(path, "rb") as file:
        content = file.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{error}; save it in UTF-8 (Windows writes cp1252 or UTF-16)") from None
    if suffix in (".csv", ".tsv"):
        return read_table(text)
    # Some files called .json have an object on each line. Others have one list, in [].
    if suffix == ".jsonl" or text.lstrip().startswith("{"):
        # Only \n ends a line, because a question may hold other ends of line.
        return [line for line in text.split("\n") if line.strip()]
    return list(json.loads(text, parse_float=Number))


def load_dataset(path, split) -> list:
    """The rows of a data set: a folder of save_to_disk, a folder of files, or a name of the hub."""
    names_file = re.search(r"\.(jsonl?|csv|tsv|parquet)(\.gz)?$", path, re.IGNORECASE)
    if names_file and not os.path.isdir(path):
        raise UserError("no such file")
    import datasets  # slow, and seldom needed

    name, *config = path.split(":", 1)
    try:
        parts = datasets.load_from_disk(path)
    except FileNotFoundError:
        builder = datasets.load_dataset_builder(name, *config)
        is_folder = os.path.isdir(name)
        if builder.name == "csv" and not is_folder:
            raise UserError("download its .csv files, and give them one by one") from None
        # The library turns the labels 007 and NA of a table into 7 and None. So it only lists the
        # files of a folder, and load_rows reads them.
        parts = builder.config.data_files if is_folder else datasets.load_dataset(name, *config)
    if isinstance(parts, datasets.Dataset):  # It was saved without splits.
        return list(parts)
    if split not in parts:
        raise UserError(f"it has no split {split!r}, but {', '.join(map(str, parts))}")
    if isinstance(parts, datasets.DatasetDict):
        return list(parts[split])
    return [row for file in parts[split] for row in load_rows(file, split)]


def read_table(text) -> list[dict]:
    """The rows of a CSV or TSV file. Each cell is a text, so 007 and NA stay as written."""
    # Where a comma is the decimal sign, programs separate the columns by semicolons.
    separator = max(",;\t", key=text.partition("\n")[0].count)
    csv.field_size_limit(1 << 31)  # By default a cell of 128 KiB is an error.
    # strict: a quote that does not close would swallow the rows behind it.
    reader = csv.DictReader(io.StringIO(text), delimiter=separator, strict=True)
    try:
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        names = [name for name in reader.fieldnames if name]
        if len(set(names)) < len(names):
            raise UserError(f"two columns have one name: {', '.join(names)}")
        # The last rows of a sheet may be empty.
        return [row for row in reader if any(row.values())]
    except csv.Error as error:
        where = f"line {reader.reader.line_num}: {error}"
        raise UserError(f"{where}; a quote inside of quotes is written twice") from None


def parse_row(row):
    """The record of a row. Raises Unusable."""
    if isinstance(row, str):
        try:
            return json.loads(row, parse_float=Number)
        except (ValueError, RecursionError):
            raise Unusable("no JSON") from None
    # csv puts surplus cells under None.
    if isinstance(row, dict) and any(row.pop(None, ())):
        raise Unusable("more cells than columns: a comma without quotes?")
    return row


# ---- records -------------------------------------------------------------------------------------


# Columns that hold a part of the question: choices, a text, a picture.
PARTS_OF_QUESTIONS = re.compile(
    "choices?|options?.*|op[a-d]|a|distractors?.*|context|passage|body|story|article|table|images?.*"
    "|picture|figure"
)


def parse_problem(record, columns=None) -> dict:
    """The question, the label and the system turn (a text or "") of a record, and its two paths.

    columns: the paths of question and label, or None. Raises Unusable.
    """
    if isinstance(record, list) and len(record) == 2:  # ORZ's two turns
        record = dict(zip("01", record))
    if not isinstance(record, dict):
        raise Unusable("no object with columns")
    names = ", ".join(record)
    if columns:
        question_paths, label_paths = [columns[0]], [columns[1]]
    else:
        question_paths, label_paths = QUESTIONS, LABELS
        record = {name.lower(): value for name, value in record.items()} | record
    question_path, question = find_first(record, question_paths)
    label_path, label = find_first(record, label_paths)
    for part, value in (("question", question), ("label", label)):
        if value is None:
            told = "FILE?columns=QUESTION,LABEL names two columns"
            raise Unusable(f"no {part} in the columns {names:.300}; {told}")
    for name, value in record.items():
        if value and not columns and PARTS_OF_QUESTIONS.fullmatch(name):
            raise Unusable(f"a column {name}; write it into the question, and name the columns")
    question, system = parse_question(question)
    # In a column that the user names, a text without a mark is the label.
    label = parse_label(label, is_solution=not columns and label_path in SOLUTIONS)
    paths = (question_path, label_path)
    return {"question": question, "label": label, "system": system, "paths": paths}


def find_first(record, paths):
    """(path, value) of the first path that leads to a value, or (None, None)."""
    for path in paths:
        value = find(record, path)
        if value not in (None, ""):
            return path, value
    return None, None


def find(record, path):
    """What stands at a path such as reward_model.ground_truth, or None."""
    # A column of a table may have a dot in its name.
    if isinstance(record, dict) and path in record:
        return record[path]
    for name in path.split("."):
        # A column of a table may hold the text of an object.
        record = parse_text(record)
        if isinstance(record, list) and name.isdecimal() and int(name) < len(record):
            record = record[int(name)]
        elif isinstance(record, dict):
            record = record.get(name)
        else:
            return None
    return record


# How a list of texts, a list of objects or an object begins. [1,2] is an interval, {1,2} a set.
OBJECTS = re.compile(r"""\s*(\[\s*\{|\[|\{)\s*["']""")


def parse_text(value):
    """The list or the object that a text holds, as JSON or as Python writes it. Else the value.

    Raises Unusable.
    """
    if not isinstance(value, str) or not OBJECTS.match(value):
        return value
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(value, parse_float=Number)
    # numpy writes two texts as ['1' '2']. literal_eval would read ['12'].
    if not re.match(r"""\s*\[\s*['"].*['"]\s+['"]""", value, re.DOTALL):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            found = ast.literal_eval(value.strip())
            return found if isinstance(found, list | dict) else value
    if value.lstrip().startswith("["):
        raise Unusable("a list that cannot be read")
    return value


NO_TEXT = re.compile(
    # JSON reads "\frac" with one backslash as a form feed and "rac", "\times" as a tab and "imes".
    "[\x00-\x08\x0b\x0c\x0e-\x1f]|\t(?=imes|heta|ext{|frac|riangle|ilde|(?:an|au)\\b)"
    "|\r(?=ho|ight|angle|floor|ceil)|\n(?=abla|(?:eq|mid|ot|otin|leq|geq)\\b)"
    # Half of a surrogate pair: tokenizers fail.
    "|[\ud800-\udfff]"
)


def parse_question(value) -> tuple[str, str]:
    """(question, text of the system turn or ""). Raises Unusable."""
    if isinstance(value, str) and re.match(r"\s*\[\s*\{", value):
        value = parse_text(value)  # In a table a conversation is a text.
    turns = list_turns(value) if isinstance(value, list) else [("user", value)]
    system = "\n".join(text for role, text in turns if role in ("system", "developer"))
    others = [(role, text) for role, text in turns if role not in ("system", "developer")]
    if [role in ("user", "human") for role, _ in others].count(True) != 1:
        raise Unusable("no turn of a user, or several")
    role, question = others[0]
    if role not in ("user", "human"):
        raise Unusable(f"a turn of {role} before the question")
    # A question "7" is the number of a question in a list.
    if not isinstance(question, str) or not question.strip() or question.strip().isdecimal():
        raise Unusable("no text as question")
    if NO_TEXT.search(system + question):
        raise Unusable("a character in the question that is no text")
    if re.search(r"!\[[^\]]*\]\(|<image|<img|\\includegraphics", question):
        raise Unusable("a picture in the question")
    return question, system


def list_turns(value) -> list[tuple[str, str]]:
    """(role, text) of each turn of a conversation. Raises Unusable."""
    turns = []
    for turn in value:
        if not isinstance(turn, dict):
            raise Unusable("a list that is no conversation")
        role = turn.get("role") or turn.get("from")
        parts = turn.get("content") or turn.get("value")
        # A turn may have several parts, such as a text and an image.
        text = ""
        for part in parts if isinstance(parts, list) else [{"text": parts}]:
            is_text = isinstance(part, dict) and part.get("type", "text") == "text"
            if not is_text or not isinstance(part.get("text"), str):
                raise Unusable("a turn that is not text alone")
            text += part["text"]
        turns.append((str(role).lower(), text))
    return turns


# What stands in place of a missing answer. The last form is a spreadsheet's error: #DIV/0! or #N/A.
NO_ANSWER = re.compile(
    r"proof|not ?found|no answer|not available|see figure|nan|none|null|n/a|<na>|-?inf|tbd"
    r"|\?|\[\]|#[a-z0/]+[!?a]",
    re.IGNORECASE,
)
BLANKS = " \n\xa0\u200b\ufeff"


def parse_label(value, is_solution=False) -> str:
    r"""The label of a record, as one line of text. Raises Unusable.

    MATH puts the label into the last \boxed{} of the worked solution. GSM8K puts it behind the
    solution: ... #### 18. is_solution: the value must have one of these two marks.
    """
    text = to_text(value)
    label = last_box(text)
    # Some solutions of MATH have \fbox.
    last_start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if last_start >= 0 and last_box(text[last_start:]) is None:
        raise Unusable(r"a \boxed without a closed {}")
    if label is None:
        solution, has_hashes, label = text.rpartition("####")
        if "####" in solution:
            raise Unusable("#### in several places")
        if is_solution and not has_hashes:
            raise Unusable(r"a solution without \boxed{} and without ####")
    label = label.rstrip(BLANKS + "\r")
    # At its start a line break may be the \n of \nabla.
    if NO_TEXT.search(label) or "\t" in label or "\r" in label:
        raise Unusable("a character in the label that is no text")
    label = label.lstrip(BLANKS)
    if not label or NO_ANSWER.fullmatch(label):
        raise Unusable(f"the label {label!r}")
    if "\n" in label:
        raise Unusable("a label of several lines")
    return label


def to_text(value) -> str:
    """The text of a label or of a solution. Raises Unusable."""
    value = parse_text(value)
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        # The last turn of a conversation has the solution.
        role, value = list_turns(value)[-1]
        if role not in ("assistant", "gpt", "model"):
            raise Unusable("a conversation that does not end with a solution")
    if isinstance(value, list) and len(value) == 1:
        [value] = value
    if isinstance(value, bool):
        return str(value).lower()  # as JSON writes it
    if type(value) is float and abs(value) > 1 << 53:
        raise Unusable("a number that has lost digits")
    if not isinstance(value, str | int | float | Decimal):
        raise Unusable(f"a label of the type {type(value).__name__}")
    return str(value)


# ---- boxes ---------------------------------------------------------------------------------------

# \boxed{    \fbox {    {    }    a sign behind a \, such as    \}    but not the box of    \\boxed{
BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox) *\{)|\\(?!\\(?:boxed|fbox) *\{).|[{}]", re.DOTALL)
# What may separate the boxes of a list: \boxed{3}, \boxed{5}    x=\boxed{3} and $y=\boxed{5}$
SEPARATOR = re.compile(
    # A comma, a semicolon, and    or    \text{ and }
    r"[\s$]*(?:,|;|(?:,\s*)?(?:\\text\{\s*)?(?:and|or)\b(?:\s*\})?)[\s$]*"
    # The name of the next value: x_1 =
    r"(?:[A-Za-z](?:_\w)?\s*=\s*)?"
)


def last_box(text) -> str | None:
    r"""The content of the last box that is closed, or a list: \boxed{3}, \boxed{5} is 3, 5.

    The last box is the one that begins last. So of nested boxes the inner one is the answer. Boxes
    are a list if only a comma, "and" or "or" separates them. If their contents are equal, the last
    box is the answer: \boxed{72}, or \boxed{72\text{ clips}}
    """
    opened = []
    boxes = []  # (start, start of the content, end of the content) of each closed box
    for brace in BRACE.finditer(text):
        if brace["box"] or brace[0] == "{":
            opened.append(brace)
        elif brace[0] == "}" and opened:
            box = opened.pop()
            if box["box"]:
                boxes.append((box.start(), box.end(), brace.start()))
    contents = []
    next_start = len(text)
    for start, content, end in sorted(boxes, reverse=True):
        if contents and not SEPARATOR.fullmatch(text, end + 1, next_start):
            break
        contents.append(text[content:end])
        next_start = start
    others = set(contents[1:])
    if contents and len(others) < 8 and all(quick_verdict(other, contents[0]) for other in others):
        return contents[0]
    return ", ".join(reversed(contents)) or None
