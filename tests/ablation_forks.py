"""Runs checks of ablation_checks.py in forks of one process, each inside a patched copy.

That process has imported the libraries, which takes seconds, and none of our modules, so that each
fork imports the patched ones. It is Python's own server of forks: it starts with the first check,
has no threads of its own, and ends with the tests.
"""

import multiprocessing
import os
import runpy
import shutil
import sys
from pathlib import Path

# The last two are what transformers imports only when a model is made.
LIBRARIES = ["torch", "numpy", "tqdm", "psutil", "deepspeed", "transformers"]
LIBRARIES += ["transformers.models.qwen2.modeling_qwen2", "transformers.integrations.deepspeed"]
OURS = {"train", "rollout", "reward", "ppo", "ckpt", "lib", "tasks", "tools"}
LAUNCHER_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
LAUNCHER_NAMES |= {"MASTER_ADDR", "MASTER_PORT"}


def run_checks(names: list[str], copy: Path, ranks=1, port=None) -> tuple[str, str]:
    """These checks with the files of that folder; what is not there is ours.

    Returns what they wrote to stdout and to stderr, all ranks together. Several ranks meet at the
    port.
    """
    shutil.copy(Path(__file__).parent / "ablation_checks.py", copy)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    processes = []
    for rank in range(ranks):
        launcher = {}
        if ranks > 1:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
            launcher = {"MASTER_ADDR": "127.0.0.1"} | {k: str(v) for k, v in numbers.items()}
        for path in written_by(rank, copy):
            path.write_text("")
        process = context.Process(target=check_here, args=(names, copy, rank, launcher))
        process.start()
        processes.append(process)
    for process in processes:
        process.join(800)
    for process in processes:
        # One that hangs is ended, and its exit code is not 0.
        process.kill()
        process.join()
    paths = [written_by(rank, copy) for rank in range(ranks)]
    out, err = ("".join(path.read_text() for path in column) for column in zip(*paths))
    codes = [process.exitcode for process in processes]
    assert not any(codes), f"exit codes {codes}: {err[-3000:]}"
    return out, err


def written_by(rank: int, copy: Path) -> tuple[Path, Path]:
    return copy / f"out_{rank}.txt", copy / f"err_{rank}.txt"


def check_here(names: list[str], copy: Path, rank: int, launcher: dict):
    """Runs in a fork. What libraries in C write goes to the files as well."""
    for number, path in enumerate(written_by(rank, copy), start=1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    for name in LAUNCHER_NAMES & set(os.environ):
        del os.environ[name]
    os.environ |= launcher
    early = [name for name in sys.modules if name.split(".")[0] in OURS]
    assert not early, f"imported before the fork, and so not the patched ones: {early}"
    sys.path.insert(0, str(copy))
    sys.argv = ["ablation_checks.py", *names]
    runpy.run_path(str(copy / "ablation_checks.py"), run_name="__main__")
