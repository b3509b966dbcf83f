"""Job files: how a recipe or a user's own file is found, read and imported.

A job file has a `Config` dataclass and `build(config) -> Job`. The Config's fields become flags of
`stepladder train`; they are read from the source text, so `--help` runs no user code and imports no
torch."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from stepladder.core.console import streams_kept
from stepladder.core.errors import InputError
from stepladder.core.secrets import without_masked
from stepladder.core.settings import Settings
from stepladder.core.source import parsed, source_of
from stepladder.core.stored import fit

MAX_INT_BITS = 1024
OTHER_BATCH_NAMES = "batch_size", "batchsize", "train_batch_size"  # what other programs call it
BUILD_SIGNATURE = "def build(config: Config) -> stepladder.Job: ..."
IMPORTED_MODULES = {  # by stepladder or torch; beside what Python itself has
    "click", "cloudpickle", "cuda", "filelock", "fsspec", "h5py", "jinja2", "mpmath", "networkx", "numpy",
    "platformdirs", "psutil", "rich", "safetensors", "stepladder", "sympy", "tensorboard", "torch", "triton",
    "typing_extensions", "xxhash",
}  # fmt: skip
RECIPES_FOLDER = Path(__file__).parent.parent / "recipes"


@dataclass(frozen=True)
class ConfigField:
    """One field of a job file's Config, as a flag. `default` is None where the text does not say
    it.

    help: the comment behind the field.
    """

    name: str
    type: type
    default: Any
    choices: tuple[str, ...] = ()
    help: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def list_recipes() -> list[str]:
    return sorted(path.stem for path in RECIPES_FOLDER.glob("[a-z]*.py"))


def find_job(name: str) -> Path:
    """The file of a recipe's name, or of a path that ends in .py. Raises InputError where there is
    none.
    """
    if name in list_recipes():
        return RECIPES_FOLDER / f"{name}.py"
    path = Path(name)
    if path.suffix == ".py":
        if path.is_file():
            validate_module_name(path.resolve())
            return path.resolve()
        raise InputError(f"job file {name} does not exist", f"ls {path.absolute().parent}")
    raise InputError(
        f"recipe {name!r} is unknown; there are {', '.join(list_recipes())}",
        f"stepladder train {list_recipes()[0]}, or a path that ends in .py",
    )


def load_stored_job(run_dir: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The job file, its Config and the settings of a run directory. Raises InputError where they
    are not there.
    """
    from stepladder.storage.run_config import (
        config_of,
    )  # late: psutil, for which `train --help` need not wait

    with config_of(run_dir) as config:
        definition, given, job_file = (
            config["definition"],
            without_masked(config["config"]),
            config.get("job_file"),
        )
        path = (
            Path(job_file)
            if job_file and Path(job_file).is_file()
            else find_job(definition["recipe"])
        )
        validate_config_values(path, given)
        own = get_type_hints(Settings)
        settings = {
            name: fit(value, own[name], name) for name, value in definition.items() if name in own
        }
        return path.resolve(), given, settings


