"""Where a rank is, in numbers that its launcher reads without asking: a few words in a file that
they share.

A rank writes plain 64-bit words (40 ns each), so they may stand in the step path. Nobody reads them
until nothing has moved for a while."""

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

from stepladder.core.stored import fit
from stepladder.rank.stacks import Frame, users_frame

PROGRESS = "STEPLADDER_PROGRESS"  # a rank's `RankFiles` as JSON
STEP, PHASE, PASS, COUNT, WAITS, REGROUP, GROUP = range(
    7
)  # a rank's words: Standing; REGROUP is its launcher's
RING = 28  # the last collectives of which a rank remembers site and size
SITES, SIZES, WORDS = 8, 8 + RING, 8 + 2 * RING
BYTES_PER_RANK = 8 * WORDS

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
# What timing.jsonl calls those that are timed, in its order; all but the last add up to a step.
TIMED = {
    READING: "data",
    COMPUTING: "compute",
    WAITING: "wait",
    UPDATING: "optimizer",
    SAVING: "snapshot",
}
TIMING_KEYS = tuple(TIMED.values())
STEP_KEYS = TIMING_KEYS[:-1]


HOOK = "register_optimizer_step_post_hook"
OF_BLOCK = " of "  # in the name of a collective, before that of a block
OWN_WORDS = [0] * WORDS  # of a process that no launcher watches


@dataclass(frozen=True)
class RankFiles:
    """The files that a rank writes and its launcher reads.

    rank: the number that the rank was started with.  slot: its place among those of its node.
    words: of all ranks of the node, at their slots.  sites: of all of them, a line for each call of
    a collective. stacks: of this rank alone."""

    rank: int
    slot: int
    words: str
    sites: str
    stacks: str

    @property
    def variable(self) -> dict[str, str]:
        """Return what tells a rank its files."""
        return {PROGRESS: json.dumps(asdict(self))}

    @staticmethod
    def of_this_process() -> RankFiles | None:
        """Return the files of this rank, or None where no launcher watches it."""
        try:
            files: RankFiles = fit(json.loads(os.environ.get(PROGRESS, "")), RankFiles)
        except ValueError:
            return None
        return files


@dataclass(frozen=True)
class CallSite(Frame):
    """A call of a collective in the source."""

    name: str


@dataclass(frozen=True)
class Standing:
    """One rank's words.

    step: the one under way, from 1; 0 before the first.  phase: of PHASES.  passes: microbatches,
    or batches of an evaluation, begun.  count: collectives begun.  waits: the number of the one it
    waits for, or 0. recent: (site, numbers that this rank brings; -1 where that may differ) by
    number, of the last RING. group: the number of the group that made them: it counts those in
    place of a broken one."""

    step: int = 0
    phase: int = UNKNOWN
    passes: int = 0
    count: int = 0
    waits: int = 0
    recent: tuple[tuple[int, tuple[CallSite, int]], ...] = ()
    group: int = 0

    def collective(self, number: int) -> tuple[CallSite, int] | None:
        return dict(self.recent).get(number)


class Progress:
    """This rank's words. `words[PHASE] = READING` is how to write one.

    Where no launcher watches they are a list, and collectives are not noted.
    """

    def __init__(self) -> None:
        self.words: Any = OWN_WORDS
        self.files: RankFiles | None = None  # where a launcher watches
        self.known: dict[int, int] = {}
        self.codes: list[Any] = []  # kept, so that no id is given twice
        self.blocks: dict[str, int] = {}  # site by what is collected, where that is a block's
        self.sites_known = 0
        if (files := RankFiles.of_this_process()) is None:
            return
        with suppress(
            OSError, ValueError
        ):  # a container of the rank's own, from which they cannot be opened
            with Path(files.words).open("r+b") as opened:
                words = memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")
            self.words = words[files.slot * WORDS : (files.slot + 1) * WORDS]
            self.files = files

    def reach(self, name: str, size: int) -> None:
        """Note that this rank begins its next collective: where its caller's caller is in the
        source, and how many numbers this rank brings, -1 where ranks may bring different ones. Half
        a microsecond."""
        if self.files is None:
            return
        frame = sys._getframe(2)
        # One whole number as the key, for a tuple would cost as much again. Addresses are multiples
        # of 16.
        site = self.known.get((id(frame.f_code) << 12) + frame.f_lasti) or self._find(name, frame)
        words = self.words
        number = words[COUNT] + 1
        place = number % RING
        words[SITES + place] = site
        words[SIZES + place] = size
        words[COUNT] = number

    def reach_block(self, name: str, block: str, size: int) -> None:
        """Note a collective of one block of the model, by the block's name: blocks have the same
        lines.
        """
        if self.files is None:
            return
        label = f"{name}{OF_BLOCK}{block}"
        if label not in self.blocks:
            self._add_site(_call_of_a_block(label))
            self.blocks[label] = self.sites_known
        number = self.words[COUNT] + 1
        self.words[SITES + number % RING] = self.blocks[label]
        self.words[SIZES + number % RING] = size
        self.words[COUNT] = number

    def _add_site(self, site: tuple[str, str, int, str]) -> None:
        """Have the launcher find the site by its number, from 1: 0 is an empty place in the ring."""
        assert self.files is not None
        append(
            self.files.sites, json.dumps((self.files.rank, *site))
        )  # as JSON: a folder's name may hold any byte
        self.sites_known += 1

    def _find(self, name: str, frame: Any) -> int:
        """The site of a call that comes for the first time, or by way of the module that makes
        collectives.
        """
        module = sys._getframe(2).f_globals
        while frame.f_globals is module and frame.f_back is not None:
            frame = frame.f_back
        code = frame.f_code
        key = (id(code) << 12) + frame.f_lasti
        if key not in self.known and self.files is not None:
            self._add_site((code.co_name, code.co_filename, frame.f_lineno, name))
            self.codes.append(code)
            self.known[key] = self.sites_known
        return self.known[key]


