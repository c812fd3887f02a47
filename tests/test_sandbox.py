"""The task "code": right and wrong programs, attacks, and the forms of problems.

Each attack must be contained in time, get reward 0 and leave no process behind.
"""

import base64
import contextlib
import errno
import functools
import json
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
import tracemalloc
import zlib
from pathlib import Path

import pytest

from lib.common import UserError
from tasks import code as task
from tasks import jail

ROOT = Path(__file__).parent.parent
SECRET = "the-run-folder's-secret"
PAIRS = [["1 2\n", "3\n"], ["4 5\n", "9\n"]]
ADD = "a, b = map(int, input().split())\nprint(a + b)"


def label(tests, calls=False, is_json=False):
    tests = [[*test, 0][:3] for test in tests]
    return json.dumps({"setup": "", "calls": calls, "json": is_json, "tests": tests})


CALLS = label([["f(2)", "4"], ["f([1])", "[1, 1]"], ["f('a')", "'aa'"]], calls=True)


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """The folder of all temporary folders. The processes of these tests have it as HOME."""
    folder = tmp_path_factory.mktemp("sandboxes")
    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    yield folder
    tempfile.tempdir = before


@pytest.fixture(scope="module")
def grader(marked):
    os.environ["SECRET_OF_TRAINER"] = SECRET
    # A right program keeps to these limits on any machine.
    with task.Grader(workers=4, memory_mb=256) as made:
        yield made
    del os.environ["SECRET_OF_TRAINER"]


@pytest.fixture(scope="module")
def strict(grader):
    with task.Grader(workers=4, cpu_seconds=1, memory_mb=256) as made:
        # The limit comes only now, after the Grader has found out in peace what the machine can do.
        made.wall_seconds = 3
        yield made


@pytest.fixture(scope="module", params=task.MODES)
def each_mode(request, grader):
    """Graders that have time: here no right program fails because others are busy."""
    if "namespaces" in request.param and "namespaces" not in grader.mode:
        pytest.skip("this machine has no namespaces")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "MODES", [request.param])
        made = task.Grader(memory_mb=256)
    with made:
        yield made


@pytest.fixture(scope="module", params=["landlock", "plain"])
def weaker(request, grader):
    """A grader as machines that lack namespaces, or Landlock too, would have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "MODES", [request.param])
        made = task.Grader(workers=2, cpu_seconds=1, memory_mb=256)
    with made:
        made.wall_seconds = 2
        yield made


def processes(marked):
    """Those that are left. The kernel may take a moment to end them."""
    deadline = time.monotonic() + 10
    while (found := running(marked)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def running(marked):
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(marked).encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def programs(marked):
    """Processes whose stdin is a file in memory, so that they are no longer the jail's own."""
    found = []
    for pid in running(marked):
        # A process may have just ended.
        with contextlib.suppress(OSError):
            if "memfd" in os.readlink(f"/proc/{pid}/fd/0"):
                found.append(pid)
    return found


def grade(grader, code, tests=None, text=None, finish="stop"):
    response = text or f"so <answer>\n```python\n{code}\n```\n</answer>"
    grader.submit("it", response, finish, tests or label(PAIRS))
    return grader.results()["it"]


def probe(grader, code):
    """Does the code run through? It must raise, because it tries what should be impossible."""
    return grade(grader, f"{code}\n{ADD}") == 1


def layers(*names):
    """Skips where a test truly needs what the machine lacks."""

    def check(grader):
        for name in names:
            if name not in grader.mode:
                pytest.skip(f"needs {name}; this machine only has: {grader.mode}")

    return check


# ---- tasks/code.py -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "expected", "equal"),
    [
        ("3", "3", True),
        ("3.0", "3", True),
        ("0.33333333", "0.3333333", True),
        ("0.3333", "0.3334", False),
        ("1000000007", "1000000008", False),
        ("0010", "10", False),
        ("1e3", "1000", True),
        ("yes", "YES", False),
        ("1  2 \n3\n\n", "1 2\n3", True),
        ("1\n2 3", "1 2\n3", False),
        ("", "0", False),
        ("nan", "1", False),
        ("1 2 3", "1 2", False),
        ("9" * 5000 + ".0", "9" * 5000, False),
        ("-1.0", "-1", True),
        ("-1.0000000001", "-1", False),
        ("-1.0000000001", "-1.0", True),
        ("1000000008.0", "1000000007", False),
        ("1e9", "1000000007", False),
        ("1000000007.0", "1000000007", True),
        ("9007199254740993.0", "9007199254740992", False),
        ("sNaN", "1", False),
        ("1e-17", "0.0", True),
        ("-2.5e-10", "0.00", True),
        ("1e-17", "0", False),
        ("1e-8", "0.0", False),
        ("1e-8", "2e-8", False),
    ],
)
def test_words_of_programs_are_compared(output, expected, equal):
    """1000000008.0 once passed for 1000000007, and 1e-17 did not for 0.0."""
    assert task.same_lines(output, expected) is equal


def test_only_plain_warns(marked, capsys, monkeypatch):
    for mode in ("landlock", "plain"):
        monkeypatch.setattr(task, "MODES", [mode])
        with task.Grader() as weak:
            assert grade(weak, f"import heapq, decimal\n{ADD}") == 1
            assert len(capsys.readouterr().err.splitlines()) == (mode == "plain")
            if mode == "landlock":
                assert not probe(weak, f"assert open({__file__!r}).read()")


def test_right_programs(grader):
    assert grade(grader, ADD) == 1
    threads = f"import threading\ndef go():\n{textwrap.indent(ADD, '    ')}\n"
    threads += "threading.Thread(target=go).start()"
    assert grade(grader, threads) == ("namespaces" in grader.mode)
    imports = "import sys, heapq, decimal\na, b = sys.stdin.read().split()\n"
    assert grade(grader, f"{imports}print(int(a) + int(b), ' ')") == 1
    assert grade(grader, f"{ADD}\nraise SystemExit") == 1
    note = "open('note', 'w').write('x')\nassert open('note').read() == 'x'\n"
    assert grade(grader, note + ADD) == 1


