"""The task "code": programs graded by tests, in processes that they cannot leave.

It has the interface of reward.py and is chosen by `--task code`; ORZ has no such task. Expected
values never enter a program's process. A process is given an input, or the expression that an
assert compares with a literal. What it writes is compared here, where ast.literal_eval reads it, so
nothing can be faked but the right answer. tasks/jail.py says what contains a program and what is
not protected. tasks/code_data.py reads the problems.

Copied together with these two and lib/common.py it works alone, on Linux:
`python -c "from tasks import code; print(code.Grader().mode)"` says in which mode of the jail.
"""

import ast
import contextlib
import json
import marshal
import math
import os
import re
import signal
import sys
import tempfile
from concurrent import futures
from decimal import Decimal
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, run

from lib.common import UserError
from tasks.code_data import Problem, load_problems

__all__ = ["Grader", "Problem", "load_problems", "text_metrics"]

MODES = ("namespaces landlock", "landlock", "plain")  # of the jail, best first
# The ways in which a check ends without a verdict.
LOST_WAYS = ("cpu_timeouts", "wall_timeouts", "crashes")
JAIL = str(Path(__file__).resolve().with_name("jail.py"))


def extract_answer(text: str) -> str | None:
    """The last fenced block in the last closed answer block, or None.

    The answer block lies between the last </answer> and the last <answer> before it.
    """
    end = max(text.rfind("</answer>"), 0)
    start = text.rfind("<answer>", 0, end)
    if start < 0:
        return None
    programs = re.findall(r"```[^\n`]*\n(.*?)```", text[start:end], re.DOTALL)
    return programs[-1] if programs else None


def same_lines(output: str, expected: str) -> bool:
    """Has a program written the expected words in each line?"""
    words = re.findall(r"\S+|\n", output.rstrip())
    expected_words = re.findall(r"\S+|\n", expected.rstrip())
    return len(words) == len(expected_words) and all(map(same_word, words, expected_words))


