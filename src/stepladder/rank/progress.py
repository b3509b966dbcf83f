"""The progress of a rank, in slots of a file that it shares with its launcher.

The slots are plain 64-bit numbers. Writing one takes 40 ns, so a rank can write several in each
step. The launcher evaluates them only when the ranks have made no progress for a while.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepladder.core.typed_file import convert
from stepladder.rank.stacks import Frame, find_user_frame, walk_stack

PROGRESS_VARIABLE = "STEPLADDER_PROGRESS"  # a rank's `RankFiles` as JSON
# The indices of a rank's slots. RankProgress explains what they hold, except for REGROUP: the
# launcher sets that slot to ask the rank to leave its group after the current step.
STEP, PHASE, PASS, COLLECTIVE, AWAITED, REGROUP, GROUP = range(7)
# Collective n stores its call site and its size at index n % RING_SIZE of two rings of slots, so
# the latest RING_SIZE collectives are remembered.
RING_SIZE = 28
FIRST_SITE_SLOT = 8
FIRST_SIZE_SLOT = FIRST_SITE_SLOT + RING_SIZE
NUM_SLOTS = FIRST_SIZE_SLOT + RING_SIZE
BYTES_PER_RANK = 8 * NUM_SLOTS
VARYING_SIZE = -1  # recorded for a collective to which ranks may contribute different sizes

UNKNOWN, STARTING, READING, COMPUTING, WAITING, UPDATING, EVALUATING, SAVING, ENDING = range(9)
PHASES = (
    "",
    "starting",
    "reading data",
    "forward and backward",
    "waiting for the other ranks",
    "optimizer step",
    "evaluation",
    "snapshot",
    "ending",
)
# The phases that are timed, and their names in timing.jsonl. The times of all but the last one,
# the snapshot, add up to the time of a step.
TIMED = {
    READING: "data",
    COMPUTING: "compute",
    WAITING: "wait",
    UPDATING: "optimizer",
    SAVING: "snapshot",
}
TIMING_KEYS = tuple(TIMED.values())
STEP_KEYS = TIMING_KEYS[:-1]

OPTIMIZER_MODULE = "torch.optim.optimizer"
STEP_HOOK = "register_optimizer_step_post_hook"
TORCH_POLL_S = 0.05
BLOCK_SEPARATOR = " of "  # between the name of a collective and the name of a model block
LOCAL_SLOTS = [0] * NUM_SLOTS  # the slots of a process that no launcher watches


@dataclass(frozen=True)
class RankFiles:
    """The files that a rank writes and its launcher reads.

    Args:
        rank: The number with which the rank was started.
        slot: The index of the rank among the ranks of its node.
        progress_file: The slots of all ranks of the node.
        sites_file: The call sites of all ranks of the node, a line each.
        stacks_file: The stacks of this rank alone.
    """

    rank: int
    slot: int
    progress_file: str
    sites_file: str
    stacks_file: str

    @property
    def variable(self) -> dict[str, str]:
        """The environment variable that names a rank's files, with its value."""
        return {PROGRESS_VARIABLE: json.dumps(asdict(self))}

    @staticmethod
    def of_this_process() -> RankFiles | None:
        """Return the files of this rank, or None if no launcher watches it."""
        try:
            text = os.environ.get(PROGRESS_VARIABLE, "")
            files: RankFiles = convert(json.loads(text), RankFiles)
        except ValueError:
            return None
        return files


@dataclass(frozen=True)
class CallSite(Frame):
    """A call of a collective in the source.

    Args:
        name: The name of the collective.
    """

    name: str


