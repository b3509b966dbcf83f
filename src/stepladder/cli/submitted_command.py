"""The command after `--` of `stepladder submit`, parsed as the job will parse it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from stepladder.cli.suggest import tell_misplaced_flags, visible_flags
from stepladder.core.errors import InputError
from stepladder.core.paths import parse_path
from stepladder.core.python_file import parse_source
from stepladder.train.job_source import validate_is_script

# Flags of `train` and `run` whose values follow from submit's own flags.
SUBMIT_FLAGS = ("--nodes", "--nproc", "--rdzv-endpoint")


@dataclass(frozen=True)
class SubmittedCommand:
    """The command after `--`, which the job runs.

    Args:
        kind: "train" or "run".
        arguments: Its arguments.
        job_dir: The folder of the job's state.
        name: The name of the recipe or script.
    """

    kind: str
    arguments: list[str]
    job_dir: Path
    name: str


def parse_submitted_command(arguments: Sequence[str]) -> SubmittedCommand:
    """Parse the command after `--` as the job will, to find mistakes before the job waits.

    Raises:
        InputError: There is no such command, or a flag of it is wrong.
    """
    if not arguments:
        raise InputError("there is nothing to run", "stepladder submit --nodes 2 -- train mnist")
    if arguments[0] not in ("train", "run"):
        if not parse_path("script", arguments[0]).is_file() or arguments[0].startswith("-"):
            raise InputError(
                f"script {arguments[0]!r} does not exist", "-- SCRIPT.py, or -- train mnist"
            )
        arguments = ("run", *arguments)
    kind, *kind_arguments = arguments
    command = importlib.import_module(f"stepladder.cli.{kind}").command
    with _explaining_misplaced_flags(kind):
        context = command.make_context(f"stepladder {kind}", list(kind_arguments))
    _validate_own_flags(context)
    params = context.params
    path: Path = command.job if kind == "train" else Path(params["script"])
    if kind == "run":
        _validate_script(path, params)
        tell_misplaced_flags(path, params["args"])
    job_dir = params["run_dir"] or Path("runs") / path.stem
    return SubmittedCommand(kind, kind_arguments, job_dir, path.stem)


@contextmanager
def _explaining_misplaced_flags(kind: str) -> Iterator[None]:
    """Raise InputError for a flag that only submit has, in place of click's error."""
    try:
        yield
    except click.NoSuchOption as error:
        flag = error.option_name
        if flag not in visible_flags(click.get_current_context(silent=True)):
            raise
        raise InputError(
            f"{flag} is a flag of submit, and stands after {kind}",
            f"stepladder submit {flag} ... -- {kind} ...",
        ) from error


def _validate_script(path: Path, params: dict[str, Any]) -> None:
    """Raise InputError where the script of `run` does not exist, or is a job file."""
    if path.is_file():
        if not params["no_python"]:
            validate_is_script(path, "stepladder submit -- train")
            if path.suffix == ".py":
                parse_source(path)  # raises InputError where it has a syntax error
    elif not params["module"] and not params["no_python"]:
        raise InputError(f"script {params['script']!r} does not exist", "-- run [FLAGS] SCRIPT.py")


def _validate_own_flags(context: click.Context) -> None:
    """Raise InputError where a flag of submit is typed after `--`."""
    for parameter in context.command.params:
        flag = next((name for name in parameter.opts if name in SUBMIT_FLAGS), None)
        source = context.get_parameter_source(parameter.name or "")
        if flag is None or source != ParameterSource.COMMANDLINE:
            continue
        if flag == "--rdzv-endpoint":
            hint = "the port follows from the job's number"
        else:
            hint = f"submit {flag} N -- {(context.info_name or '').split()[-1]}"
        raise InputError(f"{flag} stands after `--`, and is a flag of submit", hint)
