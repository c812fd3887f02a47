"""What must happen before the slow imports. Standard library only."""

import contextlib
import ctypes
import os
import re
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of Linux's prctl


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
