"""What must happen before the slow imports. Standard library only."""

import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of Linux's prctl


def follow_launcher():
    """Lets this process end with the one-process `accelerate launch` that started it.

    That launcher does not hand a SIGTERM on. The kernel sends one when the launcher is gone, and
    the run is saved. Under any other parent a run must outlive it: a shell that leaves behind
    what `nohup` started, or a scheduler's wrapper.
    """
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    is_launcher = b"accelerate" in parent and b"\0launch\0" in parent
    if is_launcher and "RANK" not in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
