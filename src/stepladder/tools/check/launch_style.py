"""Ways to start a script: from which folder, with how much of the source, as a file or a module."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.tools.check.failure import NotChecked
from stepladder.tools.findings.finding import Finding

MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '(?P<top>\w+)")
MISSING_FILE = re.compile(r"FileNotFoundError: .*: '(?P<path>[^']+)'")
PACKAGE_FILE = "__init__.py"
IMPORTS_FROM_ITS_PACKAGE = "attempted relative import with no known parent package"


@dataclass(frozen=True)
class LaunchStyle:
    """One way to start a script.

    Args:
        script: The script.
        root: The folder that is copied.
        folder: The working folder of the ranks, in the root.
        module: The name after `python -m`; empty for a file.
    """

    script: Path
    root: Path
    folder: Path
    module: str = ""

    @property
    def python_args(self) -> tuple[str, ...]:
        """What comes after `python`."""
        if self.module:
            return ("-m", self.module)
        return (os.path.relpath(self.script, self.folder),)

    @property
    def subfolder(self) -> str:
        """The working folder within the root."""
        return str(self.folder.relative_to(self.root))

    def __str__(self) -> str:
        return f"python {' '.join(self.python_args)} in {self.folder}, with a copy of {self.root}"

    def with_shown_path(self, finding: Finding) -> Finding:
        """Return a finding whose file is named as seen from the working folder."""
        if os.path.isabs(finding.location.file):  # noqa: PTH117  # a name, which may be no path
            return finding
        return finding.moved_to(os.path.relpath(self.root / finding.location.file, self.folder))


def find_styles(script: Path, working_folder: Path, root: Path | None) -> list[LaunchStyle]:
    """Return the ways to start a script, in the order in which they are tried.

    Args:
        script: The script, as an absolute path.
        working_folder: The current folder.
        root: The folder of --root.
    """
    folder = working_folder
    if root is None and not script.is_relative_to(folder):
        folder = script.parent
    if root is not None:
        validate_root(root, script, folder)
    first_root = root or folder
    styles = [LaunchStyle(script, first_root, folder)]
    styles += as_modules(script, first_root, folder)
    repository = find_repository(folder)
    if root is None and repository is not None and script.is_relative_to(repository):
        styles.append(LaunchStyle(script, repository, working_folder))
        styles += as_modules(script, repository, working_folder)
    return list(dict.fromkeys(styles))


def validate_root(root: Path, script: Path, folder: Path) -> None:
    for path in (script, folder):
        if not path.is_relative_to(root):
            raise InputError(
                f"--root {root} does not hold {path}",
                f"--root {os.path.commonpath([script, folder])}",
            )


def as_modules(script: Path, root: Path, folder: Path) -> Iterator[LaunchStyle]:
    """Yield the ways to start a script with `python -m`: from the folder, and above its package."""
    package = script.parent
    while (package / PACKAGE_FILE).is_file() and package.is_relative_to(root):
        package = package.parent
    for start in (folder, package):
        if script.is_relative_to(start) and start.is_relative_to(root) and script.parent != start:
            parts = script.relative_to(start).with_suffix("").parts
            if all(part.isidentifier() for part in parts):
                yield LaunchStyle(script, root, start, ".".join(parts))


def find_repository(folder: Path) -> Path | None:
    """Return the folder of the Git repository that a folder is in, if it is not that folder."""
    for parent in (folder, *folder.parents):
        if (parent / ".git").exists():
            return None if parent == folder else parent
    return None


def find_modules_elsewhere(style: LaunchStyle, *loaded: Mapping[str, str]) -> dict[str, Path]:
    """Return the modules of the repository that are in no folder of the script, by new places.

    These are beside the script, where Python finds them first; none is behind a link.

    Args:
        style: How the script is started.
        loaded: The files of modules that a run has loaded.
    """
    found: dict[str, Path] = {}
    repository = find_repository(style.root) or style.root
    modules = {
        module: path
        for module, file in chain.from_iterable(files.items() for files in loaded)
        if (path := Path(file).resolve()).is_relative_to(repository)
    }
    # A package above the working folder may have modules in it.
    packages = {
        module.partition(".")[0]
        for module, path in modules.items()
        if not path.is_relative_to(style.root)
    }
    for module, path in modules.items():
        beside = style.script.parent.joinpath(*module.split("."))
        target = beside / path.name if path.name == PACKAGE_FILE else beside.with_suffix(".py")
        is_elsewhere = module.partition(".")[0] in packages
        is_free = target.resolve() == target and not target.exists()
        if is_elsewhere and is_free:
            found[str(target.relative_to(style.root))] = path
    return found


def finds_what_is_missing(style: LaunchStyle, failure: NotChecked | None) -> bool:
    """Return whether a way to start a script finds the module or the file that it has missed."""
    if failure is None or failure.cause != "script":
        return False
    if match := MISSING_MODULE.search(failure.output):
        return has_module(style, match["top"])
    if match := MISSING_FILE.search(failure.output):
        path = Path(os.path.normpath(style.folder / match["path"]))
        return not style.module and path.is_relative_to(style.root) and path.exists()
    return bool(style.module) and IMPORTS_FROM_ITS_PACKAGE in failure.output


def has_module(style: LaunchStyle, name: str) -> bool:
    """Return whether a module is where this style looks, or where a script may add it to the path.

    A script adds folders beside its own, as in `sys.path.append("..")`.
    """
    if style.module:
        folders = [style.folder]
    else:
        above = [parent for parent in style.script.parents if parent.is_relative_to(style.root)]
        folders = [child for parent in above for child in (parent, *parent.iterdir())]
    return any((folder / name).is_dir() or (folder / f"{name}.py").is_file() for folder in folders)
