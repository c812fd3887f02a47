"""reward.py, in the order of its functions. Equality and hostile text are in test_equal.py."""

import csv
import fcntl
import gzip
import hashlib
import json
import os
import random
import re
import resource
import signal
import sys
import termios
import threading
import time
from decimal import Decimal
from pathlib import Path
from subprocess import Popen

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import DATA, ROOT, jsonl, run_python, wait_until

import reward
from nanoorz import equal, records
from nanoorz.ranks import UserError

# ---- problems -----------------------------------------------------------------------------------


def write(folder, name, content):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


ORZ_TRAIN = [{"from": "human", "value": "1+1?"}]
ORZ_TRAIN += [{"from": "assistant", "ground_truth": {"value": "2"}}]
ORZ_EVAL = {"prompt": [{"from": "user", "value": "1+1?"}], "final_answer": "2"}
GSM8K = {"question": "1+1?", "answer": "One and one is <<1+1=2>>2.\n#### 2"}


def test_the_template_is_orz_s_to_the_letter():
    digest = hashlib.sha256(reward.TEMPLATES["orz"].encode()).hexdigest()
    assert digest[:16] == "97a7cfb2e10d7881"


def test_prompt_is_filled_without_format(tmp_path):
    question = "What is {x} in {question} of \\boxed{} {0}?"
    path = write(tmp_path, "a.jsonl", json.dumps({"question": question, "answer": "1"}))
    filled = {"Q: {question} {bos}": f"Q: {question} <s>", "demo": f"{question}<think>"}
    filled |= {"plain": question, "chat": question}
    for template, prompt in filled.items():
        (problem,) = reward.load_problems(path, template, bos="<s>")
        assert problem.prompt == prompt


def test_a_byte_order_mark_and_empty_lines_are_no_records(tmp_path):
    expected = [reward.Problem(index, "1+1?", "2", "1+1?<think>") for index in (0, 1)]
    lines = f"\ufeff{json.dumps(GSM8K)}\n\n{json.dumps(GSM8K)}\n"
    contents = {"no_suffix": [GSM8K] * 2, "a.jsonl": lines}
    for name, content in contents.items():
        assert reward.load_problems(write(tmp_path, name, content), "demo") == expected, name


def test_files_are_read_by_their_form(tmp_path):
    """Lines of objects may be in a .json file. A table may be CSV or Parquet."""
    datasets = pytest.importorskip("datasets")
    rows = [{"question": "1+1?,\nhm", "answer": "007"}, {"question": '"a"', "answer": "2"}]
    write(tmp_path, "lines.json", "\n".join(map(json.dumps, rows)) + "\n")
    table = 'question,answer\r\n"1+1?,\nhm",007\r\n"""a""",2\r\n'
    write(tmp_path, "table.csv", table)
    # Excel writes semicolons where a comma is the decimal sign.
    write(tmp_path, "excel.csv", table.replace(",", ";").replace("?;", "?,"))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "table.parquet")
    for name in ("lines.json", "table.csv", "excel.csv", "table.parquet"):
        problems = reward.load_problems(str(tmp_path / name), "plain")
        found = [{"question": p.question, "answer": p.label} for p in problems]
        assert found == rows, name


