"""The task "code", with reward.py's interface: programs graded by tests, in processes that they cannot leave.

Expected values never enter a program's process (tools/jail.py: what contains it, and what is not protected): that gets
an input, or the expression that an assert compares with a literal; what it writes is compared here, read by
ast.literal_eval. So nothing can be faked but the right answer. tools/code_data.py reads the problems.
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
from subprocess import DEVNULL, PIPE, Popen, run

from tools.code_data import RewardError, load_problems  # noqa: F401  load_problems: for train.py

MODES = ("namespaces landlock", "landlock", "plain")  # of the jail, best first
JAIL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "jail.py")


def extract_answer(text: str) -> str | None:
    """The last fenced block between the last </answer> and the last <answer> before it, or None."""
    end = max(text.rfind("</answer>"), 0)
    block = text[text.rfind("<answer>", 0, end) : end] if "<answer>" in text[:end] else ""
    return (re.findall(r"```[^\n`]*\n(.*?)```", block, re.DOTALL) or [None])[-1]


def right(output: str, expected: str, tolerance: float, calls: bool) -> bool:
    """Expressions: equal literals. Programs: equal words in each line; decimals within 1e-6 of their size."""
    if not calls:
        got, want = (re.findall(r"\S+|\n", text.rstrip()) for text in (output, expected))
        return len(got) == len(want) and all(map(same_word, got, want))
    with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError, OverflowError):
        line, want = output.rstrip("\n").rpartition("\n")[2], ast.literal_eval(expected)
        got = ast.literal_eval(line[:100_000 + 4 * len(expected)])
        return got == want or tolerance > 0 and abs(got - want) <= tolerance
    return False


def same_word(got, want):
    if got == want or max(len(got), len(want)) > 40 or (got + want).replace("-", "").isdigit():
        return got == want  # whole numbers are exact: an answer modulo 10 ** 9 + 7 has neighbours
    with contextlib.suppress(ValueError):
        return math.isclose(float(got), float(want), rel_tol=1e-6)


class Grader(contextlib.AbstractContextManager):
    """Grades samples as they end, `workers` at a time. Reward: 1.0 if all tests pass, else 0.0; partial: their share.

    A test has cpu_seconds, memory_mb, and wall_seconds, many more, so that a busy machine fails no honest program; all
    of a program's together have 10 times wall_seconds. None follows one that ran out of time: it counts as failed.
    counts never go back to 0.
    """

    def __init__(self, workers: int = 1, cpu_seconds: int = 6, wall_seconds: int = 60, partial=False, memory_mb=1024):
        self.limits = {"CPU": cpu_seconds, "AS": memory_mb << 20, "FSIZE": 1 << 23, "NPROC": 16, "NOFILE": 64}
        self.wall_seconds, self.partial, self.verdicts, self.processes = wall_seconds, partial, {}, set()
        self.closed = False
        self.counts = dict.fromkeys(("checks", "cpu_timeouts", "wall_timeouts", "crashes"), 0)
        self.threads = futures.ThreadPoolExecutor(workers)  # each only feeds its process and waits for it
        probe = json.dumps({"setup": "", "calls": False, "tests": [["", "1", 0]]})
        self.mode = next((mode for mode in MODES if self.check("print(1)", probe, mode)[0]), None)
        if self.mode is None:
            raise RewardError("nothing contains programs here: Linux is needed; tools/jail.py says more")
        if self.mode == "plain":
            print("warning: no Landlock: programs can read and write all that their user can", file=sys.stderr)

    def submit(self, key, text: str, finish_reason: str, label) -> None:
        """Takes a finished sample and returns at once; one that did not stop by itself gets 0."""
        self.counts["checks"] += 1
        code = extract_answer(text) if finish_reason == "stop" else None
        verdict = self.threads.submit(self.check, code, label, self.mode) if code else self.threads.submit(tuple, [0.0])
        self.verdicts[key] = verdict

    def pending(self, seconds: float) -> int:
        """How many verdicts are still to come after at most so long."""
        return len(futures.wait(self.verdicts.values(), seconds).not_done)

    def results(self) -> dict:
        """{key: reward} of all that was submitted since the last call; waits for what is pending."""
        verdicts, self.verdicts = {key: verdict.result() for key, verdict in self.verdicts.items()}, {}
        for event in (event for _, *events in verdicts.values() for event in events):
            self.counts[event] += 1
        return {key: verdict[0] for key, verdict in verdicts.items()}

    def check(self, code, label, mode):
        """In a thread: (the reward of a program, the counts that it adds to); its processes have ended by then."""
        task, folder = json.loads(label), tempfile.mkdtemp()
        most = 1 << max(17, 4 + max(len(expected) for _, expected, _ in task["tests"]).bit_length())  # bytes of output
        job = {"mode": mode, "parent": os.getpid(), "prefix": sys.base_prefix, "limits": self.limits, "most": most,
               "wall_seconds": self.wall_seconds, "partial": self.partial, "calls": task["calls"],
               "code": f"{task['setup']}\n{code}", "inputs": [test[0] for test in task["tests"]]}
        environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
        process = Popen([os.path.realpath(sys.executable), "-P", "-s", "-S", JAIL], stdin=PIPE, stdout=PIPE,
                        stderr=DEVNULL, cwd=folder, env=environment, start_new_session=True)
        self.processes.add(process)
        if self.closed:  # while this one was on its way
            process.kill()
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(marshal.dumps(job))
        passed, status, late = 0, None, False
        for line, test in zip(process.stdout, task["tests"]):  # read one by one: how much there is, the program chooses
            if not line.endswith(b"\n"):  # killed on its way
                break
            status, late, text = ast.literal_eval(line.decode())
            passed += (ok := status == 0 and right(text, *test[1:], task["calls"]))
            if not ok and not self.partial:
                break
        with contextlib.suppress(ProcessLookupError):  # what is left of its group, which none can leave
            os.killpg(process.pid, 9)
        with process:  # closes its pipes and waits for it
            self.processes.discard(process)
        run(["rm", "-rf", folder])  # for Python a folder in a folder in ... can be too deep
        events = ["wall_timeouts" if late else "cpu_timeouts"] if status == 9 else []
        events += ["wall_timeouts"] if process.returncode == -signal.SIGALRM else []
        events += ["crashes"] if status is None and not events else []
        share = passed / len(task["tests"])
        return share if self.partial else float(share == 1), *events

    def close(self, *error) -> None:
        """Ends the processes and drops what is pending. They also end with their parent."""
        self.closed = True
        self.threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self.processes):
            process.kill()
        self.threads.shutdown()

    __exit__ = close


def text_metrics(text: str) -> dict[str, float]:
    """repetition: share of lines seen before; code: characters of the block that is run."""
    lines = [line for line in text.splitlines() if line.strip()]
    return {"repetition": 1 - len(set(lines)) / max(len(lines), 1), "code": float(len(extract_answer(text) or ""))}
