"""Handing a batch job to Slurm: the one call, and the note of what Slurm will forget."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.slurm.job import BatchJob
from stepladder.slurm.query import NotKnown, Submitted, ask, field, notes_file, show_job
from stepladder.slurm.render import render


def submit(job: BatchJob) -> Submitted:
    """Hand it to Slurm. Raises InputError where Slurm refuses."""
    try:
        number = ask("sbatch", "--parsable", text=render(job)).strip().partition(";")[0]
    except NotKnown as error:
        raise InputError(error.found, "stepladder submit --help, or sinfo for what this cluster has") from error
    output = field(show_job(number), "StdOut")
    done = Submitted(number, job.name, output, str(Path(job.job_dir).absolute()), round(time.time(), 1))
    notes_file().parent.mkdir(parents=True, exist_ok=True)
    with notes_file().open("a") as opened:
        opened.write(json.dumps(asdict(done)) + "\n")
    return done
