"""Reads the dumps of torch's flight recorder: the collectives that each rank has begun.

torch writes one file per rank (`TORCH_FR_DUMP_TEMP_FILE` followed by the rank) when NCCL's watchdog
sees a timeout. It is a pickle of plain containers, or JSON. The keys are those of
torch/csrc/distributed/c10d/FlightRecorder.hpp, version 2.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepladder.rank.progress import RING_SIZE, VARYING_SIZE, CallSite, RankProgress
from stepladder.rank.stacks import Frame, find_user_frame
from stepladder_exchange.flight_record import DUMP_PREFIX_VARIABLE, OLD_DUMP_PREFIX_VARIABLE

# In the names of collectives to which ranks may pass different sizes.
NAMES_WITH_ANY_SIZE = ("all_to_all", "gather", "scatter", "send", "recv", "coalesced", "_v")

UNKNOWN_CALLER = Frame("?", "?", 0)


@dataclass(frozen=True)
class _RecordedCollective:
    """One collective in a rank's dump.

    Args:
        entry: Its entry in the dump.
    """

    entry: dict[str, Any]

    @property
    def group(self) -> str:
        """The name of its process group."""
        return str(self.entry["process_group"][0])

    @property
    def number(self) -> int:
        """Its number in its process group."""
        return int(self.entry["collective_seq_id"])

    @property
    def is_completed(self) -> bool:
        """Whether the rank has completed it."""
        return self.entry["state"] == "completed" or bool(self.entry.get("retired"))

    @property
    def name(self) -> str:
        """Its name; `nccl:all_reduce` and `gloo:all_reduce` are the same collective."""
        return re.sub(r"^\w+:", "", self.entry["profiling_name"]).strip()

    @property
    def call_site(self) -> CallSite:
        """The line that has called it."""
        frames = []
        for frame in self.entry.get("frames", []):
            frames.append(Frame(frame["name"], frame["filename"], int(frame["line"])))
        caller = find_user_frame(frames) or UNKNOWN_CALLER
        return CallSite(caller.function, caller.file, caller.line, self.name)

    @property
    def size(self) -> int:
        """How many numbers the rank passes to it; VARYING_SIZE if these may differ by rank."""
        if any(part in self.name for part in NAMES_WITH_ANY_SIZE):
            return VARYING_SIZE
        return sum(math.prod(shape) for shape in self.entry["input_sizes"])


RecordedGroup = dict[int, list[_RecordedCollective]]  # of each rank


class _ContainerUnpickler(pickle.Unpickler):
    """Loads dicts, lists, strings and numbers. Any other class could run code from the file."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight recorder's dump")


def make_dump_variable(prefix: Path) -> dict[str, str]:
    """Return the environment variable that makes ranks write dumps beside `prefix`.

    It is empty if the user has set the variable.
    """
    if DUMP_PREFIX_VARIABLE in os.environ or OLD_DUMP_PREFIX_VARIABLE in os.environ:
        return {}
    return {DUMP_PREFIX_VARIABLE: f"{prefix}.flight-"}


def find_dumps(prefix: Path, ranks: Iterable[int]) -> dict[int, Path]:
    """Return the dumps that ranks have written, by rank."""
    users_prefix = os.environ.get(DUMP_PREFIX_VARIABLE) or os.environ.get(OLD_DUMP_PREFIX_VARIABLE)
    dump_prefix = users_prefix or f"{prefix}.flight-"
    paths = {rank: Path(f"{dump_prefix}{rank}") for rank in ranks}
    return {rank: path for rank, path in paths.items() if path.is_file()}


def read_dump(path: Path) -> dict[str, Any]:
    """Return the dump of one rank.

    Raises:
        ValueError: The file is not a dump.
    """
    data = path.read_bytes()
    try:
        dump = _load_dump(data)
    except (ValueError, EOFError, IndexError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path.name} is not a dump of a flight recorder: {error}") from error
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise ValueError(f"{path.name} is not a dump of a flight recorder: it has no entries")
    return dump


def _load_dump(data: bytes) -> Any:
    if data.startswith((b"{", b"[")):
        return json.loads(data)
    return _ContainerUnpickler(io.BytesIO(data)).load()


def infer_progress(dumps: dict[int, dict[str, Any]]) -> dict[int, RankProgress]:
    """Return the collectives of each rank in the group that hangs, by rank.

    That is a group in which ranks have begun different numbers of collectives; if there is none,
    the first group with a collective that is not completed.
    """
    groups: dict[str, RecordedGroup] = {}
    for rank, dump in dumps.items():
        for entry in dump["entries"]:
            if not entry.get("is_p2p"):
                collective = _RecordedCollective(entry)
                group = groups.setdefault(collective.group, {})
                group.setdefault(rank, []).append(collective)
    if not groups:
        return {}
    hanging = min(groups.values(), key=_rate_health)
    return {rank: _make_progress(hanging.get(rank, [])) for rank in dumps}


def _rate_health(group: RecordedGroup) -> tuple[bool, bool]:
    """Return whether all ranks have begun equally many collectives, and have completed them."""
    counts = set()
    are_completed = True
    for collectives in group.values():
        counts.add(max(collective.number for collective in collectives))
        are_completed = are_completed and collectives[-1].is_completed
    return len(counts) == 1, are_completed


def _make_progress(collectives: list[_RecordedCollective]) -> RankProgress:
    if not collectives:
        return RankProgress()
    last = max(collectives, key=lambda collective: collective.number)
    recent = []
    for collective in collectives[-RING_SIZE:]:
        recent.append((collective.number, (collective.call_site, collective.size)))
    awaited = 0 if last.is_completed else last.number
    return RankProgress(num_collectives=last.number, awaited=awaited, recent=tuple(recent))
