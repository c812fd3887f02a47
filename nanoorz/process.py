"""This process: its environment variables, and the signals that ask it to stop.

The import of this file sets the environment variables. Libraries read them: OpenMP and torch when
torch is imported, so train.py imports this file first; vLLM and DeepSpeed later. This file imports
the standard library alone.

SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and SIGHUP (a terminal is closed) ask a run to stop. Before the
models are loaded there is nothing to save, and the process ends at once (`leave_on_signals`).
Afterwards the run saves its last finished step and ends (`Signals`). During the export all is
saved, so a signal ends the process at once.
"""

import contextlib
import ctypes
import importlib.metadata
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

# ---- environment variables -----------------------------------------------------------------------

# {variable: value}. If the user has set a variable, the user's value stays.
ENVIRONMENT = {
    # OpenMP: threads without work sleep. By default they spin, and take a core from another rank.
    "OMP_WAIT_POLICY": "passive",
    # torch: ask the kernel for large pages. On a CPU an update takes up to a third less time.
    "THP_MEM_ALLOC_ENABLE": "1",
    # torch: segments of GPU memory can grow, so less memory is lost in gaps between tensors. vLLM
    # turns this off for the memory that it frees in its sleep.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # The hub's client would print two lines for each of its retries.
    "HF_HUB_VERBOSITY": "error",
    # DeepSpeed compiles its CPU op at the first start and keeps the result in this folder. Each
    # virtual environment has a folder of its own, because another environment compiles it again.
    "TORCH_EXTENSIONS_DIR": os.path.join(sys.prefix, "torch_extensions"),
    # vLLM: run in this process, and use as many threads as the trainer.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM: log errors only, and send no statistics of its usage.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # vLLM: do not use the sampler of flashinfer, because it has no seed for each sample.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Triton: on a GPU multiply fp32 numbers in fp32 and not in TF32.
    "TRITON_F32_DEFAULT": "ieee",
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
# vLLM's build for CPUs cannot use a GPU. torch may be a build for CUDA all the same (Makefile), and
# it would find the GPU.
if any(importlib.metadata.distributions(name="vllm-cpu")):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# DeepSpeed compiles with the ninja of this virtual environment.
os.environ["PATH"] = f"{sys.prefix}/bin:{os.environ.get('PATH', os.defpath)}"


def name_accelerator():
    """Sets the variable that tells DeepSpeed the kind of the device.

    Without it DeepSpeed logs a warning on a CPU. Call this before the import of DeepSpeed.
    """
    import torch  # slow, and needs the variables above

    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")


# ---- signals -------------------------------------------------------------------------------------

PR_SET_PDEATHSIG = 1  # an option of Linux's prctl: send a signal when the parent ends
STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
# `nohup` lets its program ignore SIGHUP.
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    STOPS.append(signal.SIGHUP)


def follow_launcher():
    """Sends this process a SIGTERM when the `accelerate launch` that started it has ended.

    An `accelerate launch` of one process ends at a SIGTERM and does not pass the signal on. So the
    kernel sends one to this process, and the run is saved. If the parent is another program, the
    run goes on when the parent ends: a shell may have started the run by `nohup`.
    """
    # In a container the /proc of the parent may be hidden. Then this function does nothing.
    with contextlib.suppress(OSError):
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        # `accelerate launch`, `accelerate-launch`, `python -m accelerate.commands.launch`
        is_launcher = re.search(rb"accelerate[^\0]*[\0.-]launch\0", parent)
        # A launcher of several processes sets RANK, and passes signals on.
        if is_launcher and "RANK" not in os.environ:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def leave_on_signals(last_words="stopped during start-up: nothing is lost"):
    """From now on a signal ends this process with these words, until a `Signals` is made.

    Python calls handlers in the main thread, which may wait for another rank inside a C function.
    That would be too late. But as soon as a signal comes, Python writes a byte into a pipe
    (signal.set_wakeup_fd), and another thread waits for this byte.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in STOPS:
        # With the default action the kernel would end the process, without a word.
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=forget_signals)
    threading.Thread(target=leave, args=[read_end, last_words], daemon=True).start()


def forget_signals():
    """A forked child has the pipe, too. A signal to the child must not end its parent."""
    signal.set_wakeup_fd(-1)
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)


def leave(read_end, last_words):
    """Waits for a signal and ends the process. The exit code is 0, or 1 with several ranks.

    If a rank ends with 1, the launcher ends the other ranks. After a 0 they would wait for ever.
    """
    os.read(read_end, 1)
    # Ctrl-C may also have ended the program that reads our stderr.
    with contextlib.suppress(OSError):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(last_words, file=sys.stderr)
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    os._exit(0 if is_alone else 1)


def end(code):
    """Ends this process with its children of multiprocessing, such as those of a tool's pool.

    It leaves out Python's clean-up, in which the threads of gloo could abort the process, vLLM
    would wait 2.6 s, and a pool would wait for its tools.
    """
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


class Signals:
    """Tells all ranks to stop sampling if one of them gets a signal or has an error.

    That rank writes into a key-value store, which the other ranks read. A collective would make all
    ranks wait for each other, and each rank is busy with its own samples. A second SIGINT ends this
    process at once.

    asked: has this rank got a signal, or has another rank written into the store?
    failed: has this rank an error?
    """

    def __init__(self, store):
        """store: the one of `start_distributed` (ranks.py)."""
        self.store = store
        self.asked = False
        self.failed = False
        self.next_look = 0.0  # when `poll` reads the store again, in seconds of time.monotonic
        for number in STOPS:
            signal.signal(number, self.handle)
        # The thread of leave_on_signals waits on, and no byte comes any more.
        signal.set_wakeup_fd(-1)

    def handle(self, number, frame):
        """Python calls this in the main thread after a signal."""
        self.asked = True
        if number == signal.SIGINT:
            # From now on SIGINT has its default action: the kernel ends the process.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            # The handler may interrupt a print. Then a second print would be an error.
            with contextlib.suppress(OSError):
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    os.write(sys.stderr.fileno(), b"stopping; a second Ctrl-C ends at once\n")

    def fail(self):
        """Tells all ranks that this rank has an error, so that they stop sampling early."""
        self.failed = True
        self.store.set("stop", "1")

    def poll(self):
        """Returns whether any rank got a signal or has an error. Tells the other ranks of a signal
        to this rank. It is called often, so it reads the store at most twice a second."""
        if self.asked:
            self.store.set("stop", "1")
        elif not self.failed and time.monotonic() > self.next_look:
            self.next_look = time.monotonic() + 0.5
            # A signal may come during the call of `check`. So never set `asked` to False here.
            if self.store.check(["stop"]):
                self.asked = True
        return self.asked or self.failed
