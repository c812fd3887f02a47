"""The task "code": what it pays, what its jail contains, its processes, filter and problems."""

import base64
import contextlib
import errno
import functools
import itertools
import json
import operator
import os
import pickle
import re
import runpy
import shutil
import signal
import struct
import sys
import tempfile
import textwrap
import tracemalloc
import zlib
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from conftest import ROOT, wait_until

from nanoorz.ranks import UserError
from tasks import code as task
from tasks import jail

PAIRS = [["1 2\n", "3\n"], ["4 5\n", "9\n"]]
ADD = "a, b = map(int, input().split())\nprint(a + b)"
SLEEP = "import time\ntime.sleep(99)"


def label(*tests, calls=False, is_json=False, setup=""):
    tests = [[*test, 0][:3] for test in tests]
    return json.dumps({"setup": setup, "calls": calls, "json": is_json, "tests": tests})


of_calls = functools.partial(label, calls=True)
of_json_calls = functools.partial(label, calls=True, is_json=True)


def submit(grader, key, code, tests):
    return grader.submit(key, f"<answer>\n```python\n{code}\n```\n</answer>", "stop", tests)


def grade(grader, code, tests):
    submit(grader, "", code, tests)
    return grader.results()[""]


@pytest.fixture
def room(monkeypatch):
    """A folder for any user, where jails run a copy of jail.py. At the end no jail may be left."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        jails = Path(name, "jails")
        jails.mkdir()
        monkeypatch.setattr(task, "JAIL", shutil.copy(task.JAIL, name))
        monkeypatch.setattr(tempfile, "tempdir", str(jails))
        yield Path(name)
        assert list(jails.glob("*")) == []
        wait_until(lambda: processes(name) == [], seconds=60)


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


ADDS = label(*PAIRS)
ADDS_ONCE = label(PAIRS[0])
SILENT = label(["", ""])
DOUBLES = of_calls(["f(2)", "4"], ["f([1])", "[1, 1]"], ["f('a')", "'aa'"])
ROOTS = of_calls(["f(2)", "1.41421", 1e-3])
IN_JSON = of_json_calls(["f(2)", "[[2, 2], []]"])
WRONG_ADDS = ["print(3)", "print(", "print(3)\nprint()\nprint(3)", f"{ADD}\nraise ValueError"]
WRONG_ADDS += ["", "\ud800", "\0", "x" * 10**6]

# (tests, right programs, wrong programs)
PROGRAMS = [
    (ADDS, [ADD, f"{ADD}\nraise SystemExit"], WRONG_ADDS),
    # Only the exit status is wrong.
    (ADDS_ONCE, [ADD], [f"{ADD}\nimport os, sys\nsys.stdout.flush()\nos.abort()"]),
    (SILENT, ["pass"], ["import os\nos._exit(1)"]),
    (ROOTS, ["f = lambda x: x ** .5"], ["f = lambda x: 1.5", "f = lambda x: float('nan')"]),
    (of_calls(["f('aa')", "{'a': 2}"]), ["from collections import Counter as f"], []),
    # The judges of APPS and LiveCodeBench take a tuple for a list, but Python's == does not.
    (of_calls(["f(2)", "[[2, 2], []]"]), [], ["f = lambda x: ((x, x), [])"]),
    (IN_JSON, ["f = lambda x: ((x, x), [])"], ["f = lambda x: {2}", "f = lambda x: ((2, 2),)"]),
    (IN_JSON, [], ["f = lambda x: '[[2, 2], []]'"]),
    (of_json_calls(["f(1)", "2"]), ["f = {1: 2}.get"], ["f = lambda x: ..."]),
]
# They end early, write their own replies, return a value that equals every value or whose literal
# never ends, patch the checker or the frames above, or look for the expected value.
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


def test_partial_pays_a_share_and_the_last_block_counts(room):
    with task.Grader(partial=True) as grader:
        assert grade(grader, "print(3)", ADDS) == 0.5
        assert grade(grader, "f = lambda x: 4", DOUBLES) == pytest.approx(1 / 3)
        assert submit(grader, "last", f"print(3)\n```\nbetter:\n```\n{ADD}", ADDS) == f"{ADD}\n"
        block = f"```\n{ADD}\n```"
        grader.submit("outside", f"{block}<answer>none</answer>", "stop", ADDS)
        grader.submit("cut off", f"<answer>{block}</answer>", "length", ADDS)
        assert grader.results() == {"last": 1, "outside": 0, "cut off": 0}


# What a program tries, by the name that docs/rewards.md gives it. It raises where it is contained.
OF_PAGE = {
    "read a file that everyone may read": "open(f'{FOLDER}/public').read()",
    "read a file of the trainer's user": "open(f'{ROOM}/private').read()",
    "write a file that everyone may write": "open(f'{FOLDER}/public', 'a').write('x')",
    "ask for the size of a file": "os.stat(f'{FOLDER}/public')",
    "read the trainer's environment in `/proc`": "open(f'/proc/{TRAINER}/environ').read()",
    "open a network socket": "socket.socket()",
    "send to a UNIX socket that has a file": "datagrams().sendto(b'x', f'{ROOM}/letters')",
    "send to a UNIX socket that has a name": "datagrams().sendto(b'x', f'\\0{ROOM}/letters')",
    "kill another process": "os.kill(VICTIM, 9)",
    "let the kernel kill it, by `fcntl`": "fcntl.fcntl(0, fcntl.F_SETOWN, VICTIM)",
    "start a second process": "if not os.fork(): os._exit(0)",
    "take more memory than its limit": "x = bytearray(300 << 20)",
    "write a file of more than 8 MB": "open('x', 'wb').write(bytes(9 << 20))",
    "write more than 64 MB of files": "for i in range(80): open(str(i), 'wb').write(b' ' * 2**20)",
}
# test_the_filter_refuses_the_calls_of_its_table has the calls that seccomp refuses.
IN_EACH_MODE = {
    "change the jail's memory": "open(f'/proc/{os.getppid()}/mem', 'r+b')",
    "find the trainer's environment": "if 'SECRET' not in os.environ: raise PermissionError",
    "start another program": "os.posix_spawn('/bin/true', ['true'], {})",
    "become root": "os.setuid(0)",
    "mount": "mount(b'x', b'.', b'tmpfs', 0, None)",
    "change the root": "os.chroot('.')",
    "open many files": "files = [open('x', 'wb') for i in range(99)]",
    "start many threads": "for i in range(40): start_thread(time.sleep, 1)",
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
# The Grader removes the links and folders of the last three.
ALLOWED = {
    "write and read": "open('a', 'w').write('x')\nif open('a').read() != 'x': raise ValueError",
    "import": "import asyncio, decimal, heapq\nasyncio.run(asyncio.sleep(0))",
    "leave a link": "os.symlink(FOLDER, 'a')",
    "leave locked folders": "os.mkdir('a', 0o300)\nos.mkdir('a/b', 0o300)\nopen('a/b/c', 'w')",
    "leave deep folders": "for i in range(1200):\n    os.mkdir('a')\n    os.chdir('a')",
}
ATTACKS = OF_PAGE | IN_EACH_MODE | BY_LANDLOCK | BY_LANDLOCK_OR_USER | BY_USER | ALLOWED
ATTACKS["use a thread"] = "start_thread(time.sleep, 0)"
# Is it refused? There is a cell for each mode, as in the table of the page.
CELLS = dict.fromkeys(IN_EACH_MODE, ["yes", "yes", "yes"])
CELLS |= dict.fromkeys(BY_LANDLOCK, ["yes", "yes", "no"])
CELLS |= dict.fromkeys(BY_LANDLOCK_OR_USER, ["yes", "yes", "as root"])
CELLS |= dict.fromkeys(BY_USER, ["as root", "as root", "as root"])
CELLS |= dict.fromkeys(ALLOWED, ["no", "no", "no"]) | {"use a thread": ["no", "", ""]}
# After an error of another kind, or where the jail died, nothing is printed: always wrong.
PROGRAM = """import ctypes, fcntl, os, socket, threading, time
def mount(*arguments):
    if ctypes.CDLL(None).mount(*arguments) < 0:
        raise OSError
