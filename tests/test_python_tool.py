"""tasks/python_tool.py: what replies hold, and what counts as an answer."""

import pytest

from rollout import Sample
from tasks import python_tool
from tasks.jail import Jail

TRACEBACK = 'Traceback (most recent call last):\n  File "<stdin>", line 1, in <module>\n'
# {program: reply without its first and its last line}
REPLIES = {
    "print(3)\nx = 4": "3",
    "import sympy\nprint(sympy.factorint(91))": "{7: 1, 13: 1}",
    "pass": "nothing was printed",
    "exit()": "nothing was printed",
    "exit(-1)": "nothing was printed",
    "": "nothing was printed",
    "1/0": f"{TRACEBACK}ZeroDivisionError: division by zero",
    "x = bytearray(3 << 30)": f"{TRACEBACK}MemoryError",
    "import os\nos.abort()": "stopped by signal 6",
    "print(1, flush=True)\nwhile True: pass": "1\nstopped: it used more than 4 s of CPU time",
    "print('`' * 3 + 'output\\0\\x1b')": "'''output??",
}


@pytest.fixture
def grader(jail, monkeypatch):
    monkeypatch.setattr(python_tool, "CPU_SECONDS", 4)
    with python_tool.Grader(workers=2) as grader:
        yield grader


def ask(program, before=""):
    text = f"{before}I compute.\n```python\n{program}\n```\n```output"
    return python_tool.reply(text, "stop", "15")


def test_a_reply_is_what_the_program_has_printed(grader):
    asked = {program: ask(program) for program in REPLIES}
    assert {program: reply.result() for program, reply in asked.items()} == {
        program: f"\n{text}\n```\n" for program, text in REPLIES.items()
    }
    # The middle of a long output is left out, and an endless one is not read to its end.
    long = ask("print('x' * 3000)\n1/0").result()
    assert long.startswith("\n" + "x" * 500 + "\n...\nx") and len(long) < 1020
    assert long.endswith("ZeroDivisionError: division by zero\n```\n")
    assert len(ask("while True: print('x' * 3000)").result()) < 1020
    assert "SyntaxError" in ask("print(\ud800)").result()
    hasty = Jail(cpu_seconds=9, wall_seconds=60)
    hasty.wall_seconds = 1
    told = python_tool.run_program(hasty, "import time\ntime.sleep(600)")
    assert told == "\nstopped: it took more than 1 s\n```\n"


def test_only_the_program_of_the_turn_runs(grader):
    first = "```python\nprint(1)\n```\n```output\n1\n```\n"
    assert ask("print(2)", first).result() == "\n2\n```\n"
    # What a program has printed is no program, and no text is one without a block.
    printed = "```python\nprint(1)\n```\n```output\n'''python\nprint(1)\n```\n"
    for text in (first, printed, "I think.\n", "```\nprint(1)\n```\n", ""):
        told = python_tool.reply(f"{text}```output", "stop", "")
        assert told == "\nthere is no block of Python\n```\n", text
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
        sample = Sample(None, [0], parts=[turn, reply, last])
        grader.submit(last, sample.drawn_text, "stop", "15")
        assert grader.results() == {last: reward}
