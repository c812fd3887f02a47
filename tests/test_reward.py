"""reward.py: problems, extraction, grading and metrics, in the order of its functions.

The rules of equality and hostile text are in test_equal.py.
"""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import termios
import time
from concurrent import futures
from pathlib import Path

import pytest
from test_equal import DATA, DEADLY, ROOT, needs_data, symbolic_pairs, verdicts

import reward
from lib import equal
from lib.common import UserError


def boxed(answer):
    return f"some thought</think> <answer> it is \\boxed{{{answer}}}. </answer>"


# ---- problems -----------------------------------------------------------------------------------


def write(folder, name, content):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


ORZ_TRAIN = [
    {"from": "human", "value": "1+1?"},
    {"from": "assistant", "ground_truth": {"value": "2"}},
]
ORZ_EVAL = {"prompt": [{"from": "user", "value": "1+1?"}], "final_answer": "2"}
GSM8K = {"question": "1+1?", "answer": "One and one is <<1+1=2>>2.\n#### 2"}


def test_import_is_light():
    """Algebra and data sets are imported where they are needed; torch comes with lib/common.py."""
    heavy = "{'transformers', 'sympy', 'math_verify', 'datasets', 'vllm', 'deepspeed'}"
    code = f"import sys, reward; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_reward_stands_alone_with_two_files_of_lib(tmp_path):
    """It is copied into other projects: algebra must find its worker there too."""
    (tmp_path / "lib").mkdir()
    for name in ("reward.py", "lib/equal.py", "lib/common.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    code = "import reward; print(reward.is_equiv('1/2', '0.5'), reward.is_equiv('2x', 'x+x'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("True True\n", "")


def test_templates_are_orz_s():
    template = reward.TEMPLATES["orz"]
    assert template.startswith(
        "{bos}A conversation between User and Assistant. The User asks a question, and the "
    )
    assert template.endswith(
        "extracted automatically by the \\boxed{} tag.\nThis is the problem:\n{question}\n\n"
        "Assistant: <think>"
    )
    assert template.count("\\") == 1 and template.count("\n") == 4
    assert template.count("<answer> answer here </answer>") == 2 and "  " not in template
    assert (
        reward.TEMPLATES["demo"] == "{question}<think>"
        and reward.TEMPLATES["plain"] == "{question}"
    )


def test_prompt_is_filled_without_format(tmp_path):
    question = "What is {x} in {question} of \\boxed{} {0}?"
    path = write(tmp_path, "a.jsonl", json.dumps({"question": question, "answer": "1"}))
    (problem,) = reward.load_problems(path, "orz", bos="<s>")
    assert problem.prompt == reward.TEMPLATES["orz"].replace("{bos}", "<s>").replace(
        "{question}", question
    )
    assert reward.load_problems(path, "Q: {question} A:")[0].prompt == f"Q: {question} A:"
    assert reward.load_problems(path, "plain")[0].prompt == question


@pytest.mark.parametrize("record", [ORZ_TRAIN, ORZ_EVAL, GSM8K, {"question": "1+1?", "answer": 2}])
def test_every_form_is_read_as_json_and_as_jsonl(tmp_path, record):
    expected = [
        reward.Problem(0, "1+1?", "2", "1+1?<think>"),
        reward.Problem(1, "1+1?", "2", "1+1?<think>"),
    ]
    assert reward.load_problems(write(tmp_path, "a.json", [record, record]), "demo") == expected
    lines = f"\ufeff{json.dumps(record)}\n\n{json.dumps(record)}\n"
    assert reward.load_problems(write(tmp_path, "a.jsonl", lines), "demo") == expected


def test_forms_are_told_apart_by_record_and_columns_can_be_named(tmp_path):
    other = {"problem": "1+1?", "solution": "2"}
    path = write(tmp_path, "a.json", [ORZ_TRAIN, ORZ_EVAL, other])
    problems = reward.load_problems(path, "plain", columns=("problem", "solution"))
    assert [(p.index, p.question, p.label) for p in problems] == [
        (i, "1+1?", "2") for i in range(3)
    ]


@needs_data
@pytest.mark.parametrize(
    ("name", "size", "label"),
    [
        ("gsm8k_train.jsonl", 7473, "72"),
        ("gsm8k_test200.jsonl", 200, "18"),
        ("aime2024.json", 30, "73"),
    ]
    + [("math500.json", 500, r"\left( 3, \frac{\pi}{2} \right)")],
)
def test_shipped_data_is_read_whole(name, size, label):
    problems = reward.load_problems(str(DATA / name), "orz")
    assert len(problems) == size and problems[0].label == label
    assert all(p.question in p.prompt and p.label and "#" not in p.label for p in problems)


def bad_files():
    line = json.dumps(GSM8K)
    yield "absent.json", None, ["absent.json", "No such file"]
    yield "absent.jsonl", None, ["absent.jsonl", "No such file"]
    yield "empty.json", "", ["empty.json", "JSON"]
    yield "empty.jsonl", "\n \n", ["empty.jsonl", "no problems"]
    yield "none.json", "[]", ["none.json", "no problems"]
    yield "broken.jsonl", f"{line}\n\n{{broken\n", ["broken.jsonl: line 3", "JSON"]
    yield "broken.json", "[1, 2", ["broken.json", "JSON"]
    yield "number.json", "5", ["number.json"]
    yield "dict.json", json.dumps({"data": [GSM8K]}), ["dict.json: item 1"]
    yield "deep.jsonl", "[" * 100_000, ["deep.jsonl: line 1"]
    yield "bytes.json", b"\xff\xfe\x00", ["bytes.json", "UnicodeDecodeError"]
    for bad, missing in [
        ({"question": "1+1?"}, "'answer'"),
        ({"answer": "2"}, "'question'"),
        ({"question": "1+\ud8001", "answer": "2"}, "surrogate"),
        ({"question": "", "answer": "2"}, "question"),
        ({"question": 5, "answer": "2"}, "question"),
        ({"question": "1+1?", "answer": None}, "answer"),
        ({"question": "1+1?", "answer": True}, "answer"),
        ({"question": "1+1?", "answer": "  "}, "answer"),
        ({"question": "1+1?", "answer": ["2"]}, "answer"),
        ({"question": "1+1?", "answer": "It is\ntwo lines"}, "#### "),
        ({"question": "1+1?", "answer": "It is 2\n#### "}, "answer"),
        ({"prompt": [], "final_answer": "2"}, "list index"),
        ({"prompt": [{"from": "user"}], "final_answer": "2"}, "'value'"),
        ({"final_answer": "2"}, "'prompt'"),
        (ORZ_TRAIN[:1], "list index"),
        ([ORZ_TRAIN[0], {"from": "assistant"}], "'ground_truth'"),
        ([ORZ_TRAIN[0], {"ground_truth": {}}], "'value'"),
        ("text", "str"),
        (5, "int"),
        (None, "NoneType"),
    ]:
        yield "bad.json", json.dumps([GSM8K, bad]), ["bad.json: item 2", missing]
        yield "bad.jsonl", f"{line}\n\n{json.dumps(bad)}\n", ["bad.jsonl: line 3", missing]


@pytest.mark.parametrize(("name", "content", "parts"), bad_files())
def test_bad_file_is_an_error_of_one_line_that_says_where(tmp_path, name, content, parts):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        write(tmp_path, name, content)
    with pytest.raises(UserError) as caught:
        reward.load_problems(str(tmp_path / name), "orz")
    message = str(caught.value)
    assert "\n" not in message and all(part in message for part in parts), message


@pytest.mark.parametrize("template", ["", "orzz", "no place for it", "{questions}"])
def test_unknown_template_is_an_error_that_names_the_known(template, tmp_path):
    with pytest.raises(UserError, match="orz, demo, plain"):
        reward.load_problems(write(tmp_path, "a.json", [GSM8K]), template)


def test_local_datasets_are_read_by_folder_and_split(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(
        [{"problem": "1+1?", "solution": "2"}, {"problem": "2+2?", "solution": "4"}]
    )
    rows.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(
        str(tmp_path / "splits")
    )
    (tmp_path / "folder").mkdir()
    rows.to_json(str(tmp_path / "folder" / "train.jsonl"))
    names = {"columns": ("problem", "solution")}
    for folder in ("saved", "splits", "folder"):
        problems = reward.load_problems(str(tmp_path / folder), "plain", **names)
        assert [(p.question, p.label) for p in problems] == [("1+1?", "2"), ("2+2?", "4")], folder
    assert len(reward.load_problems(str(tmp_path / "splits"), "plain", split="test", **names)) == 1
    with pytest.raises(UserError, match="'dev'"):
        reward.load_problems(str(tmp_path / "splits"), "plain", split="dev", **names)
    with pytest.raises(UserError, match="item 1 cannot be read: KeyError: .question."):
        reward.load_problems(str(tmp_path / "saved"), "plain")
    with pytest.raises(UserError, match="nowhere"):
        reward.load_problems(str(tmp_path / "nowhere"), "plain")


@needs_data
@pytest.mark.parametrize(("split", "size"), [("train", 100), ("test", 200)])
def test_gsm8k_in_the_hub_s_form(tmp_path, monkeypatch, split, size):
    """As "openai/gsm8k" lies on the hub: a card that names a config and its splits, and parquet
    files. Its solutions end with #### and the answer, so they are right in that form."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "openai" / "gsm8k"
    (folder / "main").mkdir(parents=True)
    card = ["---", "configs:", "- config_name: main", "  data_files:"]
    for name, source, count in (("train", "train", 100), ("test", "test200", 200)):
        lines = (DATA / f"gsm8k_{source}.jsonl").read_text().splitlines()[:count]
        rows = datasets.Dataset.from_list([json.loads(line) for line in lines])
        rows.to_parquet(str(folder / "main" / f"{name}-00000-of-00001.parquet"))
        card += [f"  - split: {name}", f"    path: main/{name}-*"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))
    # The name is that of the hub, and there is a folder of that name here.
    monkeypatch.chdir(tmp_path)
    problems = reward.load_problems("openai/gsm8k:main", "chat", split=split)
    assert len(problems) == size
    assert problems[0].label == {"train": "72", "test": "18"}[split]
    rows = datasets.load_dataset("openai/gsm8k", "main", split=split)
    pairs = [(row["answer"], problem.label) for row, problem in zip(rows, problems, strict=True)]
    assert graded("hashes", pairs) == [1.0] * size
    names = {"columns": ("problem", "answer")}
    with pytest.raises(UserError, match="item 1 cannot be read: KeyError: .problem."):
        reward.load_problems("openai/gsm8k:main", "chat", split=split, **names)
    with pytest.raises(UserError, match="other"):
        reward.load_problems("openai/gsm8k:other", "chat", split=split)


# ---- extraction ---------------------------------------------------------------------------------


def slow_extract(text):
    """Reference: every \\boxed{ is tried from the last to the first, counting braces by hand."""
    blocks = [i for i in range(len(text)) if text.startswith("</answer>", i)]
    if not blocks:
        return None
    starts = [i for i in range(blocks[-1]) if text.startswith("<answer>", i)]
    starts = [i for i in starts if i + len("<answer>") <= blocks[-1]]
    if not starts:
        return None
    block = text[starts[-1] : blocks[-1]]
    escaped = [False] * len(block)
    i = 0
    while i < len(block):
        if (
            block[i] == "\\"
            and not any(block.startswith("\\boxed{", j) for j in (i, i + 1))
            and i + 1 < len(block)
        ):
            escaped[i + 1] = True
            i += 1
        i += 1
    for start in reversed(range(len(block))):
        if block.startswith("\\boxed{", start) and not escaped[start]:
            depth = 1
            for i in range(start + len("\\boxed{"), len(block)):
                depth += (block[i] == "{") - (block[i] == "}") if not escaped[i] else 0
                if depth == 0:
                    return block[start + len("\\boxed{") : i]
    return None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>\\boxed{42}</answer>", "42"),
        ("<think>\\boxed{1}</think> <answer>\\boxed{42}</answer>", "42"),
        ("<answer>\\boxed{1}</answer> <answer>\\boxed{2}</answer>", "2"),
        ("<answer>\\boxed{1} so \\boxed{2}</answer>", "2"),
        ("<answer>\\boxed{1}</answer> and \\boxed{3}", "1"),
        ("<answer>\\boxed{1}</answer> <answer>\\boxed{2}", "1"),
        ("<answer>\\boxed{\\frac{1}{2}}</answer>", "\\frac{1}{2}"),
        ("<answer>\\boxed{\\{1, 2\\}}</answer>", "\\{1, 2\\}"),
        ("<answer>\\boxed{\\left\\{ x \\right.}</answer>", "\\left\\{ x \\right."),
        ("<answer>\\boxed{x \\}}</answer>", "x \\}"),
        ("<answer>\\boxed{1} \\boxed{2</answer>", "1"),
        ("<answer>\\boxed{1 \\boxed{2} </answer>", "2"),
        ("<answer>\\boxed{1 + \\boxed{2}}</answer>", "2"),
        ("<answer>}}} \\boxed{1}</answer>", "1"),
        ("<answer>{{{ \\boxed{1}</answer>", "1"),
        ("<answer>\\boxed{a}\nb\n\\boxed{c\nd}</answer>", "c\nd"),
        ("<answer>\\\\boxed{5}</answer>", "5"),
        ("<answer>\\boxed{ 5 }</answer>", " 5 "),
        ("<answer>\\boxed{}</answer>", ""),
        ("<answer>\\boxed{5}", None),
        ("\\boxed{5}</answer>", None),
        ("\\boxed{5}", None),
        ("<answer>5</answer>", None),
        ("<answer>\\boxed 5</answer>", None),
        ("<answer>\\fbox{5}</answer>", None),
        ("<answer>boxed{5}</answer>", None),
        ("</answer>\\boxed{5}<answer>", None),
        ("<answer>\\boxed{5}</answer> <answer>none</answer>", None),
        ("", None),
    ],
)
def test_the_answer_is_the_last_balanced_box_of_the_last_closed_block(text, answer):
    assert reward.extract_answer(text) == answer == slow_extract(text)


def test_extract_answer_equals_the_slow_reference():
    pieces = [
        "<answer>",
        "</answer>",
        "\\boxed{",
        "{",
        "}",
        "\\{",
        "\\}",
        "\\\\",
        "\\",
        "\\boxed",
        "x",
        "1",
        " ",
        "\n",
    ]
    rng = random.Random(1)
    for _ in range(20_000):
        text = "".join(rng.choices(pieces, weights=[2, 2, 4, 2, 5] + [1] * 9, k=rng.randint(1, 25)))
        text = text if rng.random() < 0.3 else f"<answer>{text}</answer>"
        assert reward.extract_answer(text) == slow_extract(text), text


@pytest.mark.parametrize(
    "middle",
    [
        "{" * 300_000,
        "}" * 300_000,
        "{" * 50_000 + "}" * 50_000,
        "\\boxed{" * 50_000,
        "\\" * 300_000,
        "\\boxed{1}" * 25_000,
    ]
    + [
        "\\boxed{" * 50_000 + "}" * 50_000,
        "<answer>" * 50_000,
        "</answer>" * 50_000,
        "\\boxed" * 50_000,
    ],
)
def test_extract_answer_is_linear(middle):
    start = time.process_time()
    for text in (middle, f"<answer>{middle}</answer>", f"<answer>{middle}", f"{middle}</answer>"):
        for form in reward.ANSWER_FORMS.values():
            form(text)
    assert time.process_time() - start < 16, "50,000 nested braces took seconds: quadratic?"


@pytest.mark.parametrize("middle", ["#", "1", "1,", "1,234", ".1", "-", "-1", "#### 1"])
def test_numbers_and_hashes_are_found_in_linear_time(middle):
    start = time.process_time()
    for form in ("last_number", "hashes"):
        reward.ANSWER_FORMS[form](middle * (10**6 // len(middle)))
    assert time.process_time() - start < 8


# As models of each kind end their responses.
ENDS = {
    "boxed_anywhere": [
        ("Therefore, Janet makes \\boxed{18} dollars every day.", "18"),
        ("</think>\n\n**Final Answer**\n\n\\[\n\\boxed{18}\n\\]", "18"),
        ("The final answer is: $\\boxed{\\$18}$. I hope it is correct.", "\\$18"),
        ("First $\\boxed{9}$ eggs, then $2 \\cdot 9 = \\boxed{18}$.", "18"),
        ("<think> a guess: \\boxed{17} </think> <answer> 18 </answer>", "17"),
        (
            "so the pair is $\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}$.",
            "\\left( 3, \\frac{\\pi}{2} \\right)",
        ),
        ("\\boxed{18", None),
        ("#### 18", None),
    ],
    "last_number": [
        ("So she makes $18 every day at the farmers' market.", "18"),
        ("The answer is 18.", "18"),
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
        ("####18\r\n", "18\r"),
        ("The answer is 18.", None),
        ("### 18", None),
        ("it is ####", ""),
    ],
}
CASES = [(form, *case) for form, cases in ENDS.items() for case in cases]


@pytest.mark.parametrize(("form", "text", "answer"), CASES)
def test_a_form_finds_the_answer_in_what_such_models_write(form, text, answer):
    assert reward.ANSWER_FORMS[form](text) == answer


def graded(form, pairs):
    """The rewards of pairs (response, label) that all ended by themselves."""
    with reward.Grader(2, form) as grader:
        for key, (text, label) in enumerate(pairs):
            grader.submit(key, text, "stop", label)
        return list(grader.results().values())


# How a right response to a problem of GSM8K ends in each form, with the label's number in it.
GSM8K_WAYS = {
    "orz": ["{work}</think> <answer> \\boxed{{{label}}} </answer>"],
    "boxed_anywhere": ["{work}\nThe answer is $\\boxed{{{label}}}$.", "\\boxed{{\\${label}.00}}"],
    "last_number": ["{work}\nThe answer is {label}.", "So it is ${label:,} in all.", "{work}"],
    "hashes": ["{work}", "{work}\n#### ${label:,}", "Adding up:\n#### {label} dollars\n\nDone."],
}


@needs_data
@pytest.mark.parametrize("form", GSM8K_WAYS)
def test_known_answers_of_gsm8k_in_every_form(form):
    """The data set's own solutions are responses of a model that was trained on it: they end with
    #### and the answer. Each response is right for its own problem and wrong for the next one."""
    lines = (DATA / "gsm8k_test200.jsonl").read_text().splitlines()
    problems = reward.load_problems(str(DATA / "gsm8k_test200.jsonl"), "plain")
    right = []
    for line, problem in zip(lines, problems, strict=True):
        work = json.loads(line)["answer"]
        number = int(problem.label.replace(",", ""))
        for way in GSM8K_WAYS[form]:
            right.append((way.format(work=work, label=number), problem.label))
    assert graded(form, right) == [1.0] * len(right)
    following = right[1:] + right[:1]
    wrong = [(text, label) for (text, own), (_, label) in zip(right, following) if own != label]
    assert len(wrong) > 150
    assert not any(graded(form, wrong))


@needs_data
def test_known_answers_of_math500_in_a_box():
    """In ORZ's form the same box must stand in an answer block."""
    problems = reward.load_problems(str(DATA / "math500.json"), "plain")
    boxes = [f"Hence the answer is $\\boxed{{{problem.label}}}$." for problem in problems]
    labels = [problem.label for problem in problems]
    assert graded("boxed_anywhere", zip(boxes, labels)) == [1.0] * 500
    assert graded("orz", zip(boxes, labels)) == [0.0] * 500
    blocks = [f"so </think> <answer> {box} </answer>" for box in boxes]
    assert graded("orz", zip(blocks, labels)) == [1.0] * 500


# ---- equality -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_is_equiv_works_alone_and_in_a_forked_child():
    assert (
        reward.is_equiv("\\frac{1}{2}", "0.5")
        and reward.is_equiv("2x", "x+x")
        and not reward.is_equiv("2x", "x")
    )
    pid = os.fork()
    if pid == 0:  # the child must use processes of its own
        os._exit(0 if reward.is_equiv("3x", "x+2x") and not reward.is_equiv("3x", "4x") else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert reward.is_equiv("5x", "x+4x")


def test_is_equiv_works_in_threads():
    """They once shared a table of verdicts: errors, and other pairs' verdicts."""
    pairs = [(f"{n}x", f"x+{n - 1 + n % 2}x") for n in range(2, 6)]
    pairs += [(f"{n}", f"{n}.{n % 2}") for n in range(60)]
    with futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda pair: reward.is_equiv(*pair), pairs))
    assert found == [n % 2 == 0 for n in range(4 + 60)]


# ---- grading ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", reward.ANSWER_FORMS)
def test_submit_says_the_answer_of_the_response(form):
    """A wrong one is one too; one of a response that was cut is none."""
    with reward.Grader(1, form) as grader:
        ends = ["</think><answer>\\boxed{7}</answer>\n#### 7", "I do not know</answer>", "####"]
        ends.append("<answer>\\boxed{}</answer>")
        found = [grader.submit(end, end, "stop", "8") for end in ends]
        assert found == ["7", None, None, None]
        assert grader.submit("cut", ends[0], "length", "7") is None
        assert not any(grader.results().values())


def test_reward_needs_a_stop_an_answer_and_equality():
    with reward.Grader() as grader:
        grader.submit("right", boxed("\\frac{1}{2}"), "stop", "0.5")
        grader.submit("truncated", boxed("\\frac{1}{2}"), "length", "0.5")
        grader.submit("wrong", boxed("\\frac{1}{3}"), "stop", "0.5")
        grader.submit("none", "I do not know</answer>", "stop", "0.5")
        grader.submit("unclosed", "<answer>\\boxed{0.5}", "stop", "0.5")
        grader.submit("empty", boxed(""), "stop", "0.5")
        grader.submit(("any", "key"), boxed("2x"), "stop", "x+x")
        grader.submit("number", boxed("72"), "stop", 72)
        found = grader.results()
        assert (
            found == {key: float(key in ("right", "number", ("any", "key"))) for key in found}
            and len(found) == 8
        )
        assert grader.results() == {}


def test_submit_returns_at_once_and_equal_pairs_share_a_check():
    with reward.Grader(workers=1, cpu_seconds=1.0) as grader:
        for number in range(64):
            grader.submit(number, boxed("999999999!"), "stop", "x+1")
            grader.submit(100 + number, boxed("1+x"), "stop", "x+1")
            assert grader.pending(0)
        found = grader.results()
        assert [found[i] for i in range(64)] == [0.0] * 64 and [
            found[100 + i] for i in range(64)
        ] == [1.0] * 64
        assert grader.counts["symbolic"] == 2 and grader.counts["cpu_timeouts"] == 1


def test_check_that_uses_up_its_cpu_time_is_0_counted_and_the_process_replaced():
    with reward.Grader(workers=1, cpu_seconds=0.5) as grader:
        for number, text in enumerate(DEADLY):
            grader.submit(number, boxed(text), "stop", "2x+1")
            grader.submit(("after", number), boxed(f"1+{number + 2}x"), "stop", f"{number + 2}x+1")
        found = grader.results()
        assert [found[number] for number in range(len(DEADLY))] == [0.0] * len(DEADLY)
        assert [found["after", number] for number in range(len(DEADLY))] == [1.0] * len(DEADLY)
        assert grader.counts == {
            "symbolic": 2 * len(DEADLY),
            "cpu_timeouts": len(DEADLY),
            "wall_timeouts": 0,
            "crashes": 0,
        }


def only_process(grader):
    grader.compare("start it", "x+1", "1+x")
    assert grader.results() == {"start it": 1.0}
    (worker,) = [worker for worker in grader.workers if worker.process]
    return worker.process


def test_hung_process_is_killed_replaced_and_counted():
    with reward.Grader(workers=1) as grader:
        process = only_process(grader)
        os.kill(process.pid, signal.SIGSTOP)
        grader.wall_seconds = 1.0
        grader.compare("hung", "x+2", "2+x")
        assert grader.results() == {"hung": 0.0}
        grader.wall_seconds = 120.0
        grader.compare("next", "x+3", "3+x")
        assert grader.results() == {"next": 1.0}
        assert process.returncode == -signal.SIGKILL
        assert (
            grader.counts["wall_timeouts"],
            grader.counts["cpu_timeouts"],
            grader.counts["crashes"],
        ) == (1, 0, 0)


def waiting(pipe):
    """Bytes that its reader has not taken yet."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_crashed_process_is_replaced_and_counted():
    with reward.Grader(workers=1) as grader:
        process = only_process(grader)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(
            os.P_PID, process.pid, os.WSTOPPED
        )  # before that it may still take what is written, then stop
        grader.compare("crashed", "x+2", "2+x")
        grader.compare("next", "x+3", "3+x")
        while not waiting(process.stdin):  # else it dies idle, which costs no verdict
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        assert grader.results() == {"crashed": 0.0, "next": 1.0}
        assert (
            grader.counts["wall_timeouts"],
            grader.counts["cpu_timeouts"],
            grader.counts["crashes"],
        ) == (0, 0, 1)


def test_process_that_died_idle_costs_no_verdict():
    with reward.Grader(workers=1) as grader:
        process = only_process(grader)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        grader.compare("next", "x+3", "3+x")
        assert grader.results() == {"next": 1.0}


@pytest.mark.parametrize("command", ["/bin/false", "/nonexistent/python"])
@pytest.mark.parametrize("is_started_before", [False, True])
def test_process_that_cannot_start_is_noted_before_it_is_an_error(
    monkeypatch, command, is_started_before
):
    """An error in one rank alone ended the run without a save: a rank asks for `broken` first."""
    with reward.Grader(workers=1) as grader:
        if is_started_before:
            process = only_process(grader)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert grader.broken is None
        monkeypatch.setattr(equal.sys, "executable", command)
        grader.compare("any", "x+3", "3+x")
        while grader.pending(1.0):
            pass
        assert grader.broken.startswith("no grading process can be started: ")
        assert command in grader.broken and "\n" not in grader.broken
        with pytest.raises(UserError, match=command):
            grader.results()


def test_pair_that_used_up_its_cpu_time_does_so_once_in_a_run():
    """8,192 answers 1000000! would have cost hours: each step forgot what the one before lost."""
    with reward.Grader(workers=1, cpu_seconds=0.5) as grader:
        grader.compare("first", "999999999!", "x+1")
        grader.compare("other", "x+2", "2+x")
        assert grader.results() == {"first": 0.0, "other": 1.0}
        counts = dict(grader.counts)
        process = grader.workers[0].process
        os.kill(process.pid, signal.SIGSTOP)
        for key in ("again", "and again"):
            grader.compare(key, "999999999!", "x+1")
            assert grader.pending(0) == 0
            assert grader.results() == {key: 0.0}
        assert grader.workers[0].process is process
        assert grader.counts == counts, "one process was lost"
        assert (counts["symbolic"], counts["cpu_timeouts"], grader.lost) == (2, 1, 1)


def test_pair_that_was_lost_otherwise_is_tried_again():
    """That may have been an accident. What a check cannot do within its CPU time it never can."""
    with reward.Grader(workers=1) as grader:
        process = only_process(grader)
        os.kill(process.pid, signal.SIGSTOP)
        grader.wall_seconds = 0.5
        grader.compare("hung", "x+2", "2+x")
        assert grader.results() == {"hung": 0.0}
        grader.wall_seconds = 120.0
        grader.compare("again", "x+2", "2+x")
        assert grader.results() == {"again": 1.0}
        assert grader.counts["symbolic"] == 3 and grader.lost == 1


def test_signals_of_the_terminal_leave_the_process_alone():
    with reward.Grader(workers=1) as grader:
        process = only_process(grader)
        os.kill(process.pid, signal.SIGINT)
        grader.compare("next", "x+3", "3+x")
        assert grader.results() == {"next": 1.0} and grader.counts["crashes"] == 0
        assert only_process(grader) is process


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def gone(pids, seconds=10.0):
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_close_leaves_no_process_even_of_a_running_check():
    with reward.Grader(workers=2, cpu_seconds=60.0) as grader:
        for number, text in enumerate(DEADLY):
            grader.compare(number, text, "2x+1")
        while not all(worker.process for worker in grader.workers):
            time.sleep(0.05)
        pids = [worker.process.pid for worker in grader.workers]
    assert gone(pids)


@pytest.mark.parametrize(
    ("end", "cpu_seconds"), [("os.kill(os.getpid(), 9)", 60.0), ("raise RuntimeError", 1.0)]
)
@pytest.mark.slow
def test_processes_end_with_their_parent(end, cpu_seconds):
    code = f"""import os, sys, reward
grader = reward.Grader(1, cpu_seconds={cpu_seconds})
grader.compare(0, "x+1", "1+x")
grader.results()
grader.compare(1, "999999999!", "x+1")
print(grader.workers[0].process.pid, flush=True)
{end}"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode != 0 and gone([int(done.stdout)])


def test_slow_check_does_not_hold_up_the_others():
    with reward.Grader(workers=2, cpu_seconds=600.0, wall_seconds=600.0) as grader:
        only_process(grader)
        grader.compare("slow", "999999999!", "x+1")
        for number in range(30):
            grader.compare(number, f"x+{number}", f"{number}+x")
        slow = grader.running.pop(("999999999!", "x+1"))
        assert len(grader.running) + len(grader.verdicts) == 30
        assert all(check.result(timeout=100) for check in grader.running.values())
        assert all(grader.verdicts.values())
        assert not slow.done()


@pytest.mark.parametrize(
    ("count", "many"),
    [
        pytest.param(210, 8, marks=pytest.mark.slow),
        pytest.param(8192, 16, marks=pytest.mark.long),
    ],
)
def test_verdicts_do_not_depend_on_load(count, many):
    """ORZ loses right answers when checks queue up. Here one process and many must agree."""
    pairs = symbolic_pairs(count)
    expected = {(text, label): right for text, label, right in pairs}
    for workers in (1, many):
        with reward.Grader(workers) as grader:
            assert verdicts(grader, expected) == expected
            assert grader.counts["symbolic"] == len(pairs)
            assert grader.lost == 0


# ---- text metrics -------------------------------------------------------------------------------


def slow_repetition(text):
    words = text.split()
    grams = [" ".join(words[i : i + 4]) for i in range(len(words) - 3)]
    return sum(gram in grams[:i] for i, gram in enumerate(grams)) / len(grams) if grams else 0.0


def test_text_metrics_are_the_repeated_4_grams_and_the_second_thoughts():
    text = "Wait, let me recheck. However, I retry; ALTERNATIVELY, wait what? however"
    assert reward.text_metrics(text) == {"repetition": 0.0, "reflection": 5.0}
    assert reward.text_metrics("") == {"repetition": 0.0, "reflection": 0.0}
    assert reward.text_metrics("a b c")["repetition"] == 0.0
    assert reward.text_metrics("so it is " * 1_000)["repetition"] > 0.99
    rng = random.Random(4)
    for _ in range(50):
        text = " ".join(rng.choices("abc", k=rng.randint(0, 60)))
        assert reward.text_metrics(text)["repetition"] == pytest.approx(slow_repetition(text))
    start = time.process_time()
    reward.text_metrics("word " * 200_000)
    assert time.process_time() - start < 3
