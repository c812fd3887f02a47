"""Reads the records of a data set: where a record has its question and its label.

Public sets lay out their records in many ways. QUESTIONS and LABELS list the known paths, and
docs/rewards.md names the sets. A record without a question or a label is left out and counted.
reward.py says what a label is. Other tasks have records of other forms.
"""

import ast
import contextlib
import csv
import gzip
import io
import json
import os
import re
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path

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
    """A record cannot be used. The text is the reason. It stands behind "3 with"."""


@dataclass
class Reading:
    """What a file holds. A number is that of a line or an item, counted from 1."""

    unit: str  # "line" of JSON, or "item": an object, a row of a table or ORZ's list
    # {number: what parse_record returned}
    records: dict[int, dict] = field(default_factory=dict)
    left_out: dict[str, list[int]] = field(default_factory=dict)  # {reason: numbers}
    first_rows: dict[str, str] = field(default_factory=dict)  # {reason: its first row}

    def count_left_out(self):
        return sum(map(len, self.left_out.values()))

    def is_refused(self):
        return not self.records or self.count_left_out() > len(self.records)

    def common_reasons(self) -> list[str]:
        return sorted(self.left_out, key=lambda reason: -len(self.left_out[reason]))[:5]

    def describe(self) -> list[str]:
        """Messages about what is left out, and about conversations of several turns."""
        messages = []
        count = self.count_left_out()
        if count:
            parts = []
            others = count
            for reason in self.common_reasons():
                numbers = self.left_out[reason]
                parts.append(f"{len(numbers)} with {reason} ({self.place_of_first(numbers)})")
                others -= len(numbers)
            if others:
                parts.append(f"{others} for other reasons")
            of_all = f"{count} of {count + len(self.records)} {self.unit}s"
            messages.append(f"{of_all} are left out: {'; '.join(parts)}")
        several = [number for number, x in self.records.items() if x.get("has_several_turns")]
        if several:
            what = f"{len(several)} {self.unit}s have several turns of a user"
            place = self.place_of_first(several)
            messages.append(f"{what}, and the last one is the question ({place})")
        return messages

    def place_of_first(self, numbers):
        return f"first: {self.unit} {numbers[0]}"


def split_path(path) -> tuple[str, dict]:
    """Splits FILE?split=test&columns=question,answer into FILE and options of `read_file`.

    Raises UserError.
    """
    file, _, query = path.partition("?")
    if Path(path).is_file():
        return path, {}  # The file has a ? in its name.
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    # A file has no splits. A data set that was saved without splits has a state.json.
    has_none = Path(file).is_file() or Path(file, "state.json").is_file()
    known = {"columns"} if has_none else {"columns", "split"}
    unknown = ", ".join(options.keys() - known)
    if unknown:
        raise UserError(f"{path}: it has no {unknown}; choose {' or '.join(sorted(known))}")
    if "columns" in options:
        options["columns"] = tuple(options["columns"].split(","))
        # A task may read more than two columns.
        if len(options["columns"]) < 2:
            raise UserError(f"{path}: name two columns, as in FILE?columns=prompt,solution")
    return file, options


def read_file(path, parse_record, split="train"):
    """A Reading of a JSON, JSONL or CSV file (also .gz), of a Parquet file, or of a dataset.

    A path that is no file is a dataset's folder or "name:config". parse_record(record) returns a
    dict with "question" and "label", and perhaps "system", or raises Unusable. Raises UserError.
    """
    try:
        unit, rows = load_rows(path, split)
        reading = Reading(unit)
        for number, row in enumerate(rows, start=1):
            if unit == "line" and not row.strip():
                continue
            if isinstance(row, dict) and all(cell in (None, "") for cell in row.values()):
                continue  # The last rows of a sheet may be empty.
            try:
                record = parse_line(row) if unit == "line" else row
                reading.records[number] = parse_record(record)
            except Unusable as error:
                reason = str(error)
                reading.left_out.setdefault(reason, []).append(number)
                reading.first_rows.setdefault(reason, str(row))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:
        # The datasets library alone has a dozen classes of errors for "not found". The cause of its
        # DatasetGenerationError says what is wrong.
        cause = error.__cause__ or error
        raise UserError(
            f"{path} cannot be read: {type(cause).__name__}: {one_line(cause)}; give a list in a "
            ".json file, an object on each line of a .jsonl file, a .csv or .parquet file, or a "
            f"dataset with split {split!r}"
        ) from None
    return reading


def load_rows(path, split):
    """("line", lines of JSON), or ("item", the items of a list, a table or a dataset)."""
    plain = path.lower().removesuffix(".gz")
    is_table = plain.endswith((".csv", ".tsv"))
    has_suffix = is_table or plain.endswith((".json", ".jsonl", ".parquet"))
    if has_suffix and not os.path.exists(path):
        raise UserError("no such file")
    if plain.endswith(".parquet") and os.path.isfile(path):
        import pyarrow.parquet  # slow, and seldom needed

        return "item", pyarrow.parquet.ParquetFile(path).read().to_pylist()
    if has_suffix or os.path.isfile(path):
        # Only \n ends a line, because a question may hold other ends of line.
        open_file = gzip.open if path.lower().endswith(".gz") else open
        options = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": "\n"}
        with open_file(path, "rt", **options) as file:
            text = file.read()
        if is_table:
            return "item", read_table(text)
        # Some files called .json have an object on each line. Others have one list, in [].
        if plain.endswith(".jsonl") or text.lstrip().startswith("{"):
            return "line", text.split("\n")
        return "item", list(json.loads(text))
    import datasets  # slow, and seldom needed

    try:
        dataset = datasets.load_from_disk(path)
    except FileNotFoundError:
        # The folder was not written by save_to_disk. It holds files, or the path is "name:config".
        dataset = datasets.load_dataset(*path.split(":", 1))
    if isinstance(dataset, dict):  # It has splits.
        if split not in dataset:
            raise UserError(f"it has no split {split!r}, but {', '.join(dataset)}")
        dataset = dataset[split]
    return "item", dataset


