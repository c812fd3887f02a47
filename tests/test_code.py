"""The task code: which programs are paid, and its problems. test_jail.py has the jail."""

import functools
import json
import os
import tracemalloc

import pytest
from conftest import launch, run_python, stand_in, wait_until, write
from jail_worker import processes

from nanoorz.ranks import UserError
from tasks import code as task
from tasks.code_data import make_label

PAIRS = [["1 2\n", "3\n"], ["4 5\n", "9\n"]]
ADD = "a, b = map(int, input().split())\nprint(a + b)"
SLEEP = "import time\ntime.sleep(99)"


def label(*tests, **changes):
    tests = [(*test, 0)[:3] for test in tests]
    return make_label(tests, **changes)


of_calls = functools.partial(label, calls=True)
of_json_calls = functools.partial(label, calls=True, json=True)


def submit(grader, key, code, tests):
    return grader.submit(key, f"<answer>\n```python\n{code}\n```\n</answer>", "stop", tests)


def grade(grader, code, tests):
    submit(grader, "", code, tests)
    return grader.results()[""]


# (output, expected)
SAME = [("3.0", "3"), ("0.33333333", "0.3333333"), ("1e-17", "0.0"), ("1  2 \n3\n\n", "1 2\n3")]
DIFFERENT = [("1000000008.0", "1000000007"), ("9007199254740993.0", "9007199254740992")]
DIFFERENT += [("-1.0000000001", "-1"), ("0.333333", "0.333334"), ("1e-17", "0"), ("1e-8", "0.0")]
DIFFERENT += [("9" * 5000 + ".0", "9" * 5000), ("sNaN", "1"), ("0010", "10")]
DIFFERENT += [("1\n2 3", "1 2\n3"), ("1 2 3", "1 2")]


@pytest.mark.parametrize("pair", SAME + DIFFERENT)
def test_words_of_programs_are_compared(pair):
    """Decimals are equal up to rounding. Whole numbers must be exact."""
    assert task.same_lines(*pair) is (pair in SAME)


# They are slow for ast.literal_eval, or make it print warnings.
HOSTILE = ["f'" + "{1}" * 10**5 + "'", "[" + "1if 1else 0," * 8000 + "]", "'" + "\\'" * 10**5]
HOSTILE += ["'" + "\\d" * 10**5 + "'", "rf''", "1e5or 1", "x", "lambda: 1", "1_0", "[1]if"]
VALUES = [1, -2.5e-7, 1e22, -3j, {1: {"a": (1,)}}, {1, 2}, set(), b"a\x00\"'", True, None, ()]
VALUES += ['it\'s "q"\n\u2028\r\t\\', "f'x'", "\U0001f600\ud800", float("-1e300")]


def test_only_what_repr_writes_is_read(recwarn):
    for text in HOSTILE:
        assert not task.LITERAL.fullmatch(text)
        assert not task.same_value(text, "1")
    for value in VALUES:
        assert task.same_value(repr(value), repr(value))
    assert not recwarn.list


ADDS = label(*PAIRS)
ADDS_ONCE = label(PAIRS[0])
SILENT = label(["", ""])
DOUBLES = of_calls(["f(2)", "4"], ["f([1])", "[1, 1]"], ["f('a')", "'aa'"])
ROOTS = of_calls(["f(2)", "1.41421", 1e-3])
IN_JSON = of_json_calls(["f(2)", "[[2, 2], []]"])
IN_LIST = of_json_calls(["f(1)", "[1]"], listed=True)
WRONG_ADDS = ["print(3)", "print(", "print(3)\nprint()\nprint(3)", f"{ADD}\nraise ValueError"]
WRONG_ADDS += ["", "\ud800", "\0", "x" * 10**6]

COUNTER = "from collections import Counter"
FUTURE = "from __future__ import annotations\ndef f(x: int): return math.floor(x) + 1"

