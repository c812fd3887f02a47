"""What the ranks do together: errors told once, the process group, signals. And the launcher."""

import datetime
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ACCELERATE, ROOT, clean_environment, held_port

from lib import common, launcher

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def test_an_error_of_several_ranks_is_told_once(capsys, monkeypatch):
    store = dist.HashStore()
    for _ in range(2):
        common.tell_once(store, "error: of both ranks")
    assert capsys.readouterr().err == "error: of both ranks\n"
    # Before there is a store, one rank on each machine tells it. Without a launcher there is one.
    for local_rank, told in ((None, "early\n"), ("0", "early\n"), ("1", "")):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local_rank:
            monkeypatch.setenv("LOCAL_RANK", local_rank)
        common.tell_once(None, "early")
        assert capsys.readouterr().err == told


def test_a_rank_whose_store_has_gone_does_not_repeat_the_error(capsys):
    """The store goes with rank 0, which has told it."""

    class Store:
        def add(self, key, amount):
            raise dist.DistNetworkError("connection reset by peer")

    common.tell_once(Store(), "error")
    assert capsys.readouterr().err == ""


def test_half_of_a_launcher_s_variables_is_one_line(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here"})
    with pytest.raises(common.UserError, match="not LOCAL_RANK, MASTER_PORT: use") as error:
        common.start_distributed()
    assert "\n" not in str(error.value)


def test_ranks_that_cannot_be_met_are_one_line(monkeypatch):
    monkeypatch.setattr(common, "PATIENCE", datetime.timedelta(seconds=1))
    monkeypatch.setattr(common, "choose_device", lambda ranks_here: torch.device("cpu"))
    with held_port() as port:
        values = ("1", "1", "2", "127.0.0.1", port)
        monkeypatch.setattr(os, "environ", dict(zip(common.LAUNCHER_NAMES, values)))
        place = f"cannot meet the other ranks at 127.0.0.1:{port}"
        with pytest.raises(common.UserError, match=place) as error:
            common.start_distributed()
    assert "\n" not in str(error.value)


def test_a_torch_for_gpus_that_finds_none_is_refused(monkeypatch):
    """An old driver, or a job on the wrong machine, became a run on the CPU."""
    common.check_stack("13.0", has_gpu=True)
    with pytest.raises(common.UserError, match="CUDA 13.0 .* driver 580 .* nvidia-smi") as error:
        common.check_stack("13.0", has_gpu=False)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(common.UserError, match="finds no GPU"):
        common.choose_device(1)


@pytest.mark.parametrize("answer, is_told", [("exit 0", True), ("exit 9", False), (None, False)])
def test_a_torch_for_cpus_beside_a_gpu_is_told(answer, is_told, tmp_path, monkeypatch, capsys):
    """nvidia-smi is also installed where there is no GPU."""
    if answer:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{answer}\n")
        program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    common.check_stack(None, has_gpu=False)
    assert ("torch is built for CPUs" in capsys.readouterr().err) == is_told


# ---- signals -------------------------------------------------------------------------------------


@pytest.fixture
def handlers():
    """Puts back the handlers that a Signals replaces."""
    kept = {number: signal.getsignal(number) for number in STOPS}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


@pytest.mark.parametrize("number", STOPS)
def test_signal_during_a_look_at_the_store_is_not_lost(number, handlers):
    class Store(dist.HashStore):
        def check(self, keys):
            os.kill(os.getpid(), number)
            return super().check(keys)

    store = Store()
    assert common.Signals(store).poll()
    other = common.Signals(store)
    assert not dist.HashStore.check(store, ["stop"])
    assert other.poll() and other.poll(), "the second look tells the other ranks"
    assert dist.HashStore.check(store, ["stop"])


def test_only_a_second_interrupt_ends_a_rank_at_once(handlers):
    """The first one may come after another signal, or after another rank's. It must not cut off the
    save."""
    signals = common.Signals(dist.HashStore())
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        assert signal.getsignal(number) == signals.handle
        signal.raise_signal(number)
    assert signals.poll()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == signals.handle


def test_ranks_agree_on_a_fault_of_one_of_them(handlers, process_group, monkeypatch):
    """Raised in that rank alone, its error left the others waiting, and nothing was saved."""
    signals = common.Signals(dist.HashStore())
    assert signals.agree() is None
    with pytest.raises(common.Stopped) as stop:
        signals.agree("it is broken")
    assert stop.value.fault == "it is broken"
    assert signals.agree() is None
    others = [(False, None), (False, "it is broken there"), (False, None)]
    monkeypatch.setattr(common, "gather", lambda mine: [mine, *others])
    with pytest.raises(common.Stopped) as stop:
        signals.agree()
    assert stop.value.fault == "it is broken there"
    signals.asked = True
    with pytest.raises(common.Stopped) as stop:
        signals.agree()
    assert stop.value.fault == "it is broken there", "also where a signal came"
    monkeypatch.setattr(common, "gather", lambda mine: [mine, (False, None)])
    with pytest.raises(common.Stopped) as stop:
        signals.agree()
    assert stop.value.fault is None


def test_an_error_of_one_rank_stops_all_ranks(process_group, monkeypatch):
    with pytest.raises(common.Stopped) as stop, common.share_errors():
        raise common.UserError("this cannot work")
    assert stop.value.fault == "this cannot work"
    with pytest.raises(common.Stopped) as stop, common.share_errors():
        raise ValueError("of this rank")
    assert stop.value.fault.startswith("ValueError: of this rank (")
    with pytest.raises(common.Stopped) as stop, common.share_errors():
        raise common.Stopped
    assert stop.value.fault is None, "all ranks have agreed on it already"
    with common.share_errors():
        pass
    monkeypatch.setattr(common, "gather", lambda mine: [mine, (False, "of another rank")])
    with pytest.raises(common.Stopped) as stop, common.share_errors():
        pass
    assert stop.value.fault == "of another rank"


# ---- lib/launcher.py -----------------------------------------------------------------------------

IN_C = f"""import ctypes, sys
sys.path.insert(0, {str(ROOT)!r})
from lib.launcher import leave_on_signals
leave_on_signals()
print("ready", flush=True)
mutex = ctypes.create_string_buffer(256)
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(mutex)  # the second time it never returns
"""


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize(
    "ranks, local_rank, code", [("1", "0", 0), ("2", "0", 1), ("2", "1", 1), (None, None, 0)]
)
def test_a_signal_during_start_up_ends_a_rank_even_within_c(number, ranks, local_rank, code):
    """Python calls no handler before a function of C's returns, and a rank may wait there for
    another one for half an hour."""
    env = clean_environment()
    if ranks:
        env |= {"WORLD_SIZE": ranks, "LOCAL_RANK": local_rank}
    process = subprocess.Popen(
        [sys.executable, "-c", IN_C],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    assert process.stdout.readline() == "ready\n"
    # It sleeps in C.
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        pass
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == code
    line = "stopped during start-up: nothing is lost\n"
    assert said == ("" if local_rank == "1" else line), "one rank on a machine says it"


def test_a_signal_during_start_up_ends_a_rank_to_which_nobody_listens():
    """Of `python train.py 2>&1 | tee log` Ctrl-C ends tee as well. The line had nowhere to go, the
    thread ended by that, and the run went on, deaf to signals."""
    process = subprocess.Popen(
        [sys.executable, "-c", IN_C],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
    )
    assert process.stdout.readline() == b"ready\n"
    process.stderr.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    process.stdout.close()


def test_a_signal_that_comes_to_the_thread_of_the_start_up_later_stops_the_run(
    handlers, monkeypatch
):
    """The kernel may choose it, where the main thread has another signal. It would end the rank at
    once, unsaved."""
    exits = []
    monkeypatch.setattr(launcher.os, "_exit", exits.append)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    thread = threading.Thread(target=launcher.leave, daemon=True)
    thread.start()
    signals = common.Signals(dist.HashStore())
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(STOPS)
    signal.pthread_kill(thread.ident, signal.SIGUSR1)
    thread.join()
    assert exits == []
    while not signals.asked:
        pass


READ_BACK = f"""import ctypes, sys
sys.path.insert(0, {str(ROOT)!r})
from lib.launcher import follow_launcher
follow_launcher()
number = ctypes.c_int(-1)
PR_GET_PDEATHSIG = 2
ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
# In one write: two ranks share the stream.
sys.stdout.write(f"death of the parent sends {{number.value}}\\n")
"""


@pytest.mark.engine
@pytest.mark.parametrize(
    "parent, number",
    [
        pytest.param(
            [sys.executable, *ACCELERATE, "--num_machines", "1", "--num_processes", "1"],
            signal.SIGTERM,
            id="a launcher of one process",
        ),
        # It must hear of the end of all ranks from their launcher, which hands signals on.
        pytest.param(
            [sys.executable, *ACCELERATE, "--use_deepspeed", "--num_machines", "1"]
            + ["--num_processes", "2", "--main_process_port", "0"],
            0,
            id="a launcher of two ranks",
        ),
        # The second command keeps the shell from becoming the first one.
        pytest.param(
            ["sh", "-c", '"$@"; true', "accelerate launch", sys.executable], 0, id="a shell"
        ),
    ],
)
def test_only_under_a_launcher_of_one_process_does_a_trainer_follow_its_parent(
    tmp_path, parent, number
):
    """Followed always, the parent took `nohup python train.py &` along, silently, when that shell
    left."""
    script = tmp_path / "read_back.py"
    script.write_text(READ_BACK)
    done = subprocess.run(
        [*parent, str(script)], capture_output=True, text=True, env=clean_environment(), timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = {line for line in done.stdout.splitlines() if line.startswith("death")}
    assert said == {f"death of the parent sends {int(number)}"}
