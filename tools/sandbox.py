"""The task "code", with reward.py's interface: programs graded by tests, in processes that they cannot leave.

Expected values never enter a program's process (tools/jail.py: what contains it, and what is not protected): that gets
an input, or the expression that an assert compares with a literal; what it writes is compared here, read by
ast.literal_eval. So nothing can be faked but the right answer. An assert must be value == literal, isclose(value,
literal), abs(value - literal) < c, f(x) or not f(x); others need the tests' own code and are left out, aloud.
"""

import ast
import builtins
import contextlib
import json
import marshal
import math
import os
import re
import sys
import tempfile
from concurrent import futures
from dataclasses import dataclass
from subprocess import DEVNULL, PIPE, Popen, run

MODES = ("namespaces landlock", "landlock", "plain")  # of the jail, best first
JAIL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "jail.py")
TEMPLATES: dict[str, str] = {
    "orz": "{bos}A conversation between User and Assistant. The Assistant first thinks about the reasoning process and "
    "then provides the User with the answer: <think> reasoning process here </think> <answer> answer here </answer>. "
    "User: The answer must be a Python program, or the function asked for, in one ```python block.\n"
    "This is the problem:\n{question}\n\nAssistant: <think>", "plain": "{question}"}


class RewardError(ValueError):
    """Bad input by the user, in one line: what, where, what to do."""


@dataclass(frozen=True)
class Problem:
    index: int  # position in its file, not counting items left out
    question: str
    label: str  # JSON: {"setup": code before the program, "calls": bool, "tests": [[input, expected, tolerance], ...]}
    prompt: str  # the template with the question in it


def load_problems(path: str, template: str, bos="", columns=("question", "tests"), split="train") -> list[Problem]:
    """Problems of a JSON or JSONL file or a dataset, in the form of MBPP, HumanEval, APPS, LiveCodeBench or columns."""
    template, problems, items, unusable = TEMPLATES.get(template, template).replace("{bos}", bos), [], 0, 0
    try:
        if os.path.isfile(path):
            with open(path, encoding="utf-8-sig", newline="\n") as file:
                rows = [json.loads(x) for x in file if x.strip()] if path.endswith("l") else json.load(file)
        else:
            import datasets  # slow to import, and only needed here
            rows = datasets.load_from_disk(path) if os.path.isdir(path) else datasets.load_dataset(*path.split(":", 1))
            rows = rows[split] if isinstance(rows, dict) else rows
        for record in rows:
            items += 1
            question = next(record[key] for key in (columns[0], "question_content", "text", "prompt") if key in record)
            label, hint, asserts = read_tests(record, columns[1])
            question, unusable = question + hint, unusable + asserts - len(label["tests"])
            prompt = template.replace("{question}", question)
            problems += [Problem(len(problems), question, json.dumps(label), prompt)] if label["tests"] else []
        assert problems and "{question}" in template, f"no problem, or no {{question}} in the template {template!r}"
    except Exception as error:  # files, JSON, forms; the datasets library alone has a dozen kinds for "not found"
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise RewardError(f"{path}: item {items}: {reason}; give items of MBPP, ... or columns {columns}") from None
    if unusable:
        print(f"warning: {path}: {unusable} asserts cannot be used and are left out, and with them "
              f"{items - len(problems)} of {items} problems", file=sys.stderr)
    return problems


def read_tests(record, column):
    """(a label, what the question must add to name a function, the number of tests before any is left out)."""
    fields = {k: json.loads(v) if k in ("input_output", "metadata", "public_test_cases", "private_test_cases")
              and isinstance(v, str) and v else v for k, v in record.items()}
    setup, hint = "\n".join([*(fields.get("test_imports") or []), fields.get("test_setup_code") or ""]), ""
    tests, apps = fields.get("test_list") or fields.get(column), fields.get("input_output") or {}
    name = apps.get("fn_name") or (fields.get("metadata") or {}).get("func_name")
    if "entry_point" in fields:  # HumanEval, whose question names the function
        setup, tests, hint = fields["prompt"], [re.sub(r"\bcandidate\b", fields["entry_point"], fields["test"])], "\n"
    elif apps:  # in some items of APPS each result is the one element of a list
        wrapped = name and all(isinstance(o, list) and len(o) == 1 for o in apps["outputs"])
        tests = [(i, o[0] if wrapped else o) for i, o in zip(apps["inputs"], apps["outputs"], strict=True)]
    elif "public_test_cases" in fields:  # LiveCodeBench; the private tests as JSON: as pickles they are code
        tests = [(t["input"], t["output"]) for k in ("public", "private") for t in fields[f"{k}_test_cases"]]
        tests = [(map(json.loads, i.split("\n")), json.loads(o)) for i, o in tests] if name else tests
    if name:
        hint = f"\n\n{fields.get('starter_code') or ''}".rstrip()
        name = f"Solution().{name}" if "class Solution" in hint else name
        tests = [f"assert {name}(*{[*i]!r}) == {o!r}" for i, o in tests]
    calls = bool(tests) and isinstance(tests[0], str)
    if not tests or not all(isinstance(text, str) for test in tests for text in ([test] if calls else test)):
        raise ValueError("lacks tests: a list of [input, output] texts, or of asserts")
    if not calls:
        return {"setup": setup, "calls": False, "tests": [(*test, 0) for test in tests]}, "", len(tests)
    asserts = [node.test for test in tests for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Assert)]
    usable = [*filter(None, (split_assert(node, setup) for node in asserts))]
    hint = hint or "".join(f"\n\nIt is called as in {text.removeprefix('not ')}" for text, *_ in usable[:1])
    return {"setup": setup, "calls": True, "tests": usable}, hint, len(asserts)


