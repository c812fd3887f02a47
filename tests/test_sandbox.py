"""The task "code": what it pays, what each mode of its jail contains, and the forms of problems."""

import base64
import contextlib
import errno
import functools
import json
import os
import pickle
import re
import shutil
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
from conftest import ROOT, wait_until

from lib.common import UserError
from tasks import code as task
from tasks import jail

PAIRS = [["1 2\n", "3\n"], ["4 5\n", "9\n"]]
ADD = "a, b = map(int, input().split())\nprint(a + b)"
SLEEP = "import time\ntime.sleep(99)"


def label(*tests, calls=False, is_json=False, setup=""):
    tests = [[*test, 0][:3] for test in tests]
    return json.dumps({"setup": setup, "calls": calls, "json": is_json, "tests": tests})


def submit(grader, key, code, tests):
    return grader.submit(key, f"<answer>\n```python\n{code}\n```\n</answer>", "stop", tests)


def grade(grader, code, tests):
    submit(grader, "", code, tests)
    return grader.results()[""]


@pytest.fixture
def room(monkeypatch):
    """A folder that any user may change. Jails run its copy of jail.py and have their folders here.

    At the end none of them may be left.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        jails = Path(name, "jails")
        jails.mkdir()
        monkeypatch.setattr(task, "JAIL", shutil.copy(task.JAIL, name))
        monkeypatch.setattr(tempfile, "tempdir", str(jails))
        yield Path(name)
        assert list(jails.glob("*")) == []
        wait_until(lambda: processes(name) == [], seconds=10)


def processes(room, limit=""):
    """The folders in /proc of the jails of that room; of those that have this limit."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        # A process may have just ended.
        with contextlib.suppress(OSError):
            is_jail = f"{room}/jail.py" in (path / "cmdline").read_text()
            if is_jail and re.search(limit, (path / "limits").read_text()):
                found.append(path)
    return found


# ---- what is paid --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "output, expected, is_right",
    [
        ("3.0", "3", True),
        ("0010", "10", False),
        ("1000000008.0", "1000000007", False),
        ("9007199254740993.0", "9007199254740992", False),
        ("-1.0000000001", "-1", False),
        ("0.33333333", "0.3333333", True),
        ("0.333333", "0.333334", False),
        ("1e-17", "0.0", True),
        ("1e-17", "0", False),
        ("1e-8", "0.0", False),
        ("9" * 5000 + ".0", "9" * 5000, False),
        ("sNaN", "1", False),
        ("1  2 \n3\n\n", "1 2\n3", True),
        ("1\n2 3", "1 2\n3", False),
        ("1 2 3", "1 2", False),
    ],
)
def test_words_of_programs_are_compared(output, expected, is_right):
    """1000000008.0 once passed for 1000000007, and 1e-17 did not for 0.0."""
    assert task.same_lines(output, expected) is is_right


ADDS = label(*PAIRS)
ADDS_ONCE = label(PAIRS[0])
SILENT = label(["", ""])
DOUBLES = label(["f(2)", "4"], ["f([1])", "[1, 1]"], ["f('a')", "'aa'"], calls=True)
WRONG_ADDS = ["print(3)", "print(", "print(3)\nprint()\nprint(3)", f"{ADD}\nraise ValueError"]
WRONG_ADDS += ["", "\ud800", "\0", "x" * 10**6]

