"""Addresses of this machine, and the network interface towards another machine."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

SIOCGIFADDR = 0x8915
"""Request of ioctl(2) for the IPv4 address of an interface (netdevice(7))."""


def address_towards(host: str) -> str | None:
    """The local address of packets to `host`; None where `host` is unreachable."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # A datagram socket: nothing is sent.
            return str(probe.getsockname()[0])
    return None


def is_this_machine(host: str) -> bool:
    """Return whether an address or a name belongs to this machine, so that a socket can be bound to it."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def interface_towards(host: str) -> str | None:
    """The name of the network interface towards `host`; None where unknown."""
    own = address_towards(host)
    if own is None or sys.platform != "linux" or ":" in own:
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    return None
