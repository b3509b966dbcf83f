"""`stepladder scale --nodes`: each measurement is a batch job; they run one after the other, and none is left."""

from __future__ import annotations

import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError
from stepladder.slurm.cluster import doubts, partitions, refuse_impossible
from stepladder.slurm.job import BatchJob
from stepladder.slurm.query import ask, look_up
from stepladder.slurm.submit import submit
from stepladder.tools.scaling.loss import Size
from stepladder.tools.scaling.measure import Round, TimedJob, TimedScript, measured, turns

SECONDS_BETWEEN_QUESTIONS = 2.0  # to Slurm's controller, which serves everybody
SECONDS_TO_CANCEL = 90.0
SECONDS_FOR_FILES = 30.0  # until a network file system shows what another node has written


def measured_on_nodes(
    subject: TimedJob | TimedScript,
    like: BatchJob,
    sizes: list[int],
    threads: int,
    rounds: int,
    say: Callable[[str], None],
) -> list[Size]:
    """On numbers of nodes. like: what all batch jobs have in common, with the processes per node.

    Raises InputError where there is no Slurm, where the cluster has no place for the largest size, or with the
    cause why a job failed.
    """
    refuse_impossible(replace(like, nodes=(max(sizes), max(sizes))), partitions())
    with Jobs(subject, like, threads).submitted(sizes, rounds, say) as run:
        found = measured(sizes, rounds, run, say, "node(s)")
    return [replace(size, nodes=nodes) for nodes, size in found.items()]


@dataclass(frozen=True)
class Jobs:
    """A batch job for each measurement of the subject."""

    subject: TimedJob | TimedScript
    like: BatchJob
    threads: int

    @contextmanager
    def submitted(
        self, sizes: list[int], rounds: int, say: Callable[[str], None]
    ) -> Iterator[Callable[[int, int], Round]]:
        """Yields run(round, nodes), which waits for that job's end."""
        folder = Path.cwd() / f".scale-{self.subject.name}-{secrets.token_hex(4)}"  # where all nodes see it
        for doubt in doubts(replace(self.like, job_dir=str(folder))):
            say(f"warning: {doubt}")
        try:
            folder.mkdir()
        except OSError as error:
            raise InputError(
                f"{folder} cannot be made: {error.strerror}", "cd to a folder that all nodes see"
            ) from error
        jobs: dict[tuple[int, int], str] = {}
        try:
            with ending_on_signals():
                for number, nodes in turns(sizes, rounds):
                    place = folder / f"{nodes}-{number}"
                    after = f"--dependency=afterany:{list(jobs.values())[-1]}" if jobs else ""
                    jobs[number, nodes] = submit(self._job(place, nodes, folder.name, after)).job
                say(f"batch jobs {', '.join(jobs.values())}, one after the other")
                yield lambda number, nodes: self._wait(jobs[number, nodes], nodes, folder / f"{nodes}-{number}")
        finally:
            cancel(folder.name, list(jobs.values()))
            shutil.rmtree(folder, ignore_errors=True)

    def _job(self, place: Path, nodes: int, name: str, after: str) -> BatchJob:
        place.mkdir()
        command, env = self.subject.batch(place)
        setup = [f"export {key}={shlex.quote(value)}" for key, value in env.items()]
        setup += [f"export OMP_NUM_THREADS={self.threads}", f"date +%s.%N > {shlex.quote(str(began_file(place)))}"]
        return replace(
            self.like, command=tuple(command), job_dir=str(place), name=name, nodes=(nodes, nodes),
            output=str(place / "output"), setup=(*self.like.setup, *setup),
            sbatch_args=(*self.like.sbatch_args, "--no-requeue", *filter(None, [after])),
        )  # fmt: skip

    def _wait(self, job: str, nodes: int, place: Path) -> Round:
        """The job's measurement, once it has ended. Raises InputError with its cause where it failed."""
        while not (known := look_up(job)).is_over:
            time.sleep(SECONDS_BETWEEN_QUESTIONS)
        deadline = time.monotonic() + SECONDS_FOR_FILES * (known.state in ("COMPLETED", ""))
        while True:
            try:
                return self.subject.read(nodes * int(self.like.nproc), place, float(began_file(place).read_text()))
            except (InputError, OSError, ValueError) as error:
                if time.monotonic() > deadline or known.state not in ("COMPLETED", ""):
                    raise why(job, nodes, known.state, place / "output", error) from error
            time.sleep(1)


def began_file(place: Path) -> Path:
    return place / "began"


def why(job: str, nodes: int, state: str, output: Path, error: Exception) -> InputError:
    """What the job says was wrong with the input; else its last words are shown, and it is named."""
    said = output.read_text(errors="replace").splitlines() if output.exists() else []
    for line in reversed(said):
        if line.startswith("error: ") and ". HINT: " in line:
            found, _, hint = line.removeprefix("error: ").partition(". HINT: ")
            return InputError(found, hint)
    if state == "COMPLETED" and isinstance(error, InputError):
        return error
    print("\n".join(said[-20:]), file=sys.stderr)
    return InputError(f"job {job} on {nodes} node(s) ended as {state or 'unknown'}, see above", "sinfo, squeue")


def cancel(name: str, jobs: list[str]) -> None:
    """What is left of them, also one whose number we have not heard; waits until they write no more."""
    left = [job for job in jobs if not look_up(job).is_over]
    if not left and jobs:
        return
    ask("scancel", f"--name={name}")
    deadline = time.monotonic() + SECONDS_TO_CANCEL
    while any(not look_up(job).is_over for job in left) and time.monotonic() < deadline:
        time.sleep(0.5)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    numbers = signal.SIGTERM, signal.SIGHUP
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
