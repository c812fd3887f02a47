"""The address of this machine, for runs on several machines. Only such a run loads this file."""

import contextlib
import os
import socket

import psutil


def announce_interface(master):
    """Tells gloo and vLLM which address of this machine the other machines can reach.

    Without that, gloo and vLLM look up the name of this machine, which often means 127.0.1.1.
    """
    interface_of = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            interface_of[entry.address] = name
    # On the first machine the route to MASTER_ADDR is the loopback. The route to an address outside
    # gives the right interface there. 192.0.2.1 is reserved for examples.
    # The first target with a usable address wins, because of setdefault.
    for target in (master, "192.0.2.1"):
        address = address_towards(target)
        if address in interface_of and not address.startswith("127."):
            os.environ.setdefault("VLLM_HOST_IP", address)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of[address])


def address_towards(target):
    """This machine's address on the route to `target`, or None without a route.

    The connect of a UDP socket sends nothing.
    """
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return probe.getsockname()[0]