# (tests, right programs, wrong programs)
PROGRAMS = [
    (ADDS, [ADD, f"{ADD}\nraise SystemExit", f"{ADD}\nexit()"], WRONG_ADDS),
    # Only the exit status is wrong.
    (ADDS_ONCE, [ADD], [f"{ADD}\nimport os, sys\nsys.stdout.flush()\nos.abort()"]),
    (SILENT, ["pass"], ["import os\nos._exit(1)"]),
    (ROOTS, ["f = lambda x: x ** .5"], ["f = lambda x: 1.5", "f = lambda x: float('nan')"]),
    (of_calls(["f('aa')", "{'a': 2}"]), [f"{COUNTER} as f"], []),
    (of_calls(["f('aa')", "[{'a': 2}]"]), [f"{COUNTER}\nf = lambda x: [Counter(x)]"], []),
    (of_calls(["f(1)", "2"], before="import math"), [FUTURE], ["def f(x): print(x + 1); exit()"]),
    # The judge of APPS takes a tuple for a list, but Python's == does not.
    (of_calls(["f(2)", "[[2, 2], []]"]), [], ["f = lambda x: ((x, x), [])"]),
    (IN_JSON, ["f = lambda x: ((x, x), [])"], ["f = lambda x: {2}", "f = lambda x: ((2, 2),)"]),
    (IN_JSON, [], ["f = lambda x: '[[2, 2], []]'"]),
    (IN_LIST, ["f = lambda x: [x]", "f = lambda x: x"], ["f = lambda x: [[x]]"]),
    (of_json_calls(["f(1)", "[1]"]), ["f = lambda x: [x]"], ["f = lambda x: x"]),
    (of_json_calls(["f(1)", "2"]), ["f = {1: 2}.get"], ["f = lambda x: ..."]),
]
# They end early, write their own replies, return a value that equals every value or whose literal
# never ends, patch the checker or the frames above, or look for the expected value.
CHEATS = [
    "raise SystemExit(0)",
    "import os\nprint('True')\nprint('passed')\nos._exit(0)",
    "import os\nreplies = '''0 1\n40 6\n[1, 1]0 4\n'aa''''\n"
    "for file in range(64):\n    try: os.write(file, replies.encode())\n    except OSError: pass\n"
    "os._exit(0)",
    "class E:\n    __eq__ = lambda *a: True\n    __repr__ = lambda a: 'E()'\nf = lambda x: E()",
    "class E:\n    __repr__ = lambda a: '[' * 10 ** 6\nf = lambda x: E()",
    "import builtins, ast, json\nbuiltins.eval = builtins.repr = lambda *a: True\n"
    "builtins.all = builtins.any = lambda *a: True\n"
    "ast.literal_eval = json.loads = lambda *a: 4\nf = lambda x: 4",
    "import sys\nframe = sys._getframe()\nwhile frame:\n"
    "    frame.f_globals['same_value'] = lambda *a: True\n"
    "    frame.f_locals.get('job', {}).clear()\n    frame = frame.f_back\nf = lambda x: 4",
    "import gc\nfound = [o for o in gc.get_objects() if type(o) is dict and 'inputs' in o]\n"
    "f = lambda x: found[0]",
]
DOUBLE = "print('a')\ndef f(x):\n    print('b')\n    return x * 2"


def test_right_programs_are_paid_and_wrong_ones_and_cheats_are_not(jail):
    expected = {}
    with task.Grader(workers=4, memory_mb=256) as grader:
        for tests, right, wrong in [*PROGRAMS, (DOUBLES, [DOUBLE], CHEATS)]:
            for code in [*right, *wrong]:
                submit(grader, (str(tests), code), code, tests)
                expected[str(tests), code] = code in right
        assert grader.results() == expected


def test_the_last_block_of_an_answer_that_ended_counts(jail):
    with task.Grader() as grader:
        assert submit(grader, "last", f"print(3)\n```\nbetter:\n```\n{ADD}", ADDS) == f"{ADD}\n"
        inline = f"```python\n{ADD}\n```\nUse ```f``` so:"
        assert submit(grader, "inline", f"pass\n```\n{inline}\n", ADDS) == f"{ADD}\n"
        block = f"```\n{ADD}\n```"
        grader.submit("outside", f"{block}<answer>none</answer>", "stop", ADDS)
        grader.submit("cut off", f"<answer>{block}</answer>", "length", ADDS)
        grader.submit("not opened", f"{block}</answer>", "stop", ADDS)
        found = {"last": 1, "inline": 1, "outside": 0, "cut off": 0, "not opened": 0}
        assert grader.results() == found


RECURSION = "def f(): f()\nimport sys\nsys.setrecursionlimit(10 ** 9)\nf()"
DISK_BOMB = "i = 0\nwhile True:\n    open(str(i), 'wb').write(bytes(1 << 22))\n    i += 1"
# {is the verdict lost?: programs}
BOMBS = {
    False: [
        "import os\nwhile True: os.fork()",
        "import os, time\nfor _ in range(8):\n    if not os.fork(): os.setsid() or time.sleep(600)",
        "x = []\nwhile True: x.append(bytearray(1 << 24))",
        "while True: print('3' * 10000)",
        DISK_BOMB,
    ],
    True: [
        "while True: pass",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import os\nwhile True: os.write(2, b'3' * 10000)",
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        # Its own timer sends it SIGKILL, like the kernel when memory runs out. This is a crash.
        "import ctypes, signal\nlibc = ctypes.CDLL(None)\ntimer = ctypes.c_void_p()\n"
        "libc.timer_create(1, (ctypes.c_int * 16)(0, 0, 9), ctypes.byref(timer))\n"
        "libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, 0, 1), None)\n"
        "while True: signal.pause()",
    ],
}


