"""The jail: runs a hostile Python program behind bubblewrap, the command bwrap.

The program has no network, none of our environment variables, and its own process numbers. It can
read /usr, the system's libraries and Python, and no other file of this machine. It can write into
its folder /tmp, which is in memory and ends with the program. prlimit limits each process.
docs/data.md says what is not protected, and what a machine needs. To use this file elsewhere, on
Linux, copy nanoorz/ranks.py, too.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import sysconfig
from subprocess import DEVNULL, PIPE, Popen
from threading import Timer

from nanoorz.ranks import UserError

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "PYTHONPATH": "/packages"}
# By default numpy starts a thread for each core.
ENVIRONMENT |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# What a program sees of this machine. Old systems have a /bin that is not a link into /usr.
SYSTEM = """--ro-bind /usr /usr --ro-bind-try /bin /bin --ro-bind-try /lib /lib --ro-bind-try
/lib64 /lib64 --perms 0755 --dir /etc --ro-bind-try /etc/ld.so.cache /etc/ld.so.cache --dev /dev"""
# A program cannot make namespaces. In its own one it would be root, and could mount more memory.
NAMESPACES = "--unshare-all --unshare-user --disable-userns --die-with-parent"
TMP = "--remount-ro /dev --size 67108864 --tmpfs /tmp --remount-ro / --chdir /tmp --"
# Root's processes have no limit. So root becomes user 65534, who may not open a Python below /root.
# So root mounts all folders in a first jail, and the user finds them there.
FIRST_JAIL = """--unshare-pid --die-with-parent --proc /proc --dir /tmp
--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID
-- setpriv --reuid 65534 --regid 65534 --clear-groups -- bwrap"""
ADVICE = """the jail needs bubblewrap 0.8, Linux 5.14 and user namespaces (`sysctl -w user.max_\
user_namespaces=10000 kernel.apparmor_restrict_unprivileged_userns=0`; a container: --privileged)"""


class Jail:
    """Runs Python programs. Raises UserError if this machine cannot contain them.

    cpu_seconds and memory_mb limit each process of a program. A program may have 15 processes and
    threads, 64 open files, files of 8 MB, and 64 MB in its folder. After wall_seconds all its
    processes end. packages: may it import the packages of this Python?
    """

    def __init__(self, cpu_seconds, wall_seconds, memory_mb=1024, packages=False):
        self.wall_seconds = wall_seconds
        self.processes = set()
        self.closed = False
        bwrap = shutil.which("bwrap")
        if not bwrap:
            raise UserError(f"no bwrap: install bubblewrap (apt install bubblewrap); {ADVICE}")
        # bwrap leaves processes that have ended. Now this process gets them, and waits for them.
        # Process 1 of a container may not wait.
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
        folders = ["--ro-bind", sys.base_prefix, "/python"]
        if packages:
            folders += ["--ro-bind", sysconfig.get_path("purelib"), "/packages"]
        self.command = [bwrap]
        if os.getuid() == 0:
            self.command += [*SYSTEM.split(), *folders, *FIRST_JAIL.split()]
            folders = ["--ro-bind", "/python", "/python", "--ro-bind-try", "/packages", "/packages"]
        self.command += [*NAMESPACES.split(), *SYSTEM.split(), *folders, *TMP.split()]
        limits = f"--cpu={cpu_seconds}:{cpu_seconds + 1} --as={memory_mb << 20} --fsize={8 << 20} "
        limits += "--nproc=16 --nofile=64 --core=0"  # bwrap is one of the 16 processes.
        python = f"/python/bin/python3.{sys.version_info.minor} -P -s {'' if packages else '-S'}"
        self.command += ["sh", "-c", f'echo && exec prlimit {limits} -- {python} "$@"', "sh"]
        # The trial starts a process, too: on an old Linux the limit counts all processes of a user.
        trial = ["-c", "import os\nif os.fork(): print('started')"]
        with self.start(trial, b"", stderr=PIPE) as process:
            if process.stdout.read() != b"started\n":
                *_, reason = process.stderr.read().decode(errors="replace").splitlines() or ["?"]
                raise UserError(f"no program can be started: {reason}; {ADVICE}")

    @contextlib.contextmanager
    def start(self, arguments, stdin, stderr=DEVNULL):
        """Starts Python with these arguments and that stdin, in bytes. Yields a Popen.

        Its stdout is a pipe, from which the caller reads no more than it needs. At the end of the
        block all processes of the program have ended. Several threads may call it. Raises OSError.
        """
        pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": stderr}
        # A new session has no terminal, into which a program could type. It is a process group.
        options = {"env": ENVIRONMENT, "cwd": "/", "start_new_session": True}
        with Popen([*self.command, *arguments], **pipes, **options) as process:
            self.processes.add(process)
            timer = Timer(0 if self.closed else self.wall_seconds, kill, [process])
            try:
                timer.start()
                # If this process is killed, bwrap ends, but not in its first milliseconds. So wait
                # for the line of `echo`. Until then the program has nothing to run.
                process.stdout.readline()
                # The program may end before it has read all.
                with contextlib.suppress(BrokenPipeError), process.stdin:
                    process.stdin.write(stdin)
                yield process
            finally:
                timer.cancel()
                kill(process)
                process.wait()
                self.processes.discard(process)
                # What bwrap leaves is now a child of this process.
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-process.pid, 0):
                        pass

    def close(self):
        """Ends all programs. They also end with this process."""
        self.closed = True
        for process in list(self.processes):
            kill(process)


def kill(process):
    """Kills the process group of a jail. While bwrap starts, its processes do not end together."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
