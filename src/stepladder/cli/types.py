"""Types of flags and arguments: numbers, times and paths, parsed in one way by all commands."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated, Any

import click
from click.shell_completion import CompletionItem

from stepladder.core.errors import InputError
from stepladder.core.flag import FAULTS, OUTPUT, PROCESSES, Flag
from stepladder.core.numbers import (
    MAX_INTEGER,
    MAX_PORT,
    MAX_WAIT_S,
    MIN_WAIT_S,
    parse_whole_number,
)
from stepladder.core.paths import parse_path
from stepladder.train.job_file import list_recipes

MEMORY_UNIT_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


class _PlainNumber:
    """A number of ASCII characters without underscores; Python itself accepts more."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not (value.isascii() and set(value).isdisjoint("_ \t\n")):
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)  # type: ignore[attr-defined]
        largest = getattr(self, "max", None)
        with suppress(ValueError, OverflowError):
            if largest is not None and float(value) > largest:
                self.fail(f"{value} is too large: {largest:g} is the most.", param, ctx)  # type: ignore[attr-defined]
        number = super().convert(value, param, ctx)  # type: ignore[misc]
        if number != number:
            self.fail(f"{value!r} is not a number.", param, ctx)  # type: ignore[attr-defined]
        return number

    def _describe_range(self) -> str:
        """Return the range for --help and for messages, without the largest number of all."""
        smallest = getattr(self, "min", None)
        largest = getattr(self, "max", None)
        if largest is None:
            return ""
        if largest in (MAX_INTEGER, MAX_WAIT_S):
            return "" if smallest is None else f"x>={smallest:g}"
        return super()._describe_range()  # type: ignore[misc,no-any-return]


class WholeNumber(_PlainNumber, click.IntRange):
    """A whole number."""

    name = "integer"

    def __init__(self, smallest: int | None = 0, largest: int | None = MAX_INTEGER) -> None:
        super().__init__(smallest, largest)


class RealNumber(_PlainNumber, click.types.FloatParamType):
    """Any number."""


class Seconds(_PlainNumber, click.FloatRange):
    """A time to wait."""

    name = "number of seconds"

    def __init__(self, smallest: float = MIN_WAIT_S) -> None:
        super().__init__(smallest, MAX_WAIT_S)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "SECONDS"


class MemorySize(click.ParamType[Any]):
    """An amount of memory, converted to bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT])(i?)B?", str(value), re.ASCII)
        size_bytes = 0
        if match is not None:
            base = 1024 if match[3] else 1000
            size_bytes = int(float(match[1]) * base ** MEMORY_UNIT_POWERS[match[2]])
        return size_bytes or self.fail(
            f"{value!r} is not an amount of memory, such as 80GB or 24GiB.", param, ctx
        )


class _CountList(click.ParamType[Any]):
    """Numbers of processes or nodes, such as 1,2,3."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        flag = param.opts[0] if param else ""
        counts = [parse_whole_number(part, 1) for part in value.split(",")]
        if not all(counts):
            unit = "nodes" if flag == "--nodes" else "processes"
            raise InputError(f"{flag} {value} is not a list of numbers of {unit}", f"{flag} 1,2,3")
        repeated = [count for count in counts if counts.count(count) > 1]
        if repeated:
            unique = ",".join(map(str, dict.fromkeys(counts)))
            raise InputError(f"{flag} {value} names {repeated[0]} twice", f"{flag} {unique}")
        return counts


class _FilePath(click.ParamType[Any]):
    """A path, whether or not something is there."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        label = "path"
        if isinstance(param, click.Argument):
            label = param.human_readable_name
        elif param:
            label = param.opts[0]
        return parse_path(label, str(value))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Let the shell complete the path."""
        return [CompletionItem(incomplete, type="file")]


class _JobName(click.ParamType[Any]):
    """The name of a recipe, or the path of a job file; `find_job` decides which."""

    name = "job"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete the names of recipes, else paths."""
        names = [CompletionItem(name) for name in list_recipes() if name.startswith(incomplete)]
        return names or PATH.shell_complete(ctx, param, incomplete)


class _PathOrName(_FilePath):
    """A text that is a path, the name of a recipe, or the number of a batch job."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        super().convert(value, param, ctx)
        return value


ANY_INTEGER = WholeNumber(None, None)  # for values whose limits core/settings.py checks
PATH = _FilePath()
NAME = _PathOrName()

# Types of parameters; flags.py makes arguments and flags of them.
Count = Annotated[int, WholeNumber(1)]
Port = Annotated[int, WholeNumber(1, MAX_PORT)]
Natural = Annotated[int, WholeNumber()]
Wait = Annotated[float, Seconds()]
PathName = Annotated[str, NAME]
JobPath = Annotated[str, _JobName()]
Counts = Annotated[list[int], _CountList()]
Words = Annotated[tuple[str, ...], click.UNPROCESSED]
AsJson = Annotated[
    bool, Flag("Print the result as one JSON object on the last line of stdout.", OUTPUT), "--json"
]
Hosts = Annotated[
    str,
    Flag(
        "Start the job on these machines, over SSH. The first one leads.",
        PROCESSES,
        metavar="[USER@]HOST[:PORT],...",
    ),
]
Ssh = Annotated[
    str, Flag("The SSH command to use, for example 'ssh -i KEY'.", PROCESSES, metavar="COMMAND")
]
ExplainAfter = Annotated[
    Wait | None,
    Flag(
        "Seconds without progress after which the reason is printed.",
        FAULTS,
        default="60, at most half of --timeout",
        metavar="SECONDS",
    ),
]
ScriptArgs = Annotated[Words, Flag(metavar="[SCRIPT'S ARGS]")]
SbatchArgs = Annotated[
    tuple[str, ...], Flag("Any other option of sbatch.", metavar="STR"), "--sbatch-arg"
]
TrustJobFile = Annotated[
    bool,
    Flag(
        "Run the job file that RUN_DIR names even if you have never trained it."
        " It is code: read it first."
    ),
]
