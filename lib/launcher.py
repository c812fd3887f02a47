"""What must happen before the slow imports. Standard library only."""

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of Linux's prctl
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def follow_launcher():
    """Lets this process end with the one-process `accelerate launch` that started it.

    That launcher does not hand a SIGTERM on. The kernel sends one when the launcher is gone, and
    the run is saved. Under any other parent a run must outlive it: a shell that leaves behind
    what `nohup` started, or a scheduler's wrapper.
    """
    # The parent may be out of sight, as the starter of a container is.
    with contextlib.suppress(OSError):
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        # `accelerate launch`, `accelerate-launch`, `python -m accelerate.commands.launch`
        is_launcher = re.search(rb"accelerate[^\0]*[\0.-]launch\0", parent)
        if is_launcher and "RANK" not in os.environ:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def leave_on_signals():
    """A signal ends this process with one line, until Signals of lib/common.py handles it.

    A thread waits for it. The main one may be inside a C function that waits for another rank, and
    Python calls no handler before such a function returns.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    threading.Thread(target=leave, daemon=True).start()


def leave():
    """Waits for a signal. The exit code is 0, but 1 for one of several ranks.

    After a 1 their launcher ends the others. After a 0 these would wait for this one.
    """
    number = signal.sigwait(STOPS)
    if callable(signal.getsignal(signal.SIGTERM)):
        # Signals is there, but the main thread was busy with another signal.
        return os.kill(os.getpid(), number)
    # Who reads it may have ended by the same Ctrl-C.
    with contextlib.suppress(OSError):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("stopped during start-up: nothing is lost", file=sys.stderr)
    os._exit(int(os.environ.get("WORLD_SIZE", "1") != "1"))
