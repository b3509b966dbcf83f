"""The lab of `stepladder lab`: a cluster of slurm_lab in a folder of stepladder's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slurm_lab import LabError
from stepladder.core.errors import InputError
from stepladder.core.folders import get_state_folder

LAB_COMMAND = "stepladder lab"
LAB_UP_HINT = f"{LAB_COMMAND} up --nodes 2"


def get_lab_folder() -> Path:
    """Return the folder of this user's lab."""
    return get_state_folder() / "lab"


@contextmanager
def as_stepladder_error() -> Iterator[None]:
    """Raise the error of a lab as one of stepladder's, whose hint names stepladder's command.

    Raises:
        InputError: The block raised LabError.
    """
    try:
        yield
    except LabError as error:
        raise InputError(error.problem, error.make_hint_for(LAB_COMMAND)) from error
