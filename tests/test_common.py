"""What the ranks do together: errors reported once, process group, signals."""

import datetime
import importlib.metadata
import json
import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import held_port, run_python, stand_in, start_python, wait_until

from nanoorz import log as log_file
from nanoorz import process, ranks

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def test_an_error_of_several_ranks_is_reported_once(capsys, monkeypatch):
    store = dist.HashStore()
    # The store goes with rank 0, which has reported the error before.
    lost = mock.Mock(add=mock.Mock(side_effect=dist.DistNetworkError("connection reset")))
    for found, told in ((store, "error\n"), (store, ""), (lost, "")):
        ranks.tell_once(found, "error")
        assert capsys.readouterr().err == told
    # Before there is a store, one rank on each machine tells it. Without a launcher there is one.
    for local_rank, told in ((None, "early\n"), ("0", "early\n"), ("1", "")):
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local_rank:
            monkeypatch.setenv("LOCAL_RANK", local_rank)
        ranks.tell_once(None, "early")
        assert capsys.readouterr().err == told


def test_the_line_of_an_error_has_a_place_outside_of_libraries():
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    assert "test_common.py, line " in ranks.name_error(caught.value)


def test_half_of_a_launcher_s_variables_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here"})
    with pytest.raises(ranks.UserError, match="not LOCAL_RANK, MASTER_PORT: use .*$"):
        ranks.start_distributed()


def test_ranks_that_cannot_be_met_are_refused_in_one_line(monkeypatch):
    """Ranks of one machine keep gloo's own choice of a network interface."""
    monkeypatch.delattr(ranks, "set_address")
    monkeypatch.setattr(ranks, "TIMEOUT", datetime.timedelta(seconds=1))
    monkeypatch.setattr(ranks, "choose_device", lambda ranks_here: torch.device("cpu"))
    with held_port() as port:
        values = ("1", "1", "2", "127.0.0.1", port)
        monkeypatch.setattr(os, "environ", dict(zip(ranks.WITHOUT_LAUNCHER, values)))
        line = f"cannot meet the other ranks at 127.0.0.1:{port}: .*$"
        with pytest.raises(ranks.UserError, match=line):
            ranks.start_distributed()


def test_a_rank_has_its_share_of_the_cores_and_its_gpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(7))
    monkeypatch.setattr(torch, "set_num_threads", mock.Mock())
    monkeypatch.setattr(torch, "cuda", mock.Mock(device_count=lambda: 2))
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = ranks.choose_device(2)
    assert device == torch.device("cuda", 1)
    torch.set_num_threads.assert_called_with(3)
    torch.cuda.set_device.assert_called_with(device)
    with pytest.raises(ranks.UserError, match=r"^8 ranks and 2 GPU\(s\) here: .*$"):
        ranks.choose_device(8)
    torch.set_num_threads.assert_called_with(1)


def test_the_cpu_stack_sees_no_gpu():
    """PyPI's torch for CUDA would find one, which vLLM's build for CPUs cannot use."""
    words = (
        "import os; from nanoorz import process; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    )
    assert run_python("-c", words, env={"CUDA_VISIBLE_DEVICES": "0"}).stdout == "''\n"


def test_seeds_are_the_same_in_every_process():
    assert ranks.hash64(1, "a") == 2461651067226055738


def test_a_torch_for_gpus_that_finds_none_is_refused(monkeypatch):
    """Else an old driver, or a job on the wrong machine, would train on the CPU without a word."""
    ranks.check_stack("13.0", has_gpu=True)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [name])
    ranks.check_stack("13.0", has_gpu=False)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ranks.UserError, match="CUDA 13.0 .* driver 580 .* nvidia-smi.*$"):
        ranks.choose_device(1)