def split_assert(node, setup):
    """(expression, literal, tolerance) of an assert's condition; None where it would need more, or tell the result."""
    tolerance, names = 0, {*dir(builtins), *re.findall(r"\w+", setup)}
    with contextlib.suppress(ValueError, TypeError):
        match node:
            case ast.Compare(value, [ast.Eq() | ast.Is()], [expected]):
                pass
            case ast.Compare(ast.Call(ast.Name("abs"), [ast.BinOp(value, ast.Sub(), expected)]), [ast.Lt()], [limit]):
                tolerance = ast.literal_eval(limit)
            case ast.Call(ast.Attribute(attr="isclose"), [value, expected], options):
                given = {"rel_tol": 1e-9, "abs_tol": 0} | {k.arg: ast.literal_eval(k.value) for k in options}
                tolerance = max(given["abs_tol"], given["rel_tol"] * abs(ast.literal_eval(expected)))
            case ast.Call(ast.Name()):
                value, expected = ast.UnaryOp(ast.Not(), node), ast.Constant(False)  # any true value will do
            case ast.UnaryOp(ast.Not(), ast.Call(ast.Name())):
                value, expected = node, ast.Constant(True)
            case _:
                return None
        names |= {n.func.id for n in ast.walk(value) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        known = all(n.id in names for n in ast.walk(value) if isinstance(n, ast.Name))
        if known and "(" in ast.unparse(value) and not any(isinstance(n, ast.Compare) for n in ast.walk(value)):
            return ast.unparse(value), repr(ast.literal_eval(expected)), tolerance


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

    A run of the program has cpu_seconds and memory_mb, all runs for a sample wall_seconds; counts never go back to 0.
    """

    def __init__(self, workers: int = 1, cpu_seconds: int = 6, wall_seconds: int = 60, partial=False, memory_mb=1024):
        self.limits = {"CPU": cpu_seconds, "AS": memory_mb << 20, "FSIZE": 1 << 23, "NPROC": 16, "NOFILE": 64}
        self.wall_seconds, self.partial, self.verdicts, self.processes = wall_seconds, partial, {}, set()
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

    def wait(self, seconds: float) -> bool:
        """Waits at most so long; True once every verdict is there."""
        return not futures.wait(self.verdicts.values(), seconds).not_done

    def results(self) -> dict:
        """{key: reward} of all that was submitted since the last call; waits for what is pending."""
        verdicts, self.verdicts = {key: verdict.result() for key, verdict in self.verdicts.items()}, {}
        for event in (event for _, *events in verdicts.values() for event in events):
            self.counts[event] += 1
        return {key: verdict[0] for key, verdict in verdicts.items()}

    def check(self, code, label, mode):
        """In a thread: (the reward of a program, the counts that it adds to); its processes have ended by then."""
        task, folder = json.loads(label), tempfile.mkdtemp()
        job = {"mode": mode, "parent": os.getpid(), "prefix": sys.base_prefix, "limits": self.limits,
               "wall_seconds": self.wall_seconds, "partial": self.partial, "calls": task["calls"],
               "code": f"{task['setup']}\n{code}", "inputs": [test[0] for test in task["tests"]]}
        environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
        process = Popen([os.path.realpath(sys.executable), "-P", "-s", "-S", JAIL], stdin=PIPE, stdout=PIPE,
                        stderr=DEVNULL, cwd=folder, env=environment, start_new_session=True)
        self.processes.add(process)
        output, _ = process.communicate(marshal.dumps(job))
        with contextlib.suppress(ProcessLookupError):  # what is left of its group, which none can leave
            os.killpg(process.pid, 9)
        self.processes.discard(process)
        run(["rm", "-rf", folder])  # for Python a folder in a folder in ... can be too deep
        replies = [ast.literal_eval(line.decode()) for line in output.rpartition(b"\n")[0].splitlines()]
        late = self.limits["CPU"] - 0.1
        events = ["cpu_timeouts" for status, seconds, _ in replies if status == 9 and seconds > late]
        events += ["wall_timeouts"] if process.returncode == -14 else [] if replies else ["crashes"]  # 14: SIGALRM
        passed = [status == 0 and right(text, *test[1:], task["calls"])
                  for (status, _, text), test in zip(replies, task["tests"])]
        share = sum(passed) / len(task["tests"])
        return share if self.partial else float(share == 1), *events

    def close(self, *error) -> None:
        """Ends the processes and drops what is pending. They also end with their parent."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self.processes):
            process.kill()
        self.threads.shutdown()

    __exit__ = close


def text_metrics(text: str) -> dict[str, float]:
    """repetition: share of lines seen before; code: characters of the block that is run."""
    lines = [line for line in text.splitlines() if line.strip()]
    return {"repetition": 1 - len(set(lines)) / max(len(lines), 1), "code": float(len(extract_answer(text) or ""))}