TURN = {"role": "user", "content": "1+1?"}
CHAT = [{"role": "system", "content": "Be brief."}, TURN]
SOLVED = {"role": "assistant", "content": "One and one:\n\\boxed{2}"}
LAYOUTS = {line["layout"]: line for line in jsonl(DATA / "layouts.jsonl")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_published_sets_are_read(layout, tmp_path, capsys):
    """In each of them the question is 1+1?. A table has objects and lists as text."""
    datasets = pytest.importorskip("datasets")
    record = LAYOUTS[layout]["record"]
    paths = [write(tmp_path, "a.json", [record]), write(tmp_path, "b.jsonl", json.dumps(record))]
    for path in paths.copy():
        paths.append(f"{path}.gz")
        with gzip.open(paths[-1], "wt") as file:
            file.write(Path(path).read_text())
    if isinstance(record, dict):
        paths.append(str(tmp_path / "d.parquet"))
        datasets.Dataset.from_list([record]).to_parquet(paths[-1])
        for to_text in (json.dumps, repr):
            cells = [x if isinstance(x, str) else to_text(x) for x in record.values()]
            paths.append(str(tmp_path / f"{to_text.__name__}.csv"))
            with open(paths[-1], "w", newline="") as file:
                csv.writer(file).writerows([record, cells])
    for path in paths:
        [problem] = reward.load_problems(path, "chat")
        found = (problem.question, problem.label, problem.system)
        assert found == ("1+1?", LAYOUTS[layout]["label"], LAYOUTS[layout].get("system", "")), path
    assert "warning" not in capsys.readouterr().err


def test_large_numbers_are_read_digit_by_digit(tmp_path):
    numbers = {10**400: f"1{'0' * 400}", 1e22: f"1{'0' * 22}", 0.1: "0.1", -3.0: "-3.0"}
    records = [{"question": "?", "answer": number} for number in numbers]
    problems = reward.load_problems(write(tmp_path, "a.json", records), "plain")
    assert [problem.label for problem in problems] == list(numbers.values())
    # A data base exports decimal numbers.
    table = pa.table({"question": ["?"], "answer": [Decimal("0.50")]})
    pq.write_table(table, tmp_path / "b.parquet")
    [problem] = reward.load_problems(str(tmp_path / "b.parquet"), "plain")
    assert problem.label == "0.50"


# (a line of JSON, or the record; the reason)
UNUSABLE = [
    ("{broken", "no JSON"),
    ('{"question": "1+1?", "answer": ' + "9" * 5000 + "}", "no JSON"),
    ('"text"', "no object with columns"),
    ({"question": 5, "answer": "2"}, "no text as question"),
    ({"messages": [SOLVED], "answer": "2"}, "no text as question"),
    ({"question": "1+\ud8001", "answer": "2"}, "a character in the question that is no text"),
    ({"prompt": ["1+1?"], "answer": "2"}, "a list that is no conversation"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}, TURN]}], "answer": "2"},
        "a turn that is not text alone",
    ),
    (
        {"prompt": [{"role": "user", "content": [{"type": "tool", "text": "1"}]}], "answer": "2"},
        "a turn that is not text alone",
    ),
    ({"messages": [TURN]}, "a conversation that does not end with a solution"),
    ({"question": "1+1?", "answer": "It is 2\n#### "}, "the label ''"),
    *(
        ({"problem": "1+1?", "answer": word}, f"the label {word!r}")
        for word in ("Proof", "notfound", "None", "NaN", "-inf", "[]", "#NAME?", "#DIV/0!", "#N/A")
    ),
    ('{"question": "1+1?", "answer": NaN}', "the label nan"),
    ('{"question": "1+1?", "answer": -Infinity}', "the label -inf"),
    ('{"question": "1+1?", "answer": 1e999}', "the label inf"),
    ({"question": "1+1?", "answer": True}, "a label of the type bool"),
    ({"question": "1+1?", "answer": '["2", "3"]'}, "a label of the type list"),
    ({"question": "1+1?", "answer": "2\n3"}, "a label of several lines"),
    ({"question": "1+1?", "answer": r'["3\times 2"]'}, "a character in the label that is no text"),
    ({"question": "1+1?", "answer": "2\ud800"}, "a character in the label that is no text"),
    ({"problem": "1+1?", "solution": "It is 2."}, r"a solution without \boxed{} and without ####"),
    ({"problem": "?", "answer": r"\boxed{2"}, r"a \boxed without a closed {}"),
    ({"question": "1+1?"}, "nothing as label; the columns are question"),
    ({"question": "", "answer": "2"}, "nothing as question; the columns are question, answer"),
    ({"question": "1+1?", "answer": None}, "nothing as label; the columns are question, answer"),
    ({"Q": "1+1?", "A": "2"}, "nothing as question; the columns are Q, A"),
    ([{"value": "1+1?"}, {}], "nothing as label; the columns are of a list"),
    (ORZ_TRAIN[:1], "a list that is not a question and a label"),
    (
        {"question": "?", "choices": ["1", "2"], "answer": 1},
        "a column choices; write it into the question, and name the columns",
    ),
    ('{"question": "1+1?", "answer": "\\frac{4}{2}"}', "a character in the label that is no text"),
    (
        '{"question": "Half of \\frac12?", "answer": "1"}',
        "a character in the question that is no text",
    ),
    ({"question": "1+1?", "answer": "['2' '3']"}, "a list that cannot be read as label"),
    ({"question": "1+1?", "answer": '{"inputs": ["1"]}'}, "a label of the type dict"),
    (
        {"prompt": "[{'role': 'user'}\n {'role': 'user'}]", "answer": "2"},
        "a conversation that cannot be read",
    ),
    (
        {"problem": "1+1?", "solution": r"\boxed{1}, then \boxed{2"},
        r"a \boxed without a closed {}",
    ),
    ({"question": "1+1? ![](a.png)", "answer": "2"}, "a picture in the question"),
    ({"question": "7", "answer": "2"}, "no text as question"),
    ('{"question": "1 \\times 1?", "answer": "2"}', "a character in the question that is no text"),
    ('{"question": "1?", "answer": "\\rho"}', "a character in the label that is no text"),
    (
        {"id": 0, "question": "?", "A": "4", "B": "6", "answer": "B"},
        "a column a; write it into the question, and name the columns",
    ),
    ({"question": "1+1?", "answer": "#### Step 1\n#### Step 2"}, "#### in several places"),
]


