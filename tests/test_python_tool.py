"""tasks/python_tool.py: what replies hold, and what counts as an answer."""

import pytest
import taught
from conftest import jsonl, launch

from rollout import Sample
from tasks import python_tool

TRACEBACK = '\nTraceback (most recent call last):\n  File "<stdin>", line 1, in <module>\n'
# {program: reply without the last line}
REPLIES = {
    "print(3)\nx = 4": "\n3",
    "import sympy\nprint(sympy.factorint(91))": "\n{7: 1, 13: 1}",
    "pass": "\nnothing was printed",
    "": "\nnothing was printed",
    "1/0": f"{TRACEBACK}ZeroDivisionError: division by zero",
    "print(\ud800)": None,
    "x = bytearray(3 << 30)": f"{TRACEBACK}MemoryError",
    "import os\nos.abort()": "\nstopped by signal 6",
    "print(1, flush=True)\nwhile True: pass": "\n1\nstopped: it used more than 1 s of CPU time",
    "import time\ntime.sleep(600)": "\nstopped: it took more than 4 s",
    "open('/etc/passwd')": f"{TRACEBACK}FileNotFoundError: [Errno 2] No such file or directory: "
    "'/etc/passwd'",
    # The middle of a long output is left out, and an endless one is not read to its end.
    "print('x' * 3000)\n1/0": None,
    "while True: print('x' * 3000)": None,
}


@pytest.fixture
def grader(jail, monkeypatch):
    monkeypatch.setattr(python_tool, "CPU_SECONDS", 1)
    monkeypatch.setattr(python_tool, "WALL_SECONDS", 4)
    with python_tool.Grader(workers=2) as grader:
        yield grader


def ask(program, before=""):
    text = f"{before}I compute.\n```python\n{program}\n```\n```output"
    return python_tool.reply(text, "stop", "15")


def test_a_reply_is_what_the_program_has_printed(grader):
    asked = {program: ask(program) for program in REPLIES}
    found = {program: reply.result().removesuffix("\n```\n") for program, reply in asked.items()}
    long = found.pop("print('x' * 3000)\n1/0")
    assert long.startswith("\n" + "x" * 500 + "\n...\nx")
    assert long.endswith("ZeroDivisionError: division by zero") and len(long) < 1010
    assert len(found.pop("while True: print('x' * 3000)")) < 1010
    assert "SyntaxError" in found.pop("print(\ud800)")
    assert found == {program: REPLIES[program] for program in found}


def test_only_the_program_of_the_turn_runs(grader):
    first = "```python\nprint(1)\n```\n```output\n1\n```\n"
    assert ask("print(2)", first).result() == "\n2\n```\n"
    assert python_tool.reply(f"{first}```output", "stop", "").result() == (
        "\nnothing was printed\n```\n"
    )
    # Without a request the response is finished.
    assert python_tool.reply(first, "stop", "") is None
    assert python_tool.reply("```python\nprint(1)\n```\n```output", "length", "") is None


def test_the_answer_must_be_drawn_by_the_policy(grader):
    """A program that prints the right answer in its form is not paid for that."""
    printed = r"<answer>\boxed{15}</answer>"
    program = r"print('<ans' + r'wer>\boxed{' + str(3 * 5) + '}</answer>')"
    turn = f"```python\n{program}\n```\n```output"
    reply = python_tool.reply(turn, "stop", "15").result()
    assert printed in reply
    for last, reward in (("", 0), ("Done.", 0), (r"<answer>\boxed{15}</answer>", 1)):
        sample = Sample(None, [0], None, "", "stop", parts=[turn, reply, last])
        grader.submit(last, sample.drawn_text, "stop", "15")
        assert grader.results() == {last: reward}


def test_the_prompts_say_how_to_call_python():
    assert python_tool.TEMPLATES["orz"].count("```output") == 1
    assert python_tool.TEMPLATES["orz"].count("must put your answer") == 1


@pytest.mark.slow
def test_a_model_that_was_taught_the_form_calls_python(jail, tmp_path):
    flags = taught.teach_calls(tmp_path / "base")
    launch(
        tmp_path / "run",
        **flags,
        task="python_tool",
        stop="```output",
        answer_form="boxed_anywhere",
        generate_max_len=48,
        log_samples=16,
        max_steps=2,
    )
    samples = jsonl(tmp_path / "run" / "samples.jsonl")
    called = [sample for sample in samples if "parts" in sample]
    assert len(called) > 24
    for sample in called:
        program, reply = sample["parts"][:2]
        expression = program.split("print(")[1].split(")")[0]
        a, b = map(int, expression.split("+"))
        assert reply == f"\n{a + b}\n```\n"
    for line in jsonl(tmp_path / "run" / "metrics.jsonl"):
        assert line["turns"] > 1.5 and line["reward"] > 0.8
