"""python docs/reference/regenerate.py: write the pages of this folder anew, after flags or
docstrings change.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import click

import stepladder
from stepladder.cli import cli
from stepladder.cli.options import JobCommand
from stepladder.tools.check.finding import texts
from stepladder.tools.explain.explain import known_errors

HERE = Path(__file__).parent
RECIPES = "digits", "gpt", "mlp", "mnist", "movielens"
MADE = "<!-- Made by docs/reference/regenerate.py from the code: do not edit. -->"


def pages() -> dict[str, str]:
    """The text of each page, by its file's name."""
    return {
        "commands.md": commands_page(),
        "python.md": python_page(),
        "errors.md": errors_page(),
        "check-rules.md": rules_page(),
    }


def rules_page() -> str:
    """What `stepladder check` looks for, from the texts that it prints."""
    parts = [f"{MADE}\n\n# The rules of stepladder check\n"]
    parts.append(
        "[check.md](../check.md) says how to use it. An error is a wrong result or a hang,"
        " a warning a risk, a note cost or taste.\n"
    )
    family = ""
    for rule in texts().values():
        if rule.family != family:
            family = rule.family
            parts.append(f"## {family.capitalize()}\n")
        parts.append(f"### {rule.id}\n\n{rule.what} ({rule.severity})\n\n{rule.why}\n")
        parts.append(f"<!-- not run here: it is the mistake -->\n```python\n{rule.example}\n```\n")
        parts.append(f"Fix: `{rule.fix}`\n")
    return "\n".join(parts)


def commands_page() -> str:
    context = click.Context(cli, info_name="stepladder")
    parts = [
        f"{MADE}\n\n# Commands and their flags\n",
        "Every command and every flag. `stepladder COMMAND --help` shows the same. What `--json` prints is in"
        " [json.md](../json.md).\n",
        "A command ends with exit code 0 when all went well, 1 after a failure, 2 for bad input (one line says"
        " what to type), 75 when it was asked to stop and can go on, and 130 after Ctrl-C.\n",
        'The Tab key completes commands, flags and recipes after `eval "$(_STEPLADDER_COMPLETE=bash_source'
        " stepladder)\"` (or `zsh_source`, `fish_source`) in the shell's start-up file. With `NO_COLOR=1` nothing"
        " is coloured.\n",
    ]
    for name in cli.list_commands(context):
        parts += command_parts(cli.get_command(context, name), f"stepladder {name}", 2)
    return "\n".join(parts)


def command_parts(command: click.Command | None, name: str, depth: int) -> Iterator[str]:
    """A command's section, and those of its own commands below it."""
    assert command is not None
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield f"{'#' * depth} {name}\n"
    yield f"`{usage}`\n"
    yield prose(command.help or "") + "\n"
    shown = [
        param for param in command.params if isinstance(param, click.Option) and not param.hidden
    ]
    yield from flag_table(shown, context)
    if isinstance(command, JobCommand) and name == "stepladder train":
        for recipe in RECIPES:
            yield f"{'#' * (depth + 1)} Flags of the recipe {recipe}\n"
            yield from flag_table(flags_of_recipe(command, recipe), context)
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            yield from command_parts(
                command.get_command(context, inner), f"{name} {inner}", depth + 1
            )


def flags_of_recipe(command: JobCommand, recipe: str) -> list[click.Option]:
    """Those of its Config, which are no flags of every job."""
    context = click.Context(command, info_name="train")
    command.parse_args(context, [recipe])
    own = command.get_params(context)[len(click.Command.get_params(command, context)) :]
    return [param for param in own if isinstance(param, click.Option)]


def flag_table(options: list[click.Option], context: click.Context) -> Iterator[str]:
    if options:
        yield "| flag | what it does |\n| --- | --- |"
        for option in options:
            left, right = option.get_help_record(context) or ("", "")
            yield f"| `{cell(left)}` | {cell(right)} |"
        yield ""


