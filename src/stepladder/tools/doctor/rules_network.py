"""Names, interfaces, routes and ports between machines."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address

from stepladder.tools.doctor.facts import Facts
from stepladder.tools.doctor.network import Interface
from stepladder.tools.doctor.rules import Finding, rule

VIRTUAL = ("docker", "podman", "virbr", "br-", "veth", "cni", "cali", "flannel", "lxcbr", "lxdbr", "vboxnet")
SLOW_MBIT = 1000
HOW_TO_NAME = "export GLOO_SOCKET_IFNAME={0} NCCL_SOCKET_IFNAME={0}"


def several_nodes(facts: Facts) -> bool:
    return facts.nodes > 1 or facts.peer is not None


def is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def is_link_local(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_link_local


@rule
def own_name(facts: Facts) -> Iterator[Finding]:
    if not several_nodes(facts):
        return
    if not facts.own_addresses:
        yield Finding(
            "warning",
            f"this machine's name {facts.host} has no address",
            "other nodes are told to meet there",
            f"--local-addr ADDRESS, or a line `ADDRESS {facts.host}` in /etc/hosts on all nodes",
        )
    elif all(map(is_loopback, facts.own_addresses)):
        yield Finding(
            "error",
            f"this machine's name {facts.host} is {facts.own_addresses[0]}, which each machine takes for itself",
            "a line in /etc/hosts, as Debian's installer writes it: other nodes would look for rank 0 at home",
            "--local-addr ADDRESS, or the machine's real address in /etc/hosts",
        )


def needs_ipv6(facts: Facts) -> bool:
    """Whether the peer has only addresses of a kind that is off here."""
    addresses = facts.peer.addresses if facts.peer is not None else ()
    return bool(addresses) and all(":" in address for address in addresses) and not facts.ipv6


@rule
def peer_unknown(facts: Facts) -> Iterator[Finding]:
    peer = facts.peer
    if peer is not None and peer.error and not needs_ipv6(facts):
        yield Finding(
            "error",
            f"{peer.host}: {peer.error}",
            "the name does not resolve here" if not peer.addresses else "there is no route to it",
            f"ping {peer.host}; use an address instead of the name, or mend /etc/hosts or DNS",
        )


@rule
def peer_route(facts: Facts) -> Iterator[Finding]:
    peer = facts.peer
    if peer is None or not peer.source:
        return
    interface = next((one for one in facts.interfaces if one.name == peer.interface), Interface(peer.interface))
    if is_loopback(peer.source) or peer.source in peer.addresses:
        yield Finding(
            "error",
            f"{peer.host} resolves to {peer.addresses[0]}, this machine itself",
            "a line in /etc/hosts, or this machine's own name or address: it should be another one",
            f"the address of {peer.host} instead of its name",
        )
    elif interface.name.startswith(VIRTUAL):
        yield Finding(
            "warning",
            f"the way to {peer.host} leads through {interface.name} ({peer.source}), a bridge for containers",
            "other machines do not reach that address",
            "docker run --network=host, or " + HOW_TO_NAME.format("the real interface"),
        )
    elif interface.speed_mbit is not None and interface.speed_mbit < SLOW_MBIT:
        faster = max(facts.interfaces, key=lambda one: one.speed_mbit or 0)
        yield Finding(
            "warning",
            f"the way to {peer.host} leads through {interface.name}, {interface.speed_mbit} Mbit/s",
            "gradients of every step go that way",
            f"an address of {peer.host} on the network of {faster.name} ({faster.speed_mbit} Mbit/s)",
        )


@rule
def named_interface(facts: Facts) -> Iterator[Finding]:
    """GLOO_SOCKET_IFNAME lists names, NCCL_SOCKET_IFNAME what `taken_by_nccl` says."""
    names = [one.name for one in facts.interfaces]
    gloo, nccl = facts.env.get("GLOO_SOCKET_IFNAME", ""), facts.env.get("NCCL_SOCKET_IFNAME", "")
    listed = ", ".join(names)
    if gloo.startswith(("^", "=")):
        yield Finding(
            "error",
            f"GLOO_SOCKET_IFNAME={gloo}",
            "^ and = are NCCL's syntax; gloo takes plain names, and would fall back to loopback",
            f"export GLOO_SOCKET_IFNAME=NAME, one of {listed}",
        )
    elif gloo and not set(gloo.split(",")) <= set(names):
        yield Finding(
            "error", f"GLOO_SOCKET_IFNAME={gloo}, and the interfaces are {listed}", "gloo finds no device",
            "unset GLOO_SOCKET_IFNAME, or name one of them",
        )  # fmt: skip
    elif gloo:
        yield from beside_the_way(facts, "GLOO_SOCKET_IFNAME", gloo.split(","))
    matches = taken_by_nccl(nccl, names)
    if nccl and not matches:
        yield Finding(
            "error", f"NCCL_SOCKET_IFNAME={nccl}, and the interfaces are {listed}", "NCCL finds no device",
            "unset NCCL_SOCKET_IFNAME, or name one of them",
        )  # fmt: skip
    elif nccl:
        yield from beside_the_way(facts, "NCCL_SOCKET_IFNAME", matches)


def taken_by_nccl(wanted: str, names: list[str]) -> list[str]:
    """NCCL_SOCKET_IFNAME lists prefixes; = before the list makes them whole names, ^ takes all others."""
    whole = wanted.removeprefix("^").startswith("=")
    listed = [one for one in wanted.removeprefix("^").removeprefix("=").split(",") if one]
    return [
        name for name in names
        if any(name == one if whole else name.startswith(one) for one in listed) != wanted.startswith("^")
    ]  # fmt: skip


def beside_the_way(facts: Facts, variable: str, names: list[str]) -> Iterator[Finding]:
    """Where a variable names interfaces, and none of them leads to the peer."""
    if facts.peer is not None and facts.peer.interface and facts.peer.interface not in names:
        yield Finding(
            "warning",
            f"{variable}={facts.env[variable]}, but {facts.peer.interface} leads to {facts.peer.host}",
            "connections would be tried on a network that does not lead there",
            HOW_TO_NAME.format(facts.peer.interface),
        )


@rule
def several_interfaces(facts: Facts) -> Iterator[Finding]:
    if facts.peer is None or not facts.peer.interface or "GLOO_SOCKET_IFNAME" in facts.env:
        return
    if is_loopback(facts.peer.source):
        return
    real = [
        i.name for i in facts.interfaces
        if i.up and i.addresses and not all(map(is_loopback, i.addresses)) and not i.name.startswith(VIRTUAL)
    ]  # fmt: skip
    if len(real) > 1:
        yield Finding(
            "note",
            f"of {', '.join(real)}, {facts.peer.interface} ({facts.peer.source}) leads to {facts.peer.host}",
            "where the machine's name belongs to another interface, gloo and NCCL take that one",
            HOW_TO_NAME.format(facts.peer.interface),
        )


@rule
def ipv6(facts: Facts) -> Iterator[Finding]:
    addresses = facts.peer.addresses if facts.peer is not None else ()
    if needs_ipv6(facts):
        yield Finding(
            "error",
            f"{facts.peer.host if facts.peer else ''} has only IPv6 addresses, and IPv6 is off here",
            "net.ipv6.conf.all.disable_ipv6=1, or a container without it",
            "sysctl net.ipv6.conf.all.disable_ipv6=0, or an IPv4 address of it",
        )
    if addresses and all(map(is_link_local, addresses)):
        yield Finding(
            "error",
            f"{facts.peer.host if facts.peer else ''} is {addresses[0]}, a link-local address",
            "it is valid on one cable only, and needs the interface's name behind it",
            "a global address of that machine: ip -6 addr show scope global",
        )


@rule
def port_in_use(facts: Facts) -> Iterator[Finding]:
    port = facts.port
    if port is None or not port.error:
        return
    cause, fix = "another run, or an orphan of an earlier one, holds it", f"ss -ltnp 'sport = :{port.number}', or "
    if port.number > 65535 or "ermission" in port.error:
        cause, fix = "ports end at 65535, and those below 1024 are the administrator's", ""
    yield Finding(
        "error",
        f"port {port.number} cannot be opened here: {port.error}",
        cause,
        f"{fix}another port (one node needs none)",
    )
