"""Runs each attack without the jail and behind it. Prints {name: [what it printed, ...]} as JSON.

test_jail.py starts this file, also as another user: python jail_worker.py ROOM.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

if __name__ == "__main__":
    # The other user may have no torch, which all of nanoorz/ranks.py would import.
    sys.modules["nanoorz.ranks"] = types.SimpleNamespace(UserError=RuntimeError)
    sys.path.insert(0, str(Path(__file__).parents[1]))

from tasks.jail import Jail

OUTLIVE = """if not os.fork():
    os.setsid()
    os.close(1)
    time.sleep(600)"""
# Each of these succeeds without the jail, and raises an error behind it.
ATTACKS = {
    "read a file that everyone may read": "open(f'{ROOM}/public').read()",
    "read a file of the trainer's user": "open(f'{ROOM}/private').read()",
    "read a file of the system": "open('/etc/passwd').read()",
    "read a file by a link": "os.symlink(f'{ROOM}/public', 'a')\nopen('a').read()",
    "ask for the size of a file": "os.stat(f'{ROOM}/public')",
    "read a file by a hard link": "os.link(f'{ROOM}/public', 'a')\nopen('a').read()",
    "read a file below an open folder": "root = os.open('/', os.O_PATH)\n"
    "os.open(f'{ROOM[1:]}/public', os.O_RDONLY, dir_fd=root)",
    "read a file by `/proc/self/root`": "open(f'/proc/self/root{ROOM}/public').read()",
    "read a file by the trainer's root": "open(f'/proc/{TRAINER}/root{ROOM}/public').read()",
    "list a folder": "os.listdir(ROOM)",
    "write a file that everyone may write": "open(f'{ROOM}/public', 'a').write('x')",
    "write a verdict into the run's metrics.jsonl": "open(f'{ROOM}/metrics.jsonl', 'a').write('x')",
    "make a file": "open(f'{ROOM}/new', 'w')",
    "remove a file": "os.remove(f'{ROOM}/spare')",
    "rename a file": "os.rename(f'{ROOM}/spare', 'a')",
    "overwrite a file": "open(f'{ROOM}/spare', 'w')",
    "make a folder": "os.mkdir(f'{ROOM}/new_folder')",
    "remove a folder": "os.rmdir(f'{ROOM}/empty')",
    "make a file in `/dev/shm`": "open('/dev/shm/x', 'w')\nos.remove('/dev/shm/x')",
    "find a variable of the trainer's environment": "os.environ['SECRET']",
    "read the trainer's environment in `/proc`": "open(f'/proc/{TRAINER}/environ').read()",
    "connect to a server": "socket.create_connection(('127.0.0.1', PORT))",
    "send to a UNIX socket that has a file": "datagrams().sendto(b'x', f'{ROOM}/letters')",
    "send to a UNIX socket that has a name": "datagrams().sendto(b'x', f'\\0{ROOM}/letters')",
    "kill another process": "os.kill(VICTIM, 9)",
    "let the kernel send a signal, by `fcntl`": "fcntl.fcntl(0, fcntl.F_SETOWN, TRAINER)",
    "start 40 processes": "for i in range(40): os.fork() or time.sleep(3) or os._exit(0)",
    "start 40 threads": "for i in range(40): start_thread(time.sleep, 1)",
    "take 300 MB of memory, where 256 MB are allowed": "x = bytearray(300 << 20)",
    "write a file of 9 MB": "open('x', 'wb').write(bytes(9 << 20))",
    "write 80 MB of files": "for i in range(80): open(str(i), 'wb').write(b' ' * 2**20)",
    "open 99 files": "files = [open('x', 'wb') for i in range(99)]",
    "raise its own limits": "resource.setrlimit(resource.RLIMIT_NOFILE, (999, 999))",
    "leave a process that outlives it": OUTLIVE,
    "make a user namespace": "call('unshare', 0x10000000)",
}
# Without the jail these need root.
OF_ROOT = {
    "change a file of Python": "open(os.__file__, 'r+b')",
    "change the trainer's memory": "open(f'/proc/{TRAINER}/mem', 'r+b')",
    "become another user": "os.setuid(1)",
    "mount": "os.mkdir('m')\ncall('mount', b'x', b'm', b'tmpfs', 0, None)\ncall('umount', b'm')",
    "change the root": "os.chroot('.')",
}
# These succeed behind the jail, too.
ALLOWED = {
    "write and read": "open('a', 'w').write('x')\nassert open('a').read() == 'x'",
    "import modules": "import asyncio, decimal, heapq\nasyncio.run(asyncio.sleep(0))",
    "use a thread with a large stack": "threading.stack_size(1 << 26)\nstart_thread(time.sleep, 0)",
    "start a process": "if not os.fork(): os._exit(0)",
    "start a program of the system": "os.posix_spawn('/bin/true', ['true'], {})",
    "open a socket": "socket.socket()",
    "send a signal to its own process": "pid = os.fork() or time.sleep(9)\nos.kill(pid, 9)",
    "make a file in memory": "os.memfd_create('x')",
    "take shared memory": "call('shmget', 0, 1 << 20, 0o600)",
    "change the mode of its own file": "open('a', 'w')\nos.chmod('a', 0o777)",
}
PROGRAM = """
import ctypes, fcntl, os, resource, socket, sys, threading, time
def call(name, *arguments):
    if getattr(ctypes.CDLL(None), name)(*arguments) < 0:
        raise OSError
