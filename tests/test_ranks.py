"""What the ranks do together: process group, signals; and the variables of a process."""

import importlib.metadata
import os
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import run_python

from nanoorz import environment, ranks

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def test_a_torch_for_gpus_that_finds_none_is_refused(monkeypatch):
    """Else an old driver, or a job on the wrong machine, would train on the CPU without a word."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [name])
    assert ranks.choose_device() == torch.device("cpu")
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [])
    with pytest.raises(ranks.UserError, match="CUDA 13.0 .* driver 580 .* nvidia-smi.*$"):
        ranks.choose_device()


def test_the_cpu_stack_sees_no_gpu():
    """PyPI's torch for CUDA would find one, which vLLM's build for CPUs cannot use."""
    words = "import os; from nanoorz import environment; print(repr(os.environ['{}']))"
    env = {"CUDA_VISIBLE_DEVICES": "0"}
    assert run_python("-c", words.format("CUDA_VISIBLE_DEVICES"), env=env).stdout == "''\n"


def test_the_import_of_ranks_changes_nothing():
    """People copy this file."""
    code = "import os, signal, torch\nbefore = dict(os.environ)\nimport nanoorz.ranks\n"
    code += "assert dict(os.environ) == before\n"
    code += "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL"
    run_python("-c", code)


def test_seeds_are_the_same_in_every_process():
    assert ranks.hash64(1, "a") == 2461651067226055738


# ---- signals -------------------------------------------------------------------------------------


@pytest.fixture
def handlers():
    """Puts back the handlers that a Signals replaces."""
    kept = {number: signal.getsignal(number) for number in STOPS}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_signal_during_a_look_at_the_store_is_not_lost(handlers):
    class Store(dist.HashStore):
        def check(self, keys):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().check(keys)

    store = Store()
    assert environment.Signals(store).poll()
    other = environment.Signals(store)
    assert not dist.HashStore.check(store, ["stop"])
    assert other.poll() and other.poll(), "the second look tells the other ranks"
    assert dist.HashStore.check(store, ["stop"])


def test_an_error_of_one_rank_stops_the_others(handlers, capfd):
    store = dist.HashStore()
    mine = environment.Signals(store)
    other = environment.Signals(store)
    with mine.stop_after_error():
        sys.exit("of the task")
    assert mine.poll() and other.poll()
    assert mine.failed and not other.failed
    assert "SystemExit: of the task" in capfd.readouterr().err


def test_only_a_second_interrupt_ends_a_rank_at_once(handlers):
    """The first interrupt may come after another signal, and must not cut off the save."""
    mine = environment.Signals(dist.HashStore())
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        assert signal.getsignal(number) == mine.handle
        mine.asked = False
        signal.raise_signal(number)
        assert mine.poll()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == mine.handle


def test_nohup_lets_a_run_go_on_when_its_terminal_is_closed():
    code = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_{})\n"
    code += "from nanoorz import environment\nprint(signal.SIGHUP in environment.STOPS)"
    assert run_python("-c", code.format("IGN")).stdout == "False\n"
    assert run_python("-c", code.format("DFL")).stdout == "True\n"


READ_BACK = """import ctypes
from nanoorz.environment import follow_launcher
follow_launcher()
number = ctypes.c_int(-1)
PR_GET_PDEATHSIG = 2
ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
print(number.value)
"""


@pytest.mark.parametrize(
    "parent, env, number",
    [
        ("accelerate launch", {}, signal.SIGTERM),
        ("accelerate-launch", {}, signal.SIGTERM),
        ("python -m accelerate.commands.launch", {}, signal.SIGTERM),
        # A launcher of two ranks hands signals on.
        ("accelerate launch", {"RANK": "0"}, 0),
        ("nohup bash accelerate launch.sh", {}, 0),
    ],
)
def test_a_trainer_follows_its_parent_only_if_that_launches_one_process(parent, env, number):
    """If a trainer always did, `nohup python train.py &` would end when its shell ends."""
    start = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[-1]])"
    assert int(run_python("-c", start, *parent.split(), READ_BACK, env=env).stdout) == number


POOL = """
from concurrent.futures import ProcessPoolExecutor
import time
from nanoorz import environment
pool = ProcessPoolExecutor(1)
pool.submit(abs, 1).result()
pool.submit(time.sleep, 9999)
environment.end(3)
"""


def test_the_end_of_a_process_ends_the_pool_of_a_tool():
    """The process of the pool would keep the pipe open, and this test would wait for its end."""
    run_python("-c", POOL, code=3)
