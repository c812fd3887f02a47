"""Signals of the operating system: SIGTERM, SIGINT and SIGUSR1 save the run and end it.

train.py imports this file before everything that is slow, so it imports the standard library alone.
Before a `Signals` is made, a signal ends the process at once (`leave_on_signals`), because there is
nothing to save.
"""

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # an option of Linux's prctl: a signal at the death of the parent
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def follow_launcher():
    """Sends this process a SIGTERM when the `accelerate launch` that started it has ended.

    A launcher of one process does not pass a SIGTERM on. So we ask the kernel to send one, and the
    run is saved. Under another parent the run goes on when the parent ends: the parent may be a
    shell that started the run by `nohup`, or a scheduler's script.
    """
    # In a container the parent's /proc may be hidden.
    with contextlib.suppress(OSError):
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        # `accelerate launch`, `accelerate-launch`, `python -m accelerate.commands.launch`
        is_launcher = re.search(rb"accelerate[^\0]*[\0.-]launch\0", parent)
        # Only a launcher of one process leaves RANK unset.
        if is_launcher and "RANK" not in os.environ:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def leave_on_signals():
    """From now on a signal ends this process with one line, until a `Signals` is made.

    A thread waits for the signal. The main thread may be inside a C function that waits for another
    rank, and Python calls a handler only after such a function has returned.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    threading.Thread(target=leave, daemon=True).start()


def leave():
    """Waits for a signal and ends the process: with exit code 0, or 1 if there are several ranks.

    The launcher of several ranks ends all of them after a 1. After a 0 the other ranks would wait
    for this rank.
    """
    number = signal.sigwait(STOPS)
    # A `Signals` has set a handler, which is a function. This thread still waits, and may take a
    # signal that is meant for the handler. So it sends the signal again.
    if callable(signal.getsignal(signal.SIGTERM)):
        return os.kill(os.getpid(), number)
    # The reader of our stderr may have ended by the same Ctrl-C.
    with contextlib.suppress(OSError):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("stopped during start-up: nothing is lost", file=sys.stderr)
    os._exit(int(os.environ.get("WORLD_SIZE", "1") != "1"))


class Signals:
    """Has any rank been asked to stop? `poll` answers, on all ranks.

    The ranks share the answer through a key-value store and not through a collective, because each
    rank is inside its own sampling. A second SIGINT ends this process at once.
    """

    def __init__(self, store):
        self.store = store
        self.asked = False
        self.next_look = 0.0  # seconds, of time.monotonic
        for number in STOPS:
            signal.signal(number, self.handle)
        # leave_on_signals has blocked the signals.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def handle(self, number, frame):
        self.asked = True
        if number == signal.SIGINT:
            # The kernel handles the second SIGINT, whatever the main thread waits for.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            # `print` could interrupt another print of this thread. The reader may have ended.
            with contextlib.suppress(OSError):
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    os.write(sys.stderr.fileno(), b"stopping; a second Ctrl-C ends at once\n")

    def poll(self):
        """Returns whether any rank has been asked. Reads the store at most twice a second."""
        if self.asked:
            self.store.set("stop", "1")
        elif time.monotonic() > self.next_look:
            self.next_look = time.monotonic() + 0.5
            # `self.asked = self.store.check(...)` could replace a True of `handle` by False.
            if self.store.check(["stop"]):
                self.asked = True
        return self.asked