def datagrams():
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]
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
import json, os, select, socket, subprocess, sys, tempfile, types
# The other user may have no torch, which all of nanoorz/ranks.py would import.
sys.modules["nanoorz.ranks"] = types.SimpleNamespace(UserError=RuntimeError, one_line=str)
from tasks import code as task
room = sys.argv[1]
task.MODES, programs = json.load(open(f"{room}/job"))
task.JAIL = f"{room}/jail.py"
tempfile.tempdir = f"{room}/jails"
os.environ["SECRET"] = "of the trainer"
os.close(os.open(f"{room}/private", os.O_CREAT, 0o600))
# Everyone may send to these servers.
servers = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
servers[0].bind(f"{room}/letters")
servers[1].bind(f"\\0{room}/letters")
os.chmod(f"{room}/letters", 0o777)
victim = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
values = f"ROOM, TRAINER, VICTIM, USER = {room!r}, {os.getpid()}, {victim.pid}, {os.getuid()}"
with task.Grader(workers=4, memory_mb=256) as grader:
    for name, (folder, program, label) in programs.items():
        text = f"<answer>```\\nFOLDER = {folder!r}\\n{values}\\n{program}\\n```</answer>"
        grader.submit(name, text, "stop", label)
    assert grader.pending(300) == 0
    rewards = grader.results()
    output, _ = victim.communicate(b"alive")
    letters, _, _ = select.select(servers, [], [], 0)
    left = os.listdir(tempfile.tempdir)
    print(json.dumps([rewards, output.decode(), len(letters), left]), flush=True)
    grader.submit("", "<answer>```\\nimport time\\ntime.sleep(99)\\n```</answer>", "stop", label)
    grader.results()