def _call_of_a_block(label: str) -> tuple[str, str, int, str]:
    """Return the site of the call of a block: the innermost one that is the job's, where there is
    one.
    """
    stack: list[Frame] = []
    frame: Any = sys._getframe(3)
    while frame is not None:
        stack.append(Frame(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    call = users_frame(stack) or stack[0]
    return call.function, call.file, call.line, label


def count_steps() -> None:
    """Note which step a script is in: those of its first optimizer, by torch's own hook, once torch
    is there.
    """
    while not hasattr(sys.modules.get("torch.optim.optimizer"), HOOK):
        time.sleep(
            0.05
        )  # in a thread: to import torch before the script would change what the script can set
    words = Progress().words
    first: list[object] = []

    def after_step(optimizer: object, *_: object) -> None:
        first[:] = first or [optimizer]
        if optimizer is first[0] and words[PHASE] == UNKNOWN:  # else our trainer notes more
            words[STEP] = max(words[STEP], 1) + 1

    getattr(sys.modules["torch.optim.optimizer"], HOOK)(after_step)


def append(file: str | Path, line: str) -> None:
    """Add a line to a file that other ranks add lines to.

    One call of the system, so that no line lies within another one. A rank that is killed in it may
    leave half a line, behind which the next one begins anew."""
    opened = os.open(file, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(opened, f"\n{line}\n".encode())
    finally:
        os.close(opened)


def clear_words(file: Path, slot: int) -> None:
    """Set the words of one rank to zero, for another process in its place."""
    _write(file, slot * BYTES_PER_RANK, bytes(BYTES_PER_RANK))


def write_word(file: Path, local_rank: int, word: int, value: int) -> None:
    _write(file, local_rank * BYTES_PER_RANK + 8 * word, value.to_bytes(8, sys.byteorder))


def _write(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b", buffering=0) as opened:
        opened.seek(offset)
        opened.write(data)


def read_progress(file: Path, sites_file: Path, ranks: Sequence[int]) -> list[Standing]:
    """Return the standing of each rank, also of one that has ended. ranks: their numbers, by slot."""
    words = memoryview(file.read_bytes()).cast("q")
    sites = _read_sites(sites_file)
    return [
        _standing(words[slot * WORDS : (slot + 1) * WORDS], sites.get(rank, []))
        for slot, rank in enumerate(ranks)
    ]


def _standing(words: memoryview, sites: list[CallSite]) -> Standing:
    step, phase, passes, count, waits, _, group = words[: GROUP + 1].tolist()
    recent = [
        (number, (sites[site - 1], words[SIZES + number % RING]))
        for number in range(max(1, count - RING + 1), count + 1)
        if 0 < (site := words[SITES + number % RING]) <= len(sites)
    ]
    return Standing(step, phase, passes, count, waits, tuple(recent), group)


def _read_sites(file: Path) -> dict[int, list[CallSite]]:
    """Return the sites of each rank, in the order in which they were noted."""
    sites: dict[int, list[CallSite]] = {}
    for line in file.read_bytes().splitlines():
        with suppress(ValueError):
            rank, *site = json.loads(line)
            sites.setdefault(rank, []).append(CallSite(*site))
    return sites