@pytest.mark.parametrize("bad, reason", UNUSABLE)
def test_what_cannot_be_used_is_left_out_and_counted(bad, reason, tmp_path, capsys):
    """A file of which more is left out than read is refused."""
    good, bad = json.dumps(GSM8K), bad if isinstance(bad, str) else json.dumps(bad)
    path = write(tmp_path, "a.jsonl", f"{good}\n\n{bad}\n")
    [problem] = reward.load_problems(path, "plain")
    assert problem.label == "2"
    told = f"warning: {path}: 1 of 2 lines are left out: 1 with {reason} (first: line 3)\n"
    assert capsys.readouterr().err == told
    path = write(tmp_path, "b.jsonl", f"{good}\n{bad}\n{bad}")
    with pytest.raises(UserError) as caught:
        reward.load_problems(path, "plain")
    why = f"2 of 3 lines are left out: 2 with {reason} (first: line 2)"
    advice = f"`python reward.py '{path}'` shows more; {reward.NAME_COLUMNS}"
    assert str(caught.value) == f"{path}: {why}; {advice}"


def test_a_byte_that_is_no_text_costs_its_line_alone(tmp_path, capsys):
    path = write(tmp_path, "a.jsonl", f"{json.dumps(GSM8K)}\n" * 2)
    with open(path, "ab") as file:
        file.write(b'{"question": "na\xefve?", "answer": "2"}\n')
    assert len(reward.load_problems(path, "plain")) == 2
    assert (
        "1 with a character in the question that is no text (first: line 3)"
        in capsys.readouterr().err
    )


BAD_TABLES = [
    # An unquoted comma shifts the columns.
    ("question,answer\n1,000+1?,1001\n2+2?,4\n", "1 with more cells than columns"),
    ('question,answer\nA,1\n"B, no end,7\nC,3\n', "line 4: unexpected end of data; a quote inside"),
    ("question,answer,answer\n1+1?,2,3\n", "two columns have one name: question, answer, answer"),
]


@pytest.mark.parametrize("text, told", BAD_TABLES)
def test_a_table_whose_cells_are_shifted_is_not_read(text, told, tmp_path, capsys):
    path = write(tmp_path, "a.csv", text)
    try:
        reward.load_problems(path, "plain")
        assert told in capsys.readouterr().err
    except UserError as error:
        assert told in str(error)


def test_labels_that_are_sentences_are_told(tmp_path, capsys):
    answers = [r"\frac{\sqrt{a}}{\text{cm}}", "two apples", "We add one and one and get 2."]
    rows = [{"question": "1+1?", "answer": answer} for answer in [*answers, "小明一共有五个苹果"]]
    path = write(tmp_path, "a.json", rows)
    assert len(reward.load_problems(path, "plain")) == 4
    told = "2 labels are sentences, which few answers will equal (first: item 3)"
    assert capsys.readouterr().err == f"warning: {path}: {told}\n"


HONEST_LABELS = [
    *("{{1,2},{3}}", '{"a","b"}', "[{1},{2}]", "[1,2]", "[0,1)", "{1,2,3}", "[[1,2],[3,4]]", "x=5"),
    *(
        r"\left\{1,2\right\}",
        r"50\%",
        r"\text{(A)}",
        "-",
        "Unknown",
        "Na",
        r"12\text{ cm}",
        "1,000",
    ),
    *(
        r"$\frac{1}{2}$",
        r"\rho",
        r"\nu",
        r"(3,\frac{\pi}{2})",
        "3:2",
        "2024-01-05",
        "½",
        "No",
        "TRUE",
    ),
    r"\begin{pmatrix}1\\2\end{pmatrix}",
]


def test_honest_labels_are_read_as_they_are(tmp_path, capsys):
    """From JSON and from a table, also where they look like a list or an object."""
    rows = [{"Question": "[{1},{2}] has how many sets?", "Answer": x} for x in HONEST_LABELS]
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [["Question", "Answer", "", ""], *map(dict.values, rows), ["", ""]]
        )
    for path in (write(tmp_path, "a.json", rows), str(tmp_path / "a.csv")):
        assert [x.label for x in reward.load_problems(path, "plain")] == HONEST_LABELS
    assert not capsys.readouterr().err


def test_names_of_files_are_no_patterns(tmp_path):
    """The datasets library took a[1].parquet for a1.parquet."""
    datasets = pytest.importorskip("datasets")
    for name, question in (("a[1].parquet", "mine"), ("a1.parquet", "other")):
        rows = [{"Question": question, "Answer": 2}]
        datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "b"))
        (tmp_path / "b").rename(tmp_path / name)
    [problem] = reward.load_problems(str(tmp_path / "a[1].parquet"), "plain")
    assert problem.question == "mine"
    path = write(tmp_path, "a?b=c.json", [GSM8K])
    assert records.split_path(path) == (path, {})


def test_many_reasons_are_not_all_told(tmp_path, capsys):
    records = [GSM8K] * 9 + [{f"column {k}": k} for k in range(7)]
    reward.load_problems(write(tmp_path, "a.json", records), "plain")
    told = capsys.readouterr().err
    assert "7 of 16 items are left out" in told and "; 2 for other reasons\n" in told


def test_an_empty_column_of_a_merged_set_is_passed_over(tmp_path):
    merged = {
        "question": None,
        "problem": "1+1?",
        "final_answer": "",
        "options": None,
        "answer": "2",
    }
    [problem] = reward.load_problems(write(tmp_path, "a.json", [merged]), "plain")
    assert (problem.question, problem.label) == ("1+1?", "2")


