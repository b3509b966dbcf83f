"""config.json: what a run was started with. Read by all who look at a run, and compared where one
is resumed.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepladder.core import typed_file
from stepladder.core.errors import InputError, as_input_error, to_one_line
from stepladder.core.masking import drop_masked
from stepladder.core.order import SORT
from stepladder.core.typed_file import Kind, convert, hash_file
from stepladder.storage.rundir import CONFIG, refuse_newer

DEFINED_BY = ("recipe", "sync", "batch_per_rank")  # other values follow from these


@contextmanager
def config_of(run_dir: Path) -> Iterator[dict[str, Any]]:
    """A run's config.json. Raises InputError where there is none, a newer one, or not what the
    block reads.
    """
    try:
        text = typed_file.read_file(run_dir / CONFIG)
    except OSError as error:
        raise InputError(
            f"{run_dir} is not a run directory: {CONFIG}: {error.strerror}", "ls runs"
        ) from error
    except ValueError as error:
        raise InputError(
            f"{run_dir} is not a run directory: {CONFIG}: {error}", "ls runs"
        ) from error
    try:
        config: dict[str, Any] = typed_file.parse_json(text, dict)
        refuse_newer(config, run_dir / CONFIG)
        yield config
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found = f"{run_dir / CONFIG} is damaged ({type(error).__name__}: {error})"
        raise InputError(found, "put a copy there, or train again with --fresh") from error


def config_of_recipe(run_dir: Path, name: str, kind: type[Kind], lacks: str, hint: str) -> Kind:
    """What a recipe was configured with, as its Config. lacks: what is said of another recipe's
    run.

    Raises InputError for that, and as `config_of`.
    """
    with config_of(run_dir) as stored:
        recipe, config = convert(stored["definition"]["recipe"], str), drop_masked(stored["config"])
    if recipe != name:
        raise InputError(f"{run_dir} is a run of {recipe}, which {lacks}", hint)
    with as_input_error(f"the config of {run_dir} is damaged", hint, (ValueError,)):
        fitting: Kind = convert(config, kind)
    return fitting


def shuffle_of(config: dict[str, Any] | None, run_dir: Path) -> str:
    """How the run puts its samples in order, as its config.json names it; "" where there is none
    yet.
    """
    if config is None:
        return ""
    try:
        shuffle: str = convert(config["plan"].get("shuffle", SORT), str)
        return shuffle
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{run_dir / CONFIG} is damaged ({error})", "--fresh") from error


def refuse_other_definition(stored: dict[str, Any], asked: dict[str, Any], path: Path) -> None:
    """Raises InputError naming both values where a run is resumed with another definition."""
    if name := first_difference(stored, asked):
        raise InputError(
            f"run directory {path} was started with {name}={to_one_line(str(stored.get(name)))},"
            f" now it is {asked.get(name)}",
            f"{how_to_resume(name, stored)}, --fresh to begin again, or another --run-dir",
        )


def first_difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The setting that two definitions do not have in common and that others may follow from; ""
    for none.
    """
    names = [*DEFINED_BY, *sorted(one.keys() | other.keys())]
    return next((name for name in names if one.get(name) != other.get(name)), "")


def how_to_resume(name: str, stored: dict[str, Any]) -> str:
    """What to type to have the stored value of one setting again."""
    flag, value = name.replace("_", "-"), stored.get(name)
    if name == "recipe":
        return f"stepladder train {value} to resume"
    if name in ("num_samples", "chunks"):
        return "the data it was started with to resume"
    if name == "machine":
        return "a machine as it was started on to resume"
    per_rank = stored.get("batch_per_rank")
    if name == "global_batch" and type(value) is type(per_rank) is int and per_rank > 0:
        return f"--nproc {value // per_rank} to resume"
    if isinstance(value, bool):
        return f"--{flag if value else 'no-' + flag} to resume"
    return f"no --{flag} to resume" if value is None else f"--{flag} {value} to resume"


def environment(job_file: str | None = None, threads: int | None = None) -> dict[str, Any]:
    """Versions, machine and code, for config.json. threads: intra-op, of each process."""
    import numpy
    import torch

    try:
        command = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git on this machine
        commit = ""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "git_commit": commit or None,
        "job_sha256": hash_file(job_file),
        "threads": threads,
    }
