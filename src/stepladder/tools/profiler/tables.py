"""Show a profile in the terminal: a column per rank, and a table of operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from rich.table import Table

from stepladder.core.numbers import format_count
from stepladder.core.terminal import make_column_tables
from stepladder.tools.profiler.advice import Profile
from stepladder.tools.profiler.breakdown import RankProfile
from stepladder.tools.profiler.profile import ProfileResult

PARTS_SHOWN = ("data", "forward", "backward", "communication", "waiting", "optimizer", "other")
MAX_RANK_COLUMNS = 12  # of more ranks, the spread and the latest are shown
NUM_LATEST_SHOWN = 3
MAX_OPERATOR_NAME = 70


def make_tables(result: ProfileResult, width: int) -> Iterator[Table]:
    yield from make_rank_tables(result.profile, result.job, width)
    yield make_operator_table(result.profile)


def make_rank_tables(profile: Profile, name: str, width: int) -> Iterator[Table]:
    steps = format_count(profile.ranks[0].steps, "step")
    title = f"{name}: ms per step, of the typical among {steps}"
    rows = ["step", *PARTS_SHOWN, "overlapped", "Python", "memory MB"]
    if profile.on_gpu:
        rows.append("GPU MB")
    yield from make_column_tables(title, "", rows, _make_rank_columns(profile), width)


def _make_rank_columns(profile: Profile) -> dict[str, list[str]]:
    """Return the cells of each rank; of many ranks, of their spread and of those that come last."""
    ranks = profile.ranks
    columns: dict[str, list[str]] = {}
    if len(ranks) > MAX_RANK_COLUMNS:
        summaries: dict[str, Callable[[Sequence[float]], float]] = {
            "least": min,
            "median": median,
            "most": max,
        }
        every_cell = [_get_numbers(rank, profile.on_gpu) for rank in ranks]
        for name, summarize in summaries.items():
            columns[name] = [
                _format_number(_summarize_known(row, summarize))
                for row in zip(*every_cell, strict=True)
            ]
        ranks = sorted(ranks, key=lambda rank: rank.share("waiting"))[:NUM_LATEST_SHOWN]
    for rank in ranks:
        numbers = _get_numbers(rank, profile.on_gpu)
        columns[f"rank {rank.rank}"] = [_format_number(number) for number in numbers]
    return columns


def _get_numbers(rank: RankProfile, on_gpu: bool) -> list[float | None]:
    """Return milliseconds per step and megabytes; None for what the trace does not show."""
    seconds = [
        rank.seconds,
        *[rank.parts[part] for part in PARTS_SHOWN],
        rank.overlapped,
        rank.python,
    ]
    numbers = [_scale_known(second, 1e3) for second in seconds]
    numbers.append(_scale_known(rank.peak_bytes, 1e-6))
    if on_gpu:
        numbers.append(_scale_known(rank.peak_gpu_bytes, 1e-6))
    return numbers


def _scale_known(number: float | None, factor: float) -> float | None:
    if number is None:
        return None
    return factor * number


def _summarize_known(
    numbers: Sequence[float | None], summarize: Callable[[Sequence[float]], float]
) -> float | None:
    known = [number for number in numbers if number is not None]
    return summarize(known) if known else None


def make_operator_table(profile: Profile) -> Table:
    table = Table(title="operators by self time")
    table.add_column("operator", justify="left", overflow="fold")
    for column in ("ms per step", "of the step", "calls per step"):
        table.add_column(column, justify="right", no_wrap=True)
    for operator in profile.operators:
        table.add_row(
            operator.name[:MAX_OPERATOR_NAME],
            f"{1e3 * operator.seconds:.3f}",
            f"{operator.seconds / profile.seconds:.0%}",
            f"{round(operator.calls, 1):g}",
        )
    return table


def _format_number(number: float | None) -> str:
    """Return a number with two decimals, or without where they mean nothing."""
    if number is None:
        return "unknown"
    return f"{number:.0f}" if number >= 100 else f"{number:.2f}"
