"""Rules for how ranks find each other: names, interfaces, routes, ports, and rank variables."""

from __future__ import annotations

from ipaddress import ip_address

from stepladder.core.errors import InputError
from stepladder.core.world import World
from stepladder.tools.doctor.finding import Findings, Rule, problem
from stepladder.tools.doctor.machine_facts import Facts
from stepladder.tools.doctor.network import Interface

VIRTUAL_INTERFACES = (
    "docker",
    "podman",
    "virbr",
    "br-",
    "veth",
    "cni",
    "cali",
    "flannel",
    "lxcbr",
    "lxdbr",
    "vboxnet",
)
SLOW_MBIT = 1000


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def _is_link_local(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_link_local


def _own_name(facts: Facts) -> Findings:
    if facts.nodes == 1 and not facts.peer.host:
        return
    if not facts.own_addresses:
        yield problem("own-name.no-address", facts)
    elif all(map(_is_loopback, facts.own_addresses)):
        yield problem("own-name", facts)


def _needs_ipv6(facts: Facts) -> bool:
    """Return whether the peer has only IPv6 addresses, and this machine has no IPv6."""
    addresses = facts.peer.addresses
    return len(addresses) > 0 and all(":" in address for address in addresses) and not facts.ipv6


def _peer_unknown(facts: Facts) -> Findings:
    if facts.peer.error and not _needs_ipv6(facts):
        name = "peer-unknown.no-route" if facts.peer.addresses else "peer-unknown"
        yield problem(name, facts)


def _peer_route(facts: Facts) -> Findings:
    peer = facts.peer
    if not peer.source:
        return
    interface = next(
        (i for i in facts.interfaces if i.name == peer.interface), Interface(peer.interface)
    )
    if _is_loopback(peer.source) or peer.source in peer.addresses:
        yield problem("peer-route", facts, address=(*peer.addresses, peer.source)[0])
    elif interface.name.startswith(VIRTUAL_INTERFACES):
        yield problem("peer-route.bridge", facts)
    elif interface.speed_mbit is not None and interface.speed_mbit < SLOW_MBIT:
        faster = max(facts.interfaces, key=lambda i: i.speed_mbit or 0)
        yield problem("peer-route.slow", facts, interface=interface, faster=faster)


def _named_interface(facts: Facts) -> Findings:
    """Check the interfaces that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name."""
    names = [interface.name for interface in facts.interfaces]
    gloo = facts.env.get("GLOO_SOCKET_IFNAME", "")
    if gloo.startswith(("^", "=")):
        yield problem("named-interface.syntax", facts, names=", ".join(names))
    else:
        listed = gloo.split(",")
        selected = listed if set(listed) <= set(names) else []
        yield from _check_named_interface(facts, "gloo", gloo, selected)
    nccl = facts.env.get("NCCL_SOCKET_IFNAME", "")
    yield from _check_named_interface(facts, "NCCL", nccl, _interfaces_of_nccl(nccl, names))


def _check_named_interface(
    facts: Facts, library: str, selection: str, selected: list[str]
) -> Findings:
    """Check that a library finds interfaces, and that they lead to the peer.

    Args:
        facts: The facts of the machine.
        library: The name of the library.
        selection: The value of its variable.
        selected: The interfaces that the library selects by it.
    """
    values = {
        "library": library,
        "selection": selection,
        "variable": f"{library.upper()}_SOCKET_IFNAME",
        "names": ", ".join(interface.name for interface in facts.interfaces),
    }
    if selection and not selected:
        yield problem("named-interface", facts, **values)
    elif selection and facts.peer.interface not in ("", *selected):
        yield problem("named-interface.other-network", facts, **values)


def _interfaces_of_nccl(value: str, names: list[str]) -> list[str]:
    """Return the interfaces that NCCL selects by NCCL_SOCKET_IFNAME.

    It lists prefixes of names; after = complete names, and after ^ the names to leave out.
    """
    excludes = value.startswith("^")
    text = value.removeprefix("^")
    is_exact = text.startswith("=")
    listed = [item for item in text.removeprefix("=").split(",") if item]

    def is_listed(name: str) -> bool:
        if is_exact:
            return name in listed
        return name.startswith(tuple(listed))

    return [name for name in names if is_listed(name) != excludes]


def _several_interfaces(facts: Facts) -> str:
    """Return the interfaces of which gloo may take another one than that to the peer."""
    peer = facts.peer
    has_route = bool(peer.interface and peer.source) and not _is_loopback(peer.source)
    if not has_route or "GLOO_SOCKET_IFNAME" in facts.env:
        return ""
    usable = [interface.name for interface in facts.interfaces if _is_usable(interface)]
    return ", ".join(usable) if len(usable) > 1 else ""


def _is_usable(interface: Interface) -> bool:
    """Return whether an interface is up, and has an address that other machines can reach."""
    has_address = not all(map(_is_loopback, interface.addresses))
    return interface.up and has_address and not interface.name.startswith(VIRTUAL_INTERFACES)


def ipv6(facts: Facts) -> Findings:
    if _needs_ipv6(facts):
        yield problem("ipv6", facts)
    if facts.peer.addresses and all(map(_is_link_local, facts.peer.addresses)):
        yield problem("ipv6.link-local", facts)


def _port_in_use(facts: Facts) -> Findings:
    port = facts.port or 0
    if facts.port_error:
        is_reserved = port > 65535 or "ermission" in facts.port_error
        yield problem("port-in-use.reserved" if is_reserved else "port-in-use", facts, port=port)


def _half_set(facts: Facts) -> Findings:
    if "RANK" not in facts.env:
        return  # Slurm sets either all of its variables or none
    try:
        World.detect(dict(facts.env))
    except InputError as error:
        yield problem("half-set", facts, error=error)


def _slurm_and_torchrun(facts: Facts) -> Findings:
    if "TORCHELASTIC_RUN_ID" in facts.env:
        if facts.tasks_on_node > 1:
            yield problem("slurm-and-torchrun", facts)
    elif facts.is_in_slurm_step and "RANK" in facts.env:
        tasks = facts.parse_variable("SLURM_STEP_NUM_TASKS")
        ranks = facts.parse_variable("WORLD_SIZE")
        task = facts.env.get("SLURM_PROCID")
        if (ranks and ranks != tasks) or facts.env["RANK"] != task:
            yield problem(
                "slurm-and-torchrun.other-ranks", facts, ranks=ranks, task=task, tasks=tasks
            )


def _tasks_without_a_step(facts: Facts) -> int:
    """Return the tasks of a job if this process is in none of its steps, and has no rank."""
    is_in_job = "SLURM_JOB_ID" in facts.env and not facts.is_in_slurm_step
    tasks = facts.parse_variable("SLURM_NTASKS")
    if is_in_job and "RANK" not in facts.env and tasks > 1:
        return tasks
    return 0


def _preset_by(facts: Facts) -> str:
    """Return which launcher has set WORLD_SIZE, if RANK is not set."""
    if "WORLD_SIZE" not in facts.env or "RANK" in facts.env:
        return ""
    hosted = any(name.startswith("RUNPOD_") for name in facts.env)
    if hosted:
        return "RunPod presets it for every process"
    return "left over from another start"


def _nodes_with_local_master(facts: Facts) -> int:
    """Return the number of nodes if MASTER_ADDR is an address of every machine itself."""
    address = facts.env.get("MASTER_ADDR", "")
    nodes = max(
        facts.nodes,
        facts.parse_variable("SLURM_STEP_NUM_NODES"),
        facts.parse_variable("GROUP_WORLD_SIZE"),
    )
    is_local = address in ("localhost", "::1") or address.startswith("127.")
    return nodes if nodes > 1 and is_local else 0


def _fewer_cores_than_asked(facts: Facts) -> bool:
    return facts.is_in_slurm_step and facts.parse_variable("SLURM_CPUS_PER_TASK") > facts.cores


NETWORK_RULES: dict[str, Rule] = {
    "own-name": _own_name,
    "peer-unknown": _peer_unknown,
    "peer-route": _peer_route,
    "named-interface": _named_interface,
    "several-interfaces": _several_interfaces,
    "ipv6": ipv6,
    "port-in-use": _port_in_use,
    "half-set": _half_set,
    "slurm-and-torchrun": _slurm_and_torchrun,
    "slurm-tasks-without-a-step": _tasks_without_a_step,
    "slurm-cores": _fewer_cores_than_asked,
    "world-size-alone": _preset_by,
    "local-master": _nodes_with_local_master,
}
