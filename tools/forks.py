"""Runs a script several times, each time in a fork: `python forks.py SCRIPT NAME ...`

tools/lab.py starts this process on each core, and SCRIPT is train.py. A line of the input is a JSON
list: a file for the output of a run, and its flags. When the run has ended, this process prints a
line. The modules NAME are imported once.

A SIGTERM is passed on to the run, or ends this process if there is none. The end of the input ends
this process, too. Unlike a server of multiprocessing, it has no module of tools/lab.py, so all code
of a run comes from the folder of SCRIPT.
"""

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path


def run(script: str, log: str, flags: list[str]) -> None:
    """Does what `python SCRIPT FLAGS` does."""
    # PR_SET_PDEATHSIG: if this process is killed, the kernel sends the run a SIGTERM.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = [script, *flags]
    # A module of the script itself must be that of __main__.
    sys.modules.pop(Path(script).stem, None)
    runpy.run_path(script, run_name="__main__")
    sys.exit()


def main() -> None:
    script, *names = sys.argv[1:]
    sys.path[0] = str(Path(script).parent)
    for name in names:
        importlib.import_module(name)
    child = 0

    def pass_on(*_):
        if not child:
            sys.exit()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    for line in sys.stdin:
        log, *flags = json.loads(line)
        # A SIGTERM between the fork and its number would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        child = os.fork()
        if child == 0:
            run(script, log, flags)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.waitpid(child, 0)
        child = 0
        # If the laboratory was killed, nobody reads this.
        with contextlib.suppress(BrokenPipeError):
            os.write(1, b"\n")


if __name__ == "__main__":
    main()
