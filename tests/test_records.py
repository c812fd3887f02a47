"""nanoorz/records.py: which records of which files are read, and as what."""

import csv
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import DATA, ROOT, jsonl, run_python, write

import reward
from nanoorz import records
from nanoorz.ranks import UserError

GSM8K = {"question": "1+1?", "answer": "One and one is <<1+1=2>>2.\n#### 2"}
TURN = {"role": "user", "content": "1+1?"}
SOLVED = {"role": "assistant", "content": "One and one:\n\\boxed{2}"}
LAYOUTS = {line["layout"]: line for line in jsonl(DATA / "layouts.jsonl")}


def read(path, template="plain", **options):
    return [(x.question, x.label) for x in reward.load_problems(str(path), template, **options)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_published_sets_are_read(layout, tmp_path, capsys):
    """In each of them the question is 1+1?. A table has objects and lists as text."""
    record = LAYOUTS[layout]["record"]
    paths = [write(tmp_path, "a.json", [record]), write(tmp_path, "b.jsonl", json.dumps(record))]
    for path in paths.copy():
        paths.append(f"{path}.gz")
        with gzip.open(paths[-1], "wt") as file:
            file.write(Path(path).read_text())
    if isinstance(record, dict):
        paths.append(str(tmp_path / "d.parquet"))
        pq.write_table(pa.Table.from_pylist([record]), paths[-1])
        for to_text in (json.dumps, repr):
            cells = [to_text(x) if isinstance(x, dict | list) else x for x in record.values()]
            paths.append(str(tmp_path / f"{to_text.__name__}.csv"))
            with open(paths[-1], "w", newline="") as file:
                csv.writer(file).writerows([record, cells])
    for path in paths:
        [problem] = reward.load_problems(path, "chat")
        found = (problem.question, problem.label, problem.system)
        assert found == ("1+1?", LAYOUTS[layout]["label"], LAYOUTS[layout].get("system", "")), path
    assert not capsys.readouterr().err


LONG = "1234567890123456789012345"
# In JSON these are numbers and names, without quotes.
JSON_LABELS = ["1e3", "1.10", "true", LONG, f"0.{LONG}", f"-{LONG}", "1E-7", "10.50e+2"]
LABELS = ["007", "NA", "1,000", "+5", "1/2", "TRUE", "No", "½", "2024-01-05", *JSON_LABELS]
# These look like a list, an object or a word for "no answer", and are labels.
LABELS += ["{{1,2},{3}}", '{"a","b"}', "[{1},{2}]", "[1,2]", "[0,1)", "-", "Na", "Unknown", "x=5"]
LABELS += [r"\left\{1,2\right\}", r"\text{(A)}", r"\rho", r"\nu", r"(3,\frac{\pi}{2})", "12 cm"]
LABELS += [r"\begin{pmatrix}1\\2\end{pmatrix}", r"50\%", "3:2"]


def test_labels_arrive_as_they_are_written(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"Question": "?", "Answer": label} for label in LABELS]
    bare = [f'{{"Question": "?", "Answer": {label}}}' for label in JSON_LABELS]
    for name, separator in (("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t")):
        with open(tmp_path / name, "w", newline="", encoding="utf-8-sig") as file:
            # A sheet may have empty columns and rows behind its own.
            table = [["Question", "Answer", "", ""], *map(dict.values, rows), ["", ""]]
            csv.writer(file, delimiter=separator).writerows(table)
    write(tmp_path, "d.json", rows)
    write(tmp_path, "e.jsonl", "\ufeff" + "\n\n".join(map(json.dumps, rows)))
    write(tmp_path, "f.json", f"[{','.join(bare)}]")
    write(tmp_path, "g.json", "\n".join(bare))
    # The datasets library alone would change the labels of files in a folder.
    for name in ("a.csv", "d.json", "g.json"):
        folder = tmp_path / f"folder of {name}"
        folder.mkdir()
        (folder / name).write_text((tmp_path / name).read_text())
    for path in tmp_path.iterdir():
        expected = JSON_LABELS if path.name.endswith(("f.json", "g.json")) else LABELS
        assert read(path) == [("?", label) for label in expected], path.name


