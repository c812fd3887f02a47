"""What the ranks of a run do together: the process group, gathering, agreeing on errors.

The five main files import this file, so copy it with them. On one machine it needs torch alone, on
several machines also lib/network.py.
"""

import contextlib
import datetime
import hashlib
import os
import socket
import subprocess
import sys
import traceback

import torch
import torch.distributed as dist

PATIENCE = datetime.timedelta(minutes=30)  # the longest wait for another rank
# The variables that a launcher sets, and their values without a launcher.
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


class UserError(Exception):
    """What the user can mend. Its text is one line: what, where, what to do. Exit code 2."""


class Stopped(Exception):
    """All ranks have agreed to save and leave.

    fault: what is broken. It is None if a signal asked the ranks to stop.
    """

    def __init__(self, fault: str | None = None):
        super().__init__(fault)
        self.fault = fault


def hash64(*parts):
    """A seed in [0, 2**63) from any printable parts: the same one on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def gather(value):
    """A list of each rank's `value`, in rank order. A collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def print0(*words):
    """Prints on rank 0 alone."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def here():
    return f"machine {socket.gethostname()}, rank {dist.get_rank()}"


# ---- errors: an error on one rank must stop all ranks --------------------------------------------

# If one rank raised an error alone, the other ranks would wait for that rank in their next
# collective. What happens depends on the place of the error:
# - Inside `raise_together` (the set-up): all ranks raise the UserError.
# - Inside `stop_together` (the loop, before the weights change): all ranks raise Stopped, save the
#   last finished step, and end.
# - At the disk (`try_disk` of ckpt.py): the rank keeps the error's text until the ranks gather.
# - Elsewhere: the rank ends with a traceback, and the launcher ends the other ranks.


@contextlib.contextmanager
def raise_together():
    """A UserError inside, on one rank or on several, is raised on all ranks. A collective.

    It is for the set-up: a file may be wrong on one machine alone.
    """
    wrong = None
    try:
        yield
    except UserError as error:
        wrong = error
    reports = gather((here(), wrong))
    # If all ranks have an error, the name of one rank would say nothing.
    if all(error for _, error in reports):
        raise reports[0][1]
    for place, error in reports:
        if error:
            raise UserError(f"{place}: {error}")


@contextlib.contextmanager
def stop_together():
    """An error inside on one rank is raised on all ranks as Stopped. A collective.

    It is for the loop, where the last finished step can be saved. A rank that fails jumps to the
    `agree` below. The next collective of the other ranks must be an `agree` too. So the code inside
    calls `agree` after lines that can fail on one rank alone, as rollout.draw does.
    """
    fault = None
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        fault = describe_error(error)
    agree(False, fault)


def agree(is_asked, fault=None):
    """Raises Stopped on all ranks if one of them is asked to stop, or has a fault. A collective."""
    reports = gather((is_asked, fault))
    faults = [fault for _, fault in reports if fault]
    if faults or any(is_asked for is_asked, _ in reports):
        raise Stopped(faults[0] if faults else None)


def check_result(cfg, method, holds, wanted, found):
    """Raises UserError if a method of the recipe has returned what the run cannot use.

    cfg: a ppo.Recipe. method: the name. holds: is the result right? wanted: what the method should
    return. found: its result, or a description of it. The error names all classes that have the
    method, the nearest first.
    """
    if holds:
        return
    owners = [x.__name__ for x in type(cfg).__mro__ if method in vars(x)]
    owner = f"{' over '.join(owners)}: " if owners else ""
    if isinstance(found, torch.Tensor):
        found = f"a tensor {tuple(found.shape)}"
    elif not isinstance(found, str):
        found = f"{found!r:.99} ({type(found).__name__})"
    raise UserError(f"{owner}{method} must return {wanted}, and returned {one_line(found)}")


def tell_once(store, text):
    """Prints an error that several ranks may have. The first rank that comes prints it.

    Without a store (None), one rank of each machine prints it.
    """
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    # If rank 0 has ended, the store is gone, and `add` raises. Rank 0 has printed the error before.
    with contextlib.suppress(RuntimeError):
        if store:
            is_first = store.add("told", 1) == 1
        if is_first:
            print(text, file=sys.stderr)


def one_line(error):
    """An error's text without line breaks, at most 400 characters of it."""
    return " ".join(str(error).split())[:400]