def test_a_tuple_is_right_where_json_has_a_list(grader):
    """The judges of APPS and LiveCodeBench take it, but Python's == of MBPP does not."""
    tests = [["f(2)", "[[2, 2], []]"], ["f([])", "[[[], []], []]"]]
    code = "def f(x): return ((x, x), [])"
    assert grade(grader, code, label(tests, calls=True, is_json=True)) == 1
    assert grade(grader, code, label(tests, calls=True)) == 0
    assert grade(grader, "f = {1: 2}.get", label([["f(1)", "2"]], calls=True, is_json=True)) == 1
    for value in ("{2, 3}", "'[[2, 2], []]'", "((2, 2), [], [])", "..."):
        wrong = label(tests[:1], calls=True, is_json=True)
        assert grade(grader, f"f = lambda x: {value}", wrong) == 0


def test_right_functions(grader):
    assert grade(grader, "def f(x): return x * 2", CALLS) == 1
    noisy = "print('noise')\ndef f(x):\n    print('more')\n    return x * 2"
    assert grade(grader, noisy, CALLS) == 1
    counted = label([["f('aab')", "{'a': 2, 'b': 1}"], ["f('')", "{}"]], calls=True)
    assert grade(grader, "from collections import Counter as f", counted) == 1
    near = label([["f(2)", "1.41421", 1e-3]], calls=True)
    assert grade(grader, "f = lambda x: x ** .5", near) == 1
    assert grade(grader, "f = lambda x: 1.5", near) == 0
    assert grade(grader, "f = lambda x: float('nan')", near) == 0


@pytest.mark.parametrize(
    "code",
    [
        "print(3)",
        "print(",
        "print(3)\nprint()\nprint(3)",
        f"{ADD}\nraise ValueError",
        f"{ADD}\nexit(1)",
        "",
        "exit()",
        f"{ADD}\nimport os\nos._exit(3)",
        "\ud800",
        "\0",
        "x" * 10**6,
    ],
)
def test_wrong_programs(grader, code):
    assert grade(grader, code) == 0


def test_partial_share_and_last_block(marked):
    with task.Grader(workers=1, partial=True) as partial:
        assert grade(partial, "print(3)") == 0.5
        assert grade(partial, "f = lambda x: 4", CALLS) == pytest.approx(1 / 3)
        text = f"<answer>```python\nprint(3)\n```\nbetter:\n```python\n{ADD}\n```</answer>"
        assert grade(partial, "", text=text) == 1
        assert grade(partial, "", text=f"```python\n{ADD}\n```<answer>none</answer>") == 0
        assert grade(partial, ADD, finish="length") == 0


CHEATS = {
    "os._exit before the asserts": "import os\nos._exit(0)",
    "exit": "raise SystemExit(0)",
    "printing success": "print('True')\nprint('passed')\nimport os\nos._exit(0)",
    "replies of its own": "print((0, False, '4'))\nimport os, sys\nsys.stdout.flush()\nos._exit(0)",
    "writing on every descriptor": "import os\n"
    "lines = b\"(0, False, '4')\\n(0, False, '[1, 1]')\\n(0, False, \\\"'aa'\\\")\\n\"\n"
    "for fd in range(64):\n    try: os.write(fd, lines)\n    except OSError: pass\nos._exit(0)",
    "equal to everything": "class E:\n    __eq__ = lambda a, b: True\n"
    "    __repr__ = lambda a: 'E()'\nf = lambda x: E()",
    "a literal that never ends": "class E:\n    __repr__ = lambda a: '[' * 10 ** 6\n"
    "f = lambda x: E()",
    "monkey-patching the checker": "import builtins, ast, json, sys, os\n"
    "builtins.eval = builtins.repr = lambda *a: True\n"
    "ast.literal_eval = json.loads = lambda *a: 4\nf = lambda x: 4\n"
    "builtins.all = builtins.any = lambda *a: True",
    "patching the frames above": "import sys\nframe = sys._getframe()\nwhile frame:\n"
    "    frame.f_globals['same_value'] = lambda *a: True\n"
    "    frame.f_locals.get('job', {}).clear()\n"
    "    frame = frame.f_back\nf = lambda x: 4",
    "looking for expected values": "import gc\n"
    "found = [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]\n"
    "f = lambda x: found[0]",
    "raising": "def f(x): raise AssertionError",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheat_gets_nothing(grader, name):
    assert grade(grader, CHEATS[name], CALLS) == 0


def test_the_whole_group_ends_whatever_the_jail_did(grader, marked, tmp_path, monkeypatch):
    (tmp_path / "jail.py").write_text(
        "import os, sys, time\nsys.stdin.buffer.read()\nif not os.fork():\n"
        "    os.close(1)\n    time.sleep(30)\nprint((0, False, '3'))\n"
        "print((0, False, '9'))\n"
    )
    monkeypatch.setattr(task, "JAIL", str(tmp_path / "jail.py"))
    assert grade(grader, ADD) == 1
    assert processes(marked) == []


def test_output_is_read_no_further_than_its_verdict_needs(marked):
    """It all was kept, six characters for a byte.

    Ten tests of a hostile program once took 2 GB of the trainer's memory.
    """
    flood = "import os\nos.write(1, b'\\xff' * (7 << 20))"
    with task.Grader(partial=True) as grader:
        tracemalloc.start()
        assert grade(grader, flood, label(PAIRS * 10)) == 0
        # Before an answer a program may say anything.
        assert grade(grader, f"{flood}\nf = lambda x: x * 2", CALLS) == 1
        assert grade(grader, f"print('3' + ' ' * (1 << 20))\n{flood}", label(PAIRS[:1])) == 0
        assert grade(grader, flood, label([["", ""]])) == 0
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
        tracemalloc.stop()
        assert grade(grader, "print('7' * 300000)", label([["", "7" * 300000]])) == 1


@pytest.mark.slow
def test_limits_are_counted_apart(marked):
    with task.Grader(workers=2, cpu_seconds=1, partial=True) as grader:
        grade(grader, "while True: pass")
        assert (grader.counts["cpu_timeouts"], grader.lost) == (1, 1)
        grader.wall_seconds = 2
        grade(grader, "import time\ntime.sleep(20)")
        grader.wall_seconds = 60
        assert (grader.counts["wall_timeouts"], grader.lost) == (1, 2)
        # Waiting is not CPU time.
        assert grade(grader, f"import time\ntime.sleep(1.2)\n{ADD}", label(PAIRS[:1])) == 1
        # Each test has the wall time for itself.
        grader.wall_seconds = 8
        assert grade(grader, f"import time\ntime.sleep(1)\n{ADD}", label(PAIRS[:1] * 9)) == 1
        assert grader.counts["checks"] == 4


def test_many_at_once_equal_one_at_a_time(marked):
    codes = [
        ADD,
        "print(3)",
        f"{ADD}\nexit(1)",
        "import os\nos.fork()\nprint(3)",
        "x = 'a' * (1 << 34)",
        f"for i in range(10 ** 6): pass\n{ADD}",
    ]
    verdicts = []
    for workers in (1, 8):
        with task.Grader(workers=workers, wall_seconds=30) as grader:
            for key in range(18):
                text = f"<answer>```\n{codes[key % 6]}\n```</answer>"
                grader.submit(key, text, "stop", label(PAIRS))
            assert not grader.pending(60)
            verdicts.append(grader.results())
    assert verdicts[0] == verdicts[1] == {key: float(key % 6 in (0, 5)) for key in range(18)}


def test_program_on_its_way_when_the_grader_closes_is_ended(marked):
    """A thread once held up the end of a run that had taken a job but not yet started it.

    Where the program sleeps, this took minutes.
    """
    with task.Grader(workers=1) as grader:
        # `close` sets this before it looks for processes.
        grader.closed = True
        verdict = grader.check("import time\ntime.sleep(60)", label(PAIRS), grader.mode)
        assert verdict == (0.0, "crashes")
    assert processes(marked) == []


def test_a_process_that_cannot_be_started_is_told_and_ends_no_run(marked, monkeypatch):
    """It was an OSError out of `results`, which ended the run without a save."""
    with task.Grader() as grader:
        assert grader.broken is None
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(marked / "deleted"))
            assert grade(grader, ADD) == 0
            with pytest.raises(UserError, match="deleted"):
                task.Grader()
        assert "deleted" in grader.broken
        assert grader.lost == grader.counts["crashes"] == 1
        assert grade(grader, ADD) == 1
    assert list(marked.iterdir()) == []


