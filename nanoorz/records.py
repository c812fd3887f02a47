"""Reads the records of a data set: where a record has its question and its label.

Public sets lay out their records in many ways. QUESTIONS and LABELS are the table of them, and
docs/rewards.md names the sets. A record without a question or a label is left out and counted.
reward.py says what a label is.
"""

import ast
import contextlib
import csv
import gzip
import io
import json
import os
import urllib.parse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from nanoorz.ranks import UserError, one_line

# The first path that a record has is used. A path leads through objects and lists.
QUESTIONS = (
    "0.value",  # ORZ's training data: a list of two turns
    "question",  # GSM8K
    "problem",  # MATH, MATH-500, DeepScaleR, Big-Math, NuminaMath, OpenR1-Math
    "prompt",  # verl's form: DAPO-Math, Skywork-OR1; ORZ's evaluation data
    "messages",  # RLVR-MATH
    "conversations",
)
LABELS = (
    "1.ground_truth.value",  # ORZ's training data
    "final_answer",  # ORZ's evaluation data
    "reward_model.ground_truth",  # verl's form
    "ground_truth",  # RLVR-MATH
    "answer",  # GSM8K, MATH-500, DeepScaleR, Big-Math, NuminaMath, OpenR1-Math
    "expected_answer",
    "solution",  # MATH
    "messages",
    "conversations",
)
# These hold a solution, and the label is a part of it.
SOLUTIONS = ("solution", "messages", "conversations")
MISSING = object()


class Unusable(Exception):
    """A record cannot be used. The text is the reason, and completes `3 lines with ...`."""


@dataclass
class Reading:
    """What a file holds. A number is that of a line or an item, counted from 1."""

    unit: str  # line or item
    records: dict[int, dict]  # {number: {"question", "label" and "system": text}}
    left_out: dict[str, list[int]]  # {reason: numbers}
    notes: dict[str, list[int]]  # {what is special: numbers}
    forms: Counter  # {(path of the question, path of the label): count}

    def count_left_out(self):
        return sum(map(len, self.left_out.values()))

    def describe(self) -> list[str]:
        """Sentences about what is left out, and about what is special."""
        sentences = []
        lost = self.count_left_out()
        if lost:
            groups = sorted(self.left_out.items(), key=lambda group: -len(group[1]))
            reasons = [self.describe_group(*group) for group in groups[:5]]
            if len(groups) > 5:
                reasons.append(f"{lost - sum(len(group[1]) for group in groups[:5])} others")
            count = lost + len(self.records)
            sentences.append(f"{lost} of {count} {self.unit}s are left out: {'; '.join(reasons)}")
        return sentences + [self.describe_group(*group) for group in self.notes.items()]

    def describe_group(self, what, numbers) -> str:
        return f"{len(numbers)} with {what} (first: {self.unit} {numbers[0]})"


def split_path(path) -> tuple[str, dict]:
    """Splits FILE?split=test&columns=question,answer into FILE and options of `read_file`.

    Raises UserError.
    """
    file, _, query = path.partition("?")
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    # A file has no splits. A data set has.
    known = {"columns"} if Path(file).is_file() else {"columns", "split"}
    unknown = ", ".join(options.keys() - known)
    if unknown:
        raise UserError(f"{path}: it has no {unknown}; choose {' or '.join(sorted(known))}")
    if "columns" in options:
        options["columns"] = tuple(options["columns"].split(","))
        if len(options["columns"]) < 2:
            raise UserError(f"{path}: name two columns, as in FILE?columns=prompt,solution")
    return file, options


def read_file(path, parse_label, columns=None, split="train"):
    """A Reading of a JSON, JSONL, CSV or Parquet file (also .gz), or of a dataset.

    A path that is no file is a dataset's folder or "name:config". parse_label(value, is_solution)
    returns the label, or raises Unusable. columns: the paths of question and label, or None. Raises
    UserError, also if more records are left out than read.
    """
    try:
        unit, rows = load_rows(path, split)
        reading = Reading(unit, {}, {}, {}, Counter())
        for number, row in enumerate(rows, start=1):
            # A line is a text with JSON. An item is an object.
            if unit == "line" and not row.strip():
                continue
            try:
                record = parse_line(row) if unit == "line" else row
                form = find_form(record, columns)
                question, system, note = parse_question(find(record, form[0]))
                is_solution = columns is None and form[1] in SOLUTIONS
                label = parse_label(find(record, form[1]), is_solution)
            except Unusable as error:
                reading.left_out.setdefault(str(error), []).append(number)
                continue
            reading.records[number] = {"question": question, "label": label, "system": system}
            reading.forms[form] += 1
            if note:
                reading.notes.setdefault(note, []).append(number)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    # The datasets library alone has a dozen classes of errors for "not found".
    except Exception as error:
        raise UserError(
            f"{path} cannot be read: {type(error).__name__}: {one_line(error)}; give a list in a "
            ".json file, an object on each line of a .jsonl file, a .csv or .parquet file, or a "
            f"dataset with split {split!r}"
        ) from None
    if reading.count_left_out() > len(reading.records):
        raise UserError(f"{path}: {'; '.join(reading.describe())}")
    if not reading.records:
        raise UserError(f"{path}: holds no problems; give a file or split with at least one")
    return reading


