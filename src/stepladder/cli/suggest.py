"""What was probably meant by a command or a flag that does not exist."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

import click

from stepladder.core.errors import InputError

# Flags of other programs, and ours that do the same.
SYNONYMS = {
    "--batch-size": "--global-batch",
    "--learning-rate": "--lr",
    "--gpus": "--gpus-per-node",
    "--num-processes": "--nproc",
    "--output-dir": "--run-dir",
}
MOST_SUGGESTIONS = 3


class SuggestingGroup(click.Group):
    """A group that answers an unknown command with the nearest of its own."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        unknown = not name.startswith("-") and self.get_command(ctx, name) is None
        if unknown and not ctx.resilient_parsing:
            meant = (
                f"stepladder train {name}, or stepladder run {name};"
                if name.endswith(".py")
                else ""
            )
            hint = meant or suggestion(name, self.list_commands(ctx))
            raise InputError(
                f"No such command {name!r}", f"{hint} {ctx.command_path} --help".strip()
            )
        return super().resolve_command(ctx, args)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "did you mean NAME?" for the names that are most like one that does not exist, or ""."""
    names = sorted(known)
    begins = [each for each in names if each.startswith(name)]
    same = SYNONYMS.get(name.replace("_", "-"))
    near = [same] if same in names else begins or get_close_matches(name, names)
    return f"did you mean {' or '.join(near[:MOST_SUGGESTIONS])}?" if near else ""


def refusal_of(error: click.ClickException) -> str:
    """Return what click refuses as one line, with a hint."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f"{context.command_path if context else 'stepladder'} --help"
    text = error.format_message()
    if isinstance(error, click.NoSuchOption):
        text = error.message
        params = context.command.get_params(context) if context else []
        options = [
            param for param in params if isinstance(param, click.Option) and not param.hidden
        ]
        flags = {name for option in options for name in option.opts}
        if meant := suggestion(error.option_name, flags):
            hint = f"{meant} {hint}"
    line = re.sub(r"\s+", " ", text).strip().rstrip(".")
    return f"{line}. HINT: {hint}"