def cell(text: str) -> str:
    """Text of a Markdown table's cell."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def errors_page() -> str:
    parts = [
        f"{MADE}\n\n# Error messages\n",
        "What common messages of PyTorch on several processes mean, and what to type. `stepladder explain TEXT`"
        " searches this page, and `stepladder explain FILE` looks for all of it in a log. stepladder's own"
        " messages say what to type after the word HINT. [debugging.md](../debugging.md) is about hangs.\n",
    ]
    known = known_errors()
    for source in dict.fromkeys(error.source for error in known):
        parts.append(f"## {source}\n\n| message | cause | what to do |\n| --- | --- | --- |")
        for error in (error for error in known if error.source == source):
            texts = "<br>".join(f"`{cell(text)}`" for text in error.texts)
            parts.append(f"| {texts} | {cell(error.cause)} | {cell(error.do)} |")
        parts.append("")
    return "\n".join(parts)


def python_page() -> str:
    parts = [
        f"{MADE}\n\n# The Python package\n",
        "All that `from stepladder import ...` offers. [your-own-job.md](../your-own-job.md) shows most of it at"
        " work. Other modules are the package's own, and their names may change.\n",
    ]
    for name in sorted(stepladder.__all__):
        if not name.startswith("_"):
            parts += name_parts(name, getattr(stepladder, name))
    return "\n".join(parts)


def name_parts(name: str, value: Any) -> Iterator[str]:
    """A class with its fields and methods, or a function."""
    yield f"## {name}\n"
    shown = (
        [field for field in fields(value) if not field.name.startswith("_")]
        if is_dataclass(value)
        else []
    )
    if not (shown or has_no_signature(value)):
        yield f"`{name}{signature(value)}`\n"
    yield explained(value) + "\n"
    if shown:
        yield "| field | type | default |\n| --- | --- | --- |"
        for field in shown:
            yield f"| `{field.name}` | `{cell(str(field.type))}` | {default_of(field)} |"
        yield ""
    for member, function in methods(value):
        is_value = isinstance(inspect.getattr_static(value, member), property | cached_property)
        yield f"### {name}.{member}\n"
        yield f"`{member}{'' if is_value else signature(function)}`\n"
        yield explained(function) + "\n"


def methods(value: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class itself defines, in its order."""
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        function = getattr(member, "fget", None) or getattr(member, "func", None) or member
        function = getattr(function, "__func__", function)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function


def signature(function: Any) -> str:
    """As it is written; of a default that is a function, its name."""
    found = inspect.signature(function)
    kept = []
    for one in found.parameters.values():
        kind = Written(one.annotation) if isinstance(one.annotation, str) else one.annotation
        if inspect.isroutine(one.default):
            one = one.replace(default=Written(one.default.__name__))
        if one.name not in ("self", "cls"):
            kept.append(one.replace(annotation=kind))
    returned = found.return_annotation
    ended = (
        Written(returned)
        if isinstance(returned, str) and returned != "None"
        else inspect.Signature.empty
    )
    return str(found.replace(parameters=kept, return_annotation=ended))


class Written(str):
    """Text that stands in a signature as it is."""

    def __repr__(self) -> str:
        return str(self)


def has_no_signature(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, (BaseException, Protocol))


def default_of(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return f"`{field.default!r}`"
    return "must be given" if field.default_factory is MISSING else "made anew for each"


def explained(value: Any) -> str:
    """A docstring, in which `name: what` becomes an item of a list for each parameter or field."""
    known = "|".join(() if has_no_signature(value) else inspect.signature(value).parameters) or "-"
    named = re.compile(rf"(?:^|(?<=[.;]) +)((?:{known})(?:, (?:{known}))*): ")
    return "\n\n".join(
        named.sub(lambda found: f"\n- `{found[1]}`: ", one).strip()
        for one in prose(inspect.getdoc(value) or "").split("\n\n")
    )


def prose(text: str) -> str:
    """Text in lines as paragraphs of one line each; examples stay as they are."""
    paragraphs = inspect.cleandoc(text.replace("\b\n", "")).split("\n\n")
    return "\n\n".join(
        "\n".join(f"    {line}" for line in one.splitlines())
        if one.startswith(">>>")
        else re.sub(r"\s+", " ", one).replace("<", "&lt;")
        for one in paragraphs
    )


if __name__ == "__main__":
    for file, page in pages().items():
        (HERE / file).write_text(page, encoding="utf-8")
