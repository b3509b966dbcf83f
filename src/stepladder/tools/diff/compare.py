"""Compare two run directories: first their records, and then, if need be, a rerun of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.scratch import temporary_folder
from stepladder.tools.diff.record_comparison import RecordComparison
from stepladder.tools.diff.recorded_run import RecordedRun
from stepladder.tools.diff.verdict import DiffVerdict, explain_by_records, explain_without_rerun


def compare(
    first: Path,
    second: Path,
    validate_job_file: Callable[[Path], None],
    notify: Callable[[str], None] = lambda _: None,
) -> DiffVerdict:
    """Compare two run directories.

    Args:
        first: A run directory.
        second: Another run directory.
        validate_job_file: Raises InputError if the job file of a run directory must not be run.
        notify: Gets a message for each thing that could not be compared.

    Raises:
        InputError: One of them is no run directory.
    """
    runs = (RecordedRun(first), RecordedRun(second))
    records = RecordComparison(*runs)
    verdict = explain_by_records(records)
    if not verdict.is_explained:
        try:
            for run in runs:
                validate_job_file(run.run_dir)
            verdict = _compare_reruns(records, verdict)
        except InputError as error:
            notify(f"the runs were not trained again: {error}")
            verdict = explain_without_rerun(records, verdict)
    for run in runs:
        for problem in run.problems[:1]:
            notify(f"{run.run_dir}: {problem}")
    return verdict


def _compare_reruns(records: RecordComparison, verdict: DiffVerdict) -> DiffVerdict:
    from stepladder.tools.diff.rerun_comparison import RerunComparison  # late: torch, and training

    with temporary_folder() as folder:
        return RerunComparison(records, verdict, folder).find_cause()