# (a line of JSON, or the record; the reason)
UNUSABLE = [
    ("{broken", "no JSON"),
    ('"text"', "no object with columns"),
    ('[{"value": "1+1?"}]', "no object with columns"),
    ({"Q": "1+1?", "A": "2"}, "no question in the columns Q, A; FILE?columns="),
    ({"question": "1+1?", "answer": None}, "no label in the columns question, answer"),
    ({"question": "7", "answer": "2"}, "no text as question"),
    ({"messages": [SOLVED], "answer": "2"}, "no turn of a user, or several"),
    ({"messages": [TURN | {"role": "tool"}, TURN], "answer": "2"}, "a turn of tool before"),
    ({"messages": [TURN, SOLVED, TURN, SOLVED]}, "no turn of a user, or several"),
    ({"prompt": ["1+1?"], "answer": "2"}, "a list that is no conversation"),
    ({"prompt": "[{'from': 1}\n {'from': 1}]", "answer": "2"}, "a list that cannot be read"),
    ({"prompt": [TURN | {"content": [{"type": "image"}]}], "answer": "2"}, "a turn that is not"),
    ({"question": "1+1? ![](a.png)", "answer": "2"}, "a picture in the question"),
    ({"question": "?", "choices": ["1", "2"], "answer": 1}, "a column choices; write it into"),
    ({"id": 0, "question": "?", "A": "4", "B": "6", "answer": "B"}, "a column a; write it into"),
    # JSON reads \f, \t, \r and \n as characters.
    ('{"question": "Half of \\frac12?", "answer": "1"}', "a character in the question that is no"),
    ('{"question": "1 \\times 1?", "answer": "2"}', "a character in the question that is no text"),
    ('{"question": "1 \\tan x?", "answer": "2"}', "a character in the question that is no text"),
    ('{"question": "Is 2 \\neq 1?", "answer": "2"}', "a character in the question that is no text"),
    ({"question": "1+\ud8001", "answer": "2"}, "a character in the question that is no text"),
    ('{"question": "1+1?", "answer": "\\frac{4}{2}"}', "a character in the label that is no text"),
    ('{"question": "1?", "answer": "\\rho"}', "a character in the label that is no text"),
    ('{"question": "1?", "answer": "\\nabla f"}', "a character in the label that is no text"),
    ({"question": "1+1?", "answer": r'["3\times 2"]'}, "a character in the label that is no text"),
    ({"question": "1+1?", "answer": '["2", "3"]'}, "a label of the type list"),
    ({"question": "1+1?", "answer": "['2' '3']"}, "a list that cannot be read"),
    ({"question": "1+1?", "answer": '{"inputs": ["1"]}'}, "a label of the type dict"),
    ({"question": "1+1?", "answer": "2\n3"}, "a label of several lines"),
    ({"question": "1+1?", "answer": "#### Step 1\n#### Step 2"}, "#### in several places"),
    ({"question": "1+1?", "answer": "It is 2\n#### "}, "the label ''"),
    ({"problem": "1+1?", "solution": "It is 2."}, r"a solution without \boxed{} and without ####"),
    ({"problem": "?", "solution": r"\boxed{1}, then \boxed{2"}, r"a \boxed without a closed {}"),
    ({"messages": [TURN]}, "a conversation that does not end with a solution"),
    ('{"question": "1+1?", "answer": NaN}', "the label 'nan'"),
    *(({"problem": "?", "answer": word}, f"the label {word!r}") for word in ("Proof", "#DIV/0!")),
]


@pytest.mark.parametrize("bad, reason", UNUSABLE)
def test_what_cannot_be_used_is_left_out_and_counted(bad, reason, tmp_path, capsys):
    """A file of which more is left out than read is refused."""
    good, bad = json.dumps(GSM8K), bad if isinstance(bad, str) else json.dumps(bad)
    path = write(tmp_path, "a.jsonl", f"{good}\n\n{bad}\n")
    assert read(path) == [("1+1?", "2")]
    told = capsys.readouterr().err
    assert told.startswith(f"WARNING: {path}: 1 of 2 records are left out: 1 with {reason}")
    assert told.endswith(" (first: record 2)\n")
    path = write(tmp_path, "b.jsonl", f"{good}\n{bad}\n{bad}")
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: 2 of 3 records are left out: 2 with {reason}")


def test_a_float_that_has_lost_digits_is_no_label():
    """For a JSON file of the hub, pyarrow reads a whole number of 25 digits as a float."""
    assert records.parse_label(0.5) == "0.5"
    with pytest.raises(records.Unusable, match="a number that has lost digits"):
        records.parse_label(float(LONG))


def test_a_table_may_have_line_breaks_quotes_and_long_cells(tmp_path):
    long = "x" * 200_000
    write(tmp_path, "a.csv", f'question,answer\r\n"1+1?,\nhm",2\r\n"""a""",3\r\n{long},4\r\n')
    expected = [("1+1?,\nhm", "2"), ('"a"', "3"), (long, "4")]
    write(tmp_path, "a.csv.gz", gzip.compress((tmp_path / "a.csv").read_bytes()))
    for name in ("a.csv", "a.csv.gz"):
        assert read(tmp_path / name) == expected
    # This limit holds for all code of the process. A small one broke an import of transformers.
    assert csv.field_size_limit() > 200_000


def test_columns_can_be_named_by_a_path(tmp_path):
    record = {"a": {"b": [{"c": "1+1?"}]}, "d": "Two.", "question": "no", "answer": "no"}
    path = write(tmp_path, "a.json", [record])
    file, options = records.split_path(f"{path}?columns=a.b.0.c,d")
    assert read(file, **options) == [("1+1?", "Two.")]
    with pytest.raises(UserError, match=r"no label in the columns a, d, question, answer; "):
        read(path, columns=("d", "e"))
    for options, told in (("columns=a.b.0.c", "name two columns"), ("split=a", "it has no split")):
        with pytest.raises(UserError, match=told):
            records.split_path(f"{path}?{options}")


