"""How ranks find each other: names, interfaces, routes and ports, and the variables that say who a
process is.
"""

from __future__ import annotations

from ipaddress import ip_address

from stepladder.core.errors import InputError
from stepladder.core.world import World
from stepladder.tools.doctor.facts import Facts
from stepladder.tools.doctor.finding import (
    Findings,
    error,
    error_if,
    note,
    note_if,
    warning,
    warning_if,
)
from stepladder.tools.doctor.network import Interface

VIRTUAL = (
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
HOW_TO_NAME = "export GLOO_SOCKET_IFNAME={0} NCCL_SOCKET_IFNAME={0}"


def is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def own_name(facts: Facts) -> Findings:
    if facts.nodes == 1 and not facts.peer.host:
        return
    if not facts.own_addresses:
        fix = f"--local-addr ADDRESS, or a line `ADDRESS {facts.host}` in /etc/hosts on all nodes"
        yield warning(
            f"this machine's name {facts.host} has no address",
            "other nodes are told to meet there",
            fix,
        )
    elif all(map(is_loopback, facts.own_addresses)):
        yield error(
            f"this machine's name {facts.host} is {facts.own_addresses[0]}, which each machine takes for itself",
            "a line in /etc/hosts, as Debian's installer writes it: other nodes would look for rank 0 at home",
            "--local-addr ADDRESS, or the machine's real address in /etc/hosts",
        )


def needs_ipv6(facts: Facts) -> bool:
    """Whether the peer has only addresses of a kind that is off here."""
    addresses = facts.peer.addresses
    return len(addresses) > 0 and all(":" in address for address in addresses) and not facts.ipv6


def peer_unknown(facts: Facts) -> Findings:
    peer = facts.peer
    if peer.error and not needs_ipv6(facts):
        yield error(
            f"{peer.host}: {peer.error}",
            "there is no route to it" if peer.addresses else "the name does not resolve here",
            f"ping {peer.host}; use an address instead of the name, or mend /etc/hosts or DNS",
        )


def peer_route(facts: Facts) -> Findings:
    peer = facts.peer
    if not peer.source:
        return
    interface = next(
        (one for one in facts.interfaces if one.name == peer.interface), Interface(peer.interface)
    )
    way = f"the way to {peer.host} leads through {interface.name}"
    if is_loopback(peer.source) or peer.source in peer.addresses:
        yield error(
            f"{peer.host} resolves to {(*peer.addresses, peer.source)[0]}, this machine itself",
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
    for library, wanted, taken in (
        ("gloo", gloo, by_gloo),
        ("NCCL", nccl, taken_by_nccl(nccl, names)),
    ):
        variable = f"{library.upper()}_SOCKET_IFNAME"
        if wanted and not taken:
            fix = f"unset {variable}, or name one of them"
            yield error(
                f"{variable}={wanted}, and the interfaces are {listed}",
                f"{library} finds no device",
                fix,
            )
        elif wanted and facts.peer.interface not in ("", *taken):
            yield warning(
                f"{variable}={wanted}, but {facts.peer.interface} leads to {facts.peer.host}",
                "connections would be tried on a network that does not lead there",
                HOW_TO_NAME.format(facts.peer.interface),
            )


def taken_by_nccl(wanted: str, names: list[str]) -> list[str]:
    """NCCL_SOCKET_IFNAME lists prefixes; = before the list makes them whole names, ^ takes all
    others.
    """
    whole = wanted.removeprefix("^").startswith("=")
    listed = [one for one in wanted.removeprefix("^").removeprefix("=").split(",") if one]
    return [
        name
        for name in names
        if any(name == one if whole else name.startswith(one) for one in listed)
        != wanted.startswith("^")
    ]


def several_interfaces(facts: Facts) -> Findings:
    peer = facts.peer
    if (
        not (peer.interface and peer.source)
        or "GLOO_SOCKET_IFNAME" in facts.env
        or is_loopback(peer.source)
    ):
        return
    real = [
        i.name
        for i in facts.interfaces
        if i.up
        and i.addresses
        and not all(map(is_loopback, i.addresses))
        and not i.name.startswith(VIRTUAL)
    ]
    if len(real) > 1:
        yield note(
            f"of {', '.join(real)}, {peer.interface} ({peer.source}) leads to {peer.host}",
            "where the machine's name belongs to another interface, gloo and NCCL take that one",
            HOW_TO_NAME.format(peer.interface),
        )


def ipv6(facts: Facts) -> Findings:
    peer = facts.peer
    if needs_ipv6(facts):
        yield error(
            f"{peer.host} has only IPv6 addresses, and IPv6 is off here",
            "net.ipv6.conf.all.disable_ipv6=1, or a container without it",
            "sysctl net.ipv6.conf.all.disable_ipv6=0, or an IPv4 address of it",
        )
    if peer.addresses and all(
        ip_address(one.partition("%")[0]).is_link_local for one in peer.addresses
    ):
        yield error(
            f"{peer.host} is {peer.addresses[0]}, a link-local address",
            "it is valid on one cable only, and needs the interface's name after it",
            "a global address of that machine: ip -6 addr show scope global",
        )


def port_in_use(facts: Facts) -> Findings:
    port, said = facts.port or 0, facts.port_error
    cause, fix = (
        "another run, or an orphan of an earlier one, holds it",
        f"ss -ltnp 'sport = :{port}', or ",
    )
    if port > 65535 or "ermission" in said:
        cause, fix = "ports end at 65535, and those below 1024 are the administrator's", ""
    if said:
        fix += "another port (one node needs none)"
        yield error(f"port {port} cannot be opened here: {said}", cause, fix)


def half_set(facts: Facts) -> Findings:
    if "RANK" not in facts.env:
        return  # Slurm's own variables come whole
    try:
        World.detect(dict(facts.env))
    except InputError as wrong:
        yield error(
            wrong.problem,
            "a rank that does not know its place waits for others for ever",
            wrong.hint,
        )


def slurm_and_torchrun(facts: Facts) -> Findings:
    tasks, here = facts.number("SLURM_STEP_NUM_TASKS"), facts.tasks_here
    if "TORCHELASTIC_RUN_ID" in facts.env and here > 1:
        yield error(
            f"torchrun inside a Slurm step with {here} tasks per node",
            "each task starts its own torchrun: several groups of ranks on each node, and one port",
            "#SBATCH --ntasks-per-node=1 for torchrun; or srun without torchrun, one task per rank",
        )
    elif facts.in_step and "RANK" in facts.env and "TORCHELASTIC_RUN_ID" not in facts.env:
        ranks = facts.number("WORLD_SIZE")
        if (ranks and ranks != tasks) or facts.env["RANK"] != facts.env.get("SLURM_PROCID"):
            yield error(
                f"RANK={facts.env['RANK']}, WORLD_SIZE={ranks} in task {facts.env.get('SLURM_PROCID')} of {tasks}",
                "exported in the batch script, where `$SLURM_PROCID` is 0, so every task gets the same rank",
                "leave RANK and WORLD_SIZE out: stepladder reads the Slurm step",
            )


def tasks_without_a_step(facts: Facts) -> int:
    """Where torchrun's variables do not say either who this process is."""
    alone = "SLURM_JOB_ID" in facts.env and "RANK" not in facts.env and not facts.in_step
    tasks = facts.number("SLURM_NTASKS")
    return tasks if alone and tasks > 1 else 0


def preset_by(facts: Facts) -> str:
    """Who has set WORLD_SIZE, where nobody has set RANK."""
    if "WORLD_SIZE" not in facts.env or "RANK" in facts.env:
        return ""
    hosted = any(name.startswith("RUNPOD_") for name in facts.env)
    return "RunPod presets it for every process" if hosted else "left over from another start"


def nodes_at_home(facts: Facts) -> int:
    """How many take this address for their own: each then waits for the others alone."""
    address = facts.env.get("MASTER_ADDR", "")
    nodes = max(facts.nodes, facts.number("SLURM_STEP_NUM_NODES"), facts.number("GROUP_WORLD_SIZE"))
    return (
        nodes
        if nodes > 1 and (address in ("localhost", "::1") or address.startswith("127."))
        else 0
    )


RULES = {
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
        "a batch script has the variables of rank 0 of N, but no other rank exists: plain `python` would wait",
        "srun python ..., or stepladder, which sees it",
    ),
    "slurm-cores": warning_if(
        lambda f: f.in_step and f.number("SLURM_CPUS_PER_TASK") > f.cores,
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
        nodes_at_home,
        "MASTER_ADDR={f.env[MASTER_ADDR]} with {0} nodes",
        "every node takes itself for the meeting place, and waits alone",
        "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -1), or none with stepladder",
    ),
}