# (tests, right programs, wrong programs)
PROGRAMS = [
    (ADDS, [ADD, f"{ADD}\nraise SystemExit"], WRONG_ADDS),
    # Only the exit status is wrong.
    (ADDS_ONCE, [ADD], [f"{ADD}\nimport os, sys\nsys.stdout.flush()\nos.abort()"]),
    (SILENT, ["pass"], ["import os\nos._exit(1)"]),
    (
        label(["f(2)", "1.41421", 1e-3], calls=True),
        ["f = lambda x: x ** .5"],
        ["f = lambda x: 1.5", "f = lambda x: float('nan')"],
    ),
    (label(["f('aa')", "{'a': 2}"], calls=True), ["from collections import Counter as f"], []),
    # The judges of APPS and LiveCodeBench take a tuple for a list, but Python's == does not.
    (label(["f(2)", "[[2, 2], []]"], calls=True), [], ["f = lambda x: ((x, x), [])"]),
    (
        label(["f(2)", "[[2, 2], []]"], calls=True, is_json=True),
        ["f = lambda x: ((x, x), [])"],
        ["f = lambda x: {2}", "f = lambda x: '[[2, 2], []]'", "f = lambda x: ((2, 2),)"],
    ),
    (label(["f(1)", "2"], calls=True, is_json=True), ["f = {1: 2}.get"], ["f = lambda x: ..."]),
]
# They end early, write replies of their own, have a value that equals all or whose literal never
# ends, patch the checker or the frames above, or look for what is expected.
CHEATS = [
    "raise SystemExit(0)",
    "import os\nprint('True')\nprint('passed')\nos._exit(0)",
    "import os\nreplies = '''(0, False, '4')\n(0, False, '[1, 1]')\n(0, False, \"'aa'\")\n'''\n"
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
    "import gc\nfound = [o for o in gc.get_objects() if type(o) is dict and 'expected' in o]\n"
    "f = lambda x: found[0]",
]
DOUBLE = "print('a')\ndef f(x):\n    print('b')\n    return x * 2"


def test_right_programs_are_paid_and_wrong_ones_and_cheats_are_not(room):
    expected = {}
    with task.Grader(workers=4, memory_mb=256) as grader:
        for tests, right, wrong in [*PROGRAMS, (DOUBLES, [DOUBLE], CHEATS)]:
            for code in [*right, *wrong]:
                submit(grader, (tests, code), code, tests)
                expected[tests, code] = code in right
        assert grader.results() == expected


def test_partial_share_and_last_block(room):
    with task.Grader(partial=True) as grader:
        assert grade(grader, "print(3)", ADDS) == 0.5
        assert grade(grader, "f = lambda x: 4", DOUBLES) == pytest.approx(1 / 3)
        assert submit(grader, "last", f"print(3)\n```\nbetter:\n```\n{ADD}", ADDS) == f"{ADD}\n"
        block = f"```\n{ADD}\n```"
        grader.submit("outside", f"{block}<answer>none</answer>", "stop", ADDS)
        grader.submit("cut off", f"<answer>{block}</answer>", "length", ADDS)
        assert grader.results() == {"last": 1, "outside": 0, "cut off": 0}


# ---- what is contained ---------------------------------------------------------------------------

