"""Job files: how a recipe, or a user's own file, is found and imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_type_hints

from stepladder.core.console import preserve_streams
from stepladder.core.errors import InputError
from stepladder.core.masking import drop_masked
from stepladder.core.settings import Settings
from stepladder.core.typed_file import convert
from stepladder.train.job_source import read_config_fields, relative_to_cwd

# Imported by stepladder or torch, besides Python's own modules.
IMPORTED_MODULES = {
    "click", "cloudpickle", "cuda", "filelock", "fsspec", "h5py", "jinja2", "mpmath", "networkx",
    "numpy", "platformdirs", "psutil", "rich", "safetensors", "stepladder",
    "stepladder_exchange", "sympy", "tensorboard", "torch", "triton", "typing_extensions", "xxhash",
}  # fmt: skip
RECIPES_FOLDER = Path(__file__).parent.parent / "recipes"


class _StoredJob(NamedTuple):
    """The job of a run directory.

    Args:
        path: The job file.
        config: The values of its Config.
        settings: The settings that are part of the run's definition.
    """

    path: Path
    config: dict[str, Any]
    settings: dict[str, Any]


def list_recipes() -> list[str]:
    """Return the names of the recipes."""
    return sorted(path.stem for path in RECIPES_FOLDER.glob("[a-z]*.py"))


def find_job(name: str) -> Path:
    """Return the file of a job, given the name of a recipe or a path that ends in .py.

    Raises:
        InputError: If there is no such file, or it hides another module.
    """
    recipes = list_recipes()
    if name in recipes:
        return RECIPES_FOLDER / f"{name}.py"
    path = Path(name)
    if path.suffix != ".py":
        hint = f"stepladder train {recipes[0]}, or a path that ends in .py"
        similar = get_close_matches(name, recipes)
        if similar:
            hint = f"did you mean {similar[0]}?"
        raise InputError(f"recipe {name!r} is unknown; there are {', '.join(recipes)}", hint)
    if not path.is_file():
        raise InputError(f"job file {name} does not exist", f"ls {path.absolute().parent}")
    _validate_module_name(path.resolve())
    return path.resolve()


def load_stored_job(run_dir: Path) -> _StoredJob:
    """Return the job that a run directory was written by.

    Raises:
        InputError: If its config.json is missing or damaged, or does not fit the job file.
    """
    # Late: it imports psutil, and `train --help` need not wait for that.
    from stepladder.storage.run_config import open_config

    with open_config(run_dir) as stored:
        definition = stored["definition"]
        config = drop_masked(stored["config"])
        job_file = stored.get("job_file")
        if job_file and Path(job_file).is_file():
            path = Path(job_file)
        else:
            path = find_job(definition["recipe"])
        _validate_config_values(path, config)
        types = get_type_hints(Settings)
        settings = {
            name: convert(value, types[name], name)
            for name, value in definition.items()
            if name in types
        }
        return _StoredJob(path.resolve(), config, settings)


def _validate_module_name(path: Path) -> None:
    """Check that a job file hides no module that Python, torch or stepladder imports.

    The job file becomes the module of its name, so an import of that name would get the job file.

    Raises:
        InputError: The file has the name of such a module.
    """
    name = path.stem
    is_taken = name in sys.stdlib_module_names or name in IMPORTED_MODULES
    if path.parent != RECIPES_FOLDER and is_taken:
        new_path = path.with_name(f"my_{path.name}")
        raise InputError(
            f"the job file {path.name} hides the module {name}, which Python then cannot import",
            f"mv {relative_to_cwd(path)} {relative_to_cwd(new_path)}",
        )


def _validate_config_values(path: Path, config: dict[str, Any]) -> None:
    """Raise ValueError if stored values of a Config do not fit the Config of the job file."""
    fields = {field.name: field for field in read_config_fields(path)}
    for name, value in config.items():
        if name not in fields:
            raise ValueError(f"config.{name} is no field of Config in {path.name}")
        if value is not None or fields[name].default is not None:
            convert(value, fields[name].type, f"config.{name}")


@contextmanager
def raise_on_exit(path: Path) -> Iterator[None]:
    """Turn an exit of the process by the job file, in the block, into an InputError.

    Even an exit with 0 would look like a run that is complete. Standard streams that the file
    closes are opened again.

    Raises:
        InputError: The job file has called sys.exit.
    """
    try:
        with preserve_streams():
            yield
    except SystemExit as error:
        raise InputError(
            f"{path.name} has called sys.exit({error.code!r:.60}) before the training",
            "raise an error instead",
        ) from error


def load_job_file(path: Path) -> ModuleType:
    """Import the file as a module, with its folder on sys.path as for `python file.py`."""
    is_recipe = path.parent == RECIPES_FOLDER
    name = path.stem
    if is_recipe:
        name = f"stepladder.recipes.{path.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path):
        return sys.modules[name]
    if not is_recipe and str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle find the module by its name
    try:
        with raise_on_exit(path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # so that a second attempt does not get half a module
        raise
    return module
