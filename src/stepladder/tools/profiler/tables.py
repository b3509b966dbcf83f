"""Show a profile in the terminal: a table of ranks, and a table of operators."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from stepladder.tools.profiler.advice import Profile
from stepladder.tools.profiler.breakdown import RankProfile
from stepladder.tools.profiler.profile import ProfileResult

PART_COLUMNS = (
    "data",
    "forward",
    "backward",
    "communication",
    "waiting",
    "optimizer",
    "other",
)
MAX_OPERATOR_NAME = 70


def make_tables(result: ProfileResult) -> Iterator[Table]:
    steps = result.profile.ranks[0].steps
    yield make_rank_table(result.profile, f"{result.job}: ms per step, mean of {steps} step(s)")
    yield make_operator_table(result.profile)


def make_rank_table(profile: Profile, title: str) -> Table:
    table = Table(title=title)
    columns = ["rank", "step", *PART_COLUMNS, "overlapped", "Python", "memory MB"]
    if profile.on_gpu:
        columns.append("GPU MB")
    for column in columns:
        table.add_column(column, justify="right")
    for rank in profile.ranks:
        table.add_row(*rank_cells(rank), *gpu_cells(rank, profile.on_gpu))
    return table


def rank_cells(rank: RankProfile) -> list[str]:
    return [
        str(rank.rank),
        format_ms(rank.seconds),
        *[format_ms(rank.parts[part]) for part in PART_COLUMNS],
        format_ms(rank.overlapped),
        format_ms(rank.python),
        format_megabytes(rank.peak_bytes),
    ]


def gpu_cells(rank: RankProfile, on_gpu: bool) -> list[str]:
    return [format_megabytes(rank.peak_gpu_bytes)] if on_gpu else []


def make_operator_table(profile: Profile) -> Table:
    table = Table(title="operators by self time")
    table.add_column("operator", justify="left")
    for column in ("ms per step", "of the step", "calls per step"):
        table.add_column(column, justify="right")
    for operator in profile.operators:
        table.add_row(
            operator.name[:MAX_OPERATOR_NAME],
            format_ms(operator.seconds),
            f"{operator.seconds / profile.seconds:.0%}",
            f"{operator.calls:g}",
        )
    return table


def format_ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1e3 * seconds:.2f}"


def format_megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.0f}"