@dataclass(frozen=True)
class RankProgress:
    """One rank's slots, as its launcher reads them.

    Args:
        step: The step in progress, from 1; 0 before the first.
        phase: An index of PHASES.
        passes: How many microbatches, or batches of an evaluation, the rank has begun.
        num_collectives: How many collectives the rank has begun in its group. They are numbered
            from 1.
        awaited: The number of the collective that the rank waits for, or 0.
        recent: The latest collectives: (number, (call site, size)). The size is how many elements
            the rank contributes, or VARYING_SIZE.
        group: The number of the current process group: 0 for the first one, and one more for each
            group that replaced it.
    """

    step: int = 0
    phase: int = UNKNOWN
    passes: int = 0
    num_collectives: int = 0
    awaited: int = 0
    recent: tuple[tuple[int, tuple[CallSite, int]], ...] = ()
    group: int = 0

    def find_call(self, number: int) -> CallSite | None:
        """Return the call site of a collective, if the rank remembers it."""
        recorded = self.find_collective(number)
        return recorded and recorded[0]

    def find_collective(self, number: int) -> tuple[CallSite, int] | None:
        """Return the call site and the size of a collective, if the rank remembers it."""
        return dict(self.recent).get(number)


class Progress:
    """The progress of this process: `slots[PHASE] = READING` writes one slot."""

    def __init__(self) -> None:
        # The slots in the file shared with the launcher. Without a launcher they are a list, and
        # collectives are not recorded.
        self.slots: Any = LOCAL_SLOTS
        # The rank's files, None without a launcher.
        self.files: RankFiles | None = None
        self._site_by_call: dict[int, int] = {}
        self._codes: list[Any] = []  # kept alive, so that no two code objects have the same id
        self._site_by_label: dict[str, int] = {}  # for collectives of one block of the model
        self._num_sites = 0
        files = RankFiles.of_this_process()
        if files is None:
            return
        # OSError: the rank runs in a container in which the file does not exist.
        with suppress(OSError, ValueError):
            with Path(files.progress_file).open("r+b") as opened:
                all_slots = memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")
            first = files.slot * NUM_SLOTS
            self.slots = all_slots[first : first + NUM_SLOTS]
            self.files = files

    def record_collective(self, name: str, size: int) -> None:
        """Record that this rank begins its next collective. Takes half a microsecond.

        The call site is the line that called the caller of this method.

        Args:
            name: The collective.
            size: How many elements this rank contributes, or VARYING_SIZE.
        """
        if self.files is None:
            return
        frame = sys._getframe(2)
        # The key is one integer, since a tuple would double the cost. It is unique: the address of
        # a code object (its id) is a multiple of 16, so shifted by 12 bits it leaves 16 bits for
        # the offset of the instruction, which is below 2^16.

        key = (id(frame.f_code) << 12) + frame.f_lasti
        site = self._site_by_call.get(key) or self._find_site(name, frame)
        slots = self.slots
        number = slots[COLLECTIVE] + 1
        index = number % RING_SIZE
        slots[FIRST_SITE_SLOT + index] = site
        slots[FIRST_SIZE_SLOT + index] = size
        slots[COLLECTIVE] = number

    def record_block_collective(self, name: str, block: str, size: int) -> None:
        """Record a collective of one block of the model, with the block's name.

        The same lines of code compute all blocks, so the call site alone would not tell the blocks
        apart.
        """
        if self.files is None:
            return
        label = f"{name}{BLOCK_SEPARATOR}{block}"
        if label not in self._site_by_label:
            self._add_site(_find_block_call(label))
            self._site_by_label[label] = self._num_sites
        number = self.slots[COLLECTIVE] + 1
        self.slots[FIRST_SITE_SLOT + number % RING_SIZE] = self._site_by_label[label]
        self.slots[FIRST_SIZE_SLOT + number % RING_SIZE] = size
        self.slots[COLLECTIVE] = number

    def _add_site(self, site: tuple[str, str, int, str]) -> None:
        """Give a call site the next number, and write it for the launcher.

        The numbers begin at 1, since 0 marks an empty slot of the ring.
        """
        assert self.files is not None
        # As JSON, since the name of a folder may hold any byte.
        append_line(self.files.sites_file, json.dumps((self.files.rank, *site)))
        self._num_sites += 1

    def _find_site(self, name: str, frame: Any) -> int:
        """Return the number of the call site of a frame, and give a new call site a number.

        The module that calls `record_collective` may do so through several of its own functions.
        The call site is the line outside of that module which called into it.
        """
        module = sys._getframe(2).f_globals  # of the caller of `record_collective`
        while frame.f_globals is module and frame.f_back is not None:
            frame = frame.f_back
        code = frame.f_code
        key = (id(code) << 12) + frame.f_lasti
        if key not in self._site_by_call and self.files is not None:
            self._add_site((code.co_name, code.co_filename, frame.f_lineno, name))
            self._codes.append(code)
            self._site_by_call[key] = self._num_sites
        return self._site_by_call[key]


