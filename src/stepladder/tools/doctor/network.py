"""Network interfaces, and which of them leads to another machine. Opens no connection."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from ipaddress import ip_address

import psutil

from stepladder.core.address import find_source_address


@dataclass(frozen=True)
class Interface:
    """speed_mbit: as the driver says, or None: many virtual ones have none."""

    name: str
    addresses: tuple[str, ...] = ()
    up: bool = True
    speed_mbit: int | None = None

    def __post_init__(self) -> None:
        check_addresses(*self.addresses)


@dataclass(frozen=True)
class Peer:
    """Another machine. source: this machine's address on the way there.  interface: that has it, or
    "".

    host: "" where nobody has asked for one.
    """

    host: str = ""
    addresses: tuple[str, ...] = ()
    source: str = ""
    interface: str = ""
    error: str = ""

    def __post_init__(self) -> None:
        check_addresses(*self.addresses, *[self.source] * bool(self.source))


def check_addresses(*texts: str) -> None:
    """Raises ValueError where one is none: a bundle may hold anything."""
    for text in texts:
        ip_address(text.partition("%")[0])


def find_interfaces() -> tuple[Interface, ...]:
    stats = psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    return tuple(
        Interface(
            name,
            tuple(a.address.partition("%")[0] for a in addresses if a.family in families),
            name in stats and stats[name].isup,
            # By ioctl: /sys may show another network namespace's devices, as in a container.
            (stats[name].speed or None) if name in stats else None,
        )
        for name, addresses in sorted(psutil.net_if_addrs().items())
    )


def look_at_peer(host: str) -> Peer:
    """The kernel is asked for its route; connecting a datagram socket sends nothing."""
    host = host.strip("[]")
    addresses: tuple[str, ...] = ()
    try:
        addresses = tuple(
            dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None))
        )
        source = find_source_address(host)
    except OSError as error:
        return Peer(host, addresses, error=str(error.strerror))
    interface = next((one.name for one in find_interfaces() if source in one.addresses), "")
    return Peer(host, addresses, source, interface)


def look_at_port(number: int) -> str:
    """Why it cannot be opened on this machine, on all addresses; or ""."""
    with socket.socket() as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", number))
            listener.listen(1)
        except (OSError, OverflowError) as error:
            return str(getattr(error, "strerror", None) or error)
    return ""
