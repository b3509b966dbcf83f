"""python docs/reference/regenerate.py: write the pages of this folder anew, after flags or
docstrings change.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc import locate
from typing import Any, get_type_hints

import click

from stepladder.cli import OLD_SPELLINGS, cli
from stepladder.cli.flags import find_metadata, read_documented
from stepladder.cli.options import JobCommand
from stepladder.core.flag import Flag
from stepladder.tools.check.rules.evidence import CHECK_TEXTS
from stepladder.tools.explain.explain import known_errors
from stepladder.tools.findings.render import format_page

HERE = Path(__file__).parent
RECIPES = "digits", "gpt", "mlp", "mnist", "movielens"
# What follows the first line of such a part, up to its end, is made from the code.
MADE_PART = re.compile(r"(<!-- made from ([\w.]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
SECTIONS = re.compile(r"\n\n(?:Args|Returns|Yields|Raises):\n")
FUNCTION = re.compile(r"<(?:built-in )?function [^=,]*>(?=[,)]|$)")  # a default, with its address
RETURNED = re.compile(r"(?:Returns|Yields):\n((?: {4}.+\n?)+)")
MADE = "<!-- Made by docs/reference/regenerate.py from the code: do not edit. -->"


def pages() -> dict[str, str]:
    """The text of each page, by its file's name."""
    return {
        "commands.md": commands_page(),
        "errors.md": errors_page(),
        "check-rules.md": rules_page(),
        "python.md": python_page(),
    }


def rules_page() -> str:
    """What `stepladder check` looks for, from the texts that it prints."""
    parts = [f"{MADE}\n\n# The rules of stepladder check\n"]
    parts.append(
        "[check.md](../check.md) says how to use it. An error is a wrong result or a hang,"
        " a warning a risk, a note cost or taste.\n"
    )
    parts += format_page(CHECK_TEXTS.rules)
    return "\n".join(parts)


def commands_page() -> str:
    context = click.Context(cli, info_name="stepladder")
    parts = [
        f"{MADE}\n\n# Commands and their flags\n",
        "Every command and every flag. `stepladder COMMAND --help` shows the same, and `stepladder --help-all`"
        " lists all commands. What `--json` prints is in"
        " [json.md](../json.md).\n",
        "A command ends with exit code 0 when all went well, 1 after a failure, 2 for bad input (one line says"
        " what to type), 75 when it was asked to stop and can go on, and 130 after Ctrl-C.\n",
        'The Tab key completes commands, flags and recipes after `eval "$(_STEPLADDER_COMPLETE=bash_source'
        " stepladder)\"` (or `zsh_source`, `fish_source`) in the shell's start-up file. With `NO_COLOR=1` nothing"
        " is coloured.\n",
    ]
    for name in cli.list_commands(context):
        parts += command_parts(cli.get_command(context, name), f"stepladder {name}", 2)
    parts += old_spellings()
    return "\n".join(parts)


def old_spellings() -> Iterator[str]:
    """Yield a table of commands and values that were renamed or removed."""
    yield "## Old spellings\n"
    yield "An old spelling of a command works for one release, and names its successor on stderr.\n"
    yield "| old | new | the old spelling |\n| --- | --- | --- |"
    for old, new in OLD_SPELLINGS.items():
        yield f"| `stepladder {old}` | `stepladder {new}` | works in 0.3, removed after it |"
    yield "| `run --rdzv-backend etcd`, `etcd-v2` | `run --rdzv-backend c10d` | refused since 0.3 |"
    yield ""


def command_parts(command: click.Command | None, name: str, depth: int) -> Iterator[str]:
    """A command's section, and those of its own commands below it."""
    assert command is not None
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield f"{'#' * depth} {name}\n"
    if isinstance(command, JobCommand):
        command.job_fields = ()  # of a job that this process has asked for before
    yield f"`{usage}`\n"
    yield prose(command.help or "") + "\n"
    if isinstance(command, JobCommand) and command.first_flags:
        for title, options in command.list_sections(context).items():
            yield f"{'#' * (depth + 1)} {title}\n"
            yield from flag_table(
                [option for option in options if "--help" not in option.opts], context
            )
    else:
        shown = [param for param in command.params if isinstance(param, click.Option)]
        yield from flag_table([option for option in shown if not option.hidden], context)
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
            explanation = cell(right).replace("[", "\\[")  # `[a] [b]` would be a link
            yield f"| `{cell(left)}` | {explanation} |"
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
    """Return the page with the signature and the docstring of each name that it lists."""
    page = (HERE / "python.md").read_text(encoding="utf-8")
    return MADE_PART.sub(lambda part: part[1] + "\n".join(name_parts(part[2])), page)