# What a program tries, by the name that docs/rewards.md gives it. It raises where it is contained.
OF_PAGE = {
    "read a file that everyone may read": "open(f'{FOLDER}/public').read()",
    "read a file of the trainer's user": "open(f'{ROOM}/private').read()",
    "write a file that everyone may write": "open(f'{FOLDER}/public', 'a').write('x')",
    "ask for the size of a file": "os.stat(f'{FOLDER}/public')",
    "read the trainer's environment in `/proc`": "open(f'/proc/{TRAINER}/environ').read()",
    "open a network socket": "socket.socket()",
    "send to a UNIX socket that has a file": "pair(2).sendto(b'x', f'{ROOM}/letters')",
    "send to a UNIX socket that has a name": "pair(2).sendto(b'x', f'\\0{ROOM}/letters')",
    "kill another process": "os.kill(VICTIM, 9)",
    "let the kernel kill it, by `fcntl`": "fcntl.fcntl(0, fcntl.F_SETOWN, VICTIM)",
    "start a second process": "if not os.fork(): os._exit(0)",
    "take more memory than its limit": "x = bytearray(300 << 20)",
    "write a file of more than 8 MB": "open('x', 'wb').write(bytes(9 << 20))",
    "write more than 64 MB of files": "for i in range(80): open(str(i), 'wb').write(b' ' * 2**20)",
}
IN_EACH_MODE = {
    "kill the jail": "os.kill(os.getppid(), 9)",
    "kill by a descriptor": "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
    "let the kernel kill it, by `ioctl`": "fcntl.ioctl(pair(1), 0x8902, struct.pack('i', VICTIM))",
    "trace the jail": "call('ptrace', 16, os.getppid(), 0, 0)",
    "change the jail's memory": "open(f'/proc/{os.getppid()}/mem', 'r+b')",
    "find the trainer's environment": "if 'SECRET' not in os.environ: raise PermissionError",
    "slow down the jail": "os.setpriority(0, os.getppid(), 19)",
    "bind the jail to a CPU": "os.sched_setaffinity(os.getppid(), [0])",
    "limit the jail": "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (4, 4))",
    "outlive the jail": "call('prctl', 1, 0)",
    "leave the group": "os.setsid()",
    "start a process by a raw call": "if not call('syscall', CLONE, 17, 0, 0, 0, 0): os._exit(0)",
    "start another program": "os.posix_spawn('/bin/true', ['true'], {})",
    "become root": "os.setuid(0)",
    "enter a namespace": "call('unshare', 0x10000000)",
    "start a process in a namespace": "call('syscall', CLONE, 0x10000011, 0, 0, 0, 0)",
    "mount": "call('mount', b'x', b'.', b'tmpfs', 0, None)",
    "change the root": "os.chroot('.')",
    "open io_uring": "call('syscall', 425, 8, ctypes.create_string_buffer(256))",
    "hide memory in a file": "os.memfd_create('x')",
    "share memory": "call('shmget', 0, 1 << 20, 0o1600)",
    "open many files": "files = [open('x', 'wb') for i in range(99)]",
    "start many threads": "for i in range(40): start_thread(time.sleep, 1)",
    "change a mode": "os.chmod(f'{FOLDER}/public', 0)",
    "change a time": "os.utime(f'{FOLDER}/public')",
    "cut a file": "os.truncate(f'{FOLDER}/public', 0)",
}
BY_LANDLOCK = {
    "read a file of the system": "open('/etc/passwd').read()",
    "list a folder": "os.listdir(FOLDER)",
    "read by a link": "os.symlink(f'{FOLDER}/public', 'a')\nopen('a').read()",
    "read by a hard link": "os.link(f'{FOLDER}/public', 'a')\nopen('a').read()",
    "read below an open folder": "root = os.open('/', os.O_PATH)\n"
    "os.open(f'{FOLDER[1:]}/public', os.O_RDONLY, dir_fd=root)",
    "read by /proc/self": "open(f'/proc/self/root{FOLDER}/public').read()",
    "overwrite a file": "open(f'{FOLDER}/public', 'w')",
    "remove a file": "os.remove(f'{FOLDER}/public')",
    "remove a folder": "os.rmdir(f'{FOLDER}/empty')",
    "make a folder": "os.mkdir(f'{FOLDER}/new')",
    "make a file in memory": "open(f'/dev/shm/{TRAINER}', 'w')\nos.remove(f'/dev/shm/{TRAINER}')",
    "take a file away": "os.rename(f'{FOLDER}/public', 'a')",
}
BY_LANDLOCK_OR_USER = {
    "change the trainer's memory": "open(f'/proc/{TRAINER}/mem', 'r+b')",
    "read by the trainer's root": "open(f'/proc/{TRAINER}/root{FOLDER}/public').read()",
}
BY_USER = {
    "have its user": "if os.getuid() != USER and os.getgid() and not os.getgroups(): raise OSError"
}
# The last three are removed later: locked folders once stayed where the trainer was not root.
ALLOWED = {
    "write and read": "open('a', 'w').write('x')\nif open('a').read() != 'x': raise ValueError",
    "import": "import asyncio, decimal, heapq\nasyncio.run(asyncio.sleep(0))",
    "leave a link": "os.symlink(FOLDER, 'a')",
    "leave locked folders": "os.mkdir('a', 0o300)\nos.mkdir('a/b', 0o300)\nopen('a/b/c', 'w')",
    "leave deep folders": "for i in range(1200):\n    os.mkdir('a')\n    os.chdir('a')",
}
CELLS = [
    (IN_EACH_MODE, ["yes", "yes", "yes"]),
    (BY_LANDLOCK, ["yes", "yes", "no"]),
    (BY_LANDLOCK_OR_USER, ["yes", "yes", "as root"]),
    (BY_USER, ["as root", "as root", "as root"]),
    (ALLOWED, ["no", "no", "no"]),
    ({"use a thread": "start_thread(time.sleep, 0)"}, ["no", "", ""]),
]
# The output says whether the attack was refused. After an error of another kind, or where the jail
# died, it says nothing, which is always wrong.
PROGRAM = """import ctypes, fcntl, os, resource, signal, socket, struct, threading, time
CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
def call(name, *arguments):
    result = ctypes.CDLL(None)[name](*arguments)
    if result < 0:
        raise OSError
    return result
def pair(kind):
    return socket.socketpair(socket.AF_UNIX, kind)[0]
def start_thread(*work):
    threading.stack_size(1 << 16)
    threading.Thread(target=work[0], args=work[1:], daemon=True).start()
try:
%s
except (OSError, MemoryError, RuntimeError):
    print("refused")
else:
    print("done")"""

