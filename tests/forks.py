"""Runs as forks of a server that has imported the libraries, which costs 15 s for each process.

A fork runs the script that `python SCRIPT WORDS` runs, with the same words and variables. It finds
what the tests find: multiprocessing hands their sys.path on.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["deepspeed", "transformers", "vllm.entrypoints.llm", "math_verify"])


def run_script(words: list[str], env: dict, cwd: Path, folder: Path) -> None:
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")


class Fork:
    """`python WORDS`, with the methods of a Popen. The server has one thread, so forks are safe."""

    def __init__(self, words, env: dict, cwd: Path):
        self.folder = tempfile.TemporaryDirectory()  # it is removed with this object
        self.args = list(map(str, words))
        args = (self.args, env, cwd, Path(self.folder.name))
        self.process = SERVER.Process(target=run_script, args=args)
        with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}):
            self.process.start()

    @property
    def returncode(self):
        return self.process.exitcode

    def wait(self, timeout=None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout=None) -> tuple[str, ...]:
        """Its output and its errors, once it has ended."""
        self.wait(timeout)
        return tuple(Path(self.folder.name, name).read_text() for name in ("output", "errors"))

    def kill(self) -> None:
        self.process.kill()
