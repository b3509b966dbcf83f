"""timing.jsonl: how long the ranks took.

One line per flush, of about the same length for any number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepladder.core.jsonl import is_count, is_finite_number
from stepladder.rank.progress import TIMING_KEYS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_NAMED_RANKS = 16  # of a line: those that took longest for their own share
MAX_TIMING_S = 1e9
MAX_RANK_DIGITS = 9
SPREAD = ("least", "median", "most")
NUM_OWN_PHASES = 2  # the first phases, data and compute, in which a rank waits for no other


def make_timing_line(step: int, steps: int, seconds: NDArray[np.float64]) -> dict[str, Any]:
    """Return the line for some steps.

    Args:
        step: The last step.
        steps: The number of steps.
        seconds: The seconds of each rank in each phase, shape (ranks, phases).
    """
    import numpy as np  # late: a launcher and `submit` do without

    own_seconds = seconds[:, :NUM_OWN_PHASES].sum(1)
    slowest = np.argsort(-own_seconds, kind="stable")[:MAX_NAMED_RANKS]
    # Not np.quantile, which costs 300 us.
    ordered = np.sort(seconds, axis=0)
    middle = len(seconds) // 2
    median = (ordered[middle] + ordered[~middle]) / 2
    spread = np.stack([ordered[0], median, ordered[-1]]).round(6).T
    spread_of_phases = {
        key: values.tolist() for key, values in zip(TIMING_KEYS, spread, strict=True)
    }
    named_ranks = {}
    for rank in sorted(slowest.tolist()):
        named_ranks[str(rank)] = seconds[rank].round(6).tolist()
    return {
        "step": step,
        "steps": steps,
        "world_size": len(seconds),
        **spread_of_phases,
        "ranks": named_ranks,
    }


def is_timing_line(line: dict[str, Any]) -> bool:
    """Tell whether a line is as `make_timing_line` makes it, or as versions before 0.2 did.

    Versions before 0.2 wrote one line for each rank.

    Args:
        line: A line of the timing file, parsed from JSON.

    Returns:
        True if all fields are there and have valid values.
    """
    if not is_count(line.get("step")):
        return False
    if not is_count(line.get("steps")) or line["steps"] == 0:
        return False
    if "rank" in line:
        seconds = [line.get(key) for key in TIMING_KEYS]
        return is_count(line["rank"]) and _is_row(seconds, len(TIMING_KEYS))
    return _has_valid_ranks(line)


def _has_valid_ranks(line: dict[str, Any]) -> bool:
    """Tell whether a line has valid seconds of some ranks, and their spread over all ranks."""
    ranks = line.get("ranks")
    if not isinstance(ranks, dict):
        return False
    if not is_count(line.get("world_size")):
        return False
    if not 0 < len(ranks) <= min(MAX_NAMED_RANKS, line["world_size"]):
        return False
    if not all(map(_is_rank, ranks)):
        return False
    if not all(_is_row(row, len(TIMING_KEYS)) for row in ranks.values()):
        return False
    if _names_all_ranks(line):
        return True
    return all(_is_row(line.get(key), len(SPREAD)) for key in TIMING_KEYS)


def _names_all_ranks(line: dict[str, Any]) -> bool:
    """Tell whether a line has every rank's own seconds, so that nobody needs the spread."""
    return len(line["ranks"]) == int(line["world_size"])


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_RANK_DIGITS


def _is_row(value: Any, count: int) -> bool:
    """Tell whether a value is a list of so many numbers of seconds."""
    if not isinstance(value, list) or len(value) != count:
        return False
    return all(is_finite_number(seconds) and 0 <= seconds < MAX_TIMING_S for seconds in value)


def get_timing_rows(line: dict[str, Any]) -> dict[int | str, list[float]]:
    """Return the seconds in each phase of the ranks that a line names.

    If it does not name all ranks, the names in SPREAD have a row too.
    """
    if "rank" in line:
        return {line["rank"]: [line[key] for key in TIMING_KEYS]}
    rows: dict[int | str, list[float]] = {}
    for rank, row in line["ranks"].items():
        rows[int(rank)] = row
    if not _names_all_ranks(line):
        for index, name in enumerate(SPREAD):
            rows[name] = [line[key][index] for key in TIMING_KEYS]
    return rows