TRAINER = """
import json, os, subprocess, sys, tempfile, types
# The other user may have no torch, which all of lib/common.py would import.
sys.modules["lib.common"] = types.SimpleNamespace(UserError=RuntimeError)
from tasks import code as task
room = sys.argv[1]
mode, programs = json.load(open(f"{room}/job"))
task.MODES = [mode]
task.JAIL = f"{room}/jail.py"
tempfile.tempdir = f"{room}/jails"
os.environ["SECRET"] = "of the trainer"
os.close(os.open(f"{room}/private", os.O_CREAT, 0o600))
victim = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
values = f"ROOM, TRAINER, VICTIM, USER = {room!r}, {os.getpid()}, {victim.pid}, {os.getuid()}"
with task.Grader(workers=4, memory_mb=256) as grader:
    for name, (folder, program, label) in programs.items():
        text = f"<answer>```\\nFOLDER = {folder!r}\\n{values}\\n{program}\\n```</answer>"
        grader.submit(name, text, "stop", label)
    assert grader.pending(300) == 0
    rewards = grader.results()
    output, _ = victim.communicate(b"alive")
    print(json.dumps([rewards, output.decode(), os.listdir(tempfile.tempdir)]), flush=True)
    grader.submit("", "<answer>```\\nimport time\\ntime.sleep(99)\\n```</answer>", "stop", label)
    grader.results()
"""


def as_user(user, room):
    """The start of a command of that user in the repository.

    Python may lie where only root can go, so it is mounted elsewhere for others.
    """
    if user == "mine":
        return [sys.executable]
    mount = 'mount --bind "$0" "$2/python" && mount --bind "$1" "$2/house" && cd "$2/house"'
    change = "exec setpriv --reuid=65534 --regid=65534 --clear-groups"
    script = f'mkdir "$2/python" "$2/house" && {mount} && {change} "$2/python/$3" "${{@:4}}"'
    program = os.path.relpath(os.path.realpath(sys.executable), sys.base_prefix)
    return ["unshare", "-m", "bash", "-c", script, sys.base_prefix, ROOT, room, program]


@pytest.fixture
def servers(room):
    """Everyone may send to these servers, and nobody may have sent."""
    with contextlib.ExitStack() as stack:
        made = []
        for name in (f"{room}/letters", f"\0{room}/letters"):
            made.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)))
            made[-1].bind(name)
        yield
        for server in made:
            with pytest.raises(BlockingIOError):
                server.recv(9, socket.MSG_DONTWAIT)


