"""The jail: runs a hostile Python program behind bubblewrap, the command bwrap.

The program has no network, no environment variables of ours, and its own process numbers. Of this
machine's files it can read /usr, the system's libraries and Python, and it can write none. It can
write into its folder /tmp, which is in memory and ends with the program. prlimit limits each of its
processes. docs/rewards.md says what the jail does not protect, and what a machine needs.

To use this file elsewhere, on Linux, copy nanoorz/ranks.py, too.
"""

import contextlib
import os
import shutil
import signal
import sys
import sysconfig
from subprocess import DEVNULL, PIPE, Popen, run
from threading import Timer

from nanoorz.ranks import UserError

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "PYTHONPATH": "/packages"}
ENVIRONMENT |= {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # Else: one for each core.
# What a program sees of this machine. Old systems have a /bin that is not a link into /usr.
SYSTEM = """
--ro-bind /usr /usr --ro-bind-try /bin /bin --ro-bind-try /lib /lib --ro-bind-try /lib64 /lib64
--perms 0755 --dir /etc --ro-bind-try /etc/ld.so.cache /etc/ld.so.cache --dev /dev
"""
# A program cannot make namespaces. In its own one it would be root, and could mount more memory.
NAMESPACES = "--unshare-all --unshare-user --disable-userns --die-with-parent"
TMP = "--remount-ro /dev --size 67108864 --tmpfs /tmp --remount-ro / --chdir /tmp --"
# Root has no limit of the number of processes. So root becomes user 65534. This user may not open
# a Python below /root. So root mounts all folders in a first jail, and the user finds them there.
FIRST_JAIL = """
--unshare-pid --die-with-parent --proc /proc --dir /tmp --cap-drop ALL --cap-add CAP_SETUID
--cap-add CAP_SETGID -- setpriv --reuid 65534 --regid 65534 --clear-groups -- bwrap
"""
FROM_FIRST_JAIL = "--ro-bind /python /python --ro-bind-try /packages /packages"
ADVICE = (
    "the jail needs bubblewrap 0.8, Linux 5.14 and namespaces of users (`sysctl -w user.max_user_"
    "namespaces=10000 kernel.apparmor_restrict_unprivileged_userns=0`; a container: --privileged)"
)


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
        folders = ["--ro-bind", sys.base_prefix, "/python"]
        if packages:
            folders += ["--ro-bind", sysconfig.get_path("purelib"), "/packages"]
        self.command = [bwrap]
        if os.getuid() == 0:
            self.command += [*SYSTEM.split(), *folders, *FIRST_JAIL.split()]
            folders = FROM_FIRST_JAIL.split()
        self.command += [*NAMESPACES.split(), *SYSTEM.split(), *folders, *TMP.split()]
        # bwrap is one of the 16 processes.
        limits = f"--cpu={cpu_seconds}:{cpu_seconds + 1} --as={memory_mb << 20} --fsize={8 << 20} "
        limits += "--nproc=16 --nofile=64 --core=0"
        python = f"/python/bin/python3.{sys.version_info.minor} -P -s"
        self.command += f"prlimit {limits} -- {python}{'' if packages else ' -S'}".split()
        # The trial starts a process, too: on an old Linux the limit counts all processes of a user.
        trial = [*self.command, "-c", "import os\nif os.fork(): print('started')"]
        done = run(trial, env=ENVIRONMENT, cwd="/", capture_output=True)
        if done.stdout != b"started\n":
            reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise UserError(f"no program can be started: {reason}; {ADVICE}")

    @contextlib.contextmanager
    def start(self, arguments, stdin, stderr=DEVNULL):
        """Starts Python with these arguments and that stdin, in bytes. Yields a Popen.

        Its stdout is a pipe, from which the caller reads no more than it needs. At the end of the
        block all processes of the program end. Several threads may call it. Raises OSError.
        """
        pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": stderr}
        # A new session has no terminal, into which a program could type.
        options = {"env": ENVIRONMENT, "cwd": "/", "start_new_session": True}
        with Popen([*self.command, *arguments], **pipes, **options) as process:
            self.processes.add(process)
            timer = Timer(0 if self.closed else self.wall_seconds, kill, [process])
            timer.daemon = True
            timer.start()
            try:
                # The program may end before it has read all.
                with contextlib.suppress(BrokenPipeError), process.stdin:
                    process.stdin.write(stdin)
                yield process
            finally:
                timer.cancel()
                kill(process)
                self.processes.discard(process)

    def close(self):
        """Ends all programs. They also end with this process."""
        self.closed = True
        for process in list(self.processes):
            kill(process)


def kill(process):
    """Kills the process group of a jail. If process 1 of a namespace ends, all its processes end.

    While bwrap starts, this does not hold yet. So the whole group is killed.
    """
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
