"""Two run directories, compared: by their records, and where these do not say why, by training both
again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.scratch import get_scratch_folder
from stepladder.tools.diff.records import Kept, Records
from stepladder.tools.diff.verdict import Answer, by_records, without_training


def compare(
    first: Path,
    second: Path,
    may_run: Callable[[Path], None],
    say: Callable[[str], None] = lambda _: None,
) -> Answer:
    """Compare two run directories. Raises InputError where one of them is none.

    may_run: raises InputError where a run directory's job file is not to be run.  say: gets what
    was left out."""
    both = Kept(first), Kept(second)
    records = Records(*both)
    found = by_records(records)
    if found.step is not None and not found.kind:
        try:
            for kept in both:
                may_run(kept.run_dir)
            from stepladder.tools.diff.retrial import (
                Retrial,
            )  # late: torch, and what is needed to train

            with tempfile.TemporaryDirectory(dir=get_scratch_folder()) as folder:
                found = Retrial(records, found, Path(folder)).verdict()
        except InputError as error:
            say(f"the runs were not trained again: {error}")
            found = without_training(records, found)
    for kept in both:
        for problem in kept.problems[:1]:
            say(f"{kept.run_dir}: {problem}")
    return found
