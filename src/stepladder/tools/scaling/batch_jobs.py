"""Measure on several numbers of nodes with Slurm, for `stepladder scale --nodes`.

Each measurement is a batch job. The jobs run one after the other, and all are cancelled when the
command ends.
"""

from __future__ import annotations

import secrets
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from stepladder.core.console import echo
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.numbers import format_count
from stepladder.core.signals import handle_signals
from stepladder.core.waiting import retry, wait_until
from stepladder.launcher.batch.cluster import Cluster, open_cluster
from stepladder.launcher.batch.jobs import CLUSTER_POLL_INTERVAL_S, find_job, submit
from stepladder.slurm.batch_job import BatchJob
from stepladder.tools.scaling.efficiency import SizeResult
from stepladder.tools.scaling.measure import Round, TimedJob, TimedScript, list_turns, measure

START_TIME_FILE = "began"  # the time at which a job's script has started
CANCEL_TIMEOUT_S = 90.0
RESULT_ERRORS = (InputError, OSError, ValueError)  # of a result that is not there yet
FILE_VISIBILITY_TIMEOUT_S = 30.0  # until a network file system shows another node's files
CANCEL_POLL_INTERVAL_S = 0.5
ALL_FIELDS = frozenset(field.name for field in fields(BatchJob))
MAX_OUTPUT_LINES = 20  # shown of a failed job


@dataclass(frozen=True)
class _SubmittedRound:
    """A batch job that measures on a number of nodes, and its number."""

    job_id: str
    job: BatchJob

    @property
    def num_nodes(self) -> int:
        return self.job.nodes[0]


def measure_on_nodes(
    subject: TimedJob | TimedScript,
    base_job: BatchJob,
    sizes: list[int],
    rounds: int,
    report: Callable[[str], None],
) -> list[SizeResult]:
    """Measure on each of these numbers of nodes.

    Args:
        subject: The job or script to measure.
        base_job: What all batch jobs have in common, with the number of processes per node.
        sizes: The numbers of nodes.
        rounds: Measurements per number of nodes.
        report: Is called with a line per measurement.

    Raises:
        InputError: There is no Slurm, the largest size does not fit, or a job has failed.
    """
    cluster = open_cluster(base_job.cluster)
    # The working directory, as all nodes must see the folder.
    folder = Path.cwd() / f".scale-{subject.name}-{secrets.token_hex(4)}"
    largest = replace(base_job, nodes=(max(sizes), max(sizes)), job_dir=str(folder))
    for line in cluster.validate(largest, ALL_FIELDS):
        report(line)
    with as_input_error(f"{folder} cannot be made", "cd to a folder that all nodes see"):
        folder.mkdir(mode=0o700)  # the folder will hold the job with its secrets
    submitted: dict[tuple[int, int], _SubmittedRound] = {}
    job_ids: list[str] = []

    def run(number: int, size: int) -> Round:
        return _wait_for_round(cluster, subject, submitted[number, size])

    try:
        # They end the block as Ctrl-C does.
        with handle_signals((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler):
            for number, size in list_turns(sizes, rounds):
                dependency = [f"--dependency=afterany:{job_id}" for job_id in job_ids[-1:]]
                job_dir = folder / f"{size}-{number}"
                job = _make_round_job(subject, base_job, size, job_dir, dependency)
                job_id = submit(cluster, job)
                job_ids.append(job_id)
                submitted[number, size] = _SubmittedRound(job_id, job)
            report(f"batch jobs {', '.join(job_ids)}, one after the other")
            results = measure(sizes, rounds, run, report, "node")
    finally:
        _cancel_jobs(cluster, folder.name, job_ids)
        shutil.rmtree(folder, ignore_errors=True)
    return [replace(result, nodes=size) for size, result in results.items()]


def _make_round_job(
    subject: TimedJob | TimedScript,
    base_job: BatchJob,
    num_nodes: int,
    job_dir: Path,
    sbatch_args: list[str],
) -> BatchJob:
    """Return the batch job of one measurement, which writes its times to `job_dir`."""
    job_dir.mkdir()
    command, env = subject.make_command(job_dir)
    setup = [f"export {key}={shlex.quote(value)}" for key, value in env.items()]
    setup.append(f"date +%s.%N > {shlex.quote(str(job_dir / START_TIME_FILE))}")
    return replace(
        base_job,
        command=tuple(command),
        job_dir=str(job_dir),
        name=job_dir.parent.name,
        nodes=(num_nodes, num_nodes),
        output=str(job_dir / "output"),
        setup=(*base_job.setup, *setup),
        sbatch_args=(*base_job.sbatch_args, "--no-requeue", *sbatch_args),
    )


def _wait_for_round(
    cluster: Cluster, subject: TimedJob | TimedScript, submitted: _SubmittedRound
) -> Round:
    """Return a batch job's measurement when it has ended; raise InputError if it has failed."""
    status = find_job(cluster, submitted.job_id)
    while not status.is_over:
        time.sleep(CLUSTER_POLL_INTERVAL_S)
        status = find_job(cluster, submitted.job_id)
    job_dir = Path(submitted.job.job_dir)
    nproc = submitted.num_nodes * int(submitted.job.nproc)
    timeout_s = 0.0
    if status.state in ("COMPLETED", ""):
        timeout_s = FILE_VISIBILITY_TIMEOUT_S

    def read() -> Round:
        return subject.read(nproc, job_dir, float((job_dir / START_TIME_FILE).read_bytes()))

    try:
        return retry(read, RESULT_ERRORS, timeout_s, 1.0)
    except RESULT_ERRORS as error:
        raise _make_job_error(submitted, status.state, error) from error


def _make_job_error(submitted: _SubmittedRound, state: str, error: Exception) -> InputError:
    """Return the InputError that the job has printed; else show the end of its output."""
    output = Path(submitted.job.output)
    lines: list[str] = []
    if output.exists():
        lines = output.read_text(errors="replace", encoding="utf-8").splitlines()
    for line in reversed(lines):
        if line.startswith("error: ") and ". HINT: " in line:
            problem, _, hint = line.removeprefix("error: ").partition(". HINT: ")
            return InputError(problem, hint)
    if state == "COMPLETED" and isinstance(error, InputError):
        return error
    echo("\n".join(lines[-MAX_OUTPUT_LINES:]), err=True)
    return InputError(
        f"job {submitted.job_id} on {format_count(submitted.num_nodes, 'node')} ended as"
        f" {state or 'unknown'}, see above",
        "sinfo, squeue",
    )


def _cancel_jobs(cluster: Cluster, name: str, job_ids: list[str]) -> None:
    """Cancel the jobs that are not over, and wait until they write no more.

    They are cancelled by their name, as sbatch may have submitted a job and been interrupted
    before it printed the job's number.
    """
    running = [job_id for job_id in job_ids if not find_job(cluster, job_id).is_over]
    if job_ids and not running:
        return
    cluster.cancel([], name)
    wait_until(
        lambda: all(find_job(cluster, job_id).is_over for job_id in running),
        CANCEL_TIMEOUT_S,
        poll_s=CANCEL_POLL_INTERVAL_S,
    )