def relative_to_cwd(path: Path) -> str:
    """Return the path as it is typed in the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def validate_module_name(path: Path) -> None:
    """Raises InputError for a job file with the name of a module that Python, torch or stepladder
    imports.

    The job file is a module of that name, so what imports the name would get the job file.
    """
    name = path.stem
    if path.parent != RECIPES_FOLDER and (
        name in sys.stdlib_module_names or name in IMPORTED_MODULES
    ):
        raise InputError(
            f"the job file {path.name} hides the module {name}, which Python then cannot import",
            f"mv {relative_to_cwd(path)} {relative_to_cwd(path.with_name('my_' + path.name))}",
        )


def validate_config_values(path: Path, given: dict[str, Any]) -> None:
    """Raises ValueError where what a run directory has of a Config is not what the job file's
    Config takes.
    """
    known = {field.name: field for field in read_config_fields(path)}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"config.{name} is no field of Config in {path.name}")
        if value is not None or known[name].default is not None:
            fit(value, known[name].type, f"config.{name}")


def read_config_fields(path: Path) -> list[ConfigField]:
    """The fields of the file's Config dataclass, from its text alone.

    Raises InputError on a syntax error, a missing `build`, or a field whose type is none of int,
    float, str, bool, Literal of strings."""
    names = _definitions(path)
    build = names.get("build")
    config = names.get("Config")
    if not isinstance(build, ast.FunctionDef):
        hint = f"stepladder run {relative_to_cwd(path)}, if it trains by itself; else add {BUILD_SIGNATURE}"
        raise InputError(
            f"{path.name} has no function build(config), so it is not a job file", hint
        )
    if not ast.unparse(build.args):
        raise InputError(
            f"build() in {path.name} takes no parameters: it must take the config", BUILD_SIGNATURE
        )
    if not isinstance(config, ast.ClassDef):
        raise InputError(
            f"{path.name} has no dataclass Config",
            "@dataclass class Config with one field per setting",
        )
    annotated = [node for node in config.body if isinstance(node, ast.AnnAssign)]
    lines = source_of(path).splitlines()
    named = [node for node in annotated if isinstance(node.target, ast.Name)]
    validate_batch_field(path, [ast.unparse(node.target) for node in named])
    return [replace(_field(path, node), help=_comment(lines, node)) for node in named]


def validate_batch_field(path: Path, names: list[str]) -> None:
    """Raise InputError for a field that looks as if it were the batch of a step, and would be
    ignored as such.
    """
    other = next((name for name in names if name in OTHER_BATCH_NAMES), None)
    if other is not None and "global_batch" not in names:
        raise InputError(
            f"{path.name}: Config.{other} would not be the run's batch: samples per optimizer step are"
            " called global_batch, 64 by default",
            f"name the field global_batch; or add a field global_batch, if {other} is something else",
        )


def _comment(lines: list[bytes], node: ast.AnnAssign) -> str:
    """What stands behind the field on its line; columns count bytes. None of what is for tools."""
    line = lines[(node.end_lineno or 0) - 1][node.end_col_offset :].decode(errors="replace")
    text = line.partition("#")[2].strip()
    return "" if text.startswith(("type:", "noqa")) else text


def has_build(path: Path) -> bool:
    """Whether the file is a job, and not a script that trains by itself. Raises InputError on a
    syntax error.
    """
    return isinstance(_definitions(path).get("build"), ast.FunctionDef)


def validate_not_job(path: Path, command: str = "stepladder train") -> None:
    """Raise InputError for a job file that is to be run as a script: it would train nothing, and
    end well.

    Args:
        path: of the script. What is no Python is left to whoever runs it.
        command: that trains a job in this place, for the HINT.
    """
    try:
        names = _definitions(path)
        statements = parsed(path).body
    except InputError:
        return
    build, config = names.get("build"), names.get("Config")
    is_job = (
        isinstance(build, ast.FunctionDef) and isinstance(config, ast.ClassDef) and build.args.args
    )
    if is_job and not any(_may_train(statement, set(names)) for statement in statements):
        raise InputError(
            f"{path.name} is a job: it has build(config), and trains nothing by itself",
            f"{command} {path}",
        )


def _may_train(statement: ast.stmt, defined: set[str]) -> bool:
    """Return whether a statement at the top of a file may do what the file is for, and not only
    prepare it.

    defined: functions and classes of the file. To call one of them, or a method `fit`, may be to
    train."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return False
    if isinstance(statement, (ast.For, ast.While, ast.With)):
        return True
    nodes = list(ast.walk(statement))
    if any(isinstance(node, ast.Name) and node.id == "__name__" for node in nodes):
        return True
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    return any(
        (isinstance(function, ast.Name) and function.id in defined)
        or (isinstance(function, ast.Attribute) and function.attr == "fit")
        for function in called
    )


def _definitions(path: Path) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    return {
        node.name: node
        for node in parsed(path).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }


def _field(path: Path, node: ast.AnnAssign) -> ConfigField:
    name = ast.unparse(node.target)
    annotation = ast.unparse(node.annotation)
    if name.startswith("__"):
        raise InputError(
            f"{path.name}: Config.{name} has a name of Python's own", "a name without leading __"
        )
    default = None
    if node.value is not None:
        with suppress(ValueError):  # else computed by the file itself; the flag still overrides it
            default = ast.literal_eval(node.value)
    validate_int_size(path, name, default)
    if choices := _choices(node.annotation):
        return ConfigField(name, str, default, choices)
    types: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}
    if annotation not in types:
        raise InputError(
            f"{path.name}: Config.{name} has type {annotation}",
            f"{name}: int, float, str, bool or Literal['a', 'b']",
        )
    return ConfigField(name, types[annotation], default)


def validate_int_size(path: Path, name: str, value: Any) -> None:
    """Raises InputError for a number that neither a double nor Python's own printing takes."""
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise InputError(
            f"{path.name}: Config.{name} has {value.bit_length()} bits", f"{MAX_INT_BITS} at most"
        )


def _choices(annotation: ast.expr) -> tuple[str, ...]:
    """The strings of Literal["a", "b"]; nothing for any other annotation."""
    if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal"):
        return ()
    inside = annotation.slice
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    values = [
        part.value
        for part in parts
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    return tuple(values) if len(values) == len(parts) else ()


@contextmanager
def raise_on_exit(path: Path) -> Iterator[None]:
    """Raises InputError where the file ends the process, also with 0: that would be a run that is
    done.

    What it closes of the process's streams is opened again.
    """
    try:
        with streams_kept():
            yield
    except SystemExit as error:
        raise InputError(
            f"{path.name} has called sys.exit({error.code!r:.60}) before the training",
            "raise an error instead",
        ) from error


def load_job_file(path: Path) -> ModuleType:
    """Import the file as a module of its own, with its folder on sys.path as for `python file.py`."""
    name = f"stepladder.recipes.{path.stem}" if path.parent == RECIPES_FOLDER else path.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path):
        return sys.modules[name]
    if path.parent != RECIPES_FOLDER and str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look the module up by name
    try:
        with raise_on_exit(path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # a second attempt must not find half a module
        raise
    return module
