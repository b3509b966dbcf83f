"""Network addresses: how the nodes of a launch reach each other, and which ports are free."""

from __future__ import annotations

import itertools
import os
import random
import re
import secrets
import socket
import sys
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from stepladder.core.errors import InputError
from stepladder.core.numbers import MAX_PORT, parse_whole_number
from stepladder.core.waiting import wait_until

CONNECT_TIMEOUT_S = 3.0
NAME_TIMEOUT_S = 20.0
NAME_POLL_S = 0.3
# Below the range from which Linux gives ports to outgoing connections.
FREE_PORT_RANGE = range(20000, 32000)
FREE_PORT_CANDIDATES = 1000
# Documentation addresses (RFC 5737, RFC 3849) that stand for any host outside; nothing is sent.
ANY_HOSTS = ("192.0.2.1", "2001:db8::1")


def parse_endpoint(text: str) -> tuple[str, int]:
    """Split HOST:PORT, or [IPv6]:PORT, into host and port.

    Returns:
        The host without brackets, and the port, 1 to 65535.

    Raises:
        InputError: The text has another form, or the port is out of range.
    """
    host, _, port_text = text.rpartition(":")
    port = parse_whole_number(port_text, 1, MAX_PORT)
    if (
        port is None
        or (":" in host and not host.startswith("["))
        or not re.fullmatch(r"\[[^][\s]+\]|[^][\s]+", host)
    ):
        is_address = text.count(":") > 1
        example = format_endpoint(text.strip("[]"), 29400) if is_address else "node1:29400"
        raise InputError(f"--rdzv-endpoint {text!r} is not HOST:PORT", f"--rdzv-endpoint {example}")
    return host.strip("[]"), port


