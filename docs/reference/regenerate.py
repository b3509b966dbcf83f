"""python docs/reference/regenerate.py: write the pages of this folder anew, after flags or
docstrings change.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from stepladder.cli import OLD_SPELLINGS, cli
from stepladder.cli.options import JobCommand
from stepladder.tools.check.rules.evidence import CHECK_TEXTS
from stepladder.tools.explain.explain import known_errors
from stepladder.tools.findings.render import format_page

HERE = Path(__file__).parent
RECIPES = "digits", "gpt", "mlp", "mnist", "movielens"
MADE = "<!-- Made by docs/reference/regenerate.py from the code: do not edit. -->"


def pages() -> dict[str, str]:
    """The text of each page, by its file's name."""
    return {
        "commands.md": commands_page(),
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
