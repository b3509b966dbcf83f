"""Suggestions for a command or a flag that does not exist."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from stepladder.cli.flags import make_command
from stepladder.core.console import print_message
from stepladder.core.errors import InputError

# Flags of other programs, and our flags that do the same.
SYNONYMS = {
    "--batch-size": "--global-batch",
    "--learning-rate": "--lr",
    "--gpus": "--gpus-per-node",
    "--num-processes": "--nproc",
    "--output-dir": "--run-dir",
}
# Flags that are not needed, or no longer there, beside a flag of the same command.
NEEDLESS = {
    ("--resume", "--fresh"): "leave it out: a run resumes by itself;",
    ("--fix", "--sarif"): "it is gone: the fix of each finding says what to type;",
}
# In a hint, in place of what a shell would take for a pipe.
EXAMPLES = {"RECIPE|FILE.py": "digits"}
MAX_SUGGESTIONS = 3
WHOLE_SENTENCE = 500  # characters, more than any first sentence has


class SuggestingGroup(click.Group):
    """A group of commands that suggests similar names for an unknown one.

    Its commands are made of annotated functions, see flags.py.
    """

    def command(  # type: ignore[override]
        self, *flags: click.Option, **attributes: Any
    ) -> Callable[..., Any]:
        """Return a decorator that adds the command of a function."""

        def decorate(function: Callable[..., Any]) -> click.Command:
            command: click.Command = make_command(click.Command, *flags, **attributes)(function)
            self.add_command(command)
            return command

        return decorate

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        is_unknown = not name.startswith("-") and self.get_command(ctx, name) is None
        if is_unknown and not ctx.resilient_parsing:
            hint = suggest(name, self.list_commands(ctx))
            if name.endswith(".py"):
                hint = f"stepladder train {name}, or stepladder run {name};"
            raise InputError(
                f"No such command {name!r}", f"{hint} {ctx.command_path} --help".strip()
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with the whole first sentence of its help, which click would cut."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(limit=WHOLE_SENTENCE))
                    for name, command in commands.items()
                    if command is not None
                ]
            )

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. An error of click's parser names no command: it gets its context here."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            if error.ctx is None and ctx.invoked_subcommand:
                command = self.get_command(ctx, ctx.invoked_subcommand)
                if command is not None:
                    error.ctx = click.Context(command, ctx, ctx.invoked_subcommand)
            raise


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "did you mean NAME?" for the known names that are most like this one, or ""."""
    names = sorted(known)
    for (needless, beside), text in NEEDLESS.items():
        if name == needless and beside in names:
            return text
    synonym = SYNONYMS.get(name.replace("_", "-"))
    matches = [candidate for candidate in names if candidate.startswith(name)]
    if synonym in names:
        matches = [synonym]
    matches = matches or get_close_matches(name, names)
    if not matches:
        return ""
    return f"did you mean {' or '.join(matches[:MAX_SUGGESTIONS])}?"


def format_click_error(error: click.ClickException) -> str:
    """Return the text of one of click's errors as one line, with a hint."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f"{context.command_path if context else 'stepladder'} --help"
    text = error.format_message()
    if isinstance(error, click.MissingParameter) and context:
        required = [format_param(p, context) for p in context.command.params if p.required]
        hint = " ".join([context.command_path, *required])
    if isinstance(error, click.NoSuchOption):
        text = error.message
        suggestion = suggest(error.option_name, visible_flags(context))
        if suggestion:
            hint = f"{suggestion} {hint}"
    line = re.sub(r"\s+", " ", text).strip().rstrip(".")
    return f"{line}. HINT: {hint}"


def format_param(param: click.Parameter, context: click.Context) -> str:
    """Return what to type for a parameter, such as "--out FILE"."""
    value = param.make_metavar(context)
    value = EXAMPLES.get(value, value)
    if isinstance(param, click.Option):
        return f"{param.opts[0]} {value}"
    return value


def visible_flags(context: click.Context | None) -> set[str]:
    """Return the names of a command's flags that its --help shows."""
    params = context.command.get_params(context) if context else []
    options = [param for param in params if isinstance(param, click.Option) and not param.hidden]
    return {name for option in options for name in option.opts} - {"--help"}


def tell_misplaced_flags(script: Path, args: Iterable[str]) -> None:
    """Print which flags of the command stand after a script whose source does not name them.

    A script that names one, with or without its dashes, has it as a flag or a variable of its own.
    """
    from stepladder.tools.check.script_source import read_source

    context = click.get_current_context()
    flags = visible_flags(context).intersection(arg.partition("=")[0] for arg in args)
    if not flags:
        return
    with suppress(InputError):  # an archive, or no Python: whoever runs it says so
        files = read_source(script.resolve(), script.parent).files
        text = "\n".join(file.text for file in files).replace("-", "_")
        for flag in sorted(flags):
            name = flag.replace("-", "_")
            if (name.strip("_") if len(flag) > 2 else name) in text:
                continue
            print_message(
                f"{flag} stands after {script}, so the script gets it: {context.info_name}'s"
                f" own flags stand before. HINT: {context.command_path} {flag} ... {script}"
            )