def format_endpoint(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets."""
    if ":" in host:
        host = f"[{host}]"
    return f"{host}:{port}"


def find_own_address() -> str:
    """Return this machine's host name, or the loopback address if the name does not resolve."""
    name = socket.getfqdn()
    return name if resolve_host(name) else "127.0.0.1"


def is_local(host: str) -> bool:
    """Tell whether `host` is an address of this machine: only those can be bound."""
    return can_bind(host, 0)


def can_bind(host: str, port: int) -> bool:
    """Tell whether this process could listen on a port of `host`, or, for "", of every address."""
    try:
        matches = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = matches[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True


def find_free_port() -> int:
    """Return a TCP port that is free, and stays so until rank 0 binds it.

    Linux gives none of these ports to other programs by itself.
    """
    return find_free_ports(1)[0]


def find_free_ports(count: int) -> tuple[int, ...]:
    """Return several free TCP ports."""
    # A seed that the user has set would choose the same ports in two launches.
    generator = random.Random(secrets.randbits(64))
    candidates = generator.sample(FREE_PORT_RANGE, FREE_PORT_CANDIDATES)
    free_ports = (port for port in candidates if can_bind("", port))
    return tuple(itertools.islice(free_ports, count))


def is_listening(host: str, port: int) -> bool:
    """Tell whether a process listens on a port of a host."""
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _find_interface_to(host: str) -> str | None:
    """Return the network interface by which this machine reaches `host`.

    A machine whose own name is a loopback address, as Debian sets it up, is meant as others see it:
    then it is the interface of the default route, or else the first one that is up.

    Returns:
        The name of the interface, or None if `host` is the address of the loopback interface.
    """
    if host in ("localhost", "127.0.0.1", "::1"):
        return None
    import psutil  # late: it would be a third of the time that `train --help` takes

    interfaces: dict[str, Any] = psutil.net_if_addrs()
    interface_by_address = {
        entry.address.partition("%")[0]: interface
        for interface, entries in interfaces.items()
        for entry in entries
    }
    for target in (host, *ANY_HOSTS):
        with suppress(OSError):
            address = find_source_address(target)
            if not ip_address(address).is_loopback:
                return interface_by_address.get(address)
    states = psutil.net_if_stats()
    for interface in interfaces:
        state = states.get(interface)
        if state is not None and state.isup and "loopback" not in state.flags:
            return interface
    return None


def find_source_address(host: str) -> str:
    """Return this machine's address on the way to `host`, by the kernel's routes; nothing is sent.

    Raises:
        OSError: The name is unknown, or there is no route.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0]).partition("%")[0]


def find_address_to(host: str) -> str:
    """Return this machine's address on the way to `host`, or `host` if it is this machine."""
    try:
        return host if is_local(host) else find_source_address(host)
    except OSError:
        return find_own_address()


def resolve_host(host: str) -> list[IPv4Address | IPv6Address]:
    """Return the addresses of a name or an address, or none if it is unknown on this machine."""
    if not host:
        return []
    try:
        matches = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # UnicodeError: a part of the name is empty or longer than 63 letters.
    except (OSError, UnicodeError):
        return []
    addresses = []
    for *_, address in matches:
        text, _, _ = str(address[0]).partition("%")  # without the interface
        addresses.append(ip_address(text))
    return addresses


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can connect to `host`."""
    addresses = resolve_host(host)
    return bool(addresses) and all(address.is_loopback for address in addresses)


def wait_for_name(flag: str, host: str, timeout_s: float) -> None:
    """Wait until `host`, the value of a flag, resolves: some clusters name a machine as it starts.

    Args:
        flag: The flag or variable, for the message.
        host: The name.
        timeout_s: Seconds to wait at most; never more than NAME_TIMEOUT_S.

    Raises:
        InputError: The name did not resolve in time.
    """
    why = f"{flag}: waiting until the name {host} is known here"
    is_known = partial(resolve_host, host)
    if not wait_until(is_known, min(timeout_s, NAME_TIMEOUT_S), why, NAME_POLL_S):
        raise InputError(
            f"{flag}: the name {host} is not known here", f"getent hosts {host}; or its address"
        )


def validate_host_name(flag: str, host: str) -> None:
    """Raise InputError if no host can have the name, the value of a flag."""
    try:
        host.strip("[]").encode("idna")
    except UnicodeError as error:
        raise InputError(
            f"{flag} {host!r} cannot be the name of a host: a part of it is empty or longer than"
            " 63 letters",
            f"{flag} node1, or its address",
        ) from error


def validate_reachable(flag: str, host: str, local_addr: str) -> None:
    """Check that other nodes can reach `host`, the value of a flag.

    A loopback address is accepted if all nodes run on this machine. That is the case if this node's
    own address is a loopback address too, or if Slurm's name for this node is not the machine's
    name, as in a lab.

    Raises:
        InputError: The host has a link-local address, or a loopback address although nodes run on
            several machines.
    """
    node = os.environ.get("SLURMD_NODENAME", "")
    is_lab_node = node not in ("", socket.gethostname().partition(".")[0])
    is_one_machine = is_lab_node or any(address.is_loopback for address in resolve_host(local_addr))
    for address in resolve_host(host):
        if address.is_link_local:
            raise InputError(
                f"{flag} {host} is a link-local address, which has no meaning on other nodes",
                "another address of that node: ip -brief address",
            )
        if address.is_loopback and not is_one_machine:
            raise InputError(
                f"{flag} {host} is this machine's loopback address, which other nodes cannot reach",
                "the first node's address, or --local-addr 127.0.0.1 with all nodes on this"
                " machine",
            )


def make_loopback_env() -> dict[str, str]:
    """Return the variables that make gloo listen on the loopback interface alone.

    An interface that the user has set stays.

    Raises:
        InputError: The user has set an interface that this machine does not have.
    """
    validate_interface()
    if sys.platform != "linux":
        return {}
    return {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or "lo"}


def set_interface_env(host: str) -> None:
    """Tell gloo and NCCL, each in its syntax, which interface leads to `host`.

    By themselves they would take the loopback interface where the host name stands for 127.0.1.1,
    and the one that leads outside on a rented machine. What the user has set stays.

    Raises:
        InputError: The user has set an interface that this machine does not have.
    """
    validate_interface()
    interface = _find_interface_to(host)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def validate_interface() -> None:
    """Check that GLOO_SOCKET_IFNAME names network interfaces that this machine has.

    Without this check each rank would print a page of C++ errors.

    Raises:
        InputError: The variable names an interface that this machine does not have.
    """
    setting = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(setting) <= 1:  # torch ignores a single letter
        return
    names = set(setting.removesuffix(",").split(","))
    known_names = sorted(name for _, name in socket.if_nameindex())
    if not names <= set(known_names):
        raise InputError(
            f"GLOO_SOCKET_IFNAME={setting!r} names no network interface of this machine",
            f"unset GLOO_SOCKET_IFNAME, or name one of {', '.join(known_names)}",
        )
