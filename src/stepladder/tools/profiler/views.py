"""What `stepladder profile` has found, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from stepladder.tools.profiler.profile import MERGED, TENSORBOARD, Found


def as_tables(found: Found) -> Iterator[Table]:
    """For the terminal: a row per rank, a row per operator."""
    profile = found.profile
    count = profile.ranks[0].steps
    shown = Table(title=f"{found.job}: ms per step, mean of {count} step(s)")
    order = ("data", "forward", "backward", "communication", "waiting", "optimizer", "other")
    for head in ("rank", "step", *order, "overlapped", "Python", "memory MB", *["GPU MB"] * profile.on_gpu):
        shown.add_column(head, justify="right")
    for rank in profile.ranks:
        parts = [milliseconds(rank.parts[part]) for part in order]
        gpu = [megabytes(rank.peak_gpu_bytes)] if profile.on_gpu else []
        shown.add_row(
            str(rank.rank), milliseconds(rank.seconds), *parts, milliseconds(rank.overlapped),
            milliseconds(rank.python), megabytes(rank.peak_bytes), *gpu,
        )  # fmt: skip
    yield shown
    most = Table(title="operators that take most, of their own")
    for head in ("operator", "ms per step", "of the step", "calls per step"):
        most.add_column(head, justify="left" if head == "operator" else "right")
    for operator in profile.operators:
        share = f"{operator.seconds / profile.seconds:.0%}"
        most.add_row(operator.name[:70], milliseconds(operator.seconds), share, f"{operator.calls:g}")
    yield most


def milliseconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1e3 * seconds:.2f}"


def megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.0f}"


def sentences(found: Found) -> Iterator[str]:
    for number, advice in enumerate(found.advice, start=1):
        yield f"{number}. {advice.text}"
    yield f"{found.out / MERGED}: all ranks on one time axis ({found.clock}), for ui.perfetto.dev"
    yield f"{found.out / TENSORBOARD}: a trace per rank; docs/see.md says how TensorBoard shows them"
