"""Rules for how ranks find each other: names, interfaces, routes, ports, and rank variables."""

from __future__ import annotations

from ipaddress import ip_address

from stepladder.core.errors import InputError
from stepladder.core.world import World
from stepladder.tools.doctor.finding import (
    Findings,
    error,
    error_if,
    note,
    note_if,
    warning,
    warning_if,
)
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
NAME_INTERFACE = "export GLOO_SOCKET_IFNAME={0} NCCL_SOCKET_IFNAME={0}"


def is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def is_link_local(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_link_local


def own_name(facts: Facts) -> Findings:
    if facts.nodes == 1 and not facts.peer.host:
        return
    if not facts.own_addresses:
        fix = f"--local-addr ADDRESS, or a line `ADDRESS {facts.host}` in /etc/hosts on all nodes"
        yield warning(
            f"this machine's name {facts.host} has no address",
            "other nodes connect to that name",
            fix,
        )
    elif all(map(is_loopback, facts.own_addresses)):
        yield error(
            f"this machine's name {facts.host} is {facts.own_addresses[0]}, which each machine "
            "takes for itself",
            "a line in /etc/hosts, as Debian's installer writes it: other nodes would look for "
            "rank 0 on themselves",
            "--local-addr ADDRESS, or the machine's real address in /etc/hosts",
        )


def needs_ipv6(facts: Facts) -> bool:
    """Return whether the peer has only IPv6 addresses, and this machine has no IPv6."""
    addresses = facts.peer.addresses
    return len(addresses) > 0 and all(":" in address for address in addresses) and not facts.ipv6


def peer_unknown(facts: Facts) -> Findings:
    peer = facts.peer
    if peer.error and not needs_ipv6(facts):
        yield error(
            f"{peer.host}: {peer.error}",
            "there is no route to it" if peer.addresses else "the name does not resolve here",
            f"ping {peer.host}; use an address instead of the name, or fix /etc/hosts or DNS",
        )


def peer_route(facts: Facts) -> Findings:
    peer = facts.peer
    if not peer.source:
        return
    interface = next(
        (i for i in facts.interfaces if i.name == peer.interface), Interface(peer.interface)
    )
    route = f"the way to {peer.host} leads through {interface.name}"
    if is_loopback(peer.source) or peer.source in peer.addresses:
        yield error(
            f"{peer.host} resolves to {(*peer.addresses, peer.source)[0]}, this machine itself",
            "a line in /etc/hosts, or this machine's own name or address: it should be another one",
            f"the address of {peer.host} instead of its name",
        )
    elif interface.name.startswith(VIRTUAL_INTERFACES):
        yield warning(
            f"{route} ({peer.source}), a bridge for containers",
            "other machines do not reach that address",
            "docker run --network=host, or " + NAME_INTERFACE.format("the real interface"),
        )
    elif interface.speed_mbit is not None and interface.speed_mbit < SLOW_MBIT:
        faster = max(facts.interfaces, key=lambda i: i.speed_mbit or 0)
        yield warning(
            f"{route}, {interface.speed_mbit} Mbit/s",
            "gradients of every step go that way",
            f"an address of {peer.host} on the network of {faster.name} ({faster.speed_mbit} "
            "Mbit/s)",
        )


def named_interface(facts: Facts) -> Findings:
    """Check the interfaces that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name."""
    names = [interface.name for interface in facts.interfaces]
    gloo = facts.env.get("GLOO_SOCKET_IFNAME", "")
    if gloo.startswith(("^", "=")):
        yield error(
            f"GLOO_SOCKET_IFNAME={gloo}",
            "^ and = are NCCL's syntax; gloo takes plain names, and would fall back to loopback",
            f"export GLOO_SOCKET_IFNAME=NAME, one of {', '.join(names)}",
        )
    else:
        listed = gloo.split(",")
        selected = listed if set(listed) <= set(names) else []
        yield from check_named_interface(facts, "gloo", gloo, selected)
    nccl = facts.env.get("NCCL_SOCKET_IFNAME", "")
    yield from check_named_interface(
        facts,
        "NCCL",
        nccl,
        interfaces_of_nccl(nccl, names),
    )


def check_named_interface(
    facts: Facts,
    library: str,
    value: str,
    selected: list[str],
) -> Findings:
    """Check that a library finds interfaces, and that they lead to the peer.

    Args:
        facts: The facts of the machine.
        library: The name of the library.
        value: The value of its variable.
        selected: The interfaces that the library selects by it.
    """
    variable = f"{library.upper()}_SOCKET_IFNAME"
    if value and not selected:
        names = ", ".join(interface.name for interface in facts.interfaces)
        yield error(
            f"{variable}={value}, and the interfaces are {names}",
            f"{library} finds no device",
            f"unset {variable}, or name one of them",
        )
    elif value and facts.peer.interface not in ("", *selected):
        yield warning(
            f"{variable}={value}, but {facts.peer.interface} leads to {facts.peer.host}",
            "connections would be tried on a network that does not lead there",
            NAME_INTERFACE.format(facts.peer.interface),
        )


def interfaces_of_nccl(value: str, names: list[str]) -> list[str]:
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


def several_interfaces(facts: Facts) -> Findings:
    peer = facts.peer
    has_route = bool(peer.interface and peer.source) and not is_loopback(peer.source)
    if not has_route or "GLOO_SOCKET_IFNAME" in facts.env:
        return
    usable = [interface.name for interface in facts.interfaces if is_usable(interface)]
    if len(usable) > 1:
        yield note(
            f"of {', '.join(usable)}, {peer.interface} ({peer.source}) leads to {peer.host}",
            "where the machine's name belongs to another interface, gloo and NCCL take that one",
            NAME_INTERFACE.format(peer.interface),
        )


def is_usable(interface: Interface) -> bool:
    """Return whether an interface is up, and has an address that other machines can reach."""
    has_address = not all(map(is_loopback, interface.addresses))
    return interface.up and has_address and not interface.name.startswith(VIRTUAL_INTERFACES)


def ipv6(facts: Facts) -> Findings:
    peer = facts.peer
    if needs_ipv6(facts):
        yield error(
            f"{peer.host} has only IPv6 addresses, and IPv6 is off here",
            "net.ipv6.conf.all.disable_ipv6=1, or a container without it",
            "sysctl net.ipv6.conf.all.disable_ipv6=0, or an IPv4 address of it",
        )
    if peer.addresses and all(map(is_link_local, peer.addresses)):
        yield error(
            f"{peer.host} is {peer.addresses[0]}, a link-local address",
            "it is valid on one cable only, and needs the interface's name after it",
            "a global address of that machine: ip -6 addr show scope global",
        )


def port_in_use(facts: Facts) -> Findings:
    port = facts.port or 0
    if not facts.port_error:
        return
    cause = "another run, or an orphan of an earlier one, holds it"
    fix = f"ss -ltnp 'sport = :{port}', or another port (one node needs none)"
    if port > 65535 or "ermission" in facts.port_error:
        cause = "ports end at 65535, and those below 1024 are the administrator's"
        fix = "another port (one node needs none)"
    yield error(f"port {port} cannot be opened here: {facts.port_error}", cause, fix)


def half_set(facts: Facts) -> Findings:
    if "RANK" not in facts.env:
        return  # Slurm sets either all of its variables or none
    try:
        World.detect(dict(facts.env))
    except InputError as wrong:
        yield error(
            wrong.problem, "a rank with incomplete variables waits for others for ever", wrong.hint
        )


def slurm_and_torchrun(facts: Facts) -> Findings:
    tasks = facts.variable_as_int("SLURM_STEP_NUM_TASKS")
    tasks_on_node = facts.tasks_on_node
    if "TORCHELASTIC_RUN_ID" in facts.env and tasks_on_node > 1:
        yield error(
            f"torchrun inside a Slurm step with {tasks_on_node} tasks per node",
            "each task starts its own torchrun: several groups of ranks on each node, and one port",
            "#SBATCH --ntasks-per-node=1 for torchrun; or srun without torchrun, one task per rank",
        )
    elif facts.is_in_slurm_step and "RANK" in facts.env and "TORCHELASTIC_RUN_ID" not in facts.env:
        ranks = facts.variable_as_int("WORLD_SIZE")
        if (ranks and ranks != tasks) or facts.env["RANK"] != facts.env.get("SLURM_PROCID"):
            yield error(
                f"RANK={facts.env['RANK']}, WORLD_SIZE={ranks} in task "
                f"{facts.env.get('SLURM_PROCID')} of {tasks}",
                "exported in the batch script, where `$SLURM_PROCID` is 0, so every task gets "
                "the same rank",
                "leave RANK and WORLD_SIZE out: stepladder reads the Slurm step",
            )


def tasks_without_a_step(facts: Facts) -> int:
    """Return the tasks of a job if this process is in none of its steps, and has no rank."""
    is_in_job = "SLURM_JOB_ID" in facts.env and not facts.is_in_slurm_step
    tasks = facts.variable_as_int("SLURM_NTASKS")
    if is_in_job and "RANK" not in facts.env and tasks > 1:
        return tasks
    return 0


def preset_by(facts: Facts) -> str:
    """Return who has set WORLD_SIZE, if RANK is not set."""
    if "WORLD_SIZE" not in facts.env or "RANK" in facts.env:
        return ""
    hosted = any(name.startswith("RUNPOD_") for name in facts.env)
    if hosted:
        return "RunPod presets it for every process"
    return "left over from another start"


def nodes_with_local_master(facts: Facts) -> int:
    """Return the number of nodes if MASTER_ADDR is an address of every machine itself."""
    address = facts.env.get("MASTER_ADDR", "")
    nodes = max(
        facts.nodes,
        facts.variable_as_int("SLURM_STEP_NUM_NODES"),
        facts.variable_as_int("GROUP_WORLD_SIZE"),
    )
    is_local = address in ("localhost", "::1") or address.startswith("127.")
    return nodes if nodes > 1 and is_local else 0


NETWORK_RULES = {
    "own-name": own_name,
    "peer-unknown": peer_unknown,
    "peer-route": peer_route,
    "named-interface": named_interface,
    "several-interfaces": several_interfaces,
    "ipv6": ipv6,
    "port-in-use": port_in_use,
    "half-set": half_set,
    "slurm-and-torchrun": slurm_and_torchrun,
    "slurm-tasks-without-a-step": note_if(
        tasks_without_a_step,
        "an allocation of {0} tasks, and this process is not in a step of them",
        "a batch script has the variables of rank 0 of N, but no other rank exists: plain "
        "`python` would wait",
        "srun python ..., or stepladder, which sees it",
    ),
    "slurm-cores": warning_if(
        lambda f: f.is_in_slurm_step and f.variable_as_int("SLURM_CPUS_PER_TASK") > f.cores,
        "SLURM_CPUS_PER_TASK={f.env[SLURM_CPUS_PER_TASK]}, but this task may use {f.cores}",
        "srun of 22.05 and later does not take --cpus-per-task from sbatch",
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK, before srun",
    ),
    "world-size-alone": warning_if(
        preset_by,
        "WORLD_SIZE={f.env[WORLD_SIZE]} without RANK",
        "{0}: stepladder ignores it, but scripts that read it wait for ranks that do not come",
        "unset WORLD_SIZE, or start with stepladder or torchrun",
    ),
    "local-master": error_if(
        nodes_with_local_master,
        "MASTER_ADDR={f.env[MASTER_ADDR]} with {0} nodes",
        "every node waits for the others on itself, alone",
        "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1), or none with "
        "stepladder",
    ),
}
