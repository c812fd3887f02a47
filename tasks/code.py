"""The task "code": the grader runs a program's tests in processes that contain the program.

`--task code` chooses this task. This file has the interface of reward.py. ORZ has no such task.
A program's process gets an input, or the expression that an assert compares with a literal. The
process never gets the expected value. This file reads the process's output with ast.literal_eval
and compares the output with the expected value. So a program passes a test only by the right
answer. tasks/jail.py says what contains a program and what is not protected. tasks/code_data.py
reads the problems.

To use this file elsewhere, on Linux, copy tasks/jail.py, tasks/code_data.py and nanoorz/ranks.py,
too. `python -c "from tasks import code; print(code.Grader().mode)"` prints the mode of the jail.
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

from nanoorz.ranks import UserError
from tasks import jail
from tasks.code_data import Problem, load_problems

__all__ = ["Grader", "Problem", "load_problems", "text_metrics"]

# The modes of the jail. The safest mode is first.
MODES = ("namespaces landlock", "landlock", "plain")
# The ways in which a check ends without a verdict.
LOST_WAYS = ("cpu_timeouts", "wall_timeouts", "crashes")
# A run keeps a copy of this file (RUN/task.py), and none of the jail.
JAIL = str(Path(jail.__file__).resolve())


def extract_answer(text: str) -> str | None:
    """Returns the last fenced block in the last closed answer block, or None.

    The answer block lies between the last </answer> and the last <answer> before it.
    """
    end = max(text.rfind("</answer>"), 0)
    start = text.rfind("<answer>", 0, end)
    if start < 0:
        return None
    programs = re.findall(r"```[^\n`]*\n(.*?)```", text[start:end], re.DOTALL)
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


def same_value(output: str, expected: str, tolerance: float, is_json: bool) -> bool:
    """Returns whether the last line of output is the expected literal, within the tolerance.

    JSON has no tuples. So if the expected value was JSON, a tuple counts as a list.
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
    """Grades samples as they end, `workers` samples at a time.

    Each test of a program has three limits: `cpu_seconds`, `memory_mb` and `wall_seconds`. The
    limit `wall_seconds` is much larger than `cpu_seconds`, so that an honest program does not fail
    on a busy machine. All tests of a program together have 10 times `wall_seconds`. If a test runs
    out of time, the tests behind it are not run and count as failed. `counts` grow during the whole
    run. `results` raises UserError if a process could not be started.
    """

    def __init__(
        self,
        workers: int = 1,
        # The only form is orz. train.find_task refuses other forms.
        answer_form: str = "orz",
        cpu_seconds: int = 6,
        wall_seconds: int = 60,
        # False: the reward is 1.0 if all tests pass, else 0.0. True: the reward is the share of
        # tests that pass. No flag sets this; change the default here.
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
        self.checks = {}  # maps a key to a Future of (reward, how the verdict was lost)
        self.processes = set()
        self.closed = False
        # Each thread writes to one process and waits for this process.
        self.threads = futures.ThreadPoolExecutor(workers)
        self.mode = self.best_mode()
        if self.mode == "plain":
            warning = "without Landlock programs can read and write all files of their user"
            print(f"warning: {warning}", file=sys.stderr)

    def best_mode(self) -> str:
        """Returns the first mode in which a right program gets 1.0, or raises UserError."""
        task = {"setup": "", "calls": False, "json": False, "tests": [["", "1", 0]]}
        label = json.dumps(task)
        reason = "the jail needs Linux"
        for mode in MODES:
            try:
                reward, _ = self.check("print(1)", label, mode)
            except UserError as error:
                reason = error
                continue
            if reward == 1:
                return mode
        raise UserError(f"no mode of tasks/jail.py works on this machine: {reason}")

    def submit(self, key, text: str, finish_reason: str, label: str) -> str | None:
        """Takes a finished sample, and returns its program or None without waiting for the grade.

        A sample that did not stop by itself gets 0.0. `key` names the sample in `results`.
        """
        self.counts["checks"] += 1
        program = None
        if finish_reason == "stop":
            program = extract_answer(text)
        self.checks[key] = self.threads.submit(self.check, program, label, self.mode)
        return program or None

    @property
    def lost(self) -> int:
        """The number of checks that ended without a verdict."""
        return sum(self.counts[way] for way in LOST_WAYS)

    def pending(self, seconds: float) -> int:
        """Waits at most so many seconds, then returns how many verdicts are still missing."""
        return len(futures.wait(self.checks.values(), seconds).not_done)

    def results(self) -> dict:
        """Waits for pending checks. Returns {key: reward} of all samples since the last call."""
        rewards = {}
        for key, check in self.checks.items():
            rewards[key], loss = check.result()
            if loss:
                self.counts[loss] += 1
        self.checks = {}
        return rewards

    def check(self, program: str | None, label: str, mode: str) -> tuple[float, str | None]:
        """Returns (reward of a program, one of LOST_WAYS or None). It runs in a thread."""
        if not program:
            return 0.0, None
        task = json.loads(label)
        job = marshal.dumps(self.make_job(program, task, mode))
        try:
            passed, loss = self.run_jail(job, task)
        except OSError as error:
            raise UserError(f"no process can be started for a program: {error}") from error
        if self.partial:
            return passed / len(task["tests"]), loss
        return float(passed == len(task["tests"])), loss

    def run_jail(self, job: bytes, task: dict) -> tuple[int, str | None]:
        """Returns (number of tests passed, one of LOST_WAYS or None) and ends all processes."""
        folder = tempfile.mkdtemp()
        try:
            process = self.start_jail(folder)
        except OSError:
            os.rmdir(folder)
            raise
        # A jail that ended early has closed its end of the pipe.
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(job)
        passed, status, is_late = self.read_replies(process.stdout, task)
        # No process can leave the jail's process group. So this ends all processes that are left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # `with process` closes the pipes and waits for the process.
        with process:
            self.processes.discard(process)
        # Nested folders can be too deep for Python's shutil.rmtree.
        if run(["rm", "-rf", folder], stderr=DEVNULL).returncode:
            # The program has made a folder that its own user may not list.
            run(["chmod", "-R", "u+rwx", folder])
            run(["rm", "-rf", folder])
        return passed, lost_by(status, is_late, process.returncode)

    def start_jail(self, folder: str) -> Popen:
        """Starts the jail in that folder, in its own process group, without our environment."""
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
        # If `close` ran before the line above, `close` has not killed this process.
        if self.closed:
            process.kill()
        return process

    def make_job(self, program: str, task: dict, mode: str) -> dict:
        """Returns what the jail needs to know. Expected values are not part of the job."""
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
        # This limit is in bytes: at least 128 KB, and at least 16 times the longest expected value.
        longest_expected = max(len(expected) for _, expected, _ in task["tests"])
        job["longest_output"] = 1 << max(17, 4 + longest_expected.bit_length())
        return job

    def read_replies(self, replies, task: dict) -> tuple[int, int | None, bool]:
        """Returns (number of tests passed, wait status of the last test or None, was it late)."""
        passed = 0
        status = None
        is_late = False
        # The jail's lines are read one by one, because a program decides how long its line is.
        for _, expected, tolerance in task["tests"]:
            line = replies.readline()
            # A jail that was killed leaves half a line, or no line.
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
        """Ends the processes and drops pending checks. The processes also end with their parent."""
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
    """Returns one of LOST_WAYS if a check ended by a time-out or a crash, else None.

    status: the wait status of the check's last test, or None if the jail did not reply. returncode:
    the exit code of the jail. If a program ignores SIGXCPU, the kernel ends it by SIGKILL. Its CPU
    time-out then counts as a crash.
    """
    if returncode == -signal.SIGALRM or (status == signal.SIGKILL and is_late):
        return "wall_timeouts"
    if status == signal.SIGXCPU:
        return "cpu_timeouts"
    if status in (None, signal.SIGKILL):
        return "crashes"
    return None


def text_metrics(text: str) -> dict[str, float]:
    """repetition: the share of lines that repeat a line. code: the characters of the program."""
    lines = [line for line in text.splitlines() if line.strip()]
    repetition = 1 - len(set(lines)) / max(len(lines), 1)
    program = extract_answer(text) or ""
    return {"repetition": repetition, "code": float(len(program))}