def same_word(word: str, expected: str) -> bool:
    """Decimals may differ by 1e-6 of their size, or by 1e-9. Whole numbers are exact.

    An answer modulo 10 ** 9 + 7 is wrong if it is one less, also as 1000000006.0. The 1e-9 is for
    0.0: on numbers up to a million, rounding leaves 1e-10 or less where nothing should be left.
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


def same_value(output: str, expected: str, tolerance: float, is_json: bool) -> bool:
    """Is the last line of output a literal equal to the expected one, or within the tolerance?

    JSON has no tuples, so a tuple is right where a list in JSON is expected.
    """
    line = output.rstrip("\n").rpartition("\n")[2]
    longest = 100_000 + 4 * len(expected)
    try:
        value = ast.literal_eval(line[:longest])
        expected_value = ast.literal_eval(expected)
        if is_json:
            value = json.loads(json.dumps(value))
        if value == expected_value:
            return True
        return tolerance > 0 and abs(value - expected_value) <= tolerance
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, OverflowError):
        return False


class Grader:
    """Grades samples as they end, `workers` at a time.

    Each test of a program has `cpu_seconds` and `memory_mb`. It also has `wall_seconds`, which are
    many more so that a busy machine fails no honest program. All tests of a program together have
    10 times `wall_seconds`. No test follows one that ran out of time, so the others count as
    failed. `counts` never go back to 0. `broken` is the error of a process that could not be
    started, or None; its check counts as a crash.
    """

    def __init__(
        self,
        workers: int = 1,
        # There is one form only, which train.find_task checks.
        answer_form: str = "orz",
        cpu_seconds: int = 6,
        wall_seconds: int = 60,
        # The reward is 1.0 if all tests pass, else 0.0. Write True here to have the share of the
        # tests that pass.
        partial: bool = False,
        memory_mb: int = 1024,
    ):
        self.limits = {
            "CPU": cpu_seconds,
            "AS": memory_mb << 20,
            "FSIZE": 8 << 20,
            "NPROC": 16,
            "NOFILE": 64,
        }
        self.wall_seconds = wall_seconds
        self.partial = partial
        self.counts = dict.fromkeys(("checks", *LOST_WAYS), 0)
        self.broken = None
        self.checks = {}  # key -> Future of (reward, loss)
        self.processes = set()
        self.closed = False
        # Each thread only feeds a process and waits for it.
        self.threads = futures.ThreadPoolExecutor(workers)
        self.mode = self.best_mode()
        if self.mode == "plain":
            warning = "no Landlock: programs can read and write all that their user can"
            print(f"warning: {warning}", file=sys.stderr)

    def best_mode(self) -> str:
        """The first mode in which a right program is graded as right. Raises UserError."""
        task = {"setup": "", "calls": False, "json": False, "tests": [["", "1", 0]]}
        label = json.dumps(task)
        for mode in MODES:
            reward, _ = self.check("print(1)", label, mode)
            if reward == 1:
                return mode
        reason = self.broken or "Linux is needed; tasks/jail.py says more"
        raise UserError(f"nothing contains programs here: {reason}")

    def submit(self, key, text: str, finish_reason: str, label: str) -> str | None:
        """Takes a finished sample and returns at once its program, if it has one.

        One that did not stop by itself gets 0.0. `key` names the sample in `results`.
        """
        self.counts["checks"] += 1
        program = None
        if finish_reason == "stop":
            program = extract_answer(text)
        self.checks[key] = self.threads.submit(self.check, program, label, self.mode)
        return program or None

    @property
    def lost(self) -> int:
        """Checks that ended without a verdict."""
        return sum(self.counts[way] for way in LOST_WAYS)

    def pending(self, seconds: float) -> int:
        """How many verdicts are still to come after at most so long."""
        return len(futures.wait(self.checks.values(), seconds).not_done)

    def results(self) -> dict:
        """{key: reward} of all samples since the last call. It waits for pending checks."""
        rewards = {}
        for key, check in self.checks.items():
            rewards[key], loss = check.result()
            if loss:
                self.counts[loss] += 1
        self.checks = {}
        return rewards

    def check(self, program: str | None, label: str, mode: str) -> tuple[float, str | None]:
        """In a thread: (reward, how the verdict was lost, if it was) of a program."""
        if not program:
            return 0.0, None
        task = json.loads(label)
        job = marshal.dumps(self.make_job(program, task, mode))
        try:
            passed, loss = self.run_jail(job, task)
        except OSError as error:
            self.broken = f"no process can be started for a program: {error}"
            return 0.0, "crashes"
        if self.partial:
            return passed / len(task["tests"]), loss
        return float(passed == len(task["tests"])), loss

    def run_jail(self, job: bytes, task: dict) -> tuple[int, str | None]:
        """(number of tests passed, loss or None) of a program, whose processes have ended then."""
        folder = tempfile.mkdtemp()
        try:
            process = self.start_jail(folder)
        except OSError:
            os.rmdir(folder)
            raise
        # A jail that ended early has closed its end.
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(job)
        passed, status, is_late = self.read_replies(process.stdout, task)
        # No process can leave the group of the jail, so this ends whatever is left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # The context closes the pipes and waits for the process.
        with process:
            self.processes.discard(process)
        # Folders in folders can be too deep for Python.
        if run(["rm", "-rf", folder], stderr=DEVNULL).returncode:
            # The program has made a folder whose content its own user may not list.
            run(["chmod", "-R", "u+rwx", folder])
            run(["rm", "-rf", folder])
        return passed, lost_by(status, is_late, process.returncode)

    def start_jail(self, folder: str) -> Popen:
        """A process with that folder and nothing of our environment, in a group of its own."""
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": folder,
            "PYTHONHASHSEED": "0",
            "PYTHONUTF8": "1",
        }
        process = Popen(
            [os.path.realpath(sys.executable), "-P", "-s", "-S", JAIL],
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        self.processes.add(process)
        # Where `close` came first, it has not seen this process.
        if self.closed:
            process.kill()
        return process

    def make_job(self, program: str, task: dict, mode: str) -> dict:
        """What the jail needs to know. Expected values are not part of it."""
        job = {
            "mode": mode,
            "parent": os.getpid(),
            "prefix": sys.base_prefix,
            "limits": self.limits,
            "wall_seconds": self.wall_seconds,
            "partial": self.partial,
            "calls": task["calls"],
            "code": f"{task['setup']}\n{program}",
            "inputs": [test[0] for test in task["tests"]],
        }
        # In bytes: at least 128 KB, and at least 16 times what the longest test expects.
        longest_expected = max(len(expected) for _, expected, _ in task["tests"])
        job["longest_output"] = 1 << max(17, 4 + longest_expected.bit_length())
        return job

    def read_replies(self, replies, task: dict) -> tuple[int, int | None, bool]:
        """(number of tests passed, wait status of the last test or None, was that too late)."""
        passed = 0
        status = None
        is_late = False
        # The jail's lines are read one by one, because a program decides how long they are.
        for _, expected, tolerance in task["tests"]:
            line = replies.readline()
            # A jail that was killed leaves half a line, or none.
            if not line.endswith(b"\n"):
                return passed, None, False
            status, is_late, output = ast.literal_eval(line.decode())
            if task["calls"]:
                is_right = same_value(output, expected, tolerance, task["json"])
            else:
                is_right = same_lines(output, expected)
            if status == 0 and is_right:
                passed += 1
            elif status in (signal.SIGKILL, signal.SIGXCPU) or not self.partial:
                break
        return passed, status, is_late

    def close(self) -> None:
        """Ends the processes and drops what is pending. They also end with their parent."""
        self.closed = True
        self.threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self.processes):
            process.kill()
        self.threads.shutdown()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def lost_by(status: int | None, is_late: bool, returncode: int) -> str | None:
    """The count that a check adds to if it ended by time-out or crash, else None.

    status: the wait status of its last test, None if there was no reply. returncode: the jail's.
    A program that ignores SIGXCPU ends by SIGKILL, so its CPU time-out counts as a crash.
    """
    if returncode == -signal.SIGALRM or (status == signal.SIGKILL and is_late):
        return "wall_timeouts"
    if status == signal.SIGXCPU:
        return "cpu_timeouts"
    if status in (None, signal.SIGKILL):
        return "crashes"
    return None


def text_metrics(text: str) -> dict[str, float]:
    """repetition: the share of lines that came before. code: characters of the program."""
    lines = [line for line in text.splitlines() if line.strip()]
    repetition = 1 - len(set(lines)) / max(len(lines), 1)
    program = extract_answer(text) or ""
    return {"repetition": repetition, "code": float(len(program))}
