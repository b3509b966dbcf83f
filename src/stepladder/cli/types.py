"""What flags and arguments may be: numbers, times and paths, each read in one way, whatever the
command.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import click
from click.shell_completion import CompletionItem

from stepladder.core.numbers import MAX_INTEGER, MAX_PORT, MAX_WAIT_S, MIN_WAIT_S
from stepladder.core.paths import parse_path
from stepladder.train.job_file import list_recipes

POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


class _Plain:
    """A number in ASCII, which is more than Python's own reading asks for, and no underscores."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not (value.isascii() and set(value).isdisjoint("_ \t\n")):
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)  # type: ignore[attr-defined]
        most = getattr(self, "max", None)
        with suppress(ValueError, OverflowError):
            if most is not None and float(value) > most:
                self.fail(f"{value} is too large: {most:g} is the most.", param, ctx)  # type: ignore[attr-defined]
        number = super().convert(value, param, ctx)  # type: ignore[misc]
        if number != number:
            self.fail(f"{value!r} is not a number.", param, ctx)  # type: ignore[attr-defined]
        return number

    def _describe_range(self) -> str:
        """For --help, and for what is out of the range. The largest number of all is no news."""
        least, most = getattr(self, "min", None), getattr(self, "max", None)
        if most in (MAX_INTEGER, MAX_WAIT_S):
            return "" if least is None else f"x>={least:g}"
        return "" if most is None else super()._describe_range()  # type: ignore[misc]


class Whole(_Plain, click.IntRange):
    """A whole number."""

    name = "integer"

    def __init__(self, least: int | None = 0, most: int | None = MAX_INTEGER) -> None:
        super().__init__(least, most)


class Real(_Plain, click.types.FloatParamType):
    """Any number."""


class Seconds(_Plain, click.FloatRange):
    """A time to wait."""

    name = "seconds"

    def __init__(self, least: float = MIN_WAIT_S) -> None:
        super().__init__(least, MAX_WAIT_S)


class MemorySize(click.ParamType[Any]):
    """An amount of memory, in bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT])(i?)B?", str(value), re.ASCII)
        amount = (
            0
            if found is None
            else int(float(found[1]) * (1024 if found[3] else 1000) ** POWERS[found[2]])
        )
        return amount or self.fail(
            f"{value!r} is not an amount of memory, such as 80GB or 24GiB.", param, ctx
        )


class Place(click.ParamType[Any]):
    """A path, whether or not something is there."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        what = (
            param.human_readable_name
            if isinstance(param, click.Argument)
            else param.opts[0]
            if param
            else "path"
        )
        return parse_path(what, str(value))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


class JobName(click.ParamType[Any]):
    """A recipe's name, or a path, which `find_job` looks at."""

    name = "job"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        names = [CompletionItem(name) for name in list_recipes() if name.startswith(incomplete)]
        return names or PATH.shell_complete(ctx, param, incomplete)


class Name(Place):
    """The same as a text: it may also be a recipe's name, or the number of a batch job."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        super().convert(value, param, ctx)
        return value


ANY, COUNT, PORT = (
    Whole(None, None),
    Whole(1),
    Whole(1, MAX_PORT),
)  # ANY: whose limits are Settings'
PATH, NAME, JOB = Place(), Name(), JobName()