@pytest.mark.parametrize("separator", ",;\t")
def test_a_csv_file_may_have_any_separator_and_long_fields(separator, tmp_path):
    long = "x" * 200_000
    text = f"question{separator}answer\n{long}{separator}2\n"
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write(text)
    paths = [write(tmp_path, "a.csv", text), write(tmp_path, "a.TSV", text)]
    for path in (*paths, str(tmp_path / "a.csv.gz")):
        [problem] = reward.load_problems(path, "plain")
        assert (problem.question, problem.label) == (long, "2")


def test_columns_can_be_named_by_a_path(tmp_path):
    record = {"a": {"b": [{"c": "1+1?"}]}, "d": "Two.", "question": "no", "answer": "no"}
    path = write(tmp_path, "a.json", [record])
    [problem] = reward.load_problems(path, "plain", columns=("a.b.0.c", "d"))
    assert (problem.question, problem.label) == ("1+1?", "Two.")
    with pytest.raises(UserError, match=r"nothing as e; the columns are a, d, question, answer \("):
        reward.load_problems(path, "plain", columns=("d", "e"))
    with pytest.raises(UserError, match=r"`python reward.py '.*/a.json\?columns=e,d'` shows more"):
        reward.load_problems(path, "plain", columns=("e", "d"))
    with pytest.raises(UserError, match="a.json: name two columns"):
        reward.load_problems(path, "plain", columns=("a.b.0.c", "d", "question"))


def test_a_conversation_gives_its_last_question_and_its_system_turn(tmp_path, capsys):
    turns = [*CHAT, SOLVED, {"role": "user", "content": "2+2?"}]
    path = write(tmp_path, "a.json", [{"messages": turns, "answer": "4"}])
    [problem] = reward.load_problems(path, "chat")
    assert (problem.question, problem.prompt, problem.system) == ("2+2?", "2+2?", "Be brief.")
    note = "1 items have several turns of a user, and the last one is the question (first: item 1)"
    assert capsys.readouterr().err == f"warning: {path}: {note}\n"
    reward.load_problems(path, "{question}\n")
    told = "1 problems have a system turn, and --template {question} leaves it out\n"
    assert capsys.readouterr().err.endswith(told)


def test_reward_py_shows_what_is_read_as_the_page_says(tmp_path):
    """A label whose braces do not close is no answer in any box."""
    records = []
    for question, label in (("6 times 7", "42"), ("half of 7", r'["\\frac{7}{2}"]'), ("5 + 5", "")):
        prompt = [{"role": "user", "content": f"What is {question}?"}]
        records.append({"prompt": prompt, "reward_model": {"ground_truth": label}})
    path = write(tmp_path, "mine.jsonl", "\n".join(map(json.dumps, records)))
    said = run_python(ROOT / "reward.py", path).stdout.replace(path, "mine.jsonl")
    assert f"```\n{said}```\n" in (ROOT / "docs/rewards.md").read_text()
    path = write(tmp_path, "odd.csv", "id,task,key\n1,2+2?,4\n2,3+3?,}6\n")
    done = run_python(ROOT / "reward.py", path, code=2)
    assert "2 of 2 items are left out" in done.stdout and "left out: {'id': '1', " in done.stdout
    said = run_python(ROOT / "reward.py", f"{path}?columns=task,key").stdout
    assert "50.00% of the labels are accepted" in said and "not accepted: item 2: }6" in said


BAD_FILES = [
    ("absent.json", None, ["absent.json: no such file"]),
    ("absent.jsonl.gz", None, ["absent.jsonl.gz: no such file"]),
    ("broken.jsonl.gz", "no gzip", ["broken.jsonl.gz cannot be read: BadGzipFile"]),
    ("empty.json", "", ["empty.json", "JSON"]),
    ("empty.jsonl", "\n \n", ["empty.jsonl", "no problems"]),
    ("none.json", "[]", ["none.json", "no problems"]),
    ("broken.json", "[1, 2", ["broken.json", "JSON"]),
    ("number.json", "5", ["number.json"]),
    ("dict.json", {"data": [GSM8K]}, ["nothing as question; the columns are data"]),
    ("deep.jsonl", "[" * 100_000, ["deep.jsonl: 1 of 1 lines are left out: 1 with no JSON"]),
]


@pytest.mark.parametrize("name, content, parts", BAD_FILES)
def test_bad_file_is_an_error_of_one_line_that_says_where(tmp_path, name, content, parts):
    if content is not None:
        write(tmp_path, name, content)
    with pytest.raises(UserError) as caught:
        reward.load_problems(str(tmp_path / name), "orz")
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("template", ["orzz", "{questions}"])
def test_unknown_template_is_an_error_that_names_the_known(template, tmp_path):
    with pytest.raises(UserError, match="orz, demo, plain"):
        reward.load_problems(write(tmp_path, "a.json", [GSM8K]), template)


