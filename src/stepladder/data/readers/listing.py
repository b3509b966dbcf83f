"""Which files paths name, and which folders hold no single set: nothing is left out unsaid."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.typed_file import parse_json
from stepladder.data.readers.damage import DAMAGE_HINT
from stepladder.data.readers.files import DATA_HINT, ONCE_HINT, READ_TWICE, is_url

SAVED_STATE = "state.json"  # of a folder that Hugging Face's save_to_disk has written
SPLIT_NAMES = "trainval|training|train|testing|test|evaluation|eval|validation|valid|val|dev"
SPLIT = re.compile(rf"(?<![a-z])(?:{SPLIT_NAMES})(?![a-z])", re.IGNORECASE)
PARTITION = re.compile(r"(?:^|/)([^/=]+)=[^/]*/")
# As Hugging Face and TensorFlow call files.
PART = re.compile(
    r"(?P<begin>.*(?<![0-9]))(?P<number>[0-9]+)-of-(?P<count>[0-9]+)(?![0-9])", re.DOTALL
)
MAX_PARTS = 100_000  # of which one may be missing
HIDDEN_NAME = re.compile(r"(?:^|/)(?:\.|__MACOSX(?:/|$))")  # files that no folder or pattern names
# Of files that other programs have not finished, or keep for themselves: Spark, Delta, datasets.
INTERNAL = re.compile(r"(?:^|/)(?:_[^/]*[./]|cache-[^/]*$)")


def list_names(path: str) -> list[str]:
    """Return the files that a path, a pattern or a URL names, without those that are hidden."""
    if not is_url(path):
        with as_input_error(f"cannot list {path}", DATA_HINT):
            return list_paths(path)
    from stepladder.data.readers.remote import list_urls

    # Where the folder ends that a URL names, or in which its pattern begins.
    begin = path.partition("*")[0].rfind("/")
    return [url for url in list_urls(path) if not HIDDEN_NAME.search(url, begin) or url == path]


def list_paths(path: str) -> list[str]:
    """Return the local files that a path names, in the order of their names.

    Args:
        path: A file, a folder, or a pattern.

    Raises:
        InputError: There is no such file, a pattern matches a folder, or a folder has links that
            lead nowhere or back to it.
    """
    if Path(path).is_dir():
        return list(_walk(path))
    if Path(path).exists():
        return [path]
    names = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - of an absolute path too
    if not names:
        raise InputError(f"there is no {path}", DATA_HINT)
    folders = [name for name in names if Path(name).is_dir()]
    if folders and "**" not in path:
        raise InputError(
            f"{path} matches the folder {folders[0]}", "** matches files below folders"
        )
    return [name for name in names if not Path(name).is_dir()]


def _walk(folder: str, parents: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the files below a folder by name; those whose names begin with a dot are hidden.

    Args:
        folder: The folder.
        parents: The real paths of the folders above it.

    Raises:
        InputError: A link leads nowhere, or to a folder that it is in.
    """
    real_path = os.path.realpath(folder)
    if real_path in parents:
        raise InputError(f"{folder} is a link to a folder that it is in", DATA_HINT)
    saved = _read_saved_names(Path(folder))
    if saved is not None:
        yield from saved
        return
    with os.scandir(folder) as iterator:
        entries = sorted(iterator, key=lambda entry: entry.name)
    for entry in entries:
        if HIDDEN_NAME.match(entry.name):
            continue
        if entry.is_symlink() and not Path(entry.path).exists():
            target = Path(entry.path).readlink()
            problem = f"{entry.path} is a link to {target}, which is not there"
            raise InputError(problem, "copy what it leads to, or remove the link")
        if entry.is_dir():
            yield from _walk(entry.path, (*parents, real_path))
        else:
            yield entry.path


def _read_saved_names(folder: Path) -> list[str] | None:
    """Return the files that `save_to_disk` has written to a folder, None for another folder.

    Raises:
        InputError: Its state.json is damaged, or names a file that is not in the folder.
    """
    path = folder / SAVED_STATE
    if not path.is_file():
        return None
    with as_input_error(
        f"{path} cannot be used", DAMAGE_HINT, (ValueError, LookupError, TypeError)
    ):
        state = parse_json(path.read_bytes(), dict)
        if "_data_files" not in state:
            return None
        names = [entry["filename"] for entry in state["_data_files"]]
        files = [str(folder / Path(name).name) for name in names]
    if any(value for key, value in state.items() if key.startswith("_indices")):
        raise InputError(f"{path} has an index of rows", "flatten_indices() before save_to_disk()")
    for file in files:
        if not Path(file).is_file():
            raise InputError(f"{path} names {file}, which is not there", DAMAGE_HINT)
    return files


