"""What the ranks of a run do together: the process group, signals, gathering. And the one error.

It imports torch and the standard library alone, so that a stage can be copied together with it.
"""

import contextlib
import datetime
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback

import torch
import torch.distributed as dist

PATIENCE = datetime.timedelta(minutes=30)  # then a silent rank is given up
LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class UserError(Exception):
    """What the user can mend: one line that says what, where and what to do. Exit code 2."""


class Stopped(Exception):
    """All ranks have agreed to save and leave: on request, or because of a fault.

    fault: says what is broken; None on request.
    """

    def __init__(self, fault: str | None = None):
        super().__init__(fault)
        self.fault = fault


def hash64(*parts):
    """A seed in [0, 2**63) from any printable parts; the same on every machine and Python run."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def gather(value):
    """`value` of every rank, in rank order. A collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def share_errors():
    """An error inside on one rank becomes Stopped on all ranks. A collective.

    A rank with an error comes to its end early, so the others' next collective must be `agree` too.
    """
    fault = None
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        fault = describe_error(error)
    agree(False, fault)


def agree(is_asked, fault):
    """A collective: raises Stopped on every rank if any was asked, or has a fault to tell."""
    reports = gather((is_asked, fault))
    faults = [fault for _, fault in reports if fault]
    if faults or any(is_asked for is_asked, _ in reports):
        raise Stopped(*faults[:1])


def print0(*words):
    """Prints on rank 0 alone."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def here():
    return f"machine {socket.gethostname()}, rank {dist.get_rank()}"


def tell_once(store, text):
    """Prints an error that several ranks may have: the rank that comes first prints it.

    Before there is a store, one rank on each machine does.
    """
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    # If the store has gone, rank 0 has ended, and has told the error before.
    with contextlib.suppress(RuntimeError):
        if store:
            is_first = store.add("told", 1) == 1
        if is_first:
            print(text, file=sys.stderr)


def start_distributed():
    """Joins the process group that `accelerate launch` laid out, or makes a group of one.

    Returns rank, world size, device, and a key-value store through which ranks can speak outside of
    collectives. It comes before any engine: vLLM joins the same group and, on a CPU, keeps the
    number of threads that it finds. Raises UserError.
    """
    # A plain `accelerate launch train.py` sets none of the names, which vLLM and DeepSpeed ask for.
    is_alone = "RANK" not in os.environ
    if is_alone:
        os.environ |= dict(zip(LAUNCHER_NAMES, ("0", "0", "1", "127.0.0.1", "0")))
    missing = [name for name in LAUNCHER_NAMES if name not in os.environ]
    if missing:
        raise UserError(
            f"RANK is set, but not {', '.join(missing)}: use `accelerate launch`, or set them all"
        )
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if ranks_here < world:
        announce_interface(os.environ["MASTER_ADDR"])
    device = choose_device(ranks_here)
    # A group of one needs no port, which another process could take.
    store = dist.HashStore() if is_alone else meet_ranks()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)
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
    """This rank's GPU, or the CPU on a machine without one; and this rank's share of the cores."""
    has_gpu = torch.cuda.is_available()
    check_stack(torch.version.cuda, has_gpu)
    # accelerate sets one OpenMP thread, and once vLLM runs on a CPU the number cannot be changed.
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
    """A run that was meant for a GPU must not become a run on the CPU without a word.

    cuda: the version that torch was built for; None if for CPUs. Raises UserError.
    """
    if has_gpu:
        return
    if cuda:
        raise UserError(
            f"torch is built for CUDA {cuda} and finds no GPU: CUDA 13 needs driver 580 or newer "
            "(see nvidia-smi); a machine without GPUs needs requirements-cpu.txt"
        )
    # nvidia-smi may also be there without a card.
    if subprocess.getstatusoutput("nvidia-smi -L")[0] == 0:
        advice = "torch is built for CPUs; for the GPU install requirements.txt"
        tell_once(None, f"warning: nvidia-smi finds a GPU, but {advice}")


def announce_interface(master):
    """Tells gloo and vLLM which of our addresses the other machines can reach.

    Left alone they look up the host's own name, which often resolves to 127.0.1.1.
    """
    import psutil

    cards = psutil.net_if_addrs()
    interface_of = {entry.address: name for name in cards for entry in cards[name]}
    # On the first machine the way to MASTER_ADDR is the loopback: there, ask for the way out.
    for target in (master, "192.0.2.1"):
        address = address_towards(target)
        if address in interface_of and not address.startswith("127."):
            os.environ.setdefault("VLLM_HOST_IP", address)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of[address])


def address_towards(target):
    """Our own address on the route to `target`. Connecting a UDP socket sends nothing."""
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return probe.getsockname()[0]


def one_line(error):
    """An error's text without line breaks, at most 400 characters of it."""
    return " ".join(str(error).split())[:400]


def describe_error(error):
    """One line for the screen. run.log gets the whole traceback."""
    if isinstance(error, UserError):
        return str(error)
    # The screen has a stream of its own since lib/report.py sends what libraries print to run.log.
    traceback.print_exception(error, file=sys.__stderr__)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {one_line(error)} ({place.filename}, line {place.lineno})"


class Signals:
    """SIGTERM, SIGINT or SIGUSR1 on any rank stops the run on all ranks.

    The news travels through a key-value store, since the other ranks may be deep in their own
    sampling. A second SIGINT ends this process at once.
    """

    def __init__(self, store):
        self.store = store
        self.asked = False
        self.next_look = 0.0  # s
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self.handle)
        # leave_on_signals (lib/launcher.py) has blocked them.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def handle(self, number, frame):
        if number == signal.SIGINT:
            # The kernel acts on the second one, whatever the main thread is waiting for.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.asked = True

    def poll(self):
        """For inner loops: has any rank been asked to stop? Looks at the store twice a second."""
        if self.asked:
            self.store.set("stop", "1")
        elif time.monotonic() > self.next_look:
            self.next_look = time.monotonic() + 0.5
            # An assignment of what the store says would undo a signal that arrives meanwhile.
            if self.store.check(["stop"]):
                self.asked = True
        return self.asked

    def agree(self, fault=None):
        """A collective: raises Stopped on every rank if any was asked, or has a fault to tell."""
        agree(self.poll(), fault)

    @contextlib.contextmanager
    def share_same_error(self):
        """An error inside on all ranks becomes Stopped. It is for code with collectives in it.

        An error on some ranks alone is raised there. The other ranks cannot hear of it, because
        they wait in a collective, which ends when the first ranks are gone.
        """
        try:
            yield
        except Exception as error:
            failed = self.store.add("failed", 1)
            deadline = time.monotonic() + 30
            while failed < dist.get_world_size() and time.monotonic() < deadline:
                time.sleep(0.1)
                failed = self.store.add("failed", 0)
            if failed < dist.get_world_size():
                raise
            raise Stopped(describe_error(error)) from error