def load_rows(path, split):
    """("line", lines of JSON), or ("item", the items of a list, a table or a dataset)."""
    plain = path.removesuffix(".gz")
    has_suffix = plain.endswith((".json", ".jsonl", ".csv", ".parquet"))
    if has_suffix and not os.path.exists(path):
        raise UserError("no such file")
    is_file = has_suffix or os.path.isfile(path)
    if is_file and not path.endswith(".parquet"):
        # Only \n ends a line, because a question may hold other ends of line.
        open_file = open if plain == path else gzip.open
        with open_file(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            text = file.read()
        if plain.endswith(".csv"):
            # Some programs separate the columns by semicolons or tabs. Take the character that
            # stands most often in the first line.
            separator = max(",;\t", key=text.partition("\n")[0].count)
            csv.field_size_limit(len(text) + 1)
            return "item", list(csv.DictReader(io.StringIO(text), delimiter=separator))
        # Some files called .json have an object on each line. Others have one list, in [].
        if plain.endswith(".jsonl") or text.lstrip().startswith("{"):
            return "line", text.split("\n")
        return "item", list(json.loads(text))
    import datasets  # slow, and seldom needed

    if is_file:
        return "item", datasets.Dataset.from_parquet(path)
    try:
        dataset = datasets.load_from_disk(path)
    except FileNotFoundError:
        # The folder was not written by save_to_disk. It holds files, or the path is "name:config".
        dataset = datasets.load_dataset(*path.split(":", 1))
    return "item", dataset[split] if isinstance(dataset, dict) else dataset


def parse_line(text):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable("no JSON") from error


def find_form(record, columns):
    """The paths of question and label in a record."""
    if not isinstance(record, list | dict):
        raise Unusable("no object with columns")
    if not columns and {"choices", "options"} & set(map(str, record)):
        raise Unusable("choices in a column of their own; write them into the question")
    form = []
    for paths in [[path] for path in columns] if columns else (QUESTIONS, LABELS):
        form += [path for path in paths if find(record, path) is not MISSING][:1]
    if len(form) == 2:
        return tuple(form)
    names = ", ".join(map(str, record)) if isinstance(record, dict) else "of no name"
    wanted = " and ".join(columns) if columns else "question or label"
    raise Unusable(
        f"the columns {names:.300}, and without {wanted}; name the columns of questions and of "
        "labels: FILE?columns=prompt,reward_model.ground_truth"
    )


def find(record, path):
    """What stands at a path such as reward_model.ground_truth, or MISSING."""
    # A table may have a column with this name, or a column whose text holds an object.
    if isinstance(record, dict) and path in record:
        return record[path]
    for name in path.split("."):
        record = parse_text(record)
        if isinstance(record, list) and name.isdecimal() and int(name) < len(record):
            record = record[int(name)]
        elif isinstance(record, dict) and name in record:
            record = record[name]
        else:
            return MISSING
    return record


def parse_text(value):
    """The list or the object that a text holds, as JSON or as Python writes it. Else the value."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return parse(value.strip())
    return value


def parse_question(value) -> tuple[str, str, str]:
    """The question; the text of a system turn, or ""; a note, or ""."""
    # In a table a conversation is a text.
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        value = parse_text(value)
    system = note = ""
    if isinstance(value, list):
        turns = list_turns(value)
        system = "\n".join(text for role, text in turns if role == "system")
        questions = [text for role, text in turns if role in ("user", "human")]
        if len(questions) > 1:
            note = "several turns of a user, of which the last one is the question"
        value = questions[-1] if questions else None
    if not isinstance(value, str) or not value.strip():
        raise Unusable("no text as question")
    try:
        (system + value).encode()
    except UnicodeEncodeError as error:
        # No tokenizer takes half of a surrogate pair.
        raise Unusable("half of a surrogate pair in the question") from error
    return value, system, note


def list_turns(value) -> list[tuple[str, str]]:
    """(role, text) of each turn of a conversation. Raises Unusable."""
    turns = []
    for turn in value:
        if not isinstance(turn, dict):
            raise Unusable("a list that is no conversation")
        text = turn.get("content", turn.get("value"))
        # A turn may have several parts, such as a text and an image.
        parts = text if isinstance(text, list) else [{"text": text}]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
            raise Unusable("a turn that is not text alone")
        turns.append((turn.get("role", turn.get("from")), "".join(texts)))
    return turns
