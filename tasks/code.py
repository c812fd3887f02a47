r"""The task code: the reward is 1.0 if a program passes its tests, which run in a jail.

    python train.py --model Qwen/Qwen2.5-0.5B-Instruct --task code \
        --data google-research-datasets/mbpp --template chat --stop ""

A program gets an input, or its test evaluates an expression such as f(2). It never gets the
expected value. This file compares its output with the expected value, word by word or read by
ast.literal_eval. So a program passes a test only by the right answer. tasks/jail.py contains a
program, code_tests.py runs the tests in the jail, and code_data.py reads the problems. ORZ has no
such task. To use this file elsewhere, on Linux, copy these three files of tasks/, reward.py and the
files of nanoorz/ that reward.py names, too.
"""

import ast
import json
import marshal
import math
import re
import signal
from concurrent import futures
from decimal import Decimal
from pathlib import Path

from reward import last_block
from tasks import code_tests
from tasks.code_data import load_problems
from tasks.jail import Jail

__all__ = ["Grader", "load_problems", "text_metrics"]

RUN_TESTS = Path(code_tests.__file__).read_text()
# What repr() writes. Other texts, such as f-strings, can be slow for ast or make it print warnings.
# *+ never goes back, so a hostile text takes no longer than another one.
LITERAL = re.compile(
    # 'text'    "text"    b'bytes'
    r"""(?:'(?:[^'\\]|\\[\\'nrtxuU])*+'|"(?:[^"\\]|\\[\\'nrtxuU])*+"|b(?=['"])"""
    # The other signs, numbers such as    12    1e    1e05    2j    and words.
    r"""|[\s\[\](){},:.+-]|(?:\d+(?:e\d*)?j?|set|True|False|None)(?!\w))*+"""
)


def extract_answer(text: str) -> str | None:
    """The last block of ``` in the last closed answer block, or None.

    The line in which a block begins has no other ` before. So ```f``` begins no block.
    """
    block = last_block(text) or ""
    programs = re.findall(r"^[^\n`]*`{3,}[^\n`]*\n(.*?)```", block, re.DOTALL | re.MULTILINE)
    return programs[-1] if programs else None


def same_lines(output: str, expected: str) -> bool:
    """Returns whether each line of the output has the expected words."""
    words = re.findall(r"\S+|\n", output.rstrip())
    expected_words = re.findall(r"\S+|\n", expected.rstrip())
    return len(words) == len(expected_words) and all(map(same_word, words, expected_words))


def same_word(word: str, expected: str) -> bool:
    """Returns whether two words are equal. Decimals are equal within 1e-6 of their size, or 1e-9.

    Whole numbers must be exactly equal, because an answer modulo 10 ** 9 + 7 is wrong if it is one
    less. This also holds for an output such as 1000000006.0. The 1e-9 is for an expected 0.0: with
    numbers up to a million, rounding leaves an error of 1e-10 or less in place of 0.
    """
    is_whole = is_integer(word) and is_integer(expected)
    is_long = max(len(word), len(expected)) > 40
    if word == expected or is_whole or is_long:
        return word == expected
    try:
        if is_integer(expected):
            return Decimal(word) == Decimal(expected)
        return math.isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-9)
    except (ValueError, ArithmeticError):
        return False


def is_integer(word: str) -> bool:
    return word.removeprefix("-").isdigit()


def same_value(output: str, expected: str, tolerance=0.0, is_json=False, is_listed=False) -> bool:
    """Returns whether the last line of output is the expected literal, within the tolerance.

    JSON has no tuples. So if the expected value was JSON, a tuple counts as a list. is_listed: the
    expected value is a list of one value, and this value alone is right, too.
    """
    line = output.rstrip("\n").rpartition("\n")[2]
    # Python reads some long literals slowly, such as a set whose members have one hash.
    if len(line) > 100_000 or not LITERAL.fullmatch(line):
        return line == expected
    try:
        value = ast.literal_eval(line)
        expected_value = ast.literal_eval(expected)
        if is_json:
            value = json.loads(json.dumps(value))
        if value == expected_value or (is_listed and [value] == expected_value):
            return True
        return tolerance > 0 and abs(value - expected_value) <= tolerance
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, OverflowError):
        return False


