"""What is the same for all jobs of a site or a person, from a small file: `stepladder.toml`.

[submit]
partition = "gpu"
account = "physics"
setup = ["module load cuda", "source ~/venv/bin/activate"]
container = "apptainer exec --nv stepladder.sif"
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.core.user_folders import config_folder

NAME = "stepladder.toml"


@dataclass(frozen=True, kw_only=True)
class SiteDefaults:
    """Defaults of `submit`. setup: lines of the batch script before anything starts.

    container: the command that runs another inside an image, on each node.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    container: str = ""
    setup: tuple[str, ...] = ()


def find_site(start: Path | None = None) -> SiteDefaults:
    """From the first file found in the current folder, those above it, or the user's own configuration."""
    here = (start or Path.cwd()).resolve()
    for path in [*(folder / NAME for folder in (here, *here.parents)), config_folder() / "config.toml"]:
        if path.is_file():
            return read_site(path)
    return SiteDefaults()


def read_site(path: Path) -> SiteDefaults:
    """Raises InputError on an unknown key or a value of the wrong kind."""
    try:
        whole = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read: {error}", 'a table [submit] with lines like partition = "gpu"'
        ) from error
    known = {field.name for field in fields(SiteDefaults)}
    table = whole.pop("submit", {})
    if whole or not isinstance(table, dict) or table.keys() - known:
        unknown = next(iter(whole or (table.keys() - known if isinstance(table, dict) else ["submit"])))
        raise InputError(f"{path}: {unknown} is unknown", f"under [submit]: {', '.join(sorted(known))}")
    for name, value in table.items():
        lines = value if name == "setup" and isinstance(value, list) else [value]
        if not all(isinstance(line, str) for line in lines) or (name == "setup") != isinstance(value, list):
            kind = 'a list of lines, ["module load cuda"]' if name == "setup" else 'a text, "..."'
            raise InputError(f"{path}: {name} = {value!r}", f"{name} is {kind}")
    return SiteDefaults(**{**table, "setup": tuple(table.get("setup", ()))})