@pytest.mark.parametrize("answer, is_told", [("exit 0", True), ("exit 9", False), (None, False)])
def test_a_torch_for_cpus_beside_a_gpu_warns(answer, is_told, tmp_path, monkeypatch, capsys):
    """nvidia-smi is also installed where there is no GPU."""
    if answer:
        stand_in(tmp_path, "nvidia-smi", answer)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    ranks.check_stack(None, has_gpu=False)
    assert ("the packages for CPUs are installed" in capsys.readouterr().err) == is_told


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
    assert process.Signals(store).poll()
    other = process.Signals(store)
    assert not dist.HashStore.check(store, ["stop"])
    assert other.poll() and other.poll(), "the second look tells the other ranks"
    assert dist.HashStore.check(store, ["stop"])


def test_an_error_of_one_rank_is_told_to_the_others_and_is_no_signal(handlers):
    store = dist.HashStore()
    mine = process.Signals(store)
    other = process.Signals(store)
    mine.fail()
    assert mine.poll() and other.poll()
    assert mine.failed and not mine.asked


def test_only_a_second_interrupt_ends_a_rank_at_once(handlers, capfd):
    """The first interrupt may come after another signal, and must not cut off the save."""
    mine = process.Signals(dist.HashStore())
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        assert signal.getsignal(number) == mine.handle
        signal.raise_signal(number)
    assert mine.poll()
    assert capfd.readouterr().err == "stopping; a second Ctrl-C ends at once\n"
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == mine.handle


def test_stop_together_stops_all_ranks_for_an_error_of_one(process_group, monkeypatch, capfd):
    """If one rank alone raised its error, the others would wait, and nothing would be saved. An
    error counts more than a signal to another rank."""
    with ranks.stop_together():
        pass
    faults = {
        ranks.UserError("this cannot work"): "this cannot work",
        ValueError("of\nthis rank"): r"ValueError: of this rank \(.*test_common.py, line \d+\)",
        # All ranks have agreed on it already.
        ranks.Stopped(): "None",
    }
    for error, fault in faults.items():
        with pytest.raises(ranks.Stopped, match=f"^{fault}$"), ranks.stop_together():
            raise error
    told = capfd.readouterr().err
    assert told.count("Traceback (most recent") == 1, "what is no UserError has a traceback"
    # The trace has our lines, without those of libraries and of context managers, and the notes.
    with pytest.raises(ranks.Stopped), ranks.stop_together(), log_file.Clock(3)("advantage"):
        torch.ones(2).view(3)
    trace = capfd.readouterr().err.partition("Traceback without libraries (run.log")[2]
    _, place, code, *_, note = trace.splitlines()  # Python 3.13 adds a line of marks below the code
    assert "test_common.py" in place and code.strip() == "torch.ones(2).view(3)"
    assert note.startswith("in phase advantage of step 3")
    others = [(True, None, ""), (False, "of another rank", "")]
    monkeypatch.setattr(ranks, "gather", lambda mine: [mine, *others])
    with pytest.raises(ranks.Stopped, match="^of another rank$"), ranks.stop_together():
        pass


# ---- before the slow imports ---------------------------------------------------------------------

IN_C = """import ctypes
from nanoorz.process import leave_on_signals
leave_on_signals()
print("ready", flush=True)
mutex = ctypes.create_string_buffer(256)
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(mutex)  # the second time it never returns
"""


@pytest.mark.parametrize(
    "number, ranks, local_rank, code, lines",
    [
        (signal.SIGTERM, None, None, 0, 1),
        (signal.SIGINT, "1", "0", 0, 1),
        (signal.SIGUSR1, "2", "0", 1, 1),
        (signal.SIGTERM, "2", "1", 1, 0),
        (signal.SIGTERM, None, None, 0, None),
        (signal.SIGHUP, None, None, 0, 1),
    ],
)
def test_a_signal_during_start_up_ends_a_rank_even_within_c(number, ranks, local_rank, code, lines):
    """Python calls no handler before a function of C's returns, and a rank may wait there for half
    an hour. One rank on a machine says a line. lines is None: nobody reads the output any more, as
    after Ctrl-C in `python train.py 2>&1 | tee log`."""
    env = {"WORLD_SIZE": ranks, "LOCAL_RANK": local_rank} if ranks else None
    with start_python("-c", IN_C, env=env) as process:
        assert process.stdout.readline() == "ready\n"
        stat = Path(f"/proc/{process.pid}/stat")
        # It sleeps in C.
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", process)
        if lines is None:
            process.stderr.close()
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    line = "stopped during start-up: nothing is lost\n"
    assert (process.returncode, said) == (code, line * (lines or 0))