def test_a_system_turn_is_kept_for_the_chat_template(tmp_path, capsys):
    turns = [{"role": "system", "content": "Be brief."}, TURN]
    path = write(tmp_path, "a.json", [{"messages": turns, "answer": "4"}])
    [problem] = reward.load_problems(path, "chat")
    assert (problem.prompt, problem.system) == ("1+1?", "Be brief.")
    assert not capsys.readouterr().err
    reward.load_problems(path, "{question}\n")
    assert "1 problems have a system turn; only --template chat" in capsys.readouterr().err


APPLES = "question,answer\nÄpfel?,2\n"
BAD_FILES = [
    ("a.csv", 'question,answer\nA,1\n"B, no end,7\nC,3', "line 4: unexpected end of data; a quote"),
    ("b.csv", "question,answer,answer\n1+1?,2,3", "two columns have one name: question, answer"),
    # A comma without quotes shifts the cells.
    ("c.csv", "question,answer\n1,000+1?,1001", "more cells than columns: a comma without quotes"),
    ("windows.csv", APPLES.encode("cp1252"), "save it in UTF-8"),
    ("utf-16.csv", APPLES.encode("utf-16"), "save it in UTF-8"),
    ("absent.jsonl.gz", None, "absent.jsonl.gz: no such file"),
    ("broken.jsonl.gz", "no gzip", "broken.jsonl.gz cannot be read: BadGzipFile"),
    ("empty.jsonl", "\n \n", "empty.jsonl holds no problems"),
    ("none.json", "[]", "none.json holds no problems"),
    ("broken.json", "[1, 2", "broken.json cannot be read: JSONDecodeError"),
    ("dict.json", {"data": [GSM8K]}, "no question in the columns data"),
    ("deep.jsonl", "[" * 100_000, "deep.jsonl: 1 of 1 records are left out: 1 with no JSON"),
]


@pytest.mark.parametrize("name, content, told", BAD_FILES)
def test_a_bad_file_is_an_error_of_one_line(name, content, told, tmp_path):
    if content is not None:
        write(tmp_path, name, content)
    with pytest.raises(UserError) as caught:
        read(tmp_path / name)
    assert told in str(caught.value) and "\n" not in str(caught.value)


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
        assert read(path) == [("1+1?", "2"), ("2+2?", "4")], path
    for path in ("splits", "openai/gsm8k:main"):
        assert len(read(path, split="test")) == 1
        with pytest.raises(UserError, match="it has no split 'dev', but train, test"):
            read(path, split="dev")
    with pytest.raises(UserError, match="saved.split=test: it has no split; choose columns"):
        records.split_path("saved?split=test")
    for path in ("nowhere", "openai/gsm8k:other"):
        with pytest.raises(UserError, match=path):
            read(path)


def test_five_reasons_are_told_and_that_there_are_others(tmp_path, capsys):
    """A reason names the columns of its record."""
    rows = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(9)]
    rows += [{"question": "1+1?", f"column_{n}": ""} for n in range(7)]
    path = write(tmp_path, "odd.jsonl", "\n".join(map(json.dumps, rows)))
    assert len(read(path)) == 9
    told = capsys.readouterr().err
    assert "7 of 16 records are left out" in told and told.strip().endswith("; others")


def test_tables_of_the_hub_are_refused(monkeypatch):
    """The datasets library would read the label 007 as 7."""
    datasets = pytest.importorskip("datasets")
    builder = SimpleNamespace(name="csv")
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *words: builder)
    with pytest.raises(UserError, match="^someone/tables: download its .csv files"):
        read("someone/tables")


def test_reward_py_shows_what_is_read(tmp_path):
    rows = []
    for question, label in (("6 times 7", "42"), ("half of 7", r'["\\frac{7}{2}"]'), ("5 + 5", "")):
        prompt = [{"role": "user", "content": f"What is {question}?"}]
        rows.append({"prompt": prompt, "reward_model": {"ground_truth": label}})
    rows.append({"question": "Is 7 odd?", "answer": True})
    path = write(tmp_path, "mine.jsonl", "\n".join(map(json.dumps, rows)))
    done = run_python(ROOT / "reward.py", path)
    assert "1 of 4 records are left out: 1 with no label in the columns prompt" in done.stderr
    assert "question  What is half of 7?\nlabel     \\frac{7}{2}\n" in done.stdout
    assert done.stdout.endswith("1 of 3 labels are no numbers\n  true\n")
    path = write(tmp_path, "odd.csv", "id,task,key\n1,2+2?,4\n2,3+3?,6\n")
    done = run_python(ROOT / "reward.py", path, code=2)
    assert "2 with no question in the columns id, task, key" in done.stderr
    assert "question  3+3?" in run_python(ROOT / "reward.py", f"{path}?columns=task,key").stdout