def name_parts(path: str) -> Iterator[str]:
    """Yield the section of a public name: what it is, its arguments, its public members."""
    named: Any = locate(path)
    yield f"### {named.__name__}\n"
    if signature_of(named).parameters:
        yield f"`{call_of(named)}`\n"
    yield f"{description_of(named)}\n"
    arguments = list(argument_lines(named))
    if arguments:
        yield "\n".join(arguments) + "\n"
    members = [] if inspect.isfunction(named) else list(member_lines(named))
    if members:
        yield "Its methods and properties:\n"
        yield "\n".join(members) + "\n"


def call_of(named: Any) -> str:
    """Return how a name is called, without the types, which its arguments have."""
    signature = signature_of(named)
    parameters = [
        parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()
    ]
    return FUNCTION.sub("...", f"{named.__name__}{inspect.Signature(parameters)}")


def signature_of(named: Any) -> inspect.Signature:
    """Return the signature of a function or class, without `self`; that of a protocol is empty."""
    has_own = inspect.isfunction(named) or "__init__" in vars(named)
    if not has_own or getattr(named, "_is_protocol", False):
        return inspect.Signature()
    signature = inspect.signature(named)
    parameters = [
        parameter for name, parameter in signature.parameters.items() if name not in ("self", "cls")
    ]
    return signature.replace(parameters=parameters)


def description_of(named: Any) -> str:
    """Return a docstring as paragraphs of one line each, up to its first section."""
    text = SECTIONS.split(inspect.getdoc(named) or "")[0]
    return prose(text)


def argument_lines(named: Any, indent: str = "") -> Iterator[str]:
    """Yield an entry for each argument, and for what is returned and raised."""
    documented = read_documented(named)
    for name, parameter in signature_of(named).parameters.items():
        flag = documented.pop(name, None) or flag_of(named, name, parameter)
        shown = parameter.replace(annotation=without_metadata(parameter.annotation))
        entry = f"{indent}- `{FUNCTION.sub('...', format_parameter(shown))}`"
        if flag:
            entry += f". {flag.help}"
            if flag.default and parameter.default is None:
                entry += f" By default {flag.default}."
        yield entry
    returned = RETURNED.search(inspect.getdoc(named) or "")
    if returned:
        yield f"{indent}- Returns: {prose(returned[1])}"
    for name, flag in documented.items():
        yield f"{indent}- Raises `{name}`: {flag.help}"


def format_parameter(parameter: inspect.Parameter) -> str:
    """Return a parameter with its type as source has it, without the quotes of inspect."""
    return str(parameter).replace(f"'{parameter.annotation}'", parameter.annotation, 1)


def flag_of(named: Any, name: str, parameter: inspect.Parameter) -> Flag | None:
    """Return the flag that the annotation of a field of `Settings` has."""
    if not str(parameter.annotation).startswith("Annotated["):
        return None
    flag: Flag = find_metadata(get_type_hints(named, include_extras=True)[name], Flag)
    return flag


def without_metadata(annotation: str) -> str:
    """Return the type of an annotation without what `Annotated` adds to it."""
    tree = ast.parse(annotation, mode="eval").body
    if isinstance(tree, ast.Subscript) and ast.unparse(tree.value) == "Annotated":
        assert isinstance(tree.slice, ast.Tuple)
        tree = tree.slice.elts[0]
    return ast.unparse(tree)


def member_lines(named: type) -> Iterator[str]:
    """Yield an entry for each public method and property."""
    for name, member in vars(named).items():
        text = description_of(member).replace("\n\n", " ")
        if name.startswith("_") or not text:
            continue
        if isinstance(member, property):
            yield f"- `{name}`. {text}"
        elif isinstance(member, (staticmethod, classmethod)) or inspect.isfunction(member):
            function = getattr(member, "__func__", member)
            yield f"- `{call_of(function)}`. {text}"
            yield from argument_lines(function, "    ")


def prose(text: str) -> str:
    """Text in lines as paragraphs of one line each; examples stay as they are."""
    paragraphs = inspect.cleandoc(text.replace("\b\n", "")).split("\n\n")
    return "\n\n".join(
        "\n".join(f"    {line}" for line in one.splitlines())
        if one.startswith(">>>")
        else re.sub(r"\s+(?!- )", " ", one).replace("<", "&lt;")
        for one in paragraphs
    )


if __name__ == "__main__":
    for file, page in pages().items():
        (HERE / file).write_text(page, encoding="utf-8")
