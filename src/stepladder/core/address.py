"""How nodes reach each other."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import socket
import sys
import time
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address

from stepladder.core.errors import InputError
from stepladder.core.numbers import MOST_PORT, whole

SECONDS_TO_ANSWER = 3.0
SECONDS_FOR_A_NAME = 20.0


def parse_endpoint(text: str) -> tuple[str, int]:
    """HOST:PORT, or [IPv6]:PORT. Raises InputError."""
    host, _, port = text.rpartition(":")
    number = whole(port, 1, MOST_PORT)
    if number is None or not re.fullmatch(r"\[[^][\s]+\]|[^][\s]+", host):
        raise InputError(
            f"--rdzv-endpoint {text!r} is not HOST:PORT", "--rdzv-endpoint node1:29400"
        )
    return host.strip("[]"), number


def own_address() -> str:
    """This machine's host name where it resolves; in a test bed without names, the loopback
    address.
    """
    name = socket.getfqdn()
    return name if addresses_of(name) else "127.0.0.1"


def is_local(host: str) -> bool:
    """Whether `host` is an address of this machine: only those can be bound."""
    return is_bindable(host, 0)


def is_bindable(host: str, port: int) -> bool:
    """Whether this process could listen on `port` now, of `host` or (if that is "") of every
    address.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True


def free_port() -> int:
    """A TCP port that nobody listens on now, nor is given by Linux to others before rank 0 comes to
    it.
    """
    return free_ports(1)[0]


def free_ports(count: int) -> tuple[int, ...]:
    candidates = secrets.SystemRandom().sample(
        range(20000, 32000), 1000
    )  # no seed of a user's makes two alike
    return tuple(itertools.islice((port for port in candidates if is_bindable("", port)), count))


def answers(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((host, port), SECONDS_TO_ANSWER).close()
    except OSError:
        return False
    return True


def interface_towards(host: str) -> str | None:
    """The network device by which this machine reaches `host`, or None for the loopback device's
    own address.

    A machine whose own name is a loopback address, as Debian sets it up, is meant as others see it:
    then it is the device of the default route, or else the first that is up."""
    if host in ("localhost", "127.0.0.1", "::1"):
        return None
    import psutil  # late: it would be a third of the time that `train --help` takes

    addresses = psutil.net_if_addrs()
    devices = {
        found.address.partition("%")[0]: device
        for device, all_of in addresses.items()
        for found in all_of
    }
    for towards in (
        host,
        "192.0.2.1",
        "2001:db8::1",
    ):  # the others stand for anywhere: no packet is sent
        with suppress(OSError):
            address = source_towards(towards)
            if not ip_address(address).is_loopback:
                return devices.get(address)
    up = [
        device
        for device, state in psutil.net_if_stats().items()
        if state.isup and "loopback" not in state.flags
    ]
    return next((device for device in addresses if device in up), None)


def source_towards(host: str) -> str:
    """This machine's own address on the way to `host`, by the kernel's routes; nothing is sent.
    Raises OSError.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0]).partition("%")[0]


def show_endpoint(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def refuse_unreachable(flag: str, host: str, local_addr: str) -> None:
    """Raises InputError where other nodes cannot reach `host`, which `flag` gave.

    Loopback is taken where this node's own address is loopback too: all nodes are then on this
    machine. So they are where Slurm's name for this node is not the machine's, as in a plain lab.
    """
    node = os.environ.get("SLURMD_NODENAME", "")
    on_one_machine = node not in ("", socket.gethostname().partition(".")[0])
    on_one_machine |= any(own.is_loopback for own in addresses_of(local_addr))
    for found in addresses_of(host):
        if found.is_link_local:
            raise InputError(
                f"{flag} {host} is a link-local address, which has no meaning on other nodes",
                "another address of that node: ip -brief address",
            )
        if found.is_loopback and not on_one_machine:
            raise InputError(
                f"{flag} {host} is this machine's loopback address, which other nodes cannot reach",
                "the first node's address, or --local-addr 127.0.0.1 with all nodes on this machine",
            )


def await_name(flag: str, host: str, seconds: float) -> None:
    """Until `host`, which `flag` gave, has an address: in some clusters names come with their
    machines.

    seconds: to wait at most, and no more than SECONDS_FOR_A_NAME. Raises InputError.
    """
    deadline = time.monotonic() + min(seconds, SECONDS_FOR_A_NAME)
    while not addresses_of(host):
        if time.monotonic() > deadline:
            raise InputError(
                f"{flag}: the name {host} is not known here", f"getent hosts {host}; or its address"
            )
        time.sleep(0.3)


def refuse_no_host(flag: str, host: str) -> None:
    """Raises InputError where no host can have the name that `flag` gave."""
    try:
        host.strip("[]").encode("idna")
    except UnicodeError as error:
        found = f"{flag} {host!r} cannot be the name of a host: a part of it is empty or longer than 63 letters"
        raise InputError(found, f"{flag} node1, or its address") from error


def addresses_of(host: str) -> list[IPv4Address | IPv6Address]:
    """What a name or an address stands for; nothing where it is not known here."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except (
        OSError,
        UnicodeError,
    ):  # the latter: a part of the name is empty, or longer than 63 letters
        return []
    return [ip_address(str(address[0]).partition("%")[0]) for *_, address in found]


def address_towards(host: str) -> str:
    """This machine's address on the way to `host`; `host` itself where that is this machine."""
    try:
        return host if is_local(host) else source_towards(host)
    except OSError:
        return own_address()


def is_loopback(host: str) -> bool:
    """Whether only this machine can come to `host`."""
    found = addresses_of(host)
    return bool(found) and all(address.is_loopback for address in found)


def on_this_machine() -> dict[str, str]:
    """Variables that tell gloo to listen on the loopback device alone; none where the user has
    named another.

    Raises InputError.
    """
    refuse_absent_interface()
    return (
        {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or "lo"}
        if sys.platform == "linux"
        else {}
    )


def name_interface(host: str) -> None:
    """Tell gloo and NCCL, each in its syntax, which interface leads to `host`, unless the user has:
    where a host name stands for 127.0.1.1 they would take loopback, and on a rented machine the one
    that leads outside.

    Raises InputError where the user has named none of this machine's.
    """
    refuse_absent_interface()
    device = interface_towards(host)
    if device is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", device)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={device}")


def refuse_absent_interface() -> None:
    """Raises InputError where GLOO_SOCKET_IFNAME lists what is not here: each rank would show a
    page of C++.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    here = sorted(name for _, name in socket.if_nameindex())
    if len(named) > 1 and not set(named.removesuffix(",").split(",")) <= set(
        here
    ):  # torch skips a single letter
        raise InputError(
            f"GLOO_SOCKET_IFNAME={named!r} names no network interface of this machine",
            f"unset GLOO_SOCKET_IFNAME, or name one of {', '.join(here)}",
        )