"""


def as_user(user, room):
    """The start of that user's command. Mounts lead another user to Python, also below /root."""
    if user == "mine":
        return [sys.executable]
    mount = 'mount --bind "$0" "$2/python" && mount --bind "$1" "$2/house" && cd "$2/house"'
    change = "exec setpriv --reuid=65534 --regid=65534 --clear-groups"
    script = f'mkdir "$2/python" "$2/house" && {mount} && {change} "$2/python/$3" "${{@:4}}"'
    program = os.path.relpath(os.path.realpath(sys.executable), sys.base_prefix)
    return ["unshare", "-m", "bash", "-c", script, sys.base_prefix, ROOT, room, program]


@pytest.mark.parametrize("user", ["mine", pytest.param("another", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", task.MODES)
@pytest.mark.engine
def test_the_page_says_what_is_contained(mode, user, room):
    """The attacks have real targets. When the trainer is killed, its program ends too."""
    if user == "another" and os.getuid():
        pytest.skip("only root can be another user")
    is_root = user == "mine" and os.getuid() == 0
    word_of = {"yes": "refused", "no": "done", "as root": "refused" if is_root else "done"}
    page = (ROOT / "docs/rewards.md").read_text()
    lines = page[page.index(f"| {' | '.join(task.MODES)} |") :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    cells_of = {name: cells for name, *cells in rows}
    assert cells_of.keys() == OF_PAGE.keys()
    expected = {}
    programs = {}
    for name, cells in (cells_of | CELLS).items():
        cell = cells[task.MODES.index(mode)]
        if cell:
            folder = room / str(len(programs))
            (folder / "empty").mkdir(parents=True)
            (folder / "public").write_text("public")
            expected[name] = word_of[cell]
            program = PROGRAM % textwrap.indent(ATTACKS[name], "    ")
            programs[name] = (str(folder), program, label(["", expected[name]]))
    (room / "job").write_text(json.dumps([[mode], programs]))
    for path in [room, *room.rglob("*")]:
        path.chmod(0o777)

    command = [*as_user(user, room), "-c", TRAINER, room]
    with Popen(command, cwd=ROOT, text=True, stdout=PIPE, stderr=PIPE) as trainer:
        report = trainer.stdout.readline()
        if report:
            # A program has this limit, but not the jail around it.
            wait_until(lambda: processes(room, limit="open files +64 "), trainer)
            (program,) = processes(room, limit="open files +64 ")
            if "namespaces" in mode and os.getuid() == 0:
                for name in ("ns/net", "ns/pid", "ns/mnt", "ns/ipc", "ns/uts"):
                    assert (program / name).readlink() != Path("/proc/self", name).readlink()
        trainer.kill()
        errors = trainer.stderr.read()
    if "namespaces" in mode and "no mode of tasks/jail.py works" in errors:
        pytest.skip("this machine lacks namespaces or Landlock")
    if "unshare failed" in errors:
        pytest.skip("this machine lets no other user reach Python")
    assert errors.count("\n") == (mode == "plain"), errors
    rewards, *others = json.loads(report)
    assert [name for name in programs if rewards[name] != 1] == []
    assert others == ["alive", 0, []]
    for name, (folder, _, _) in programs.items():
        if expected[name] == "refused" or name in ALLOWED:
            names = sorted(path.name for path in Path(folder).iterdir())
            assert (names, Path(folder, "public").read_text()) == (["empty", "public"], "public")
    # The trainer could no longer remove the folder of the last program.
    shutil.rmtree(room / "jails")


# {how the verdict is lost, as the counts name it: programs}
BOMBS = {
    None: [
        "import os\nwhile True: os.fork()",
        "import os, time\nfor _ in range(8):\n    if not os.fork(): os.setsid() or time.sleep(600)",
        "x = []\nwhile True: x.append(bytearray(1 << 24))",
        "while True: print('3' * 10000)",
        # A call of another architecture.
        "import ctypes\nctypes.CDLL(None).syscall(0x40000000 | 39)\nwhile True: pass",
    ],
    "cpu_timeouts": [
        "while True: pass",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import os\nwhile True: os.write(2, b'3' * 10000)",
    ],
    "crashes": [
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        # Its own timer sends it SIGKILL, like the kernel when memory runs out. This is a crash.
        "import ctypes, signal\nlibc = ctypes.CDLL(None)\ntimer = ctypes.c_void_p()\n"
        "libc.timer_create(1, (ctypes.c_int * 16)(0, 0, 9), ctypes.byref(timer))\n"
        "libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, 0, 1), None)\n"
        "while True: signal.pause()",
    ],
}
RECURSION = "def f(): f()\nimport sys\nsys.setrecursionlimit(10 ** 9)\nf()"
DISK_BOMB = "i = 0\nwhile True:\n    open(str(i), 'wb').write(bytes(1 << 22))\n    i += 1"
IN_WEAKER = [pytest.param(mode, marks=pytest.mark.slow) for mode in task.MODES[1:]]


@pytest.mark.parametrize("mode", [task.MODES[0], *IN_WEAKER])
@pytest.mark.engine
def test_bombs_get_nothing_and_end_and_are_counted(room, mode, monkeypatch):
    monkeypatch.setattr(task, "MODES", [mode])
    expected = {code: (0, loss) for loss, codes in BOMBS.items() for code in codes}
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
        # With this limit the Grader could have found a wrong mode on a busy machine.
        grader.wall_seconds = 1
        assert grade(grader, SLEEP, ADDS) == 0
        counts = {"checks": len(expected) + 1, "cpu_timeouts": 3, "wall_timeouts": 1, "crashes": 2}
        assert (grader.counts, grader.lost) == (counts, 6)
        # The machine decides which limit ends this one.
        assert grade(grader, RECURSION, ADDS) == 0


def test_a_program_gets_no_id_of_a_user_or_group(monkeypatch):
    """Of root's programs each has an id of its own, which could be that of a user once."""

    def find_in(taken):
        return lambda number: taken.index(number) if number in taken else {}[number]

    monkeypatch.setattr(jail.pwd, "getpwuid", find_in(range(32768, 65530)))
    monkeypatch.setattr(jail.grp, "getgrgid", find_in([65530, 65531, 65533]))
    assert {jail.free_user(number) for number in (0, 1, 32765, 10**6)} == {65532}
    monkeypatch.setattr(jail.grp, "getgrgid", find_in(range(65530, 65534)))
    with pytest.raises(OSError, match="belongs to a user or a group"):
        jail.free_user(5)


@pytest.mark.slow
def test_waiting_has_a_limit_for_each_test_and_for_all(room):
    """Each test has `wall_seconds`, and all tests of a program have ten times as many."""
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
        assert 0 < hasty.results()["many"] < 1
        assert hasty.counts["wall_timeouts"] == patient.counts["wall_timeouts"] == 1


def test_output_is_read_no_further_than_its_verdict_needs(room):
    """Output that no verdict needs is dropped, so ten tests cannot fill the trainer's memory."""
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
    """Otherwise a job that is taken but not started holds up the end of a run for minutes."""
    with task.Grader() as grader:
        # `close` sets this before it looks for processes.
        grader.closed = True
        assert grader.check(SLEEP, ADDS, grader.mode) == (0.0, "crashes")


def test_a_process_that_cannot_be_started_is_an_error_of_results(room, monkeypatch):
    with task.Grader() as grader, monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(room / "deleted"))
        with pytest.raises(UserError, match="^no process can be started .*deleted"):
            grade(grader, ADD, ADDS)
        with pytest.raises(UserError, match="^no mode of tasks/jail.py works .*deleted"):
            task.Grader()


def test_a_jail_that_goes_wrong_leaves_no_process_and_is_a_crash(room):
    """A jail that is killed counts as a crash, also after a good reply."""
    start = "import os, sys, time\nsys.stdin.buffer.read()\n"
    start += "if not os.fork():\n    os.close(1)\n    time.sleep(60)\nprint((0, False, '3'))\n"
    with task.Grader(partial=True) as grader:
        (room / "jail.py").write_text(f"{start}print((0, False, '9'), flush=True)")
        assert grade(grader, ADD, ADDS) == 1
        start += "print(end='(0, ', flush=True)\nos.kill(os.getpid(), 9)"
        (room / "jail.py").write_text(start)
        assert grade(grader, ADD, ADDS) == 0.5
        assert grader.counts["crashes"] == 1


REFUSED = """
fork vfork prctl socket io_uring_setup kill rt_sigqueueinfo tkill tgkill rt_tgsigqueueinfo
pidfd_send_signal pidfd_open setsid setpgid setpriority sched_setparam sched_setscheduler
sched_setaffinity ioprio_set sched_setattr chmod fchmod fchmodat fchmodat2 chown fchown lchown
fchownat utime utimes utimensat futimesat setxattr lsetxattr fsetxattr removexattr lremovexattr
fremovexattr setxattrat removexattrat file_setattr truncate ptrace process_vm_readv
process_vm_writev shmget semget msgget mq_open memfd_create unshare setns add_key request_key keyctl
perf_event_open bpf userfaultfd
"""
PASSES = {jail.IF_EQUAL: operator.eq, jail.IF_AT_LEAST: operator.ge, jail.IF_ANY_BIT: operator.and_}
HEADERS = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}


def verdict(machine, number, first=0, second=0, architecture=None):
    """What the filter returns for a system call, by following its instructions."""
    words = {jail.CALL_NUMBER: number, jail.FIRST_ARGUMENT: first, jail.SECOND_ARGUMENT: second}
    words[jail.ARCHITECTURE] = jail.ARCHITECTURES[architecture or machine]
    skips = 0
    for instruction in jail.call_filter(machine):
        operation, if_true, if_false, value = struct.unpack("=HBBI", instruction)
        if skips:
            skips -= 1
        elif operation == jail.RETURN:
            return value
        elif operation == jail.LOAD:
            loaded = words[value]
        else:
            skips = if_true if PASSES[operation](loaded, value) else if_false


@pytest.mark.parametrize("machine", HEADERS)
def test_the_filter_refuses_the_calls_of_its_table(machine):
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
    flags = (0, 0x800, 0x80000, 0x80800)
    for family, kind, more in itertools.product((1, 2, 30), range(1, 11), flags):
        expected = jail.ALLOW if family == kind == 1 else no_permission
        assert decide(partly["socketpair"], family, kind | more) == expected

    # The kernel's headers, where the machine has them, give the same numbers.
    header = Path("/usr/include", HEADERS[machine])
    if header.exists():
        known = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", header.read_text()))
        ours = {name: str(number) for name, number in (partly | refused).items() if name in known}
        assert len(ours) > 40 and ours.items() <= known.items()


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


# In merged sets items have empty columns of other sets.
MBPP = ["assert f(2) == 4", "assert f(1)", "assert not f(0)", "assert abs(f(1) - 2.5) < 1"]
MBPP += ["assert math.isclose(f(1), 2.5, rel_tol=0.5)"]
OF_MBPP = [["f(2)", "4"], ["not f(1)", "False"], ["not f(0)", "True"]]
OF_MBPP += [["f(1)", "2.5", 1], ["f(1)", "2.5", 1.25]]
CHECK = "def check(candidate):\n    assert candidate(3) == 1.5\n"
HUMANEVAL = {"prompt": "half = 1.5\n", "entry_point": "f", "test": CHECK}
OF_HUMANEVAL = of_calls(["f(3)", "1.5"], setup="half = 1.5\n")
APPS = {"inputs": [["1 2", ""], "4 5\n"], "outputs": [["3\n"], "9\n"]}
CLASS = "class Solution:\n    def f(self, a, b):"
APPS_CALL = {"question": "?", "starter_code": CLASS}
APPS_CALL["input_output"] = json.dumps({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]})
CASES = [json.dumps([{"input": text, "output": output}]) for text, output in PAIRS]
LIVECODEBENCH = {"question_content": "?", "input_output": ""}
LIVECODEBENCH |= {"public_test_cases": CASES[0], "private_test_cases": packed(CASES[1])}
LIVE_CALL = {"question_content": "?", "metadata": '{"func_name": "f"}', "private_test_cases": ""}
LIVE_CALL["public_test_cases"] = [{"input": "1\n[2]", "output": "3"}]

# (item, a right program, label)
FORMS = [
    ({"text": "?", "test_list": MBPP}, "f = lambda x: 2 * x", of_calls(*OF_MBPP)),
    (HUMANEVAL, "f = lambda x: x * half / 3", OF_HUMANEVAL),
    ({"question": "?", "input_output": APPS}, ADD, ADDS),
    (APPS_CALL, f"{CLASS} return a + b", of_json_calls(["Solution().f(*[1, 2])", "3"])),
    (LIVECODEBENCH, ADD, ADDS),
    (LIVE_CALL, "def f(a, b): return a + b[0]", of_json_calls(["f(*[1, [2]])", "3"])),
    ({"question": "?", "tests": PAIRS, "input_output": None}, ADD, ADDS),
]


def test_problems_of_every_form_are_read_and_graded(room):
    lines = [json.dumps(item) for item, _, _ in FORMS]
    (room / "data.jsonl").write_text("\n".join(lines))
    problems = task.load_problems(str(room / "data.jsonl"), "orz", bos="<s>")
    assert [problem.label for problem in problems] == [found for _, _, found in FORMS]
    with task.Grader(workers=4) as grader:
        for problem, (_, program, _) in zip(problems, FORMS):
            assert problem.prompt.startswith("<s>") and problem.question in problem.prompt
            submit(grader, problem.index, program, problem.label)
        assert grader.results() == dict.fromkeys(range(len(FORMS)), 1)


def test_the_copy_of_the_task_that_a_run_keeps_finds_the_jail(tmp_path):
    copy = str(shutil.copy(task.__file__, tmp_path / "task.py"))
    with runpy.run_path(copy)["Grader"]() as grader:
        assert grade(grader, ADD, label(*PAIRS)) == 1


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


def test_unusable_asserts_are_counted_in_one_line(tmp_path, capsys):
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