def describe_error(error):
    """One line for the screen. The whole traceback goes to run.log."""
    if isinstance(error, UserError):
        return str(error)
    # lib/report.py sends file descriptor 2 to run.log, and makes a new sys.stderr for the screen.
    # sys.__stderr__ still writes to descriptor 2.
    traceback.print_exception(error, file=sys.__stderr__)
    return name_error(error)


def name_error(error):
    """An error's class, text and place."""
    text = f"{type(error).__name__}: {one_line(error)}"
    # The last line of our code or of the user's, and not of a library that it has called.
    places = traceback.extract_tb(error.__traceback__)
    own = [x for x in places if "/lib/python3" not in x.filename and x.filename[0] != "<"]
    place = (own or places)[-1]
    # The text of a SyntaxError has its place.
    is_syntax = isinstance(error, SyntaxError)
    return text if is_syntax else f"{text} ({place.filename}, line {place.lineno})"


# ---- the process group ---------------------------------------------------------------------------


def start_distributed():
    """Joins the process group that `accelerate launch` has prepared, or makes a group of one rank.

    Returns rank, number of ranks, device, and a key-value store that a rank can use without the
    other ranks. Call this before vLLM starts: vLLM joins the same group, and on a CPU it keeps the
    number of threads that it finds. Raises UserError.
    """
    # For one process `accelerate launch` sets no variable of ALONE. vLLM and DeepSpeed need them.
    is_alone = "RANK" not in os.environ
    if is_alone:
        os.environ |= ALONE
    missing = [name for name in ALONE if name not in os.environ]
    if missing:
        raise UserError(
            f"RANK is set, but not {', '.join(missing)}: use `accelerate launch`, or set them all"
        )
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if ranks_here < world:
        from lib.network import announce_interface

        announce_interface(os.environ["MASTER_ADDR"])
    device = choose_device(ranks_here)
    # A store in memory needs no port. Another process could have taken a port.
    store = dist.HashStore() if is_alone else meet_ranks()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)
    # The prefix keeps our keys apart from torch's keys.
    return rank, world, device, dist.PrefixStore("nanoorz", store)


def meet_ranks() -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT, which rank 0 opens."""
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=PATIENCE))
    except dist.DistError as error:
        raise UserError(
            f"cannot meet the other ranks at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']}: {one_line(error)}"
        ) from error
    return store


def choose_device(ranks_here):
    """This rank's GPU, or the CPU on a machine without a GPU. Also sets the number of threads."""
    has_gpu = torch.cuda.is_available()
    check_stack(torch.version.cuda, has_gpu)
    # accelerate sets one thread. Once vLLM runs on a CPU, the number cannot be changed.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_here))
    if not has_gpu:
        return torch.device("cpu")
    cards = torch.cuda.device_count()
    if ranks_here > cards:
        raise UserError(f"{ranks_here} ranks and {cards} GPU(s) here: lower --num_processes")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def check_stack(cuda, has_gpu):
    """Refuses a run on the CPU that was meant for a GPU, or warns of it.

    cuda: the CUDA version that torch was built for, or None. Raises UserError.
    """
    if has_gpu:
        return
    if cuda:
        raise UserError(
            f"torch is built for CUDA {cuda} and finds no GPU: CUDA 13 needs driver 580 or newer "
            "(see nvidia-smi); a machine without GPUs needs requirements-cpu.txt"
        )
    # nvidia-smi may be installed on a machine without a GPU: then `nvidia-smi -L` fails.
    if subprocess.getstatusoutput("nvidia-smi -L")[0] == 0:
        advice = "torch is built for CPUs; for the GPU install requirements.txt"
        tell_once(None, f"warning: nvidia-smi finds a GPU, but {advice}")