def test_nohup_lets_a_run_go_on_when_its_terminal_is_closed():
    code = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_{})\n"
    code += "from nanoorz import process\nprint(signal.SIGHUP in process.STOPS)"
    assert run_python("-c", code.format("IGN")).stdout == "False\n"
    assert run_python("-c", code.format("DFL")).stdout == "True\n"


def test_a_signal_during_the_export_says_what_is_left_to_do():
    """The thread of the start-up still waits, and gets no signal any more."""
    code = IN_C.replace("print(", "leave_on_signals('the last words')\nprint(")
    with start_python("-c", code) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
    assert (process.returncode, said) == (0, "the last words\n")


IN_PARENT = """import os, signal, time
from nanoorz.process import leave_on_signals
leave_on_signals()
read_end, write_end = os.pipe()
child = os.fork()
if child == 0:
    os.write(write_end, b"1")
    time.sleep(60)
os.read(read_end, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
time.sleep(0.5)
os._exit(5)
"""


def test_a_signal_to_a_forked_child_ends_the_child_alone():
    """It has the pipe of its parent. A task may use processes to load its problems."""
    assert run_python("-c", IN_PARENT, code=5).stdout == f"{-signal.SIGTERM}\n"


IN_COLLECTIVE = """import os, signal
from nanoorz.process import leave_on_signals
leave_on_signals()
from nanoorz import ranks
from nanoorz.ranks import print_crash
rank, *_ = ranks.start_distributed()
try:
    if rank == 0:
        ranks.gather("both are here")
        print("ready", flush=True)
        signal.pause()
    for _ in range(2):
        ranks.gather("both are here")
except Exception as error:
    print_crash(error)
    os._exit(1)  # as train.py ends
"""


def test_a_signal_to_a_rank_ends_another_rank_in_a_collective_with_one_line():
    with held_port() as port:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [
            start_python("-c", IN_COLLECTIVE, env=place | {"RANK": rank, "LOCAL_RANK": rank})
            for rank in "01"
        ]
        with ranks[0], ranks[1]:
            assert ranks[0].stdout.readline() == "ready\n"
            ranks[0].send_signal(signal.SIGTERM)
            said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert said[0] == "stopped during start-up: nothing is lost\n"
    assert "rank 1: another rank has ended (" in said[1] and "Traceback" not in said[1]


IN_RUN = """import os, time
import torch.distributed as dist
from nanoorz.process import Signals, leave_on_signals
leave_on_signals()
signals = Signals(dist.HashStore())
print("ready", flush=True)
while not signals.asked:
    time.sleep(0.05)
print("asked", flush=True)
os._exit(5)
"""


def test_after_the_start_up_a_signal_only_asks_the_run_to_stop():
    with start_python("-c", IN_RUN) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)
    assert (process.returncode, said) == (5, ("asked\n", ""))


READ_BACK = """import ctypes
from nanoorz.process import follow_launcher
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
from nanoorz import process
pool = ProcessPoolExecutor(1)
pool.submit(abs, 1).result()
pool.submit(time.sleep, 9999)
process.end(3)
"""


def test_the_end_of_a_process_ends_the_pool_of_a_tool():
    """The process of the pool would keep the pipe open, and this test would wait for its end."""
    run_python("-c", POOL, code=3)
