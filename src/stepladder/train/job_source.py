"""The text of a job file, read without running it.

A job file has a `Config` dataclass and `build(config) -> Job`. The Config's fields become flags of
`stepladder train`. They are read from the text, so `--help` runs no user code and imports no torch.
"""

from __future__ import annotations

import ast
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError
from stepladder.core.python_file import parse_source, read_source

MAX_INT_BITS = 1024
OTHER_BATCH_NAMES = ("batch_size", "batchsize", "train_batch_size")  # as other programs call it
BUILD_SIGNATURE = "def build(config: Config) -> stepladder.Job: ..."
FIELD_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}


@dataclass(frozen=True)
class ConfigField:
    """One field of a job file's Config, which becomes a flag.

    Args:
        name: The name of the field.
        type: int, float, str or bool.
        default: The default value, None if the text does not say it.
        choices: The values that a Literal allows.
        help: The comment behind the field.
    """

    name: str
    type: type
    default: Any
    choices: tuple[str, ...] = ()
    help: str = ""

    @property
    def flag(self) -> str:
        """The flag of `stepladder train`."""
        return "--" + self.name.replace("_", "-")


def read_config_fields(path: Path) -> list[ConfigField]:
    """Return the fields of the file's Config dataclass, from its text alone.

    Raises:
        InputError: If the text has a syntax error or no `build`, or the type of a field is none of
            int, float, str, bool, Literal of strings.
    """
    definitions = _read_definitions(path)
    build = definitions.get("build")
    config = definitions.get("Config")
    if not isinstance(build, ast.FunctionDef):
        _validate_not_imported(path, "build")
        run = f"stepladder run {relative_to_cwd(path)}"
        raise InputError(
            f"{path.name} has no function build(config), so it is not a job file",
            f"{run}, if it trains by itself; stepladder convert --to job {path.name}; or add "
            f"{BUILD_SIGNATURE}",
        )
    if not ast.unparse(build.args):
        raise InputError(
            f"build() in {path.name} takes no parameters: it must take the config", BUILD_SIGNATURE
        )
    if not isinstance(config, ast.ClassDef):
        _validate_not_imported(path, "Config")
        raise InputError(
            f"{path.name} has no dataclass Config",
            "@dataclass class Config with one field per setting",
        )
    annotated = [node for node in config.body if isinstance(node, ast.AnnAssign)]
    nodes = [node for node in annotated if isinstance(node.target, ast.Name)]
    _validate_batch_field(path, [ast.unparse(node.target) for node in nodes])
    lines = read_source(path).splitlines()
    return [_read_field(path, node, lines) for node in nodes]


def _validate_not_imported(path: Path, name: str) -> None:
    """Raise InputError if the file imports its Config or build, whose text is then elsewhere."""
    for statement in parse_source(path).body:
        if not isinstance(statement, ast.ImportFrom):
            continue
        for alias in statement.names:
            if (alias.asname or alias.name) == name:
                raise InputError(
                    f"{path.name} imports {name} by `{ast.unparse(statement)}`: it must be defined"
                    " in the job file, whose text alone gives the flags of --help",
                    f"copy the definition of {name} into {path.name}",
                )


def _validate_batch_field(path: Path, names: list[str]) -> None:
    """Check that no field looks like the batch of a step but would have no effect.

    Args:
        path: The job file.
        names: The names of the Config's fields.

    Raises:
        InputError: There is such a field, for example `batch_size`, and no field `global_batch`.
    """
    if "global_batch" in names:
        return
    for name in names:
        if name in OTHER_BATCH_NAMES:
            raise InputError(
                f"{path.name}: Config.{name} would not be the run's batch: samples per optimizer"
                " step are called global_batch, 64 by default",
                "name the field global_batch; or add a field global_batch, if"
                f" {name} is something else",
            )


def validate_int_size(path: Path, name: str, value: Any) -> None:
    """Raise InputError for an int that neither fits a double nor can be printed by Python."""
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise InputError(
            f"{path.name}: Config.{name} has {value.bit_length()} bits", f"{MAX_INT_BITS} at most"
        )


