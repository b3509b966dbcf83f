"""timing.jsonl: how long the ranks took. One line per flush, of about the same length for any
number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepladder.core.jsonl import is_number, is_whole
from stepladder.rank.progress import TIMING_KEYS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NAMED = 16  # ranks of a line: those that took longest for their own share
MOST_SECONDS = 1e9
SPREAD = ("least", "median", "most")


def timing_line(step: int, steps: int, seconds: NDArray[np.float64]) -> dict[str, Any]:
    """Of the `steps` steps up to `step`. seconds: of each rank in each phase, shape (ranks, keys)."""
    import numpy as np  # late: a launcher and `submit` do without

    slowest = np.argsort(-seconds[:, :2].sum(1), kind="stable")[:NAMED]
    ordered, middle = np.sort(seconds, axis=0), len(seconds) // 2  # np.quantile costs 300 us
    median = (ordered[middle] + ordered[~middle]) / 2
    spread = np.stack([ordered[0], median, ordered[-1]]).round(6).T
    return {
        "step": step,
        "steps": steps,
        "world_size": len(seconds),
        **{key: three.tolist() for key, three in zip(TIMING_KEYS, spread, strict=True)},
        "ranks": {str(rank): seconds[rank].round(6).tolist() for rank in sorted(slowest.tolist())},
    }


def is_timing(line: dict[str, Any]) -> bool:
    """Whether it is as `timing_line` has it, or as before version 0.2, which wrote a line for each
    rank.
    """
    if not (is_whole(line.get("step")) and is_whole(line.get("steps")) and line["steps"]):
        return False
    if "rank" in line:
        return is_whole(line["rank"]) and _are_seconds(
            [line.get(key) for key in TIMING_KEYS], len(TIMING_KEYS)
        )
    ranks = line.get("ranks")
    return (
        is_whole(line.get("world_size"))
        and isinstance(ranks, dict)
        and 0 < len(ranks) <= min(NAMED, line["world_size"])
        and all(rank.isascii() and rank.isdigit() and len(rank) < 10 for rank in ranks)
        and all(_are_seconds(row, len(TIMING_KEYS)) for row in ranks.values())
        and (
            names_all(line) or all(_are_seconds(line.get(key), len(SPREAD)) for key in TIMING_KEYS)
        )
    )


def names_all(line: dict[str, Any]) -> bool:
    """Whether it has every rank's own seconds, so that nobody reads the spread."""
    return len(line["ranks"]) == int(line["world_size"])


def _are_seconds(value: Any, count: int) -> bool:
    is_row = isinstance(value, list) and len(value) == count
    return is_row and all(is_number(seconds) and 0 <= seconds < MOST_SECONDS for seconds in value)


def rows_of(line: dict[str, Any]) -> dict[int | str, list[float]]:
    """Seconds by phase of each rank that the line names; of SPREAD too, where it does not name all."""
    if "rank" in line:
        return {line["rank"]: [line[key] for key in TIMING_KEYS]}
    rows: dict[int | str, list[float]] = {int(rank): row for rank, row in line["ranks"].items()}
    if not names_all(line):
        rows |= {
            name: [line[key][place] for key in TIMING_KEYS] for place, name in enumerate(SPREAD)
        }
    return rows
