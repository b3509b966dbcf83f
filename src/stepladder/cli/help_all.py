"""--help-all: the commands or flags that --help leaves out."""

from __future__ import annotations

import click

from stepladder.core.console import echo

_SHOWS_ALL = "stepladder.help_all"  # the key in click's context


def shows_all(ctx: click.Context) -> bool:
    """Return whether the help was asked for by --help-all."""
    return bool(ctx.meta.get(_SHOWS_ALL))


def _show_all(ctx: click.Context, _param: click.Parameter, is_set: bool) -> None:
    if is_set and not ctx.resilient_parsing:
        ctx.meta[_SHOWS_ALL] = True
        echo(ctx.get_help())
        ctx.exit()


def make_help_all(what: str) -> click.Option:
    """Return the flag, which shows all of the commands or flags and ends the command."""
    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_all,
        help=f"Show this message with all {what}, and exit.",
    )
