"""torch's flight recorder, read: which collectives each rank has begun, as it left them when NCCL
gave up.

torch writes a file per rank (`TORCH_FR_DUMP_TEMP_FILE` and the rank) when NCCL's watchdog sees a
timeout: a pickle of plain containers, or JSON. The keys are those of
torch/csrc/distributed/c10d/FlightRecorder.hpp, version 2."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stepladder.rank.progress import RING, CallSite, Standing
from stepladder.rank.stacks import Frame, users_frame

PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
OTHER_PREFIX = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"  # its older name
SIZES_MAY_DIFFER = ("all_to_all", "gather", "scatter", "send", "recv", "coalesced", "_v")


class _Containers(pickle.Unpickler):
    """Loads dicts, lists, strings and numbers; anything else in a file would be a way in."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight recorder's dump")


def prefix_for(file: Path) -> dict[str, str]:
    """The variable that makes a rank leave its dump beside `file`; {} where the user has said
    where.
    """
    if PREFIX in os.environ or OTHER_PREFIX in os.environ:
        return {}
    return {PREFIX: f"{file}.flight-"}


def dumps_of(file: Path, ranks: Iterable[int]) -> dict[int, Path]:
    """The dumps that ranks have left, by rank."""
    prefix = os.environ.get(PREFIX) or os.environ.get(OTHER_PREFIX) or f"{file}.flight-"
    found = {rank: Path(f"{prefix}{rank}") for rank in ranks}
    return {rank: path for rank, path in found.items() if path.is_file()}


def read_dump(path: Path) -> dict[str, Any]:
    """One rank's dump. Raises ValueError for anything else."""
    data = path.read_bytes()
    try:
        found = (
            json.loads(data) if data[:1] in (b"{", b"[") else _Containers(io.BytesIO(data)).load()
        )
    except (ValueError, EOFError, IndexError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path.name} is not a dump of a flight recorder: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("entries"), list):
        raise ValueError(f"{path.name} is not a dump of a flight recorder: it has no entries")
    return found


def standings(dumps: dict[int, dict[str, Any]]) -> dict[int, Standing]:
    """Each rank's collectives in the group that hangs, as if it had noted them in its words.

    That is the group whose members differ in how many they have begun, else the first with one not
    completed."""
    groups: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for rank, dump in dumps.items():
        for entry in dump["entries"]:
            if not entry.get("is_p2p"):
                groups.setdefault(entry["process_group"][0], {}).setdefault(rank, []).append(entry)
    if not groups:
        return {}
    chosen = min(groups.values(), key=_is_well)
    return {rank: _standing(chosen.get(rank, [])) for rank in dumps}


def _is_well(group: dict[int, list[dict[str, Any]]]) -> tuple[bool, bool]:
    last = {max(entry["collective_seq_id"] for entry in entries) for entries in group.values()}
    return len(last) == 1, all(_is_done(entries[-1]) for entries in group.values())


def _is_done(entry: dict[str, Any]) -> bool:
    return entry["state"] == "completed" or bool(entry.get("retired"))


def _standing(entries: list[dict[str, Any]]) -> Standing:
    if not entries:
        return Standing()
    last = max(entries, key=lambda entry: entry["collective_seq_id"])
    count = last["collective_seq_id"]
    recent = tuple((e["collective_seq_id"], _collective(e)) for e in entries[-RING:])
    return Standing(count=count, waits=0 if _is_done(last) else count, recent=recent)


def _collective(entry: dict[str, Any]) -> tuple[CallSite, int]:
    """Its place in the source, and how many numbers the rank brings, -1 where that may differ."""
    name = re.sub(
        r"^\w+:", "", entry["profiling_name"]
    ).strip()  # `nccl:all_reduce` and `gloo:all_reduce` are one
    frames = [Frame(f["name"], f["filename"], int(f["line"])) for f in entry.get("frames", [])]
    place = users_frame(frames) or Frame("?", "?", 0)
    may_differ = any(word in name for word in SIZES_MAY_DIFFER)
    size = -1 if may_differ else sum(math.prod(shape) for shape in entry["input_sizes"])
    return CallSite(place.function, place.file, place.line, name), size
