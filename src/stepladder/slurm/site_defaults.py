"""Settings of `submit` that all jobs of a site or a user have in common: stepladder.toml."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stepladder.core import typed_file
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.folders import find_file_above, get_config_folder, validate_ownership

SITE_FILE = "stepladder.toml"


@dataclass(frozen=True, kw_only=True)
class SiteDefaults:
    """The content of `stepladder.toml`, as in this example.

        [submit]
        partition = "gpu"
        account = "physics"
        setup = ["module load cuda", "source ~/venv/bin/activate"]
        container = "apptainer exec --nv stepladder.sif"

    Args:
        partition: As of sbatch, like the next four.
        account: As of sbatch.
        qos: As of sbatch.
        constraint: As of sbatch.
        reservation: As of sbatch.
        container: The command that runs another one in a container image, on each node.
        setup: Lines of the batch script before the training starts.
        cluster: Name of the batch system, an entry point of the group `stepladder.clusters`; Slurm
            by default.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    container: str = ""
    setup: tuple[str, ...] = ()
    cluster: str = ""


def find_site_defaults() -> SiteDefaults:
    """Return the defaults of the first file in this folder, one above it, or the user's own."""
    path = find_file_above(SITE_FILE)
    if path is not None:
        return _read_site_defaults(path)
    user_file = get_config_folder() / "config.toml"
    if user_file.is_file():
        validate_ownership(user_file)
        return _read_site_defaults(user_file)
    return SiteDefaults()


def _read_site_defaults(path: Path) -> SiteDefaults:
    """Return the defaults of one file.

    Raises:
        InputError: If it has an unknown key or a value of the wrong type.
    """
    hint = 'a table [submit] with lines like partition = "gpu"; setup = ["module load cuda"]'
    with as_input_error(f"{path} cannot be used", hint, (OSError, ValueError)):
        tables = typed_file.read_toml(path)
        table = typed_file.convert(tables.pop("submit", {}), dict[str, Any], "submit")
        known = {field.name for field in fields(SiteDefaults)}
        if unknown := [*tables, *(table.keys() - known)]:
            raise InputError(
                f"{path}: {unknown[0]} is unknown", f"under [submit]: {', '.join(sorted(known))}"
            )
        defaults: SiteDefaults = typed_file.convert(table, SiteDefaults, "submit")
    return defaults
