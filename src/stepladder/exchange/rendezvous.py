"""How ranks get memory that they share: one rank of a group makes it, the others open it.

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
from typing import Any, Protocol

from stepladder.rank.open_file import OpenFile
from stepladder.rank.shared_segment import MAX_SLOTS, can_share_memory, make_segment

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")


class KeyStore(Protocol):
    """The part of torch's store that this module uses."""

    def set(self, key: str, value: str) -> None:
        """Set the value of a key."""

    def get(self, key: str) -> bytes:
        """Wait until a key has a value, and return it."""


@dataclass(frozen=True)
class Participant:
    """What one rank tells the others before they share memory.

    Attributes:
        machine: Identifies the machine and the namespace in which its process id is valid.
        pid: The process.
        file: The number of the open memory file, on the rank that has made it.
        obstacle: Why this rank cannot share memory; "" if it can.
    """

    machine: str
    pid: int
    file: int = -1
    obstacle: str = ""

    @staticmethod
    def of_this_process(file: int = -1, obstacle: str = "") -> Participant:
        """Return what this process tells the others."""
        machine = ""
        with suppress(OSError):
            machine = f"{BOOT_ID.read_text(encoding='utf-8').strip()} {PID_NAMESPACE.readlink()}"
        return Participant(
            machine,
            os.getpid(),
            file,
            obstacle,
        )


@dataclass(frozen=True)
class Rendezvous:
    """The result of a rendezvous: what the ranks of a group have agreed on.

    Attributes:
        memory: The memory that they share; None if they do not.
        pids: The process of each rank.
        obstacle: Why they share no memory; "" if they do.
    """

    memory: mmap.mmap | None
    pids: list[int]
    obstacle: str = ""


def share_memory(
    store: KeyStore,
    rank: int,
    ranks: int,
) -> Rendezvous:
    """Let the ranks of a group share memory, if all of them can.

    This is a collective: all ranks of the group must call it.

    Args:
        store: A store of this group alone.
        rank: This rank.
        ranks: How many ranks the group has.

    Returns:
        What they have agreed on, which is the same on all ranks but for the mapping.
    """
    if ranks == 1:
        return Rendezvous(None, [])
    offer = _make_offer(store, rank, ranks)
    own_entry = Participant.of_this_process(offer.file, offer.obstacle)
    store.set(str(rank), json.dumps(asdict(own_entry)))
    participants = [_read_participant(store, peer) for peer in range(ranks)]
    if offer.segment is not None:
        offer.segment.close()
    obstacles = [participant.obstacle for participant in participants if participant.obstacle]
    if obstacles:
        return Rendezvous(None, [], obstacles[0])
    return Rendezvous(offer.memory, [participant.pid for participant in participants])


@dataclass(frozen=True)
class Offer:
    """The memory that one rank has made or opened, or the reason why it has none.

    Attributes:
        obstacle: Why it cannot share memory; "" if it can.
        memory: The memory, mapped.
        segment: The open file of the memory, on the rank that has made it.
    """

    obstacle: str = ""
    memory: mmap.mmap | None = None
    segment: OpenFile | None = None

    @property
    def file(self) -> int:
        """The number of the open file, -1 if there is none."""
        return -1 if self.segment is None else self.segment.number


def _make_offer(
    store: KeyStore,
    rank: int,
    ranks: int,
) -> Offer:
    """Make the memory on rank 0, open it on the others."""
    obstacle = _find_obstacle(ranks)
    if obstacle:
        return Offer(obstacle)
    if rank == 0:
        segment = make_segment(ranks)
        if segment is None:
            return Offer("this machine makes no memory file so large")
        return Offer("", mmap.mmap(segment.number, 0), segment)
    try:
        return Offer("", _open_memory(_read_participant(store, 0)))
    except OSError as error:
        return Offer(str(error))


def _find_obstacle(ranks: int) -> str:
    """Return why so many ranks cannot share memory here, as far as one process can see it."""
    if ranks > MAX_SLOTS:
        return f"more than {MAX_SLOTS} ranks share none"
    if not can_share_memory(ranks):
        return "it takes Linux on x86-64"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return "this system does not tell when a process ends (pidfd_open)"
    return ""


def _open_memory(maker: Participant) -> mmap.mmap:
    """Return the memory that another rank has made.

    Raises:
        OSError: It cannot be mapped, with the reason in a few words.
    """
    if maker.obstacle:
        raise OSError(maker.obstacle)
    if maker.machine != Participant.of_this_process().machine:
        raise OSError("the ranks are on several machines")
    try:
        file = os.open(f"/proc/{maker.pid}/fd/{maker.file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(f"the memory of rank 0 cannot be opened ({error.strerror})") from error
    try:
        return mmap.mmap(file, 0)
    finally:
        os.close(file)


def _read_participant(store: KeyStore, rank: int) -> Participant:
    fields: dict[str, Any] = json.loads(store.get(str(rank)))
    return Participant(**fields)