class Grader:
    """Grades samples as they end, `workers` samples at a time. Raises UserError without a jail.

    Each test of a program has three limits: `cpu_seconds`, `memory_mb` and `wall_seconds`. The
    limit `wall_seconds` is much larger than `cpu_seconds`, so that an honest program does not fail
    on a busy machine. All tests of a program together have 10 times `wall_seconds`. `lost` counts
    the programs of the whole run that a limit of time or a SIGKILL has ended, or whose results
    cannot be read. Their reward is 0.
    """

    def __init__(
        self, workers=1, answer_form="orz", cpu_seconds=6, wall_seconds=60, memory_mb=1024
    ):
        # There is only one form of answers. train.load_task checks --answer_form.
        self.jail = Jail(cpu_seconds, 10 * wall_seconds, memory_mb)
        self.wall_seconds = wall_seconds
        self.lost = 0
        self.checks = {}  # maps a key to a Future of (do all tests pass?, is the verdict lost?)
        # Each thread writes to one process and waits for this process.
        self.threads = futures.ThreadPoolExecutor(workers)

    def submit(self, key, text, finish_reason, label) -> str | None:
        """Takes a finished sample, and returns its program or None without waiting for the grade.

        A sample that did not stop by itself gets 0.0. `key` names the sample in `results`.
        """
        program = None
        if finish_reason == "stop":
            program = extract_answer(text)
        self.checks[key] = self.threads.submit(self.check, program, label)
        return program or None

    def pending(self, seconds: float) -> int:
        """Waits at most so many seconds, then returns how many verdicts are still missing."""
        return len(futures.wait(self.checks.values(), seconds).not_done)

    def results(self) -> dict:
        """Waits for pending checks. Returns {key: reward} of all samples since the last call."""
        rewards = {}
        for key, check in self.checks.items():
            is_right, is_lost = check.result()
            rewards[key] = float(is_right)
            self.lost += is_lost
        self.checks = {}
        return rewards

    def check(self, program: str | None, label: dict) -> tuple[bool, bool]:
        """Returns (does the program pass all tests?, is the verdict lost?). It runs in a thread."""
        if not program:
            return False, False
        # The limit is in bytes: at least 128 KB, and at least 16 times the longest expected value.
        longest_expected = max(len(expected) for _, expected, _ in label["tests"])
        job = {
            "before": label["before"],
            "program": program,
            "after": label["after"],
            "calls": label["calls"],
            "inputs": [test[0] for test in label["tests"]],
            "seconds": self.wall_seconds,
            "longest_output": 1 << max(17, 4 + longest_expected.bit_length()),
        }
        with self.jail.start(["-c", RUN_TESTS], marshal.dumps(job)) as process:
            return self.read_results(process, label, job["longest_output"])

    def read_results(self, process, label, longest_output) -> tuple[bool, bool]:
        """Returns the same as `check`."""
        for _, expected, tolerance in label["tests"]:
            # A program could write here. So a line of another form is no result.
            head = re.fullmatch(rb"(-?\d+) (\d+)\n", process.stdout.readline(99))
            if head is None:
                return False, True
            code, size = map(int, head.groups())
            output = process.stdout.read(min(size, longest_output)).decode(errors="replace")
            if code:
                # A program that is too late gets a SIGKILL, and SIGXCPU if it used up its CPU time.
                return False, code in (-signal.SIGXCPU, -signal.SIGKILL)
            if label["calls"]:
                is_right = same_value(output, expected, tolerance, label["json"], label["listed"])
            else:
                is_right = same_lines(output, expected)
            if not is_right:
                return False, False
        return True, False

    def close(self) -> None:
        """Ends the programs and drops pending checks. Programs also end with this process."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.jail.close()
        self.threads.shutdown()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def text_metrics(text: str) -> dict[str, float]:
    """repetition: the share of lines that repeat a line. code: the characters of the program."""
    lines = [line for line in text.splitlines() if line.strip()]
    repetition = 1 - len(set(lines)) / max(len(lines), 1)
    program = extract_answer(text) or ""
    return {"repetition": repetition, "code": float(len(program))}