def test_datasets_are_read_by_folder_name_and_split(tmp_path, monkeypatch):
    """A card with a config and its splits, and parquet files: so GSM8K lies on the hub."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([GSM8K, {"question": "2+2?", "answer": "4"}])
    one = rows.select([1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows.save_to_disk("saved")
    datasets.DatasetDict({"train": rows, "test": one}).save_to_disk("splits")
    rows.to_parquet("openai/gsm8k/main/train-00000-of-00001.parquet")
    one.to_parquet("openai/gsm8k/main/test-00000-of-00001.parquet")
    files = "[{split: train, path: main/train-*}, {split: test, path: main/test-*}]"
    card = f"---\nconfigs:\n- config_name: main\n  data_files: {files}\n---\n"
    Path("openai/gsm8k/README.md").write_text(card)
    for path in ("saved", "splits", "openai/gsm8k:main"):
        problems = reward.load_problems(path, "plain")
        assert [(p.question, p.label) for p in problems] == [("1+1?", "2"), ("2+2?", "4")], path
    for path in ("splits", "openai/gsm8k:main"):
        assert len(reward.load_problems(path, "plain", split="test")) == 1
        with pytest.raises(UserError, match="it has no split 'dev', but train, test"):
            reward.load_problems(path, "plain", split="dev")
    with pytest.raises(UserError, match="saved.split=test: it has no split; choose columns"):
        records.split_path("saved?split=test")
    for path in ("saved", "openai/gsm8k:main"):
        with pytest.raises(UserError, match="nothing as problem; the columns are question, answer"):
            reward.load_problems(path, "plain", columns=("problem", "answer"))
    for path in ("nowhere", "openai/gsm8k:other"):
        with pytest.raises(UserError, match=path):
            reward.load_problems(path, "plain")


# ---- extraction ---------------------------------------------------------------------------------


def slow_extract(text):
    """Reference: every box is tried from the last to the first, counting braces by hand."""
    begin = re.compile(r"\\(boxed|fbox) *\{")
    head, closed, _ = text.rpartition("</answer>")
    _, opened, block = head.rpartition("<answer>")
    if not closed or not opened:
        return None
    escaped = [False] * (len(block) + 1)
    i = 0
    while i < len(block):
        box_is_near = begin.match(block, i) or begin.match(block, i + 1)
        if block[i] == "\\" and not box_is_near:
            i += 1
            escaped[i] = True
        i += 1
    for start in reversed(range(len(block))):
        box = begin.match(block, start)
        if box and not escaped[start]:
            depth = 1
            for i in range(box.end(), len(block)):
                if not escaped[i]:
                    depth += (block[i] == "{") - (block[i] == "}")
                if depth == 0:
                    return block[box.end() : i]
    return None


@pytest.mark.parametrize(
    "text, answer",
    [
        ("<think>\\boxed{1}</think> <answer>\\boxed{42}</answer>", "42"),
        ("<answer>\\boxed{1} so \\boxed{2}</answer> and \\boxed{3}", "2"),
        ("<answer>\\boxed{1}</answer> <answer>\\boxed{2}", "1"),
        ("<answer>\\boxed{\\frac{1}{2}}</answer>", "\\frac{1}{2}"),
        ("<answer>\\boxed{x \\}}</answer>", "x \\}"),
        ("<answer>\\boxed{1 + \\boxed{2}}</answer>", "2"),
        ("<answer>}}} {{{ \\boxed{a\nb}</answer>", "a\nb"),
        ("<answer>\\boxed{}</answer>", ""),
        ("<answer>5 \\boxed 5 boxed{5}</answer>", None),
        ("<answer>\\boxed {5}</answer>", "5"),
        ("<answer>\\boxed{4} is wrong. \\fbox{5}</answer>", "5"),
        ("</answer>\\boxed{5}<answer>", None),
        ("<answer>\\boxed{5}</answer> <answer>none</answer>", None),
    ],
)
def test_the_answer_is_the_last_balanced_box_of_the_last_closed_block(text, answer):
    assert reward.extract_answer(text) == answer == slow_extract(text)


def test_extract_answer_equals_the_slow_reference():
    pieces = ["<answer>", "</answer>", "\\boxed{", "{", "}", "\\{", "\\}", "\\\\", "\\"]
    pieces += ["\\boxed", "x", "1", " ", "\n"]
    weights = [2, 2, 4, 2, 5] + [1] * 9
    rng = random.Random(1)
    for _ in range(6_000):
        text = "".join(rng.choices(pieces, weights, k=rng.randint(1, 25)))
        if rng.random() < 0.7:
            text = f"<answer>{text}</answer>"
        assert reward.extract_answer(text) == slow_extract(text), text


BOXES = ["{", "}", "\\boxed{", "\\", "\\boxed{1}", "\\boxed", "<answer>", "</answer>"]
NUMERALS = ["#", "1", "1,", "1,234", ".1", "-", "-1", "#### 1"]


@pytest.mark.parametrize("piece", [*BOXES, *NUMERALS])
def test_an_answer_is_found_in_linear_time(piece):
    middle = piece * (300_000 // len(piece))
    if piece in ("{", "\\boxed{"):
        middle += "}" * 50_000
    start = time.process_time()
    for text in (middle, f"<answer>{middle}</answer>"):
        for form in reward.ANSWER_FORMS.values():
            form(text)
    assert time.process_time() - start < 8, "50,000 nested braces took seconds: quadratic?"


# {form: (how a response ends, its answer)}
ENDS = {
    "boxed_anywhere": [
        ("</think>\n\n**Final Answer**\n\n\\[\n\\boxed{18}\n\\]", "18"),
        ("The final answer is: $\\boxed{\\$18}$. I hope it is correct.", "\\$18"),
        ("First $\\boxed{9}$ eggs, then $2 \\cdot 9 = \\boxed{18}$.", "18"),
        ("<think> a guess: \\boxed{17} </think> <answer> 18 </answer>", "17"),
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("\\boxed{18", None),
        ("#### 18", None),
        # Boxes in one sentence are a list.
        ("\\boxed{3}, \\boxed{5}, \\boxed{7}", "3, 5, 7"),
        ("They are $\\boxed{3}$ and $\\boxed{5}$.", "3, 5"),
        ("$x=\\boxed{3}$, $y=\\boxed{5}$", "3, 5"),
        ("\\boxed{3} \\text{ or } \\boxed{5}", "3, 5"),
        ("First \\boxed{3}, so the sum is \\boxed{8}.", "8"),
        ("\\boxed{3}. Or rather: \\boxed{8}", "8"),
        ("\\boxed{8}, \\boxed{8}", "8"),
        ("\\boxed{72}, or \\boxed{72\\text{ clips}}", "72\\text{ clips}"),
    ],
    "last_number": [
        ("So she makes $18 every day at the farmers' market.", "18"),
        ("The answer is **$1,234.50**.", "1,234.50"),
        ("a profit of $200,000-$130,000 = $70,000.", "70,000"),
        ("it fell by 3 degrees, to -7.", "-7"),
        ("she has -$7 left", "-$7"),
        ("so x = −7", "−7"),
        ("pages 3-7", "7"),
        ("x-7", "7"),
        ("(4)-7", "7"),
        ("9 * 2 = <<9*2=18>>18 dollars", "18"),
        ("the chance is .25", ".25"),
        ("1, 2, 3,4567", "4567"),
        ("of 2,125", "2,125"),
        ("eighteen", None),
    ],
    "hashes": [
        ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18"),
        ("#### Step 1\n9 eggs\n#### $18.00\nThat is all.", "$18.00"),
        ("**#### 18**", "18"),
        ("#### **1,234**", "1,234"),
        ("The answer is 18.", None),
        ("### 18", None),
        ("it is ####", ""),
    ],
}
CASES = [(form, *case) for form, cases in ENDS.items() for case in cases]


@pytest.mark.parametrize("form, text, answer", CASES)
def test_a_form_finds_the_answer_in_what_such_models_write(form, text, answer):
    assert reward.ANSWER_FORMS[form](text) == answer


# How a right response to a problem of GSM8K ends in each form, with the label's number in it.
GSM8K_WAYS = {
    "orz": ["{work}</think> <answer> \\boxed{{{label}}} </answer>"],
    "boxed_anywhere": ["{work}\nThe answer is $\\boxed{{{label}}}$.", "\\boxed{{\\${label}.00}}"],
    "last_number": ["{work}\nThe answer is {label}.", "So it is ${label:,} in all.", "{work}"],
    "hashes": ["{work}", "{work}\n#### ${label:,}", "Adding up:\n#### {label} dollars\n\nDone."],
}


@pytest.mark.parametrize("form", GSM8K_WAYS)
def test_known_answers_of_gsm8k_in_every_form(form):
    """Each response is right for its own problem and wrong for the next one."""
    path = DATA / "gsm8k.jsonl"
    right = []
    for line, problem in zip(jsonl(path), reward.load_problems(str(path), "plain"), strict=True):
        number = int(problem.label.replace(",", ""))
        for way in GSM8K_WAYS[form]:
            right.append((way.format(work=line["answer"], label=number), problem.label))
    following = right[1:] + right[:1]
    wrong = [(text, label) for (text, own), (_, label) in zip(right, following) if own != label]
    assert len(wrong) > 75
    expected = dict.fromkeys(right, 1.0) | dict.fromkeys(wrong, 0.0)
    with reward.Grader(2, form) as grader:
        for text, label in expected:
            grader.submit((text, label), text, "stop", label)
        assert grader.results() == expected


# ---- grading ------------------------------------------------------------------------------------


def boxed(answer):
    return f"some thought</think> <answer> it is \\boxed{{{answer}}}. </answer>"


def test_reward_needs_a_stop_an_answer_and_equality():
    """submit says the answer of a response that ended by itself, also a wrong one."""
    samples = {
        "right": (boxed("\\frac{1}{2}"), "stop", "0.5", "\\frac{1}{2}"),
        "truncated": (boxed("\\frac{1}{2}"), "length", "0.5", None),
        "wrong": (boxed("\\frac{1}{3}"), "stop", "0.5", "\\frac{1}{3}"),
        "none": ("I do not know</answer>", "stop", "0.5", None),
        "unclosed": ("<answer>\\boxed{0.5}", "stop", "0.5", None),
        "empty": (boxed(""), "stop", "0.5", None),
        ("any", "key"): (boxed("2x"), "stop", "x+x", "2x"),
        "number": (boxed("72"), "stop", 72, "72"),
    }
    with reward.Grader() as grader:
        for key, (text, finish_reason, label, answer) in samples.items():
            assert grader.submit(key, text, finish_reason, label) == answer
        right = {"right": 1.0, "number": 1.0, ("any", "key"): 1.0}
        assert grader.results() == dict.fromkeys(samples, 0.0) | right
        assert grader.results() == {}


def only_process(grader):
    """The process of a grader with one worker, which has a check behind it."""
    grader.compare("start it", "x+1", "1+x")
    assert grader.results() == {"start it": 1.0}
    return grader.workers[0].process


def stop(process):
    """Before it has stopped, it may still take what is written."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


