"""Network interfaces, and which of them leads to another machine. Opens no connection."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from ipaddress import ip_address

import psutil

from stepladder.core.address import find_source_address


@dataclass(frozen=True)
class Interface:
    """A network interface. Its speed is that of the driver; many virtual ones have None."""

    name: str
    addresses: tuple[str, ...] = ()
    up: bool = True
    speed_mbit: int | None = None

    def __post_init__(self) -> None:
        check_addresses(*self.addresses)


@dataclass(frozen=True)
class Peer:
    """Another machine.

    Args:
        host: The name or address that was asked for; empty for none.
        addresses: What the name resolves to.
        source: The address of this machine from which a packet is sent to it.
        interface: The interface with that address; empty where it is not known.
        error: Why the machine cannot be reached.
    """

    host: str = ""
    addresses: tuple[str, ...] = ()
    source: str = ""
    interface: str = ""
    error: str = ""

    def __post_init__(self) -> None:
        check_addresses(*self.addresses)
        if self.source:
            check_addresses(self.source)


def check_addresses(*texts: str) -> None:
    """Raise ValueError where a text is no address: a stored bundle may hold anything."""
    for text in texts:
        ip_address(text.partition("%")[0])


def find_interfaces() -> tuple[Interface, ...]:
    stats = psutil.net_if_stats()
    interfaces = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        ip_addresses = [
            address.address.partition("%")[0]
            for address in addresses
            if address.family in (socket.AF_INET, socket.AF_INET6)
        ]
        is_up = name in stats and stats[name].isup
        # By ioctl: /sys may show another network namespace's devices, as in a container.
        speed_mbit = stats[name].speed if name in stats else None
        interfaces.append(Interface(name, tuple(ip_addresses), is_up, speed_mbit or None))
    return tuple(interfaces)


def inspect_peer(host: str) -> Peer:
    """Ask the kernel for its route to a host; an empty name is no host.

    Connecting a datagram socket sends nothing.
    """
    if not host:
        return Peer()
    host = host.strip("[]")
    addresses: tuple[str, ...] = ()
    try:
        resolved = [str(info[4][0]) for info in socket.getaddrinfo(host, None)]
        addresses = tuple(dict.fromkeys(resolved))
        source = find_source_address(host)
    except OSError as error:
        return Peer(host, addresses, error=str(error.strerror))
    names = (i.name for i in find_interfaces() if source in i.addresses)
    return Peer(host, addresses, source, next(names, ""))


def find_port_error(port: int | None) -> str:
    """Return why a port cannot be opened on all addresses of this machine; empty if it can."""
    if port is None:
        return ""
    with socket.socket() as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
            listener.listen(1)
        except (OSError, OverflowError) as error:
            return str(getattr(error, "strerror", None) or error)
    return ""