# A timer of its own sends the program SIGKILL, like the kernel where memory runs out.
KILLED = """import ctypes, signal
libc = ctypes.CDLL(None)
timer = ctypes.c_void_p()
assert libc.timer_create(1, (ctypes.c_int * 16)(0, 0, 9), ctypes.byref(timer)) == 0
assert libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, 0, 1), None) == 0
while True: signal.pause()"""


def test_a_killed_program_has_not_used_up_its_cpu_time(each_mode):
    """Any SIGKILL that came in time once counted as the limit of CPU time."""
    before = dict(each_mode.counts)
    assert grade(each_mode, KILLED) == 0
    change = {name: each_mode.counts[name] - before[name] for name in before}
    assert change == {"checks": 1, "cpu_timeouts": 0, "wall_timeouts": 0, "crashes": 1}


def test_a_jail_that_ends_between_two_tests_is_a_crash(marked, tmp_path, monkeypatch):
    """Its last reply said that all was well, so it was counted as nothing."""
    code = "import os, sys\nsys.stdin.buffer.read()\nprint((0, False, '3'), flush=True)\n"
    (tmp_path / "jail.py").write_text(f"{code}os.kill(os.getpid(), 9)")
    with task.Grader(partial=True) as grader:
        monkeypatch.setattr(task, "JAIL", str(tmp_path / "jail.py"))
        assert grade(grader, ADD) == 0.5
        assert grader.counts["crashes"] == 1