@pytest.mark.engine
def test_check_that_uses_up_its_cpu_time_is_0_once_in_a_run_and_holds_up_no_other():
    """A check that exceeds its CPU time is not repeated: 8,192 times 1000000! would cost hours."""
    # The limit holds although the process inherits that its signal is ignored.
    handler = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    with reward.Grader(workers=1, cpu_seconds=0.5) as grader:
        process = only_process(grader)
        stop(process)
        for number in range(64):
            grader.submit(number, boxed("999999999!"), "stop", "x+1")
            grader.submit(100 + number, boxed("x+2"), "stop", "2+x")
        assert grader.pending(0) == 2, "submit returns at once"
        os.kill(process.pid, signal.SIGCONT)
        found = grader.results()
        assert found == {key: float(key >= 100) for key in found}
        counts = {"equal": 2, "cpu_timeouts": 1}
        assert grader.counts == counts, "equal pairs share a check"
        for key in ("again", "and again"):
            grader.compare(key, "999999999!", "x+1")
            assert grader.pending(0) == 0, "no process is asked"
            assert grader.results() == {key: 0.0}
        assert (grader.counts, grader.lost) == (counts, 1)
    signal.signal(signal.SIGPROF, handler)


def waiting(pipe):
    """Bytes that its reader has not taken yet."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


@pytest.mark.engine
def test_lost_process_is_replaced_and_counted_and_its_pair_tried_again():
    """The same pair is compared again later, because a killed process may be an accident."""
    with reward.Grader(workers=1) as grader:
        process = only_process(grader)
        # 2 GiB of memory, of which a normal check needs 80 MB.
        assert resource.prlimit(process.pid, resource.RLIMIT_AS) == (2 << 30, 2 << 30)
        # Signals to the whole group are for the trainer.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            os.kill(process.pid, number)
        assert only_process(grader) is process

        stop(process)
        grader.workers[0].wall_seconds = 0.5
        grader.compare("hung", "x+2", "2+x")
        assert grader.results() == {"hung": 0.0}
        assert process.returncode == -signal.SIGKILL
        assert grader.counts == {"equal": 2, "wall_timeouts": 1}
        grader.workers[0].wall_seconds = 120.0
        grader.compare("hung", "x+2", "2+x")
        assert grader.results() == {"hung": 1.0}

        process = only_process(grader)
        stop(process)
        grader.compare("crashed", "x+2", "2+x")
        grader.compare("next", "x+3", "3+x")
        # The process dies with a question, so this is a crash.
        wait_until(lambda: waiting(process.stdin))
        os.kill(process.pid, signal.SIGKILL)
        assert grader.results() == {"crashed": 0.0, "next": 1.0}
        assert (grader.counts["crashes"], grader.lost) == (1, 2)

        process = only_process(grader)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        # A process that died idle is replaced and not counted.
        only_process(grader)
        assert grader.lost == 2


@pytest.mark.parametrize("command", ["/bin/false", "/nonexistent/python"])
def test_a_process_that_cannot_start_is_an_error_of_results_in_one_line(monkeypatch, command):
    monkeypatch.setattr(equal.sys, "executable", command)
    with reward.Grader(workers=1) as grader:
        grader.compare("any", "x+3", "3+x")
        while grader.pending(1.0):
            pass
        told = f"^no grading process can be started: [^\n]*{command}[^\n]*$"
        with pytest.raises(UserError, match=told):
            grader.results()


@pytest.mark.engine
def test_the_grader_works_beside_another_nanoorz_and_keeps_pythonpath(tmp_path):
    """The user may start it in a folder with a `nanoorz`, and PYTHONPATH may lead to packages."""
    for name in ("nanoorz", "packages"):
        (tmp_path / name).mkdir()
    (tmp_path / "nanoorz" / "__init__.py").write_text("")
    seen = tmp_path / "seen"
    (tmp_path / "packages/sitecustomize.py").write_text(f"open({str(seen)!r}, 'a').write('x')")
    (tmp_path / "sympy.py").write_text("raise ImportError")
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}/packages"}
    code = "import reward; print(reward.is_equiv('2x', 'x+x'))"
    assert run_python("-P", "-c", code, cwd=tmp_path, env=env).stdout == "True\n"
    assert seen.read_text() == "xx", "of this process and of the worker"


@pytest.mark.engine
def test_slow_check_does_not_hold_up_the_others():
    with reward.Grader(workers=2, cpu_seconds=120.0, wall_seconds=600.0) as grader:
        grader.compare("slow", "999999999!", "x+1")
        for number in range(30):
            grader.compare(number, f"x+{number}", f"{number}+x")
        wait_until(lambda: grader.pending(0.1) == 1)
        assert not grader.running["999999999!", "x+1"].done()
        idle = grader.idle_workers[0].process
        stop(idle)
        grader.compare("asked", "x+30", "30+x")
        wait_until(lambda: waiting(idle.stdin))
        grader.compare("queued", "x+31", "31+x")
        queued = grader.running["x+31", "31+x"]
    assert [worker.process.returncode for worker in grader.workers] == [-signal.SIGKILL] * 2
    assert queued.cancelled()


def test_process_that_starts_while_its_grader_closes_is_ended(monkeypatch):
    """A thread may be about to start a process when `close` finds none to end."""
    starting = threading.Event()
    closed = threading.Event()

    def slow_popen(*arguments, **options):
        starting.set()
        closed.wait()
        return Popen(*arguments, **options)

    monkeypatch.setattr(equal, "Popen", slow_popen)
    with reward.Grader() as grader:
        grader.compare("any", "x+1", "1+x")
        starting.wait()
    closed.set()
    assert grader.running["x+1", "1+x"].result() == "crashes"
    assert grader.workers[0].process.returncode == -signal.SIGKILL
    grader.close()  # also where the process is lost


@pytest.mark.engine
def test_processes_end_with_their_parent():
    """Importing reward.py also imports none of the slow packages."""
    # The output ends with the last process that holds it.
    code = """import os, signal, sys, reward
