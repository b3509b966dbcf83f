"""Commands made of plain functions, and flags made of the fields of a class.

A parameter before `*` is an argument, one behind it a flag. The signature has its type and default,
and the docstring's Args its text for --help, with what --help shows for the value in parentheses:

    def submit(script: Path, *, nodes: Annotated[Count, "-N", "--nodes"] = 1) -> None:
        '''Submit SCRIPT.

Args:
            nodes (N): Number of nodes.
        '''

`Annotated` adds the spellings of a flag, its section of --help, or a type of click.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from stepladder.cli.types import ANY_INTEGER, NAME, PATH, RealNumber, Seconds
from stepladder.core.flag import Flag
from stepladder.rank.preemption import parse_fail_at

HIDDEN = "Hidden"  # the section of flags that --help does not show
PARAM_TYPES: dict[Any, Any] = {
    int: ANY_INTEGER,
    float: RealNumber(),
    str: click.STRING,
    Path: PATH,
    tuple[int, int]: parse_fail_at,
}
DOCUMENTED = re.compile(r"^ {4}(\w+)(?: \((.+?)\))?: (.+(?:\n {8}.+)*)", re.MULTILINE)


class GroupedOption(click.Option):
    """A flag that knows its section of --help."""

    def __init__(self, *args: Any, group: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group = group

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """Return the value. "--" is none: in `--account -- train` the value was forgotten."""
        if value == "--":
            raise click.BadOptionUsage(self.opts[0], f"Option '{self.opts[0]}' needs a value", ctx)
        return super().process_value(ctx, value)


def make_command(
    kind: type[click.Command] = click.Command, *flags: click.Option, **attributes: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a command of a function.

    Args:
        kind: The class of the command.
        *flags: Flags besides the function's own, which get them as keyword arguments.
        **attributes: Those of the command.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        hints = get_type_hints(function, include_extras=True)
        documented = read_documented(function)
        params: list[click.Parameter] = []
        for name, parameter in inspect.signature(function).parameters.items():
            default: dict[str, Any] = {"required": True}
            if parameter.default is not parameter.empty:
                default = {"default": parameter.default}
            flag = find_metadata(hints[name], Flag) or documented.get(name, Flag())
            if parameter.kind is parameter.KEYWORD_ONLY:
                params.append(_make_option(name, hints[name], flag, **default))
            elif parameter.kind is not parameter.VAR_KEYWORD:
                params.append(_make_argument(name, hints[name], flag, **default))
        text = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")[0]
        return click.command(cls=kind, help=text, params=params + list(flags), **attributes)(
            function
        )

    return decorate


def make_field_options(fields: type, *names: str) -> list[GroupedOption]:
    """Return the flags of these annotated fields of a class, by default of all that have one."""
    hints = get_type_hints(fields, include_extras=True)
    documented = read_documented(fields)
    options = []
    for name in names or hints:
        flag = find_metadata(hints[name], Flag) or documented.get(name, Flag())
        if not flag.python_only:
            options.append(
                _make_option(name, hints[name], flag, default=getattr(fields, name, None))
            )
    return options


def read_documented(documented: Any) -> dict[str, Flag]:
    """Return the entries of a docstring's Args, by name."""
    return {
        name: Flag(re.sub(r"\n +", " ", text), metavar=metavar or None)
        for name, metavar, text in DOCUMENTED.findall(inspect.getdoc(documented) or "")
    }


def _make_argument(name: str, annotation: Any, flag: Flag, **attributes: Any) -> click.Argument:
    """Return an argument."""
    kind, _ = _split_annotation(annotation)
    return click.Argument(
        [name],
        type=_find_param_type(annotation, flag),
        nargs=-1 if get_origin(kind) is tuple else 1,
        metavar=flag.metavar,
        **attributes,
    )


def _make_option(name: str, annotation: Any, flag: Flag, **attributes: Any) -> GroupedOption:
    """Return a flag."""
    kind, metadata = _split_annotation(annotation)
    texts = [item for item in metadata if isinstance(item, str)]
    names = [text for text in texts if text.startswith("-")]
    group = next((text for text in texts if not text.startswith("-")), flag.group)
    default = attributes.get("default")
    text = f"{flag.help}  [default: {flag.default}]" if flag.default else flag.help
    return GroupedOption(
        [*(names or [format_flag(name)]), name],
        group=group,
        type=_find_param_type(annotation, flag),
        is_flag=kind is bool,
        multiple=get_origin(kind) is tuple,
        help=text,
        show_default=default is not False and default not in (None, "", ()),
        metavar=flag.metavar,
        hidden=flag.hidden or group == HIDDEN,
        **attributes,
    )


def format_flag(name: str) -> str:
    """Return the flag of a field or parameter."""
    return f"--{name.replace('_', '-')}"


def _split_annotation(annotation: Any) -> tuple[Any, list[Any]]:
    """Return the type of an annotation without None, and what `Annotated` adds to it."""
    if get_origin(annotation) is Annotated:
        annotated, *added = get_args(annotation)
        kind, metadata = _split_annotation(annotated)
        return kind, metadata + added
    if get_origin(annotation) in (Union, UnionType):
        return _split_annotation(get_args(annotation)[0])
    return annotation, []


def find_metadata(annotation: Any, kind: type) -> Any:
    """Return what `Annotated` adds of this kind, or None."""
    metadata = _split_annotation(annotation)[1]
    return next((item for item in metadata if isinstance(item, kind)), None)


def _find_param_type(annotation: Any, flag: Flag) -> Any:
    """Return click's type of a parameter."""
    kind, _ = _split_annotation(annotation)
    own_type = find_metadata(annotation, click.ParamType)
    if own_type is not None:
        return own_type
    if flag.is_wait:
        return Seconds(flag.minimum or 0)
    if flag.is_path:
        return NAME
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if get_origin(kind) is tuple and kind not in PARAM_TYPES:
        return _find_param_type(get_args(kind)[0], flag)
    return PARAM_TYPES.get(kind)
