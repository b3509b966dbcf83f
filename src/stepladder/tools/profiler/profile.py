"""`stepladder profile`: runs a job or a script under torch.profiler, and says where its steps go."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from stepladder.core.durable import remove
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.output_file import write_output
from stepladder.core.scratch import get_scratch_folder
from stepladder.core.world import World
from stepladder.tools.profiler.advice import Advice, Profile, advise
from stepladder.tools.profiler.parts import align, rank_profiles, top_operators
from stepladder.tools.profiler.trace import Event, Trace

RESULT, MERGED, TENSORBOARD = "profile.json", "merged.json", "tensorboard"
IDS_PER_RANK = 2**40  # arrows and streams of different ranks must not get mixed up
Run = Callable[[Path], int]  # runs the ranks; their traces go to the folder; the exit code


@dataclass(frozen=True)
class Found:
    """What `profile` has found, and where it lies. clock: how the ranks' clocks were aligned."""

    job: str
    out: Path
    clock: str
    profile: Profile
    advice: list[Advice]

    def as_json(self) -> dict[str, Any]:
        operators = [asdict(operator) for operator in self.profile.operators]
        return {
            "schema": 1,
            "job": self.job,
            "out": str(self.out),
            "steps": self.profile.ranks[0].steps,
            "clock": self.clock,
            "ranks": [rank.as_json() for rank in self.profile.ranks],
            "operators": operators,
            "advice": [asdict(one) for one in self.advice],
        }


def record(name: str, run: Run, out: Path, world: World) -> Found | int:
    """Run the ranks, and leave in `out` what their traces say; or the exit code of ranks that
    failed.

    world: perhaps one of several ranks that another launcher has started, on several machines.
    Their traces meet beside `out`, which all of them must see; the first rank's is the result, the
    others' an exit code."""
    refuse_foreign(out)
    if world.world_size == 1:
        with tempfile.TemporaryDirectory(dir=get_scratch_folder()) as folder:
            return run(Path(folder)) or examined(name, Path(folder), out)
    shared = out.with_name(f"{out.name}.traces")
    if not world.is_first:
        return run(shared)
    if shared.is_dir():  # rmtree would wait for a FIFO's writer
        shutil.rmtree(
            shared, ignore_errors=True
        )  # before it meets the others, who write only after they have met
    missing = [above for above in shared.absolute().parents if not above.exists()]
    shared.mkdir(parents=True)
    try:
        return run(shared) or examined(name, shared, out)
    finally:
        shutil.rmtree(shared, ignore_errors=True)
        for above in missing:  # empty where there is no profile
            with suppress(OSError):
                above.rmdir()


def examined(name: str, folder: Path, out: Path) -> Found:
    """What the traces of a folder say; they move to `out`, in the place of an earlier profile."""
    files = sorted(folder.glob("*.pt.trace.json"))
    traces = sorted(map(Trace, files), key=lambda trace: trace.rank)
    if not traces:
        raise InputError(
            f"{name} was stopped before its steps were recorded", "a later end, or fewer --steps"
        )
    clock = align(traces)
    profile = Profile(rank_profiles(traces), top_operators(traces))
    found = Found(name, out, clock, profile, advise(profile))
    remove(out / TENSORBOARD)
    (out / TENSORBOARD).mkdir(parents=True)
    for file in files:
        shutil.move(file, out / TENSORBOARD / file.name)
    merge(traces, clock, out / MERGED)
    write_output(
        out / RESULT, json.dumps(found.as_json(), indent=1), "--out"
    )  # last: it marks the folder as ours
    return found


def merge(traces: list[Trace], clock: str, path: Path) -> None:
    """One file with a process per rank, and one per rank's GPU, from the window's first event on."""
    start = min(float(trace.steps.min()) for trace in traces)
    events = [e for place, trace in enumerate(traces) for e in renamed(trace, place, start)]
    about = {
        "clock": clock,
        "ranks": [trace.about for trace in traces],
        "hosts": [t.host for t in traces],
    }
    trace = {"displayTimeUnit": "ms", "stepladder": about, "traceEvents": events}
    write_output(path, json.dumps(trace), "--out")