def datagrams():
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
def start_thread(*work):
    threading.Thread(target=work[0], args=work[1:], daemon=True).start()
try:
%s
except (OSError, MemoryError, RuntimeError, KeyError, ValueError):
    print("refused")
else:
    print("done")
"""


def processes(mark):
    """The numbers of the processes with this text in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        # A process may have just ended.
        with contextlib.suppress(OSError):
            if mark in (path / "cmdline").read_text():
                found.append(int(path.name))
    return found


def has_left_a_process(mark, seconds):
    """Is a process with this text still there after so many seconds? Ends it."""
    deadline = time.monotonic() + seconds
    while (found := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for number in found:
        os.kill(number, 9)
    return bool(found)


def main(room):
    os.environ["SECRET"] = "of the trainer"
    os.umask(0)
    for name, mode in (("public", 0o666), ("metrics.jsonl", 0o600), ("private", 0o600)):
        os.close(os.open(f"{room}/{name}", os.O_CREAT, mode))
    server = socket.create_server(("127.0.0.1", 0))
    letters = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    letters[0].bind(f"{room}/letters")
    letters[1].bind(f"\0{room}/letters")
    jail = Jail(cpu_seconds=5, wall_seconds=60, memory_mb=256)
    found = {}
    mark = f"attacks_in_{room}"
    for number, (name, attack) in enumerate((ATTACKS | OF_ROOT | ALLOWED).items()):
        outcomes = []
        for is_behind in (False, True):
            victim = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
            Path(room, "spare").touch()
            Path(room, "empty").mkdir(exist_ok=True)
            values = f"ROOM, TRAINER, VICTIM = {room!r}, {os.getpid()}, {victim.pid}\n"
            values += f"PORT = {server.getsockname()[1]}\n"
            program = (values + PROGRAM % textwrap.indent(attack, "    ")).encode()
            folder = Path(room, f"folder{number}{is_behind}")
            folder.mkdir()
            if is_behind:
                with jail.start(["-", mark], program) as process:
                    outcome = process.stdout.read(9999).decode().strip()
            else:
                command = [sys.executable, "-P", "-s", "-S", "-", mark]
                done = subprocess.run(command, input=program, stdout=subprocess.PIPE, cwd=folder)
                outcome = done.stdout.decode().strip()
            # The kernel ends the processes of a jail one after the other.
            if attack == OUTLIVE and not has_left_a_process(mark, 60 if is_behind else 0):
                outcome = "refused"
            if "VICTIM" in attack and outcome == "done":
                assert victim.wait(60) == -9
            assert victim.poll() in (None, -9)
            victim.kill()
            victim.wait()
            outcomes.append(outcome)
        found[name] = outcomes
    public = Path(room, "public").read_text(), Path(room, "metrics.jsonl").read_text()
    assert public == ("x", "x"), "only the attacks without the jail have written"
    print(json.dumps(found), flush=True)
    # The trainer is killed while this program runs.
    program = b"print(1, flush=True)\nwhile True: pass"
    with jail.start(["-", f"killed_{room}"], program) as process:
        process.stdout.read(1)
        print("runs", flush=True)
        process.wait()


if __name__ == "__main__":
    main(sys.argv[1])