@pytest.mark.engine
def test_bombs_get_nothing_and_leave_nothing_and_are_counted(jail, tmp_path, monkeypatch):
    # The command of each process has this text.
    monkeypatch.setattr(task, "RUN_TESTS", f"{task.RUN_TESTS}\n# {tmp_path}")
    expected = {code: (False, loss) for loss, codes in BOMBS.items() for code in codes}
    with task.Grader(workers=4, cpu_seconds=1, memory_mb=256) as grader:
        for code in expected:
            submit(grader, code, code, ADDS)
        assert {code: check.result() for code, check in grader.checks.items()} == expected
        grader.results()
        # With this limit the other programs could be too late on a busy machine.
        grader.wall_seconds = 1
        assert grade(grader, SLEEP, ADDS) == 0
        assert grader.lost == len(BOMBS[True]) + 1
        # The machine decides which limit ends this one.
        assert grade(grader, RECURSION, ADDS) == 0
        wait_until(lambda: processes(str(tmp_path)) == [], seconds=60)


@pytest.mark.slow
def test_waiting_has_a_limit_for_each_test_and_for_all(jail):
    """Each test has `wall_seconds`, and all tests of a program have ten times as many."""
    with task.Grader(wall_seconds=1) as hasty, task.Grader(cpu_seconds=1) as patient:
        submit(hasty, "many", f"import time\ntime.sleep(0.4)\n{ADD}", label(*PAIRS[:1] * 50))
        # Waiting is no CPU time, and each test may wait.
        submit(patient, "few", f"import time\ntime.sleep(1.2)\n{ADD}", label(*PAIRS[:1] * 6))
        assert (patient.results(), patient.lost) == ({"few": 1}, 0)
        assert (hasty.results(), hasty.lost) == ({"many": 0}, 1)


def test_output_is_read_no_further_than_its_verdict_needs(jail):
    """Output that no verdict needs is dropped, so it cannot fill the trainer's memory."""
    flood = "import os\nos.write(1, b'\\xff' * (7 << 20))"
    with task.Grader() as grader:
        tracemalloc.start()
        # Before an answer a program may say anything.
        assert grade(grader, f"{flood}\nf = lambda x: x * 2", DOUBLES) == 1
        assert grade(grader, f"print('3' + ' ' * (1 << 20))\n{flood}", ADDS_ONCE) == 0
        assert grade(grader, flood, SILENT) == 0
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
        tracemalloc.stop()
        assert grade(grader, "print('7' * 300000)", label(["", "7" * 300000])) == 1


@pytest.mark.parametrize("head", ["x", "0", "0 -1", "9" * 99])
def test_results_that_a_program_has_written_in_another_form_are_lost(jail, head, monkeypatch):
    """A program could reach the process that runs its tests, and write its results."""
    monkeypatch.setattr(task, "RUN_TESTS", f"print('0 1\\n3{head}')")
    with task.Grader() as grader:
        assert (grade(grader, ADD, ADDS), grader.lost) == (0, 1)


# In merged sets items have empty columns of other sets.
MBPP = ["assert f(2) == 4", "assert f(1)", "assert not f(0)", "assert abs(f(1) - 2.5) < 1"]
MBPP += ["assert math.isclose(f(1), 2.5, rel_tol=0.5)", "assert set(f([])) == set((4, 5))"]
MBPP += ["assert f([i for i in 'ab'], lambda x: x) == 3"]
PROGRAM_OF_MBPP = "def f(x, g=None): return {4, 5} if x == [] else 3 if g else 2 * x"
OF_MBPP = [["f(2)", "4"], ["not f(1)", "False"], ["not f(0)", "True"]]
OF_MBPP += [["f(1)", "2.5", 1], ["f(1)", "2.5", 1.25], ["set(f([]))", "{4, 5}"]]
OF_MBPP += [["f([i for i in 'ab'], lambda x: x)", "3"]]
CHECK = "def check(candidate):\n    assert candidate(3) == 1.5\n"
HUMANEVAL = {"prompt": "half = 1.5\n", "entry_point": "f", "test": CHECK}
OF_HUMANEVAL = of_calls(["f(3)", "1.5"], before="half = 1.5\n")
APPS = {"inputs": [["1 2", ""], "4 5\n"], "outputs": [["3\n"], "9\n"]}
CLASS = "class Solution:\n    def f(self, a, b):"
APPS_CALL = {"question": "?", "starter_code": CLASS}
APPS_CALL["input_output"] = json.dumps({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]})
SOLUTION = ["Solution().f(*[1, 2])", "[3]"]
TWO = ["f(1)", "2.0", 2e-9]