assert not {"sympy", "math_verify", "datasets", "transformers", "vllm"} & set(sys.modules)
grader = reward.Grader()
grader.compare(0, "x+1", "1+x")
grader.results()
# A process that runs would end with its pipe.
os.kill(grader.workers[0].process.pid, signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)"""
    run_python("-c", code, code=-signal.SIGKILL, timeout=100)


def symbolic_pairs(count):
    """Right and wrong pairs that only sympy can tell, each different: {pair: is it right?}."""
    pairs = {}
    for a in range(2, 2 + count // 8):
        pairs[f"{a}x+{3 * a}", f"{a}(x+3)"] = True
        pairs[f"{a}x+3", f"{a}(x+3)"] = False
        pairs[f"{a}+\\sqrt{{2}}", f"\\sqrt{{2}}+{a}"] = True
        pairs[f"2+\\sqrt{{{a + 1}}}", f"\\sqrt{{2}}+{a + 1}"] = False
        pairs[f"x^2+{2 * a}x+{a}^2", f"(x+{a})^2"] = True
        pairs[f"x^2+{a}^2", f"(x+{a})^2"] = False
        pairs[f"(1, 3*{a}]", f"(1, {3 * a}]"] = True
        pairs[f"[1, {3 * a}]", f"(1, {3 * a}]"] = False
    return pairs


@pytest.mark.engine
def test_verdicts_do_not_depend_on_load():
    """Neither the number of workers nor the order of the pairs changes a verdict."""
    expected = symbolic_pairs(32)
    for workers, pairs in ((1, list(expected)), (2, list(reversed(expected)))):
        with reward.Grader(workers) as grader:
            for pair in pairs:
                grader.compare(pair, *pair)
            assert grader.results() == expected
            assert grader.counts == {"equal": 16, "different": 16}


# ---- text metrics -------------------------------------------------------------------------------


def slow_repetition(text):
    words = text.split()
    grams = [" ".join(words[i : i + 4]) for i in range(len(words) - 3)]
    repeated = sum(gram in grams[:i] for i, gram in enumerate(grams))
    return repeated / max(1, len(grams))


def test_text_metrics_are_the_repeated_4_grams_and_the_second_thoughts():
    text = "Wait, let me recheck. However, I retry; ALTERNATIVELY, wait what? however"
    assert reward.text_metrics(text) == {"repetition": 0.0, "reflection": 5.0}
    assert reward.text_metrics("a b c") == {"repetition": 0.0, "reflection": 0.0}
    rng = random.Random(4)
    for _ in range(50):
        text = " ".join(rng.choices("abc", k=rng.randint(0, 60)))
        assert reward.text_metrics(text)["repetition"] == pytest.approx(slow_repetition(text))
    reward.text_metrics("word " * 200_000)  # slow_repetition would take hours