def read_table(text):
    # Some programs separate the columns by another character than a comma. Take the one that stands
    # most often in the first line.
    separator = max(",;\t|", key=text.partition("\n")[0].count)
    csv.field_size_limit(len(text) + 1)  # By default a cell of 128 KiB is an error.
    # strict: a quote that does not close would swallow the rows behind it.
    reader = csv.DictReader(io.StringIO(text), delimiter=separator, strict=True)
    try:
        names = [name.strip() for name in reader.fieldnames or ()]
        named = [name for name in names if name]
        if len(set(named)) < len(named):
            raise UserError(f"two columns have one name: {', '.join(named)}")
        reader.fieldnames = names
        return list(reader)
    except csv.Error as error:
        where = f"line {reader.reader.line_num}: {error}"
        raise UserError(f"{where}; a quote inside of quotes is written twice") from error


def parse_line(text):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unusable("no JSON") from error


# If one of these columns has a value (choices A to D, a text, a picture), the question has a part
# there.
PARTS_OF_QUESTIONS = re.compile(
    "choices?|options?.*|op[a-d]|a|distractors?.*|context|passage|body|story|article|table|images?.*"
    "|picture|figure"
)


def find_parts(record, columns):
    """(path, path) and (value, value) of question and label. A value is neither None nor ""."""
    if not isinstance(record, list | dict):
        raise Unusable("no object with columns")
    if isinstance(record, list) and len(record) != 2:
        raise Unusable("a list that is not a question and a label")
    # csv puts surplus cells under None.
    if isinstance(record, dict) and any(record.get(None) or ()):
        raise Unusable("more cells than columns: a comma without quotes?")
    names = list(map(str, record)) if isinstance(record, dict) else ["of a list"]
    if not columns and isinstance(record, dict):
        record = {name.lower(): value for name, value in zip(names, record.values())}
    parts = {}
    for part, known in (("question", QUESTIONS), ("label", LABELS)):
        candidates = [columns[len(parts)]] if columns else known
        for path in candidates:
            value = find(record, path)
            if value not in (None, ""):
                parts[part] = (path, value)
                break
        else:
            wanted = candidates[0] if columns else part
            raise Unusable(f"nothing as {wanted}; the columns are {', '.join(names):.300}")
    if not columns and isinstance(record, dict):
        for name, value in record.items():
            if value and PARTS_OF_QUESTIONS.fullmatch(name):
                raise Unusable(f"a column {name}; write it into the question, and name the columns")
    return zip(*parts.values())


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


def parse_text(value):
    """The list or the object that a text holds, as JSON or as Python writes it. Else the value."""
    if not isinstance(value, str) or not OBJECTS.match(value):
        return value
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(value)
    # numpy writes two texts as ['1' '2']. literal_eval would read ['12'].
    if not re.match(r"""\s*\[\s*['"].*['"]\s+['"]""", value, re.DOTALL):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            found = ast.literal_eval(value.strip())
            return found if isinstance(found, list | dict) else value
    return value


# A list of texts, a list of objects, an object. Not [1,2] and {1,2}: an interval and a set.
OBJECTS = re.compile(r"""\s*(\[\s*\{|\[|\{)\s*["']""")


def parse_question(value) -> tuple[str, str, bool]:
    """(question, text of a system turn or "", is it the last of several turns of a user?)."""
    # In a table a conversation is a text.
    if isinstance(value, str) and re.match(r"""\s*\[\s*\{\s*["']""", value):
        value = parse_text(value)
        if isinstance(value, str):
            raise Unusable("a conversation that cannot be read")
    system = ""
    questions = [value]
    if isinstance(value, list):
        turns = list_turns(value)
        system = "\n".join(text for role, text in turns if role in ("system", "developer"))
        questions = [text for role, text in turns if role in ("user", "human")]
    question = questions[-1] if questions else None
    # A number alone is the number of a question.
    if not isinstance(question, str) or not question.strip() or question.strip().isdecimal():
        raise Unusable("no text as question")
    if NO_TEXT.search(system + question):
        raise Unusable("a character in the question that is no text")
    if re.search(r"!\[[^\]]*\]\(|<image|<img|\\includegraphics", question):
        raise Unusable("a picture in the question")
    return question, system, len(questions) > 1


NO_TEXT = re.compile(
    # JSON reads "\frac" with one backslash as a form feed and "rac", "\times" as a tab and "imes".
    "[\x00-\x08\x0b\x0c\x0e-\x1f]|\t(?=imes|heta|ext{)|\r(?=ho|ight)|\n(?=eq\\b|abla)"
    # Half of a surrogate pair: tokenizers fail. `open` makes it of a byte that is no UTF-8.
    "|[\ud800-\udfff]"
)


def list_turns(value) -> list[tuple[str, str]]:
    """(role, text) of each turn of a conversation. Raises Unusable."""
    turns = []
    for turn in value:
        if not isinstance(turn, dict):
            raise Unusable("a list that is no conversation")
        role = turn.get("role") or turn.get("from")
        text = turn.get("content") or turn.get("value")
        # A turn may have several parts, such as a text and an image.
        parts = text if isinstance(text, list) else [{"text": text}]
        texts = [as_text(part) for part in parts]
        turns.append((str(role).lower(), "".join(texts)))
    return turns


def as_text(part):
    is_text = isinstance(part, dict) and part.get("type", "text") == "text"
    if not is_text or not isinstance(part.get("text"), str):
        raise Unusable("a turn that is not text alone")
    return part["text"]