def renamed(trace: Trace, place: int, start: float) -> list[Event]:
    """The rank's events, with numbers of processes and arrows that no other rank has."""
    own = trace.step_notes[0]["pid"]
    numbers: dict[Any, int] = {own: place}
    found: list[Event] = []
    for event in trace.content["traceEvents"]:
        if not isinstance(event.get("pid"), int) or event["name"].startswith("process_"):
            continue  # Kineto's marks of its own start and end, and names that are given anew below
        pid = numbers.setdefault(event["pid"], 1000 * (place + 1) + len(numbers))
        new = {**event, "pid": pid}
        if "ts" in event:
            new["ts"] = round(event["ts"] + trace.shift - start, 3)
        if "id" in event:
            new["id"] = place * IDS_PER_RANK + int(event["id"])
        found.append(new)
    for pid, number in numbers.items():
        name = f"rank {trace.rank}" if pid == own else f"rank {trace.rank}, GPU {pid}"
        for key, value in (("name", f"{name} ({trace.host})"), ("sort_index", number)):
            found.append(
                {"ph": "M", "name": f"process_{key}", "pid": number, "tid": 0, "args": {key: value}}
            )
    return found


def refuse_foreign(out: Path) -> None:
    """Raises InputError where a profile would have to replace something else."""
    if blocked := [
        folder for folder in out.absolute().parents if folder.exists() and not folder.is_dir()
    ]:
        raise InputError(f"--out {out}: {blocked[0]} is not a folder", "--out another folder")
    is_there = out.is_symlink() or out.exists()  # a link in a circle does not exist
    if is_there and not (out / RESULT).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out {out} is there already, and no profile", "--out another folder")
    nearest = next(
        folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir()
    )
    with as_input_error(f"--out {out} cannot be written", "--out another folder"):
        Path(tempfile.mkdtemp(dir=nearest)).rmdir()


def as_tables(found: Found) -> Iterator[Table]:
    """For the terminal: a row per rank, a row per operator."""
    profile = found.profile
    count = profile.ranks[0].steps
    shown = Table(title=f"{found.job}: ms per step, mean of {count} step(s)")
    order = ("data", "forward", "backward", "communication", "waiting", "optimizer", "other")
    for head in (
        "rank",
        "step",
        *order,
        "overlapped",
        "Python",
        "memory MB",
        *["GPU MB"] * profile.on_gpu,
    ):
        shown.add_column(head, justify="right")
    for rank in profile.ranks:
        parts = [milliseconds(rank.parts[part]) for part in order]
        gpu = [megabytes(rank.peak_gpu_bytes)] if profile.on_gpu else []
        shown.add_row(
            str(rank.rank),
            milliseconds(rank.seconds),
            *parts,
            milliseconds(rank.overlapped),
            milliseconds(rank.python),
            megabytes(rank.peak_bytes),
            *gpu,
        )
    yield shown
    most = Table(title="operators that take most, of their own")
    for head in ("operator", "ms per step", "of the step", "calls per step"):
        most.add_column(head, justify="left" if head == "operator" else "right")
    for operator in profile.operators:
        share = f"{operator.seconds / profile.seconds:.0%}"
        most.add_row(
            operator.name[:70], milliseconds(operator.seconds), share, f"{operator.calls:g}"
        )
    yield most


def milliseconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1e3 * seconds:.2f}"


def megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.0f}"


def sentences(found: Found) -> Iterator[str]:
    for number, advice in enumerate(found.advice, start=1):
        yield f"{number}. {advice.text}"
    yield f"{found.out / MERGED}: all ranks on one time axis ({found.clock}), for ui.perfetto.dev"
    yield f"{found.out / TENSORBOARD}: a trace per rank, for TensorBoard with torch-tb-profiler"