def _find_block_call(label: str) -> tuple[str, str, int, str]:
    """Return the call site of a block: the innermost frame in the user's code, if there is one."""
    # Frame 1 is `record_block_collective`, and frame 2 is the code of Stepladder that called it.
    stack = walk_stack(sys._getframe(3))
    call = find_user_frame(stack) or stack[0]
    return call.function, call.file, call.line, label


def count_script_steps() -> None:
    """Record the step of a script, by counting the steps of its first optimizer with torch's hook.

    Runs in a thread and waits until the script has imported torch. If this thread imported torch
    itself, it would be too late for the script to set what torch reads when it is imported.
    """
    while not hasattr(sys.modules.get(OPTIMIZER_MODULE), STEP_HOOK):
        time.sleep(TORCH_POLL_S)
    slots = Progress().slots
    first_optimizer: list[object] = []

    def after_step(optimizer: object, *_: object) -> None:
        if not first_optimizer:
            first_optimizer.append(optimizer)
        # In any other phase the script runs Stepladder's trainer, which records the steps itself.
        if optimizer is first_optimizer[0] and slots[PHASE] == UNKNOWN:
            slots[STEP] = max(slots[STEP], 1) + 1

    getattr(sys.modules[OPTIMIZER_MODULE], STEP_HOOK)(after_step)


def append_line(file: str | Path, line: str) -> None:
    """Append a line to a file to which other ranks append too.

    The line is written by one system call, so that lines of several ranks do not mix. A rank that
    is killed during the call may leave half a line; each line therefore begins with a newline.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, f"\n{line}\n".encode())
    finally:
        os.close(descriptor)


def clear_slots(file: Path, local_rank: int) -> None:
    """Set all slots of one rank to zero, for the process that replaces it."""
    _write_at(file, local_rank * BYTES_PER_RANK, bytes(BYTES_PER_RANK))


def write_slot(file: Path, local_rank: int, slot: int, value: int) -> None:
    """Write one slot of one rank, from the launcher."""
    _write_at(file, local_rank * BYTES_PER_RANK + 8 * slot, value.to_bytes(8, sys.byteorder))


def _write_at(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b", buffering=0) as opened:
        opened.seek(offset)
        opened.write(data)


def read_progress(file: Path, sites_file: Path, ranks: Sequence[int]) -> list[RankProgress]:
    """Return the progress of each rank of a node, including ranks that have ended.

    Args:
        file: The file of the slots of all ranks.
        sites_file: The file of the call sites of all ranks.
        ranks: The rank number of each local rank.
    """
    slots = memoryview(file.read_bytes()).cast("q")
    sites = _read_sites(sites_file)
    return [
        _parse_slots(slots[index * NUM_SLOTS : (index + 1) * NUM_SLOTS], sites.get(rank, []))
        for index, rank in enumerate(ranks)
    ]


def _parse_slots(slots: memoryview, sites: list[CallSite]) -> RankProgress:
    step, phase, passes, num_collectives, awaited, _, group = slots[: GROUP + 1].tolist()
    recent = []
    for number in range(max(1, num_collectives - RING_SIZE + 1), num_collectives + 1):
        site = slots[FIRST_SITE_SLOT + number % RING_SIZE]
        if 0 < site <= len(sites):
            recent.append((number, (sites[site - 1], slots[FIRST_SIZE_SLOT + number % RING_SIZE])))
    return RankProgress(step, phase, passes, num_collectives, awaited, tuple(recent), group)


def _read_sites(file: Path) -> dict[int, list[CallSite]]:
    """Return the call sites of each rank, in the order of their numbers."""
    sites: dict[int, list[CallSite]] = {}
    for line in file.read_bytes().splitlines():
        with suppress(ValueError):
            rank, *site = json.loads(line)
            sites.setdefault(rank, []).append(CallSite(*site))
    return sites
