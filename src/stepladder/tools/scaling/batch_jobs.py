"""`stepladder scale --nodes`: each measurement is a batch job; they run one after the other, and
none is left.
"""

from __future__ import annotations

import secrets
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from stepladder.core.console import echo
from stepladder.core.errors import InputError, as_input_error
from stepladder.slurm.batch_job import BatchJob
from stepladder.slurm.client import run_slurm
from stepladder.slurm.partitions import find_job_warnings, list_partitions, validate_job_fits
from stepladder.slurm.submitted_jobs import SLURM_POLL_INTERVAL_S, find_job, submit
from stepladder.tools.scaling.loss import Size
from stepladder.tools.scaling.measure import Round, TimedJob, TimedScript, measured, turns

BEGAN = "began"  # a file: when a job's script began
SECONDS_TO_CANCEL = 90.0
SECONDS_FOR_FILES = 30.0  # until a network file system shows what another node has written


def measured_on_nodes(
    subject: TimedJob | TimedScript,
    like: BatchJob,
    sizes: list[int],
    rounds: int,
    say: Callable[[str], None],
) -> list[Size]:
    """On numbers of nodes. like: what all batch jobs have in common, with the processes per node.

    Raises InputError where there is no Slurm, where the cluster has no place for the largest size,
    or with the cause why a job failed."""
    validate_job_fits(replace(like, nodes=(max(sizes), max(sizes))), list_partitions())
    folder = Path.cwd() / f".scale-{subject.name}-{secrets.token_hex(4)}"  # where all nodes see it
    for doubt in find_job_warnings(replace(like, job_dir=str(folder))):
        say(f"warning: {doubt}")
    with as_input_error(f"{folder} cannot be made", "cd to a folder that all nodes see"):
        folder.mkdir(mode=0o700)  # for in it is the job, with its secrets
    jobs: dict[tuple[int, int], tuple[str, BatchJob]] = {}
    try:
        with ending_on_signals():
            for number, nodes in turns(sizes, rounds):
                after = [f"--dependency=afterany:{last}" for last, _ in list(jobs.values())[-1:]]
                job = job_for(subject, like, nodes, folder / f"{nodes}-{number}", after)
                jobs[number, nodes] = submit(job), job
            say(f"batch jobs {', '.join(job for job, _ in jobs.values())}, one after the other")
            found = measured(
                sizes, rounds, lambda *turn: waited_for(subject, *jobs[turn]), say, "node(s)"
            )
    finally:
        cancel(folder.name, [job for job, _ in jobs.values()])
        shutil.rmtree(folder, ignore_errors=True)
    return [replace(size, nodes=nodes) for nodes, size in found.items()]


def job_for(
    subject: TimedJob | TimedScript, like: BatchJob, nodes: int, place: Path, after: list[str]
) -> BatchJob:
    """One measurement of the subject, which leaves its times in `place`."""
    place.mkdir()
    command, env = subject.batch(place)
    setup = [f"export {key}={shlex.quote(value)}" for key, value in env.items()]
    setup.append(f"date +%s.%N > {shlex.quote(str(place / BEGAN))}")
    return replace(
        like,
        command=tuple(command),
        job_dir=str(place),
        name=place.parent.name,
        nodes=(nodes, nodes),
        output=str(place / "output"),
        setup=(*like.setup, *setup),
        sbatch_args=(*like.sbatch_args, "--no-requeue", *after),
    )


def waited_for(subject: TimedJob | TimedScript, number: str, job: BatchJob) -> Round:
    """The job's measurement, once it has ended. Raises InputError with its cause where it failed."""
    while not (known := find_job(number)).is_over:
        time.sleep(SLURM_POLL_INTERVAL_S)
    place, nodes = Path(job.job_dir), job.nodes[0]
    deadline = time.monotonic() + SECONDS_FOR_FILES * (known.state in ("COMPLETED", ""))
    while True:
        try:
            return subject.read(nodes * int(job.nproc), place, float((place / BEGAN).read_bytes()))
        except (InputError, OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise why(number, nodes, known.state, Path(job.output), error) from error
        time.sleep(1)


def why(job: str, nodes: int, state: str, output: Path, error: Exception) -> InputError:
    """What the job says was wrong with the input; else its last words are shown, and it is named."""
    said = (
        output.read_text(errors="replace", encoding="utf-8").splitlines() if output.exists() else []
    )
    for line in reversed(said):
        if line.startswith("error: ") and ". HINT: " in line:
            found, _, hint = line.removeprefix("error: ").partition(". HINT: ")
            return InputError(found, hint)
    if state == "COMPLETED" and isinstance(error, InputError):
        return error
    echo("\n".join(said[-20:]), err=True)
    return InputError(
        f"job {job} on {nodes} node(s) ended as {state or 'unknown'}, see above", "sinfo, squeue"
    )


def cancel(name: str, jobs: list[str]) -> None:
    """What is left of them, also one whose number we have not heard; waits until they write no
    more.
    """
    left = [job for job in jobs if not find_job(job).is_over]
    if not left and jobs:
        return
    run_slurm("scancel", f"--name={name}")
    deadline = time.monotonic() + SECONDS_TO_CANCEL
    while any(not find_job(job).is_over for job in left) and time.monotonic() < deadline:
        time.sleep(0.5)


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does."""
    with ExitStack() as at_end:
        for number in (signal.SIGTERM, signal.SIGHUP):
            at_end.callback(
                signal.signal, number, signal.signal(number, signal.default_int_handler)
            )
        yield