def has_build(path: Path) -> bool:
    """Return whether the file is a job, and not a script that trains by itself.

    Raises:
        InputError: If the text has a syntax error.
    """
    return isinstance(_read_definitions(path).get("build"), ast.FunctionDef)


def validate_is_script(path: Path, command: str = "stepladder train") -> None:
    """Check that a script is no notebook, and no job file, which trains nothing by itself.

    Args:
        path: The script. Text that is not Python is left to the program that runs it.
        command: The command that trains a job, for the HINT.

    Raises:
        InputError: The script is a notebook or a job file.
    """
    if path.suffix == ".ipynb":
        raise InputError(f"{path} is a notebook", f"jupyter nbconvert --to script {path}")
    try:
        definitions = _read_definitions(path)
        statements = parse_source(path).body
    except InputError:
        return
    build = definitions.get("build")
    has_config = isinstance(definitions.get("Config"), ast.ClassDef)
    is_job = has_config and isinstance(build, ast.FunctionDef) and bool(build.args.args)
    defined_names = set(definitions)
    if is_job and not any(_may_train(statement, defined_names) for statement in statements):
        raise InputError(
            f"{path.name} is a job: it has build(config), and trains nothing by itself",
            f"{command} {path}",
        )


def relative_to_cwd(path: Path) -> str:
    """Return the path as it is typed in the current folder."""
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _may_train(statement: ast.stmt, defined_names: set[str]) -> bool:
    """Return whether a top-level statement may train, and does not only prepare a training.

    Args:
        statement: The statement.
        defined_names: Functions and classes of the file. A call of one of them may train, and so
            may a call of a method `fit`.
    """
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return False
    if isinstance(statement, (ast.For, ast.While, ast.With)):
        return True
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and node.id == "__name__":
            return True
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in defined_names:
                return True
            if isinstance(function, ast.Attribute) and function.attr == "fit":
                return True
    return False


def _read_definitions(path: Path) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """Return the top-level classes and functions of a file, by name."""
    statements = parse_source(path).body
    kinds = (ast.ClassDef, ast.FunctionDef)
    return {node.name: node for node in statements if isinstance(node, kinds)}


def _read_field(path: Path, node: ast.AnnAssign, lines: list[bytes]) -> ConfigField:
    name = ast.unparse(node.target)
    if name.startswith("__"):
        raise InputError(
            f"{path.name}: Config.{name} has a name of Python's own", "a name without leading __"
        )
    default = None
    if node.value is not None:
        with suppress(ValueError):  # computed by the file itself; a flag still overrides it
            default = ast.literal_eval(node.value)
    validate_int_size(path, name, default)
    comment = _read_comment(lines, node)
    choices = _read_choices(node.annotation)
    if choices:
        return ConfigField(name, str, default, choices, comment)
    annotation = ast.unparse(node.annotation)
    if annotation not in FIELD_TYPES:
        raise InputError(
            f"{path.name}: Config.{name} has type {annotation}",
            f"{name}: int, float, str, bool or Literal['a', 'b']",
        )
    return ConfigField(name, FIELD_TYPES[annotation], default, (), comment)


def _read_comment(lines: list[bytes], node: ast.AnnAssign) -> str:
    """Return the comment behind a field, "" for a comment that tools read.

    Args:
        lines: Of the file, as bytes, since the columns of ast count bytes.
        node: The field.
    """
    line = lines[(node.end_lineno or 0) - 1]
    after_field = line[node.end_col_offset :].decode(errors="replace")
    comment = after_field.partition("#")[2].strip()
    return "" if comment.startswith(("type:", "noqa")) else comment


def _read_choices(annotation: ast.expr) -> tuple[str, ...]:
    """Return the strings of Literal["a", "b"], nothing for any other annotation."""
    if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal"):
        return ()
    parameters = annotation.slice
    parts = parameters.elts if isinstance(parameters, ast.Tuple) else [parameters]
    choices = []
    for part in parts:
        if not (isinstance(part, ast.Constant) and isinstance(part.value, str)):
            return ()
        choices.append(part.value)
    return tuple(choices)