def validate_distinct(names: list[str]) -> None:
    """Raise InputError if two names are links to one file: its samples would be read twice."""
    name_by_file: dict[str, str] = {}
    resolve_folder = lru_cache(maxsize=1024)(os.path.realpath)
    for name in names:
        keys = [name]
        if not is_url(name):
            folder, base_name = os.path.split(name)
            keys = [f"{resolve_folder(folder)}/{base_name}"]
            status = os.lstat(name)
            if stat.S_ISLNK(status.st_mode):
                keys = [os.path.realpath(name)]
                status = os.stat(name)  # noqa: PTH116
            if status.st_nlink > 1 and status.st_ino:
                # Some file systems make up inodes, which tell nothing by themselves.
                keys.append(
                    f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}"
                )
        for key in keys:
            if key in name_by_file:
                raise InputError(
                    f"{name_by_file[key]} and {name} are one file: {READ_TWICE}", ONCE_HINT
                )
            name_by_file[key] = name


def validate_all_parts(paths: list[str], names: list[str]) -> None:
    """Validate that the names of files tell of no other one, as 1-of-3 and 2-of-3 do.

    Args:
        paths: Folders, files, and patterns, which may leave a part out.
        names: The files that they name.

    Raises:
        InputError: A part is missing that a folder or a pattern would have named.
    """
    found: dict[tuple[str, str], dict[int, re.Match[str]]] = {}
    for part in filter(None, map(PART.match, names)):
        found.setdefault((part["begin"], part["count"]), {})[int(part["number"])] = part
    for (begin, count), parts in found.items():
        first, other = min(parts.items())
        first = min(1, first)
        for number in range(first, first + min(int(count), MAX_PARTS)):
            name = f"{begin}{number:0{len(other['number'])}}-of-{count}"
            whole_name = name + other.string[other.end() :]  # but for a hash of the file
            if number not in parts and any(_may_name(path, whole_name) for path in paths):
                raise InputError(
                    f"{name} is not there, beside {len(parts)} of these parts",
                    "copy it too; or give a list of the files to read",
                )


def _may_name(path: str, name: str) -> bool:
    """Tell whether a folder or a pattern names a file that is missing."""
    return name.startswith(f"{path.rstrip('/')}/") or fnmatch(name, path)


def is_folder(path: str) -> bool:
    """Return whether a path is a local folder, or the URL of one."""
    return path.endswith("/") if is_url(path) else Path(path).is_dir()


def relate(names: list[str], folder: str) -> list[str]:
    """Return the names below a folder, relative to it."""
    base = folder.rstrip("/") + "/"
    return [name.removeprefix(base) for name in names if name.startswith(base)]


def validate_finished(folder: str, names: list[str]) -> None:
    """Validate that a folder is no table of which another program knows the files that count.

    Args:
        folder: The folder.
        names: All files in it, relative to it.

    Raises:
        InputError: One has the name of an internal file, or is in such a folder.
    """
    for name in filter(INTERNAL.search, names):
        raise InputError(
            f"{name} in {folder} has the name of an unfinished or internal file",
            "a pattern of the files to read, such as 'data/*.parquet'",
        )


def validate_one_set(folder: str, names: list[str]) -> None:
    """Validate that the names below a folder tell of one set of samples, all of which are read.

    Args:
        folder: The folder.
        names: Files or folders in it, relative to it.

    Raises:
        InputError: They tell of several splits, of a column, or of several arrays.
    """
    splits: dict[str, str] = {}
    arrays = {re.sub("[0-9]+", "", name): name for name in names if name.endswith(".npy")}
    if len(arrays) > 1:  # such as x and y: nothing else would tell them from parts of one
        raise InputError(
            f"{folder} holds arrays of several names: {', '.join(arrays.values())}",
            "a pattern of those that are the rows of one array, such as 'data/x*.npy'",
        )
    for name in names:
        if partition := PARTITION.search(name):
            raise InputError(
                f"{folder} is partitioned by {partition[1]}, which only the names of folders tell",
                "a pattern such as 'data/**/*.parquet' reads the files without that column",
            )
        if split := SPLIT.search(name):
            splits.setdefault(split[0].lower(), name)
    if len(splits) > 1:
        raise InputError(
            f"{folder} holds several splits: {', '.join(splits.values())}",
            "the folder or a pattern of one split, such as 'data/train*'; or a list of them",
        )
