"""How ranks get memory that they share: one rank of each machine makes it, the others open it.

The memory is a file without a name. A process of the same user on the same machine can open it
through /proc while its maker has it open. The kernel frees it when the last process that has mapped
it ends.
"""

from __future__ import annotations

import json
import mmap
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stepladder_exchange.shared_segment import MAX_SLOTS, can_share_memory, make_segment

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")
NO_FILE = -1
MAX_VALUE_BYTES = 1024  # of what a rank tells the others at a time


@dataclass(frozen=True)
class _Participant:
    """What one rank tells the others before they share memory.

    Args:
        machine: Identifies the machine and the namespace in which its process id is valid.
        pid: The process.
        obstacle: Why this rank cannot share memory; "" if it can.
    """

    machine: str
    pid: int
    obstacle: str = ""

    @staticmethod
    def of_this_process(obstacle: str) -> _Participant:
        """Return what this process tells the others."""
        machine = ""
        with suppress(OSError):
            machine = f"{BOOT_ID.read_text(encoding='utf-8').strip()} {PID_NAMESPACE.readlink()}"
        return _Participant(machine, os.getpid(), obstacle or _find_obstacle())


@dataclass(frozen=True)
class _Rendezvous:
    """The result of a rendezvous: what the ranks of a group have agreed on.

    Args:
        obstacle: Why they share no memory; "" if they do.
        memory: The memory of the ranks of this machine; None if they share none.
        nodes: The ranks of each machine, in the order of its first rank.
        pids: The process of each rank.
    """

    obstacle: str = ""
    memory: mmap.mmap | None = None
    nodes: tuple[tuple[int, ...], ...] = ()
    pids: tuple[int, ...] = ()


def share_memory(gloo: Any, rank: int, ranks: int, obstacle: str = "") -> _Rendezvous:
    """Let the ranks of each machine share memory, if all of them can.

    This is a collective: all ranks of the group must call it.

    Args:
        gloo: The gloo group of the ranks.
        rank: This rank.
        ranks: How many ranks the group has.
        obstacle: Why this rank shall share no memory; "" if it may.

    Returns:
        What they have agreed on, which is the same on all ranks but for the mapping.
    """
    if ranks == 1:
        return _Rendezvous()
    own = asdict(_Participant.of_this_process(obstacle))
    participants = [_Participant(**peer) for peer in _gather(gloo, ranks, own)]
    nodes = _find_nodes([participant.machine for participant in participants])
    obstacles = [*(peer.obstacle for peer in participants), _find_obstacle_of_nodes(nodes)]
    if any(obstacles):
        return _Rendezvous(next(filter(None, obstacles)))
    node = next(node for node in nodes if rank in node)
    maker = node[0]
    segment: int | None = None
    if rank == maker:
        segment = make_segment(len(node))
    files = _gather(gloo, ranks, NO_FILE if segment is None else segment)
    memory: mmap.mmap | None = None
    try:
        memory = _open_memory(participants[maker].pid, files[maker])
    except OSError as error:
        obstacle = str(error)
    obstacles = _gather(gloo, ranks, obstacle)
    if segment is not None:
        os.close(segment)
    if any(obstacles):
        return _Rendezvous(next(filter(None, obstacles)))
    pids = tuple(participant.pid for participant in participants)
    return _Rendezvous("", memory, nodes, pids)


def _gather(gloo: Any, ranks: int, value: Any) -> list[Any]:
    """Return the value of each rank, of those that JSON has."""
    data = bytearray(json.dumps(value).encode().ljust(MAX_VALUE_BYTES))
    own = torch.frombuffer(data, dtype=torch.uint8)
    values = [torch.empty_like(own) for _ in range(ranks)]
    gloo.allgather([values], [own]).wait()
    return [json.loads(bytes(value.tolist())) for value in values]


def _find_nodes(machines: list[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each machine, given the machine of each rank."""
    nodes: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        nodes.setdefault(machine, []).append(rank)
    return tuple(map(tuple, nodes.values()))


def _find_obstacle() -> str:
    """Return why this process can share no memory; "" if it can."""
    if not can_share_memory(MAX_SLOTS):
        return "it takes Linux on x86-64"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return "this system does not tell when a process ends (pidfd_open)"
    return ""


def _find_obstacle_of_nodes(nodes: tuple[tuple[int, ...], ...]) -> str:
    """Return why ranks that lie so on machines share no memory; "" if they can."""
    counts = list(map(len, nodes))
    if max(counts) > MAX_SLOTS:
        return f"more than {MAX_SLOTS} ranks share none"
    if min(counts) == 1:
        return "a machine has only one of the ranks"
    return ""


def _open_memory(maker: int, file: int) -> mmap.mmap:
    """Return the memory of which another process has an open file.

    Raises:
        OSError: It cannot be mapped, with the reason in a few words.
    """
    if file == NO_FILE:
        raise OSError("this machine makes no memory file so large")
    try:
        number = os.open(f"/proc/{maker}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(f"the memory of another rank cannot be opened ({error.strerror})") from error
    try:
        return mmap.mmap(number, 0)
    finally:
        os.close(number)