# ---- tasks/jail.py -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [[], ["landlock"], ["plain"]])
def test_nothing_outlives_the_trainer(tmp_path, mode):
    """A folder of its own, because a trainer that is killed removes none."""
    code = (
        "import tempfile, sys\ntempfile.tempdir = sys.argv[1]\nfrom tasks import code as task\n"
        "task.MODES = sys.argv[3:] or task.MODES\ng = task.Grader()\n"
        "text = '<answer>```\\nimport time\\ntime.sleep(99)\\n```</answer>'\n"
        "g.submit(0, text, 'stop', sys.argv[2])\n"
        "print('up', flush=True)\ng.results()"
    )
    command = [sys.executable, "-c", code, str(tmp_path), label(PAIRS), *mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as trainer:
        assert trainer.stdout.readline() == b"up\n"
        deadline = time.monotonic() + 60
        while not programs(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert programs(tmp_path)
        trainer.send_signal(signal.SIGKILL)
    assert processes(tmp_path) == []


@pytest.mark.slow
def test_programs_that_wait_in_every_test_have_a_limit_too(marked):
    with task.Grader(partial=True) as grader:
        grader.wall_seconds = 1
        assert grade(grader, f"import time\ntime.sleep(0.4)\n{ADD}", label(PAIRS * 50)) < 1
        assert grader.counts["wall_timeouts"] == 1


def test_namespaces_of_its_own(grader, marked):
    """It is looked at from outside, because Landlock refuses what a program could ask."""
    layers("namespaces")(grader)
    text = "<answer>```\nimport time\ntime.sleep(50)\n```</answer>"
    grader.submit("it", text, "stop", label(PAIRS[:1]))
    deadline = time.monotonic() + 60
    while not (inside := programs(marked)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for kind in ("net", "pid", "mnt", "ipc", "uts"):
        own = os.readlink(f"/proc/self/ns/{kind}")
        assert os.readlink(f"/proc/{inside[0]}/ns/{kind}") != own
    crashes = grader.counts["crashes"]
    os.kill(int(inside[0]), signal.SIGKILL)
    assert grader.results() == {"it": 0}
    assert grader.counts["crashes"] == crashes + 1


def test_uncountable_memory_is_limited(grader):
    layers("namespaces")(grader)
    assert not probe(grader, "for i in range(99): open(f'f{i}', 'wb').write(bytes(1 << 20))")


@pytest.mark.parametrize(
    "code",
    [
        "open(PATH).read()",
        "import os\nassert os.listdir(FOLDER)",
        "import os\nos.symlink(PATH, 'a')\nopen('a').read()",
        "import os\nos.link(PATH, 'a')\nopen('a').read()",
        "import os\nos.chdir(FOLDER)\nopen('state').read()",
        "import subprocess\nassert subprocess.run(['cat', PATH], capture_output=True).stdout",
        "open('/proc/self/root' + PATH).read()",
        "open('/proc/1/root' + PATH).read()",
        "import os\nos.chroot('.')",
        "import os\nfd = os.open('/', os.O_RDONLY)\nos.open(PATH[1:], os.O_RDONLY, dir_fd=fd)",
    ],
)
def test_run_folder_is_unreadable(grader, marked, tmp_path_factory, code):
    layers("landlock")(grader)
    folder = tmp_path_factory.mktemp("run")
    (folder / "state").write_text(SECRET)
    for path in (folder, *list(folder.parents)[:2]):
        path.chmod(0o777)
    assert not probe(grader, f"PATH, FOLDER = {str(folder / 'state')!r}, {str(folder)!r}\n{code}")


@pytest.mark.parametrize(
    "code",
    [
        "open(PATH, 'w').write('mine')",
        "open(PATH, 'a').write('mine')",
        "import os\nos.remove(PATH)",
        "import os\nos.truncate(PATH, 0)",
        "import os\nos.symlink(PATH, 'a')\nopen('a', 'w').write('mine')",
        "import shutil\nshutil.rmtree(FOLDER)",
        "import os\nos.rename(PATH, 'a')",
        "import os\nos.chmod(PATH, 0)",
        "import os\nos.mkdir(FOLDER + '/new')",
        "import os\nos.utime(PATH)",
        "import os\nos.chmod(FOLDER, 0)",
        "import os\nos.rename(FOLDER, FOLDER + '2')",
        "open('/dev/shm/' + NEW, 'w')",
        "open('/tmp/' + NEW, 'w')",
    ],
)
def test_nothing_outside_changes(grader, tmp_path_factory, code):
    layers("landlock")(grader)
    folder = tmp_path_factory.mktemp("run")
    (folder / "state").write_text(SECRET)
    os.utime(folder / "state", (1, 1))
    for path in (folder / "state", folder, *list(folder.parents)[:2]):
        path.chmod(0o777)
    new = f"left-over-{os.getpid()}"
    names = f"PATH, FOLDER, NEW = {str(folder / 'state')!r}, {str(folder)!r}, {new!r}"
    assert not probe(grader, f"{names}\n{code}")
    assert not any((Path(place) / new).exists() for place in ("/dev/shm", "/tmp"))
    assert (folder / "state").read_text() == SECRET and (folder / "state").stat().st_mtime == 1
    assert [path.name for path in folder.iterdir()] == ["state"]
    assert folder.stat().st_mode & 0o777 == (folder / "state").stat().st_mode & 0o777 == 0o777


def test_symlink_left_behind_is_not_followed(grader, tmp_path):
    (tmp_path / "kept").write_text("kept")
    assert grade(grader, f"import os\nos.symlink({str(tmp_path)!r}, 'a')\n{ADD}") in (0, 1)
    assert (tmp_path / "kept").read_text() == "kept"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nvalues = os.environ.values()\n"
        "assert any('trainer' in value for value in values) or 'SECRET_OF_TRAINER' in os.environ",
        "assert open(f'/proc/PARENT/environ').read()",
        "assert open('/proc/PARENT/cmdline').read()",
        "import os\nassert os.listdir('/proc/PARENT')",
        "import os\nassert os.listdir('/proc/PARENT/fd')",
        "open('/proc/PARENT/mem', 'rb')",
        "import os\nassert open(f'/proc/{os.getppid()}/environ').read()",
        "open('/proc/self/environ').read()",
    ],
)
def test_environment_and_proc_are_hidden(grader, code):
    if "/proc" in code:
        layers("landlock")(grader)
    assert not probe(grader, code.replace("PARENT", str(os.getpid())))


def verdict(machine, architecture, number, first=0, second=0):
    """What the filter returns for a system call, by following its instructions."""
    instructions = jail.call_filter(machine)
    words = {jail.CALL_NUMBER: number, jail.ARCHITECTURE: architecture}
    words |= {jail.FIRST_ARGUMENT: first, jail.SECOND_ARGUMENT: second}
    loaded = None
    position = 0
    while True:
        operation, if_true, if_false, value = struct.unpack("=HBBI", instructions[position])
        position += 1
        if operation == jail.RETURN:
            return value
        if operation == jail.LOAD:
            loaded = words[value]
            continue
        passes = {
            jail.IF_EQUAL: loaded == value,
            jail.IF_AT_LEAST: loaded >= value,
            jail.IF_ANY_BIT: loaded & value != 0,
        }
        position += if_true if passes[operation] else if_false


@pytest.mark.parametrize("machine", jail.ARCHITECTURES)
def test_verdicts_of_the_filter(machine):
    """This includes the architecture that the test does not run on."""
    own = jail.ARCHITECTURES[machine]
    column = list(jail.ARCHITECTURES).index(machine)
    partly = {name: numbers[column] for name, numbers in jail.PARTLY_REFUSED.items()}
    no_permission = jail.FAIL_WITH | errno.EPERM
    decide = functools.partial(verdict, machine, own)

    for architecture in {*jail.ARCHITECTURES.values(), 0} - {own}:
        assert verdict(machine, architecture, 0) == jail.KILL_PROCESS
    assert decide(jail.X32_CALLS | 39) == jail.KILL_PROCESS
    refused = {numbers[column] for numbers in jail.REFUSED.values()}
    for number in set(range(500)) - {*partly.values()}:
        assert decide(number) == (no_permission if number in refused else jail.ALLOW), number
    assert decide(partly["clone3"]) == jail.FAIL_WITH | errno.ENOSYS
    assert decide(partly["clone"], jail.CLONE_THREAD) == jail.ALLOW
    assert decide(partly["clone"], signal.SIGCHLD) == no_permission
    # Each of these flags asks for a new namespace of one kind.
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert decide(partly["clone"], 1 << bit | jail.CLONE_THREAD) == no_permission
    assert decide(partly["prlimit64"], 0) == jail.ALLOW
    assert decide(partly["prlimit64"], 1) == no_permission
    # These numbers are in the kernel's headers, for both architectures.
    commands = {
        number for number in range(2000) if decide(partly["fcntl"], 3, number) != jail.ALLOW
    }
    assert commands == {8, 10, 15}
    requests = {n for n in range(0x5400, 0x8A00) if decide(partly["ioctl"], 3, n) != jail.ALLOW}
    assert requests == {0x8901, 0x8902}
    for flags in (0, 0x800, 0x80000, 0x80800):
        for family in (1, 2, 30):
            for kind in range(1, 11):
                is_fine = family == kind == 1
                decided = decide(partly["socketpair"], family, kind | flags)
                assert decided == (jail.ALLOW if is_fine else no_permission)


HEADERS = ("x86_64-linux-gnu/asm/unistd_64.h", "asm-generic/unistd.h")


@pytest.mark.parametrize("column", range(2), ids=list(jail.ARCHITECTURES))
def test_numbers_of_system_calls(column):
    """The kernel's headers, where the machine has them, give the same numbers."""
    header = Path("/usr/include", HEADERS[column])
    if not header.exists():
        pytest.skip("no headers of the kernel")
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", header.read_text()))
    tables = {**jail.PARTLY_REFUSED, **jail.REFUSED}
    found = {name: int(known[name]) for name in tables if name in known}
    assert len(found) > 40
    assert found == {name: tables[name][column] for name in found}


@pytest.mark.parametrize(
    "code",
    [
        "import socket\nsocket.socket()",
        "import socket\nsocket.create_connection(('127.0.0.1', PORT))",
        "import ctypes\nassert ctypes.CDLL(None).socket(2, 1, 0) >= 0",
        "import ctypes\nassert ctypes.CDLL(None).socket(1, 1, 0) >= 0",
        "import ctypes\nio_uring_setup = 425\nparameters = ctypes.create_string_buffer(256)\n"
        "assert ctypes.CDLL(None).syscall(io_uring_setup, 8, parameters) >= 0",
    ],
)
def test_no_sockets(grader, code):
    assert not probe(grader, code.replace("PORT", "22"))


OTHERS = [
    "import os\nos.kill(PARENT, 9)",
    "import os\nos.kill(os.getppid(), 9)",
    "import os\nos.kill(-1, 9)",
    "import os\nos.killpg(0, 9)",
    "import ctypes\nassert ctypes.CDLL(None).ptrace(16, PARENT, 0, 0) == 0",
    "import os\nos.setpriority(0, PARENT, 19)",
    "import signal, os\nsignal.pidfd_send_signal(os.pidfd_open(PARENT), 9)",
    "import os\nos.sched_setaffinity(PARENT, [0])",
    "import resource\nresource.prlimit(PARENT, resource.RLIMIT_NOFILE, (4, 4))",
    "import os\nos.setuid(0)",
    "import os\nos.setsid()",
    "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "import ctypes, os, platform\nclone = {'x86_64': 56, 'aarch64': 220}[platform.machine()]\n"
    "new_users = 0x10000000\npid = ctypes.CDLL(None).syscall(clone, new_users | 17, 0, 0, 0, 0)\n"
    "assert pid >= 0\nif not pid: os._exit(0)",
    "import ctypes\nassert ctypes.CDLL(None).prctl(1, 0) == 0",
    "import os\nassert os.memfd_create('x') >= 0",
    "import ctypes\nassert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0",
    "import ctypes\nassert ctypes.CDLL(None).mount(b'x', b'.', b'tmpfs', 0, None) == 0",
]


@pytest.mark.parametrize("code", OTHERS)
def test_other_processes_are_out_of_reach(grader, marked, code):
    assert not probe(grader, code.replace("PARENT", str(os.getpid())))
    assert processes(marked) == []


@pytest.mark.parametrize("code", OTHERS)
def test_other_processes_are_out_of_reach_on_a_machine_with_less(weaker, marked, code):
    """There a program could name the trainer's process, and only seccomp stands before it."""
    assert not probe(weaker, code.replace("PARENT", str(os.getpid())))
    assert processes(marked) == []


# The kernel can be asked to send a signal when a file becomes ready. The victim is the jail around
# the program, which has the same user in all modes; if it dies, there is no reward.
BY_FILE = """import fcntl, os, socket, struct
reader, writer = os.pipe()
stream, peer = socket.socketpair()
jail = os.getppid()
refused = 0
for call, *arguments in (
    (fcntl.fcntl, reader, 8, jail),
    (fcntl.fcntl, reader, 10, 9),
    (fcntl.fcntl, reader, 15, struct.pack("ii", 1, jail)),
    (fcntl.ioctl, stream, 0x8901, struct.pack("i", jail)),
    (fcntl.ioctl, stream, 0x8902, struct.pack("i", jail)),
):
    try:
        call(*arguments)
    except PermissionError:
        refused += 1
for file in (reader, stream):
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_ASYNC)
os.write(writer, b"x")
peer.send(b"x")
assert refused == 5"""


def test_no_signal_by_way_of_a_file(each_mode):
    """F_SETOWN once killed what kill could not reach: the trainer too, where it has that user."""
    assert probe(each_mode, BY_FILE)


@pytest.fixture
def servers():
    """UNIX sockets that everyone may write to: {name: socket}."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
        os.chmod(folder, 0o777)
        made = {}
        for name in (f"{folder}/letters", f"\0{folder}/letters", f"{folder}/calls"):
            kind = socket.SOCK_STREAM if "calls" in name else socket.SOCK_DGRAM
            made[name] = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            made[name].bind(name)
            made[name].setblocking(False)
        made[f"{folder}/calls"].listen()
        os.chmod(f"{folder}/letters", 0o777)
        os.chmod(f"{folder}/calls", 0o777)
        yield made


TO_SERVERS = """import asyncio, socket
for name in NAMES:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
        for send in (lambda: one.sendto(b"ESCAPED", name), lambda: one.connect(name)):
            try:
                one, two = socket.socketpair(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
                send()
            except OSError:
                continue
            raise SystemExit("something was sent")
asyncio.run(asyncio.sleep(0))"""


def test_sockets_of_other_programs_are_out_of_reach(each_mode, servers):
    """A datagram socket of a pair could send to any server whose file the program may write."""
    assert probe(each_mode, TO_SERVERS.replace("NAMES", repr([*servers])))
    for name, server in servers.items():
        with pytest.raises(BlockingIOError):
            server.accept() if "calls" in name else server.recv(9)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.slow
def test_a_program_that_waits_holds_its_worker_for_one_test_only(marked, partial):
    """The wall time of all tests together once was one sum.

    For 150 tests this was 30 minutes, and the other ranks waited.
    """
    with task.Grader(wall_seconds=4, partial=partial) as grader:
        started = time.monotonic()
        assert grade(grader, "import time\ntime.sleep(60)", label(PAIRS * 50)) == 0
        code = f"import time\n{ADD}\nif a > 1: time.sleep(60)"
        assert grade(grader, code, label([PAIRS[0], PAIRS[1], *PAIRS[:1] * 38])) == partial / 40
        # This is time for two limits beside other work, and not for 140 of them.
        assert time.monotonic() - started < 100
        assert grader.counts["wall_timeouts"] == 2


@pytest.mark.parametrize(("status", "reward"), [(0, 1.0), (256, 0.0), (9, 0.0)])
def test_exit_status_of_the_only_test_counts(grader, status, reward):
    ends = {
        0: "",
        256: "\nimport os, sys\nsys.stdout.flush()\nos._exit(1)",
        9: "\nimport os, sys\nsys.stdout.flush()\nos.abort()",
    }
    assert grade(grader, ADD + ends[status], label(PAIRS[:1])) == reward
    assert grade(grader, "pass" + ends[status], label([["", ""]])) == reward


# Each reaches one limit in a way that no other limit or namespace stops.
@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(300 << 20)",
        "open('x', 'wb').write(bytes(9 << 20))",
        "open('x', 'wb').truncate(9 << 20)",
        "import threading, time\nthreading.stack_size(1 << 16)\nfor i in range(40):\n"
        "    threading.Thread(target=time.sleep, args=(1,), daemon=True).start()",
        "files = [open('x', 'wb') for i in range(99)]",
        "import os\nassert os.getuid() == 0 or os.getgid() == 0 or os.getgroups()",
    ],
)
def test_each_limit(grader, code):
    if "getuid" in code and os.getuid():
        pytest.skip("needs root: only root can give programs a user of their own")
    assert not probe(grader, code)


ATTACKS = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "fork bomb that ignores errors": "import os\nwhile True:\n"
    "    try: os.fork()\n    except OSError: pass",
    "sleeping children in sessions of their own": "import os, time\nfor i in range(8):\n"
    "    if not os.fork():\n"
    "        try: os.setsid()\n        except OSError: pass\n        time.sleep(600)\nprint(0)",
    "memory bomb": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "one huge allocation": "x = 'a' * (1 << 40)\nprint(3)",
    "disk bomb": "i = 0\nwhile True:\n    open(f'f{i}', 'wb').write(bytes(1 << 22))\n    i += 1",
    "endless output": "while True: print('3' * 10000)",
    "endless errors": "import sys\nwhile True: print('3' * 10000, file=sys.stderr)",
    "endless loop": "while True: pass",
    "sleeping for ever": "import time\ntime.sleep(600)",
    "ignoring signals": "import signal\nfor n in range(1, 65):\n"
    "    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: pass",
    "printing the expected line and then failing": f"{ADD}\nimport os, sys\n"
    "sys.stdout.flush()\nos.abort()",
    "deep recursion": "def f(): f()\nimport sys\nsys.setrecursionlimit(10 ** 9)\nf()",
    "forbidden architecture": "import ctypes\nctypes.CDLL(None).syscall(0x40000000 | 39)\n"
    "while True: pass",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_gets_nothing_and_ends(strict, marked, name):
    started = time.monotonic()
    assert grade(strict, ATTACKS[name]) == 0
    assert time.monotonic() - started < 100
    assert processes(marked) == []
    assert list(marked.iterdir()) == []


WEAKER = {
    "a process of its own": f"import os\nos.fork()\n{ADD}",
    "by another call": "import ctypes, platform\n"
    "number = {'x86_64': 57, 'aarch64': 220}[platform.machine()]\n"
    f"assert ctypes.CDLL(None).syscall(number, 17, 0, 0, 0, 0) >= 0\n{ADD}",
    "a socket": f"import socket\nsocket.socket()\n{ADD}",
    "another user": f"import os\nassert os.getuid() == 0\n{ADD}",
    "a signal": f"import os\nos.kill(os.getppid(), 9)\n{ADD}",
    "outliving": "import ctypes, time\nctypes.CDLL(None).prctl(1, 0)\ntime.sleep(20)",
    "folders too deep for Python": "import os\nfor i in range(1200):\n"
    "    os.mkdir('a')\n    os.chdir('a')",
    "memory": f"x = bytearray(300 << 20)\n{ADD}",
    "disk": f"open('x', 'wb').write(bytes(9 << 20))\n{ADD}",
    "processor": "while True: pass",
}


@pytest.mark.parametrize("name", WEAKER)
@pytest.mark.slow
def test_attack_on_a_machine_with_less(weaker, marked, name):
    assert grade(weaker, WEAKER[name]) == 0
    assert processes(marked) == []
    assert list(marked.iterdir()) == []


# What a program tries, by the name that docs/rewards.md gives it. It raises where it is contained.
TRIED = {
    "read a file that everyone may read": "open(f'{FOLDER}/public').read()",
    "read a file of the trainer's user": "open(f'{FOLDER}/private').read()",
    "write a file that everyone may write": "open(f'{FOLDER}/public', 'a').write('x')",
    "ask for the size of a file": "import os\nos.stat(f'{FOLDER}/public')",
    "read the trainer's environment in `/proc`": "open(f'/proc/{TRAINER}/environ').read()",
    "open a network socket": "import socket\nsocket.socket()",
    "send to a UNIX socket that has a file": "import socket\n"
    "socket.socketpair(1, socket.SOCK_DGRAM)[0].sendto(b'x', f'{FOLDER}/letters')",
    "send to a UNIX socket that has a name": "import socket\n"
    "socket.socketpair(1, socket.SOCK_DGRAM)[0].sendto(b'x', f'\\0{FOLDER}/letters')",
    "kill another process": "import os\nos.kill(VICTIM, 9)",
    "let the kernel kill it, by `fcntl`": "import fcntl, os\nreader, writer = os.pipe()\n"
    "fcntl.fcntl(reader, 8, VICTIM)\nfcntl.fcntl(reader, 10, 9)\n"
    "fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)\nos.write(writer, b'x')",
    "start a second process": "import os\nif not os.fork(): os._exit(0)",
    "take more memory than its limit": "x = bytearray(300 << 20)",
    "write a file of more than 8 MB": "open('x', 'wb').write(bytes(9 << 20))",
    "write more than 64 MB of files": "for i in range(80): open(str(i), 'wb').write(b' ' * 2**20)",
}
# It ends well, and has made folders that its own user may not list.
HIDES = f"import os\nos.mkdir('a', 0o300)\nos.mkdir('a/b', 0o300)\nopen('a/b/c', 'w')\n{ADD}"
TRAINER = """
import json, os, subprocess, sys, tempfile, types
# The other user may have no torch, which all of lib/common.py would import.
sys.modules["lib.common"] = types.SimpleNamespace(UserError=RuntimeError)
from tasks import code as task
folder, mode, programs, label = json.load(sys.stdin)
task.MODES = [mode]
tempfile.tempdir = f"{folder}/jails"
os.close(os.open(f"{folder}/private", os.O_CREAT, 0o600))
victim = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
with task.Grader(memory_mb=256) as grader:
    for name, code in programs.items():
        names = f"FOLDER, TRAINER, VICTIM = {folder!r}, {os.getpid()}, {victim.pid}"
        text = f"<answer>```\\n{names}\\n{code}\\n```</answer>"
        grader.submit(name, text, "stop", label)
    rewards = grader.results()
output, _ = victim.communicate(b"alive")
print(json.dumps([rewards, output.decode(), os.listdir(tempfile.tempdir), grader.counts]))
"""


def rows_of_page():
    """{attack: a cell for each mode} of the table in docs/rewards.md."""
    page = (ROOT / "docs/rewards.md").read_text()
    lines = page[page.index(f"| {' | '.join(task.MODES)} |") :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {attack: cells for attack, *cells in rows}


def as_user(is_root, folder):
    """The start of a command of that user in the repository.

    Python may lie where only root can go, so it is mounted elsewhere for others.
    """
    if is_root or os.getuid():
        return [sys.executable]
    mount = 'mount --bind "$0" "$2/python" && mount --bind "$1" "$2/house" && cd "$2/house"'
    change = "exec setpriv --reuid=65534 --regid=65534 --clear-groups"
    script = f'{mount} && {change} "$2/python/$3" "${{@:4}}"'
    program = os.path.relpath(os.path.realpath(sys.executable), sys.base_prefix)
    return ["unshare", "-m", "bash", "-c", script, sys.base_prefix, ROOT, folder, program]


@pytest.mark.parametrize("is_root", [True, False], ids=["root", "other"])
@pytest.mark.parametrize("mode", task.MODES)
@pytest.mark.slow
def test_the_page_says_what_is_contained(mode, is_root):
    """Real files, servers, a real victim; and what a program hid from its own user is removed.

    A user other than root once left such folders behind, and rm's complaint on stderr.
    """
    if is_root and os.getuid():
        pytest.skip("needs root")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
        for name in ("python", "house", "jails"):
            Path(folder, name).mkdir()
        Path(folder, "public").write_text("")
        servers = []
        for name in (f"{folder}/letters", f"\0{folder}/letters"):
            servers.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)))
            servers[-1].bind(name)
        for name in ("", "public", "letters", "jails"):
            Path(folder, name).chmod(0o777)
        programs = {name: f"{code}\n{ADD}" for name, code in TRIED.items()}
        job = json.dumps([folder, mode, programs | {"hide": HIDES}, label(PAIRS[:1])])
        command = [*as_user(is_root, folder), "-c", TRAINER]
        done = subprocess.run(command, input=job, capture_output=True, text=True, cwd=ROOT)
        if "namespaces" in mode and "nothing contains programs here" in done.stderr:
            pytest.skip("this machine lacks namespaces or Landlock")
        if "unshare failed" in done.stderr:
            pytest.skip("this machine lets no other user reach Python")
        assert done.returncode == 0, done.stderr
        rewards, output, left, counts = json.loads(done.stdout)
        for server in servers:
            with pytest.raises(BlockingIOError):
                server.recv(9, socket.MSG_DONTWAIT)
        is_changed = Path(folder, "public").read_text() != ""
    assert done.stderr.count("\n") == (mode == "plain"), done.stderr
    assert (output, left, counts["crashes"]) == ("alive", [], 0)
    assert rewards.pop("hide") == 1
    contained = {name: reward == 0 for name, reward in rewards.items()}
    assert is_changed != contained["write a file that everyone may write"]
    says = {"yes": True, "no": False, "as root": is_root}
    column = task.MODES.index(mode)
    assert contained == {name: says[cells[column]] for name, cells in rows_of_page().items()}


# ---- tasks/code_data.py --------------------------------------------------------------------------


FORMS = {
    "mbpp": (
        {
            "text": "Double it.",
            "code": "def f(x): return x * 2",
            "test_list": ["assert f(2) == 4", "assert f([1]) == [1, 1]"],
        },
        "def f(x): return x * 2",
    ),
    "mbpp, truth": (
        {"text": "Even?", "test_list": ["assert f(2)", "assert not f(3)"]},
        "f = lambda x: 'x' * (x == 2)",
    ),
    "mbpp, isclose": (
        {"text": "Halve.", "test_list": ["assert math.isclose(f(1), 0.5001, rel_tol=0.001)"]},
        "f = lambda x: x / 2",
    ),
    "apps, function": (
        {
            "question": "Add.",
            "input_output": {"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]},
            "starter_code": "class Solution:\n    def f(self, a, b):",
        },
        "class Solution:\n    def f(self, a, b): return a + b",
    ),
    "livecodebench, function": (
        {
            "question_content": "Add.",
            "metadata": json.dumps({"func_name": "f"}),
            "public_test_cases": [{"input": "1\n[2]", "output": "3"}],
            "private_test_cases": "",
        },
        "def f(a, b): return a + b[0]",
    ),
    "humaneval": (
        {
            "prompt": "import math\ndef f(x):\n    '''Half.'''\n",
            "entry_point": "f",
            "test": "def check(candidate):\n    assert candidate(3) == 1.5\n"
            "    assert abs(candidate(1) - 0.5) < 1e-6\n",
        },
        "def f(x): return x / 2",
    ),
    "apps": (
        {"question": "Add.", "input_output": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})},
        ADD,
    ),
    "livecodebench": (
        {
            "question_content": "Add.",
            "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3"}]),
            "private_test_cases": json.dumps([{"input": "4 5\n", "output": "9"}]),
        },
        ADD,
    ),
    "apps, lists of lines": (
        {
            "question": "Add.",
            "input_output": {"inputs": [["1 2", ""], ["4 5"]], "outputs": [["3"], ["9"]]},
        },
        ADD,
    ),
    "livecodebench, packed": (
        {
            "question_content": "Add.",
            "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3"}]),
            "private_test_cases": base64.b64encode(
                zlib.compress(pickle.dumps(json.dumps([{"input": "4 5\n", "output": "9"}])))
            ).decode(),
        },
        ADD,
    ),
    "columns": ({"question": "Add.", "tests": PAIRS}, ADD),
    "merged sets": ({"question": "Add.", "tests": PAIRS, "input_output": None}, ADD),
    "merged sets, livecodebench": (
        {
            "question_content": "Add.",
            "input_output": "",
            "public_test_cases": [{"input": "1 2\n", "output": "3"}],
            "private_test_cases": [],
        },
        ADD,
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(grader, tmp_path, name):
    record, code = FORMS[name]
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    (problem,) = task.load_problems(str(tmp_path / "data.jsonl"), "orz", bos="<s>")
    assert problem.prompt.startswith("<s>") and problem.question in problem.prompt
    assert grade(grader, code, problem.label) == 1
    assert grade(grader, "def f(x): return 0\nprint(0)", problem.label) == 0
    assert json.loads(problem.label)["json"] is name.endswith("function")


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"question": "x"},
        {"question": "x", "tests": []},
        {"question": "x", "tests": [[1, 2]]},
        {"question": "\ud800", "tests": PAIRS},
        {"question": 5, "tests": PAIRS},
        {"tests": PAIRS},
        {"question": "x", "input_output": '{"inputs": '},
        {
            "question": "x",
            "public_test_cases": "[]",
            "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(os.system))).decode(),
        },
    ],
)
def test_bad_items_are_named(tmp_path, record):
    (tmp_path / "data.jsonl").write_text(json.dumps(record))
    with pytest.raises(UserError, match="data.jsonl: item 1"):
        task.load_problems(str(tmp_path / "data.jsonl"), "plain")


def test_template_without_a_question(tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"question": "Add.", "tests": PAIRS}))
    with pytest.raises(UserError, match="{question}"):
        task.load_problems(str(tmp_path / "data.jsonl"), "no place")


def test_unusable_asserts_are_counted_aloud(tmp_path, capsys):
    records = [
        {"text": "a", "test_list": ["assert f(1) == 1", "assert f(2) == g(2)", "assert x == 1"]},
        # Some items of APPS look like this.
        {"question": "d", "input_output": ""},
        {
            "text": "b",
            "test_list": [
                "assert all(f(i) == i for i in range(3))",
                "for y in (1, 2): assert f(y) == 3",
                "assert isinstance(f(1), int) and f(2) == 2",
                "assert f(1) in (1, 2)",
            ],
        },
        {"text": "c", "test_list": ["assert f(1) == 1"]},
    ]
    (tmp_path / "data.json").write_text(json.dumps(records))
    problems = task.load_problems(str(tmp_path / "data.json"), "plain")
    assert [(p.index, p.question[0]) for p in problems] == [(0, "a"), (1, "c")]
    assert json.loads(problems[0].label)["tests"] == [["f(1)", "1", 0]]
    (line,) = capsys.readouterr().err.splitlines()
    assert re.findall(r" (\d+) ", line) == ["7", "2", "4"]
    (tmp_path / "data.json").write_text(json.dumps(records[1:3]))
    with pytest.raises(UserError, match="no problem"):
        task.load_problems(str(tmp_path / "data.json"), "plain")
