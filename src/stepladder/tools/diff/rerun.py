"""Train the steps of a run again, on one process, and record what they compute."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.settings import Settings, TrainRequest
from stepladder.core.typed_file import hash_file
from stepladder.storage.run_files import CONFIG_FILE, SNAPSHOTS_FOLDER, find_snapshots
from stepladder.storage.snapshot import read_snapshot
from stepladder.storage.snapshot_slices import DamagedSnapshot
from stepladder.tools.diff.record_comparison import JOB_HASH
from stepladder.tools.diff.recorded_run import RecordedRun
from stepladder.tools.diff.step_events import Event, EventRecorder
from stepladder.tools.trial.ranks import run_on_ranks
from stepladder.tools.trial.training import open_training
from stepladder.train.job_file import load_stored_job

EVENTS_FILE = "events.json"
UNSUPPORTED_FLAGS = ("compile", "capture")  # module hooks do not run in compiled or captured code


@dataclass(frozen=True)
class StepRange:
    """The steps of a rerun whose events are recorded, both ends included."""

    first: int
    last: int


@dataclass(frozen=True)
class Rerun:
    """A finished rerun: its run directory, the snapshot it started from, and its events."""

    folder: Path
    start: int  # the step of that snapshot, or 0
    events: list[Event]


def _train_and_record(request: TrainRequest, start: int, first: int) -> int:
    """Train on this rank, write the events of all steps from `first` on, and return 0."""
    with open_training(request) as training:
        recorder = EventRecorder(training.job, start, first)
        job = replace(training.job, loss=recorder.compute_loss)
        replace(training, job=job).fit(recorder)
    text = json.dumps(recorder.events)
    (request.settings.run_dir / EVENTS_FILE).write_text(text, encoding="utf-8")
    return 0


def find_start(run: RecordedRun, step: int) -> int:
    """Return the step of the newest undamaged snapshot before a step, or 0 without any."""
    for snapshot_step, path in sorted(find_snapshots(run.run_dir).items(), reverse=True):
        if snapshot_step >= step:
            continue
        try:
            read_snapshot(path)
        except DamagedSnapshot as error:
            run.problems.append(f"snapshot {path.name} is damaged ({error})")
        else:
            return snapshot_step
    return 0


def rerun_steps(run: RecordedRun, start: int, steps: StepRange, folder: Path) -> Rerun:
    """Train the steps of a run after `start` again, in a new run directory.

    Raises:
        InputError: The run cannot be trained again.
    """
    request = _make_request(run, steps.last, folder)
    if start:
        snapshot = find_snapshots(run.run_dir)[start]
        copytree(snapshot, folder / SNAPSHOTS_FOLDER / snapshot.name)
    work = partial(_train_and_record, request, start, steps.first)
    run_on_ranks(work, 1, request)
    events = [Event(*event) for event in json.loads((folder / EVENTS_FILE).read_bytes())]
    return Rerun(folder, start, events)


def _make_request(run: RecordedRun, last_step: int, folder: Path) -> TrainRequest:
    """Return the request that trains a run's first steps again on one process."""
    job_path, config, settings = load_stored_job(run.run_dir)
    _validate_rerun(run, job_path, settings, last_step)
    if "epochs" not in run.definition:  # otherwise a schedule depends on the number of epochs
        epochs = -(-last_step // run.plan.steps_per_epoch)
        if "epochs" in config:
            config = {**config, "epochs": epochs}
        else:
            settings = {**settings, "epochs": epochs}
    settings = {
        **settings,
        "run_dir": folder,
        "steps": last_step,
        "snapshot_every": last_step,
        "progress": False,
        "threads": run.settings["threads"] or 1,
    }
    with as_input_error(
        f"{run.run_dir / CONFIG_FILE} is damaged", "put a copy there", (TypeError, ValueError)
    ):
        return TrainRequest(job_path, config, Settings(**settings))


def _validate_rerun(
    run: RecordedRun, job_path: Path, settings: dict[str, Any], last_step: int
) -> None:
    if run.world_size_at(last_step) is None:
        raise InputError(
            f"the ledger of {run.run_dir} does not prove step {last_step}",
            f"stepladder audit {run.run_dir}",
        )
    recorded_hash = run.environment.get(JOB_HASH)
    if recorded_hash is not None and recorded_hash != hash_file(job_path):
        raise InputError(
            f"{job_path} is no longer the file that {run.run_dir} was trained with",
            "restore that version of it",
        )
    if settings.get("batch_per_rank") is not None:
        raise InputError(
            f"{run.run_dir} has a batch per process, but a rerun has one process only",
            "--global-batch B",
        )
    for name in UNSUPPORTED_FLAGS:
        if settings.get(name):
            raise InputError(
                f"{run.run_dir} was trained with --{name}, which hides its operations",
                "the same runs without it",
            )