@pytest.mark.parametrize("user", ["mine", pytest.param("another", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", task.MODES)
def test_the_page_says_what_is_contained(mode, user, room, servers):
    """Tried with real files, servers and a process to kill, in each mode, as root or another user.

    Then the trainer dies, and its program with it.
    """
    if user == "another" and os.getuid():
        pytest.skip("only root can be another user")
    is_root = user == "mine" and os.getuid() == 0
    word_of = {"yes": "refused", "no": "done", "as root": "refused" if is_root else "done"}
    page = (ROOT / "docs/rewards.md").read_text()
    lines = page[page.index(f"| {' | '.join(task.MODES)} |") :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    cells_of = {name: cells for name, *cells in rows}
    code_of = dict(OF_PAGE)
    assert cells_of.keys() == code_of.keys()
    for attacks, cells in CELLS:
        code_of |= attacks
        cells_of |= dict.fromkeys(attacks, cells)
    expected = {}
    programs = {}
    for name, code in code_of.items():
        cell = cells_of[name][task.MODES.index(mode)]
        if cell:
            folder = room / str(len(programs))
            (folder / "empty").mkdir(parents=True)
            (folder / "public").write_text("public")
            expected[name] = word_of[cell]
            program = PROGRAM % textwrap.indent(code, "    ")
            programs[name] = (str(folder), program, label(["", expected[name]]))
    (room / "job").write_text(json.dumps([mode, programs]))
    for path in [room, *room.rglob("*")]:
        path.chmod(0o777)

    command = [*as_user(user, room), "-c", TRAINER, room]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as trainer:
        report = trainer.stdout.readline()
        if report:
            # A program has this limit, but not the jail around it.
            wait_until(lambda: processes(room, limit="open files +64 "), trainer)
            (program,) = processes(room, limit="open files +64 ")
            namespaces = [program / "ns" / kind for kind in ("net", "pid", "mnt", "ipc", "uts")]
            if "namespaces" in mode and os.getuid() == 0:
                for path in namespaces:
                    assert path.readlink() != Path("/proc/self/ns", path.name).readlink()
        trainer.kill()
        errors = trainer.stderr.read()
    if "namespaces" in mode and "nothing contains programs here" in errors:
        pytest.skip("this machine lacks namespaces or Landlock")
    if "unshare failed" in errors:
        pytest.skip("this machine lets no other user reach Python")
    assert errors.count("\n") == (mode == "plain"), errors
    rewards, output, left = json.loads(report)
    assert [name for name in programs if rewards[name] != 1] == []
    assert (output, left) == ("alive", [])
    for name, (folder, _, _) in programs.items():
        if expected[name] == "refused" or name in ALLOWED:
            names = sorted(path.name for path in Path(folder).iterdir())
            assert (names, Path(folder, "public").read_text()) == (["empty", "public"], "public")
    # The trainer could no longer remove the folder of the last program.
    shutil.rmtree(room / "jails")


# (how its verdict was lost, code)
BOMBS = [
    (None, "import os\nwhile True: os.fork()"),
    (
        None,
        "import os, time\nfor i in range(8):\n    if not os.fork(): os.setsid() or time.sleep(600)",
    ),
    (None, "x = []\nwhile True: x.append(bytearray(1 << 24))"),
    (None, "x = 'a' * (1 << 40)"),
    (None, "while True: print('3' * 10000)"),
    # A call of another architecture.
    (None, "import ctypes\nctypes.CDLL(None).syscall(0x40000000 | 39)\nwhile True: pass"),
    ("cpu_timeouts", "while True: pass"),
    ("cpu_timeouts", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"),
    ("cpu_timeouts", "import os\nwhile True: os.write(2, b'3' * 10000)"),
    (
        "crashes",
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
    ),
    # A timer of its own sends it SIGKILL, like the kernel where memory runs out. That once counted
    # as the limit of CPU time.
    (
        "crashes",
        "import ctypes, signal\nlibc = ctypes.CDLL(None)\ntimer = ctypes.c_void_p()\n"
        "libc.timer_create(1, (ctypes.c_int * 16)(0, 0, 9), ctypes.byref(timer))\n"
        "libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, 0, 1), None)\n"
        "while True: signal.pause()",
    ),
]
RECURSION = "def f(): f()\nimport sys\nsys.setrecursionlimit(10 ** 9)\nf()"
DISK_BOMB = "i = 0\nwhile True:\n    open(str(i), 'wb').write(bytes(1 << 22))\n    i += 1"
IN_WEAKER = [pytest.param(mode, marks=pytest.mark.slow) for mode in task.MODES[1:]]


@pytest.mark.parametrize("mode", [task.MODES[0], *IN_WEAKER])
def test_bombs_get_nothing_and_end_and_are_counted(room, mode, monkeypatch):
    monkeypatch.setattr(task, "MODES", [mode])
    expected = {code: (0, loss) for loss, code in BOMBS}
    if "namespaces" in mode:
        expected[DISK_BOMB] = (0, None)
    try:
        grader = task.Grader(workers=4, cpu_seconds=1, memory_mb=256)
    except UserError:
        pytest.skip(f"this machine lacks {mode}")
    with grader:
        for code in expected:
            submit(grader, code, code, ADDS)
        assert {code: check.result() for code, check in grader.checks.items()} == expected
        grader.results()
        # The limit comes only now, after the Grader has found out in peace what the machine can do.
        grader.wall_seconds = 1
        assert grade(grader, SLEEP, ADDS) == 0
        counts = {"checks": len(expected) + 1, "cpu_timeouts": 3, "wall_timeouts": 1, "crashes": 2}
        assert (grader.counts, grader.lost) == (counts, 6)
        # The machine decides which limit ends this one.
        assert grade(grader, RECURSION, ADDS) == 0


@pytest.mark.slow
def test_waiting_has_a_limit_for_each_test_and_for_all(room):
    """The wall time of all tests together once was one sum: 30 minutes for 150 tests."""
    started = time.monotonic()
    with task.Grader(partial=True) as hasty, task.Grader(2, cpu_seconds=1, partial=True) as patient:
        hasty.wall_seconds = 1
        patient.wall_seconds = 6
        submit(hasty, "many", f"import time\ntime.sleep(0.4)\n{ADD}", label(*PAIRS[:1] * 50))
        # Waiting is no CPU time, and each test may wait.
        submit(patient, "few", f"import time\ntime.sleep(1.2)\n{ADD}", label(*PAIRS[:1] * 6))
        # No test follows one that ran out of time, and it alone holds its worker.
        tests = label(*PAIRS, *PAIRS[:1] * 38)
        submit(patient, "one", f"import time\n{ADD}\nif a > 1: time.sleep(99)", tests)
        assert patient.results() == {"few": 1, "one": 1 / 40}
        assert time.monotonic() - started < 50
        assert 0 < hasty.results()["many"] < 1
        assert hasty.counts["wall_timeouts"] == patient.counts["wall_timeouts"] == 1


# ---- the processes of a grader -------------------------------------------------------------------


def test_output_is_read_no_further_than_its_verdict_needs(room):
    """It all was kept, and ten tests of a hostile program took 2 GB of the trainer's memory."""
    flood = "import os\nos.write(1, b'\\xff' * (7 << 20))"
    with task.Grader(partial=True) as grader:
        tracemalloc.start()
        assert grade(grader, flood, label(*PAIRS * 10)) == 0
        # Before an answer a program may say anything.
        assert grade(grader, f"{flood}\nf = lambda x: x * 2", DOUBLES) == 1
        assert grade(grader, f"print('3' + ' ' * (1 << 20))\n{flood}", ADDS_ONCE) == 0
        assert grade(grader, flood, SILENT) == 0
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
        tracemalloc.stop()
        assert grade(grader, "print('7' * 300000)", label(["", "7" * 300000])) == 1


def test_a_program_on_its_way_when_the_grader_closes_is_ended(room):
    """A job that was taken but not yet started held up the end of a run for minutes."""
    with task.Grader() as grader:
        # `close` sets this before it looks for processes.
        grader.closed = True
        assert grader.check(SLEEP, ADDS, grader.mode) == (0.0, "crashes")


def test_a_process_that_cannot_be_started_is_told_and_ends_no_run(room, monkeypatch):
    """It was an OSError out of `results`, which ended the run without a save."""
    with task.Grader() as grader:
        assert grader.broken is None
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(room / "deleted"))
            assert grade(grader, ADD, ADDS) == 0
            with pytest.raises(UserError, match="deleted"):
                task.Grader()
        assert "deleted" in grader.broken
        assert grader.lost == grader.counts["crashes"] == 1
        assert grade(grader, ADD, ADDS) == 1


def test_a_jail_that_goes_wrong_leaves_no_process_and_is_a_crash(room):
    """A jail that was killed after a good reply was counted as nothing."""
    start = "import os, sys, time\nsys.stdin.buffer.read()\n"
    start += "if not os.fork():\n    os.close(1)\n    time.sleep(60)\nprint((0, False, '3'))\n"
    with task.Grader(partial=True) as grader:
        (room / "jail.py").write_text(f"{start}print((0, False, '9'), flush=True)")
        assert grade(grader, ADD, ADDS) == 1
        start += "print(end='(0, ', flush=True)\n"
        (room / "jail.py").write_text(f"{start}os.kill(os.getpid(), 9)")
        assert grade(grader, ADD, ADDS) == 0.5
        assert grader.counts["crashes"] == 1


# ---- the filter of system calls ------------------------------------------------------------------

REFUSED = """
fork vfork prctl socket io_uring_setup kill rt_sigqueueinfo tkill tgkill rt_tgsigqueueinfo
pidfd_send_signal pidfd_open setsid setpgid setpriority sched_setparam sched_setscheduler
sched_setaffinity ioprio_set sched_setattr chmod fchmod fchmodat fchmodat2 chown fchown lchown
fchownat utime utimes utimensat futimesat setxattr lsetxattr fsetxattr removexattr lremovexattr
fremovexattr setxattrat removexattrat file_setattr truncate ptrace process_vm_readv
process_vm_writev shmget semget msgget mq_open memfd_create unshare setns add_key request_key keyctl
perf_event_open bpf userfaultfd
"""
HEADERS = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}


def verdict(machine, number, first=0, second=0, architecture=None):
    """What the filter returns for a system call, by following its instructions."""
    words = {jail.CALL_NUMBER: number, jail.FIRST_ARGUMENT: first, jail.SECOND_ARGUMENT: second}
    words[jail.ARCHITECTURE] = jail.ARCHITECTURES[architecture or machine]
    instructions = iter(jail.call_filter(machine))
    loaded = None
    while True:
        operation, if_true, if_false, value = struct.unpack("=HBBI", next(instructions))
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
        for _ in range(if_true if passes[operation] else if_false):
            next(instructions)


@pytest.mark.parametrize("machine", HEADERS)
def test_verdicts_of_the_filter(machine):
    """This includes the architecture that the test does not run on."""
    column = list(jail.ARCHITECTURES).index(machine)
    partly = {name: numbers[column] for name, numbers in jail.PARTLY_REFUSED.items()}
    refused = {name: numbers[column] for name, numbers in jail.REFUSED.items()}
    no_permission = jail.FAIL_WITH | errno.EPERM
    decide = functools.partial(verdict, machine)

    (other,) = HEADERS.keys() - {machine}
    assert decide(0, architecture=other) == jail.KILL_PROCESS
    assert decide(jail.X32_CALLS | 39) == jail.KILL_PROCESS
    assert set(REFUSED.split()) <= refused.keys()
    for number in set(range(500)) - {*partly.values()}:
        is_refused = number in refused.values()
        assert decide(number) == (no_permission if is_refused else jail.ALLOW), number
    assert decide(partly["clone3"]) == jail.FAIL_WITH | errno.ENOSYS
    assert decide(partly["clone"], jail.CLONE_THREAD) == jail.ALLOW
    assert decide(partly["clone"], signal.SIGCHLD) == no_permission
    # Each of these flags asks for a new namespace of one kind.
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert decide(partly["clone"], 1 << bit | jail.CLONE_THREAD) == no_permission
    assert decide(partly["prlimit64"], 0) == jail.ALLOW
    assert decide(partly["prlimit64"], 1) == no_permission
    # These numbers are in the kernel's headers, for both architectures.
    commands = {n for n in range(1100) if decide(partly["fcntl"], 3, n) != jail.ALLOW}
    assert commands == {8, 10, 15}
    of_files = [*range(0x5400, 0x5500), *range(0x8900, 0x8A00)]
    requests = {n for n in of_files if decide(partly["ioctl"], 3, n) != jail.ALLOW}
    assert requests == {0x8901, 0x8902}
    for flags in (0, 0x800, 0x80000, 0x80800):
        for family in (1, 2, 30):
            for kind in range(1, 11):
                is_fine = family == kind == 1
                decided = decide(partly["socketpair"], family, kind | flags)
                assert decided == (jail.ALLOW if is_fine else no_permission)

    # The kernel's headers, where the machine has them, give the same numbers.
    header = Path("/usr/include", HEADERS[machine])
    if header.exists():
        known = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", header.read_text()))
        ours = {name: number for name, number in (partly | refused).items() if name in known}
        assert len(ours) > 40
        assert ours == {name: int(known[name]) for name in ours}


# ---- tasks/code_data.py --------------------------------------------------------------------------


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


ASSERTS = ["assert f(2) == 4", "assert f(1)", "assert not f(0)", "assert abs(f(1) - 2.5) < 1"]
ASSERTS += ["assert math.isclose(f(1), 2.5, rel_tol=0.5)"]
OF_ASSERTS = [["f(2)", "4"], ["not f(1)", "False"], ["not f(0)", "True"]]
OF_ASSERTS += [["f(1)", "2.5", 1], ["f(1)", "2.5", 1.25]]
CHECK = "def check(candidate):\n    assert candidate(3) == 1.5\n"
APPS = {"inputs": [["1 2", ""], "4 5\n"], "outputs": [["3\n"], "9\n"]}
APPS_CALL = {"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]}
CLASS = "class Solution:\n    def f(self, a, b):"
CASES = [[{"input": text, "output": output}] for text, output in PAIRS]
CASE_OF_CALL = {"input": "1\n[2]", "output": "3"}

# (item, a right program, label) of MBPP, HumanEval, APPS, LiveCodeBench and of columns. In merged
# sets they have empty columns of other sets.
FORMS = [
    ({"text": "?", "test_list": ASSERTS}, "f = lambda x: 2 * x", label(*OF_ASSERTS, calls=True)),
    (
        {"prompt": "half = 1.5\n", "entry_point": "f", "test": CHECK},
        "f = lambda x: x * half / 3",
        label(["f(3)", "1.5"], calls=True, setup="half = 1.5\n"),
    ),
    ({"question": "?", "input_output": APPS}, ADD, ADDS),
    (
        {"question": "?", "input_output": json.dumps(APPS_CALL), "starter_code": CLASS},
        f"{CLASS} return a + b",
        label(["Solution().f(*[1, 2])", "3"], calls=True, is_json=True),
    ),
    (
        {"question_content": "?", "input_output": "", "public_test_cases": json.dumps(CASES[0])}
        | {"private_test_cases": packed(json.dumps(CASES[1]))},
        ADD,
        ADDS,
    ),
    (
        {"question_content": "?", "metadata": json.dumps({"func_name": "f"})}
        | {"public_test_cases": [CASE_OF_CALL], "private_test_cases": ""},
        "def f(a, b): return a + b[0]",
        label(["f(*[1, [2]])", "3"], calls=True, is_json=True),
    ),
    ({"question": "?", "tests": PAIRS, "input_output": None}, ADD, ADDS),
]


def test_forms(room):
    lines = [json.dumps(item) for item, _, _ in FORMS]
    (room / "data.jsonl").write_text("\n".join(lines))
    problems = task.load_problems(str(room / "data.jsonl"), "orz", bos="<s>")
    assert [problem.label for problem in problems] == [found for _, _, found in FORMS]
    with task.Grader(workers=4) as grader:
        for problem, (_, program, _) in zip(problems, FORMS):
            assert problem.prompt.startswith("<s>") and problem.question in problem.prompt
            submit(grader, problem.index, program, problem.label)
        assert grader.results() == dict.fromkeys(range(len(FORMS)), 1)


BAD = [{"question": None}, {"question": " "}, {"question": "\ud800"}, {"tests": None}]
BAD += [{"tests": []}, {"tests": [[1, 2]]}, {"input_output": '{"inputs": '}]
BAD += [{"public_test_cases": "[]", "private_test_cases": packed(os.system)}]


@pytest.mark.parametrize("change", BAD)
def test_bad_items_are_named(tmp_path, change):
    good = {"question": "Add.", "tests": PAIRS}
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(good | change)}")
    with pytest.raises(UserError, match="data.jsonl: item 2"):
        task.load_problems(str(tmp_path / "data.jsonl"), "plain")
    with pytest.raises(UserError, match="{question}"):
        task.load_problems(str(tmp_path / "data.jsonl"), "no room")


def test_unusable_asserts_are_counted_aloud(tmp_path, capsys):
    unusable = ["assert all(f(i) == i for i in range(3))", "for y in (1, 2): assert f(y) == 3"]
    unusable += ["assert isinstance(f(1), int) and f(2) == 2", "assert f(1) in (1, 2)"]
    items = [
        {"text": "a", "test_list": ["assert f(1) == 1", "assert f(2) == g(2)", "assert x == 1"]},
        # Some items of APPS look like this.
        {"question": "d", "input_output": ""},
        {"text": "b", "test_list": unusable},
        {"text": "c", "test_list": ["assert f(1) == 1"]},
    ]
    (tmp_path / "data.json").write_text(json.dumps(items))
    problems = task.load_problems(str(tmp_path / "data.json"), "plain")
    assert [(problem.index, problem.question[0]) for problem in problems] == [(0, "a"), (1, "c")]
    assert json.loads(problems[0].label)["tests"] == [["f(1)", "1", 0]]
    (line,) = capsys.readouterr().err.splitlines()
    assert re.findall(r" (\d+) ", line) == ["7", "2", "4"]
    (tmp_path / "data.json").write_text(json.dumps(items[1:3]))
    with pytest.raises(UserError, match="no problem"):
        task.load_problems(str(tmp_path / "data.json"), "plain")