# (item, a right program, label)
FORMS = [
    ({"text": "?", "test_list": MBPP}, PROGRAM_OF_MBPP, of_calls(*OF_MBPP)),
    (HUMANEVAL, "f = lambda x: x * half / 3", OF_HUMANEVAL),
    ({"question": "?", "input_output": APPS}, ADD, ADDS),
    (APPS_CALL, f"{CLASS} return a + b", of_json_calls(SOLUTION, listed=True)),
    ({"question": "?", "tests": PAIRS, "input_output": None}, ADD, ADDS),
    # In a table a list is a text, and in a merged file the columns of other data sets are empty.
    ({"question": None, "prompt": "?", "tests": json.dumps(PAIRS), "entry_point": None}, ADD, ADDS),
    (
        {"text": "?", "test_list": ["assert f(tree) == 1"], "test_setup_code": "tree = Node(1)"},
        "class Node(int): pass\nf = int",
        of_calls(["f(tree)", "1"], after="tree = Node(1)"),
    ),
    ({"text": "?", "test_list": ["assert isclose(f(1), 2.0)"]}, "f = lambda x: 2", of_calls(TWO)),
]


def test_problems_of_every_form_are_read_and_graded(jail, tmp_path):
    path = write(tmp_path, "data.json", [item for item, _, _ in FORMS])
    problems = task.load_problems(path, "orz", bos="<s>")
    assert [problem.label for problem in problems] == [found for _, _, found in FORMS]
    with task.Grader(workers=4) as grader:
        for problem, (_, program, _) in zip(problems, FORMS):
            assert problem.prompt.startswith("<s>") and problem.question in problem.prompt
            submit(grader, problem.index, program, problem.label)
        assert grader.results() == dict.fromkeys(range(len(FORMS)), 1)


def test_each_process_reads_the_same_label(tmp_path):
    """The repr of a set is not the same in each process, and ranks compare their labels."""
    tests = ["assert f(1) == {'a', 'b', 'c'}", "assert f(2) == set('abc')"]
    path = write(tmp_path, "a.json", [{"text": "?", "test_list": tests}])
    code = f"from tasks import code; print(code.load_problems({path!r}, 'plain'))"
    told = {run_python("-c", code, env={"PYTHONHASHSEED": seed}).stdout for seed in "123"}
    assert len(told) == 1 and "'c'" in told.pop()


def test_unusable_asserts_are_counted_in_one_line(tmp_path, capsys):
    unusable = ["assert all(f(i) == i for i in range(3))", "for y in (1, 2): assert f(y) == 3"]
    unusable += ["assert isinstance(f(1), int) and f(2) == 2", "assert f(1) in (1, 2)"]
    # The program could see the expected value, and define `same` itself. It does not know x.
    unusable += ["assert same(f(2), [4])", "assert same((f(2), 4))", "x = 3\nassert f(x) == 3"]
    unusable += ["assert same(f(2), expected=4)", "assert f(2).is_equal(4) == True"]
    unusable += ["assert f(2) - 4 == 0", "assert (f(2) == 4) == True"]
    unusable += ["list = [3]\nassert f(list) == 3", "from math import ceil\nassert ceil(f(1)) == 3"]
    items = [
        {"text": "a", "test_list": ["assert f(1) == 1", "assert f(2) == g(2)", "assert x == 1"]},
        # Some items of APPS look like this.
        {"question": "d", "input_output": ""},
        {"text": "b", "test_list": unusable, "test_setup_code": "def same(a, b): 'of x'"},
        {"text": "c", "test_list": ["assert f(1) == 1"]},
    ]
    problems = task.load_problems(write(tmp_path, "data.json", items), "plain")
    assert [(problem.index, problem.question[0]) for problem in problems] == [(0, "a"), (1, "c")]
    assert problems[0].label["tests"] == [("f(1)", "1", 0)]
    lines = capsys.readouterr().err.splitlines()
    assert "2 of 4 records are left out" in lines[0] and "1 with no usable test" in lines[0]
    assert lines[1].endswith("2 tests cannot be used and are left out")
    with pytest.raises(UserError, match="no usable test"):
        task.load_problems(write(tmp_path, "data.json", items[1:3]), "plain")


@pytest.mark.engine
def test_a_run_that_cannot_contain_programs_is_refused_in_one_line(tiny, tmp_path):
    stand_in(tmp_path, "bwrap", "echo 'bwrap: No permissions' >&2\nexit 1")
    path = write(tmp_path, "data.json", [{"question": "1+1", "tests": PAIRS}] * 8)
    flags = tiny | {"data": path, "template": "plain", "task": "code"}
    flags.pop("eval_data", None)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = launch(tmp_path / "run", code=2, env=env, **flags)
    assert "error: no program can be started: bwrap: No permissions; the jail" in done.stderr
    assert "Traceback" not in done.stderr
