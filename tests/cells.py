"""Cells: small jobs on real DeepSpeed engines, many to a launch, which costs far more than a cell.

A test file lists its cells, `launch` gives them to ppo_worker.py, and each test reads the result of
its cell by name.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import tiny
import torch
from conftest import clean_environment, held_port

WORKER = Path(__file__).with_name("ppo_worker.py")
ACCELERATE = ["-m", "accelerate.commands.launch", "--use_deepspeed", "--num_machines", "1"]


def cell(name: str, kind: str, tied=True, whole=False, spec=None, **settings) -> dict:
    """A job of ppo_worker.py: its function `cell_KIND` gets the settings and `spec`.

    tied: of the model's embeddings. whole: small parameters stay whole under ZeRO-3, as in a run;
    else everything is sharded and the embedding exceeds a bucket, as in a large model.
    """
    options = {"name": name, "kind": kind, "tied": tied, "whole": whole, "spec": spec or {}}
    return options | {"settings": settings}


def make_models(root: Path) -> dict[bool, Path]:
    """Tied and untied. Their configs ask for dropout, which must stay off: a dropped unit would
    break ratio = 1."""
    folders = {}
    for tied in (True, False):
        folders[tied] = tiny.make_model(root / f"tied-{tied}", tied=tied)
        config = folders[tied] / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.3}))
    return folders


def launch(ranks: int, cells: list[dict], folder: Path, models: dict) -> Callable[[str], dict]:
    """Runs the cells in one launch; returns a reader of a cell's result, which fails with the log
    where there is none."""
    folder.mkdir()
    for job in cells:
        job["settings"]["model"] = str(models[job["tied"]])
    (folder / "cells.json").write_text(json.dumps(cells))
    # Freed memory goes back at once, since a cell measures peaks.
    env = clean_environment() | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "20000000"}
    with open(folder / "log.txt", "w") as log, held_port() as port:
        launcher = []
        if ranks > 1:
            launcher = [*ACCELERATE, "--num_processes", str(ranks), "--main_process_port", port]
        command = [sys.executable, *launcher, str(WORKER), str(folder)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdout=log, stderr=log, timeout=600, env=env)

    def read(name: str) -> dict:
        path = folder / f"{name}.pt"
        if not path.exists():
            log = (folder / "log.txt").read_text()
            raise AssertionError(f"cell {name!r} on {ranks} ranks left no result:\n{log[-4000:]}")
        return torch.load(path)

    return read


def find(cells: list[dict], name: str) -> dict:
    return next(job for job in cells if job["name"] == name)
