"""Names, interfaces, routes and ports between machines."""

from __future__ import annotations

from ipaddress import ip_address

from stepladder.tools.doctor.facts import Facts
from stepladder.tools.doctor.finding import Findings, error, note, warning
from stepladder.tools.doctor.network import Interface, Peer

VIRTUAL = ("docker", "podman", "virbr", "br-", "veth", "cni", "cali", "flannel", "lxcbr", "lxdbr", "vboxnet")
SLOW_MBIT = 1000
HOW_TO_NAME = "export GLOO_SOCKET_IFNAME={0} NCCL_SOCKET_IFNAME={0}"


def is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def own_name(facts: Facts) -> Findings:
    if facts.nodes == 1 and facts.peer is None:
        return
    if not facts.own_addresses:
        fix = f"--local-addr ADDRESS, or a line `ADDRESS {facts.host}` in /etc/hosts on all nodes"
        yield warning(
            f"this machine's name {facts.host} has no address", "other nodes are told to meet there", fix
        )
    elif all(map(is_loopback, facts.own_addresses)):
        yield error(
            f"this machine's name {facts.host} is {facts.own_addresses[0]}, which each machine takes for itself",
            "a line in /etc/hosts, as Debian's installer writes it: other nodes would look for rank 0 at home",
            "--local-addr ADDRESS, or the machine's real address in /etc/hosts",
        )


def needs_ipv6(facts: Facts) -> bool:
    """Whether the peer has only addresses of a kind that is off here."""
    addresses = facts.peer.addresses if facts.peer is not None else ()
    return len(addresses) > 0 and all(":" in address for address in addresses) and not facts.ipv6


def peer_unknown(facts: Facts) -> Findings:
    peer = facts.peer
    if peer is not None and peer.error and not needs_ipv6(facts):
        yield error(
            f"{peer.host}: {peer.error}",
            "the name does not resolve here" if not peer.addresses else "there is no route to it",
            f"ping {peer.host}; use an address instead of the name, or mend /etc/hosts or DNS",
        )


def peer_route(facts: Facts) -> Findings:
    peer = facts.peer
    if peer is None or not peer.source:
        return
    interface = next((one for one in facts.interfaces if one.name == peer.interface), Interface(peer.interface))
    way = f"the way to {peer.host} leads through {interface.name}"
    if is_loopback(peer.source) or peer.source in peer.addresses:
        yield error(
            f"{peer.host} resolves to {peer.addresses[0]}, this machine itself",
            "a line in /etc/hosts, or this machine's own name or address: it should be another one",
            f"the address of {peer.host} instead of its name",
        )
    elif interface.name.startswith(VIRTUAL):
        yield warning(
            f"{way} ({peer.source}), a bridge for containers",
            "other machines do not reach that address",
            "docker run --network=host, or " + HOW_TO_NAME.format("the real interface"),
        )
    elif interface.speed_mbit is not None and interface.speed_mbit < SLOW_MBIT:
        faster = max(facts.interfaces, key=lambda one: one.speed_mbit or 0)
        yield warning(
            f"{way}, {interface.speed_mbit} Mbit/s",
            "gradients of every step go that way",
            f"an address of {peer.host} on the network of {faster.name} ({faster.speed_mbit} Mbit/s)",
        )


def named_interface(facts: Facts) -> Findings:
    """GLOO_SOCKET_IFNAME lists names, NCCL_SOCKET_IFNAME what `taken_by_nccl` says."""
    names = [one.name for one in facts.interfaces]
    gloo, nccl = facts.env.get("GLOO_SOCKET_IFNAME", ""), facts.env.get("NCCL_SOCKET_IFNAME", "")
    listed = ", ".join(names)
    if gloo.startswith(("^", "=")):
        yield error(
            f"GLOO_SOCKET_IFNAME={gloo}",
            "^ and = are NCCL's syntax; gloo takes plain names, and would fall back to loopback",
            f"export GLOO_SOCKET_IFNAME=NAME, one of {listed}",
        )
        gloo = ""
    by_gloo = gloo.split(",") if set(gloo.split(",")) <= set(names) else []
    for library, wanted, taken in (("gloo", gloo, by_gloo), ("NCCL", nccl, taken_by_nccl(nccl, names))):
        variable = f"{library.upper()}_SOCKET_IFNAME"
        if wanted and not taken:
            fix = f"unset {variable}, or name one of them"
            yield error(f"{variable}={wanted}, and the interfaces are {listed}", f"{library} finds no device", fix)
        elif wanted and facts.peer is not None and facts.peer.interface not in ("", *taken):
            yield warning(
                f"{variable}={wanted}, but {facts.peer.interface} leads to {facts.peer.host}",
                "connections would be tried on a network that does not lead there",
                HOW_TO_NAME.format(facts.peer.interface),
            )


def taken_by_nccl(wanted: str, names: list[str]) -> list[str]:
    """NCCL_SOCKET_IFNAME lists prefixes; = before the list makes them whole names, ^ takes all others."""
    whole = wanted.removeprefix("^").startswith("=")
    listed = [one for one in wanted.removeprefix("^").removeprefix("=").split(",") if one]
    return [
        name for name in names
        if any(name == one if whole else name.startswith(one) for one in listed) != wanted.startswith("^")
    ]  # fmt: skip


def several_interfaces(facts: Facts) -> Findings:
    peer = facts.peer or Peer("")
    if not peer.interface or "GLOO_SOCKET_IFNAME" in facts.env or is_loopback(peer.source):
        return
    real = [
        i.name for i in facts.interfaces
        if i.up and i.addresses and not all(map(is_loopback, i.addresses)) and not i.name.startswith(VIRTUAL)
    ]  # fmt: skip
    if len(real) > 1:
        yield note(
            f"of {', '.join(real)}, {peer.interface} ({peer.source}) leads to {peer.host}",
            "where the machine's name belongs to another interface, gloo and NCCL take that one",
            HOW_TO_NAME.format(peer.interface),
        )


def ipv6(facts: Facts) -> Findings:
    peer = facts.peer or Peer("")
    if needs_ipv6(facts):
        yield error(
            f"{peer.host} has only IPv6 addresses, and IPv6 is off here",
            "net.ipv6.conf.all.disable_ipv6=1, or a container without it",
            "sysctl net.ipv6.conf.all.disable_ipv6=0, or an IPv4 address of it",
        )
    if peer.addresses and all(ip_address(one.partition("%")[0]).is_link_local for one in peer.addresses):
        yield error(
            f"{peer.host} is {peer.addresses[0]}, a link-local address",
            "it is valid on one cable only, and needs the interface's name behind it",
            "a global address of that machine: ip -6 addr show scope global",
        )


def port_in_use(facts: Facts) -> Findings:
    port = facts.port
    if port is None or not port.error:
        return
    cause, fix = "another run, or an orphan of an earlier one, holds it", f"ss -ltnp 'sport = :{port.number}', or "
    if port.number > 65535 or "ermission" in port.error:
        cause, fix = "ports end at 65535, and those below 1024 are the administrator's", ""
    fix += "another port (one node needs none)"
    yield error(f"port {port.number} cannot be opened here: {port.error}", cause, fix)


RULES = {
    "own-name": own_name,
    "peer-unknown": peer_unknown,
    "peer-route": peer_route,
    "named-interface": named_interface,
    "several-interfaces": several_interfaces,
    "ipv6": ipv6,
    "port-in-use": port_in_use,
}
