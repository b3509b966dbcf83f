"""config.json: how a run was started.

Every command that inspects a run reads it, and a resume compares it with the new definition.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepladder.core import typed_file
from stepladder.core.errors import InputError, as_input_error, get_reason, to_one_line
from stepladder.core.masking import drop_masked
from stepladder.core.order import SORT
from stepladder.core.typed_file import Kind, convert, hash_file
from stepladder.storage.run_files import CONFIG_FILE, as_damage, suggest_run_dirs, validate_schema

# Compared first, because other settings follow from them.
DEFINING_SETTINGS = ("recipe", "sync", "batch_per_rank")


@contextmanager
def open_config(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield a run's config.json.

    Raises:
        InputError: If there is none, a newer version wrote it, or the block does not find in it
            what it reads.
    """
    try:
        text = typed_file.read_file(run_dir / CONFIG_FILE)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{run_dir} is not a run directory: {CONFIG_FILE}: {get_reason(error)}",
            suggest_run_dirs(run_dir, CONFIG_FILE),
        ) from error
    hint = "put a copy there, or train again with --fresh"
    with as_damage(run_dir / CONFIG_FILE, hint):
        config: dict[str, Any] = typed_file.parse_json(text, dict)
        validate_schema(config, run_dir / CONFIG_FILE)
        yield config


def read_recipe_config(run_dir: Path, name: str, kind: type[Kind], lacks: str, hint: str) -> Kind:
    """Return the configuration of a run's recipe.

    Args:
        run_dir: The run directory.
        name: The recipe that the run must be of.
        kind: The recipe's Config class.
        lacks: What the message says of another recipe, as in "has no vocabulary".
        hint: What to do then.

    Returns:
        The configuration.

    Raises:
        InputError: If the run is of another recipe, or its config.json is damaged.
    """
    with open_config(run_dir) as stored:
        recipe = convert(stored["definition"]["recipe"], str)
        config = drop_masked(stored["config"])
    if recipe != name:
        raise InputError(f"{run_dir} is a run of {recipe}, which {lacks}", hint)
    with as_input_error(f"the config of {run_dir} is damaged", hint, (ValueError,)):
        converted: Kind = convert(config, kind)
    return converted


def find_shuffle(config: dict[str, Any] | None, run_dir: Path) -> str:
    """Return the shuffle algorithm that a run's config.json names, "" if there is none yet.

    Args:
        config: The content of config.json.
        run_dir: The run directory, for the message.

    Returns:
        The name of the algorithm.

    Raises:
        InputError: If the entry is damaged.
    """
    if config is None:
        return ""
    with as_damage(run_dir / CONFIG_FILE):
        shuffle: str = convert(config["plan"].get("shuffle", SORT), str)
    return shuffle


def validate_same_definition(
    stored: dict[str, Any], current: dict[str, Any], run_dir: Path
) -> None:
    """Raise InputError if a run is resumed with another definition than it was started with."""
    name = find_first_difference(stored, current)
    if not name:
        return
    reason = ""
    other_folder = "another --run-dir"
    if name == "epochs":  # it is only a part of the definition if there is a schedule
        reason = ", and the steps of a learning-rate schedule depend on it"
        other_folder += f" with --init-from {run_dir} to continue from its weights"
    raise InputError(
        f"run directory {run_dir} was started with"
        f" {name}={to_one_line(str(stored.get(name)))}, now it is {current.get(name)}{reason}",
        f"{_make_resume_hint(name, stored)}, --fresh to begin again, or {other_folder}",
    )


def find_first_difference(stored: dict[str, Any], current: dict[str, Any]) -> str:
    """Return the first setting in which two definitions differ, "" if they are equal."""
    names = [*DEFINING_SETTINGS, *sorted(stored.keys() | current.keys())]
    return next((name for name in names if stored.get(name) != current.get(name)), "")


def _make_resume_hint(name: str, stored: dict[str, Any]) -> str:
    """Return what to type so that one setting has its stored value."""
    hints = {
        "recipe": f"the recipe or job file {stored.get('recipe')}",
        "num_samples": "the data it was started with",
        "chunks": "the data it was started with",
        "machine": "a machine as it was started on",
    }
    return f"{hints.get(name) or _format_flag(name, stored)} to resume"


def _format_flag(name: str, stored: dict[str, Any]) -> str:
    flag = name.replace("_", "-")
    value = stored.get(name)
    per_rank = stored.get("batch_per_rank")
    if name == "global_batch" and type(value) is type(per_rank) is int and per_rank > 0:
        return f"--nproc {value // per_rank}"
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"no --{flag}" if value is None else f"--{flag} {value}"


def describe_environment(job_file: str | None = None, threads: int | None = None) -> dict[str, Any]:
    """Return versions, machine and code of this run, for config.json.

    Args:
        job_file: The job file, if it is not a recipe.
        threads: Intra-op threads of each process.
    """
    import numpy
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "git_commit": _find_git_commit(),
        "job_sha256": hash_file(job_file),
        "threads": threads,
    }


def _find_git_commit() -> str | None:
    command = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return None
    return result.stdout.strip() or None
