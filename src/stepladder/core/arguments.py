"""Check the types of what a user's Python code passes to public functions and classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, wraps
from numbers import Integral, Real
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from stepladder.core.errors import InputError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
NUMBERS = {int: Integral, float: Real}  # which NumPy's numbers are too


def validate_arguments(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return the function, with a check of its arguments before it is called.

    It raises InputError for an argument of another type than its annotation says.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call_validated(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        bound = signature.bind(*args, **kwargs)
        validate_types(function, bound.arguments)
        return function(*args, **kwargs)

    return call_validated


def validate_types(annotated: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Check that values have the types that annotations say.

    Args:
        annotated: The function or dataclass with the annotations.
        values: The values by name.

    Raises:
        InputError: A value has another type.
    """
    for name, classes in _list_classes(annotated).items():
        if name in values and not _is_instance(values[name], classes):
            names = [kind.__name__ for kind in classes]
            expected = " or ".join(names).replace("NoneType", "None")
            problem = f"{name}={values[name]!r:.60}"
            raise InputError(problem, f"{name}= {expected}")


@cache
def _list_classes(annotated: Callable[..., Any]) -> dict[str, tuple[type, ...]]:
    """Return the classes of each annotation, but for those that `isinstance` cannot check."""
    classes_by_name = {}
    for name, hint in get_type_hints(annotated).items():
        kinds = [hint]
        if get_origin(hint) in (Union, UnionType):
            kinds = list(get_args(hint))
        classes = tuple(get_origin(kind) or kind for kind in kinds)
        if tuple in classes:
            classes += (list,)  # what a tuple becomes in JSON
        if all(map(_is_class, classes)):
            classes_by_name[name] = classes
    return classes_by_name


def _is_class(kind: Any) -> bool:
    is_protocol = getattr(kind, "_is_protocol", False)
    return isinstance(kind, type) and kind is not Any and not is_protocol


def _is_instance(value: Any, classes: tuple[type, ...]) -> bool:
    """Return whether a value is of one of the classes; True and False are no numbers."""
    if isinstance(value, bool):
        return bool in classes
    accepted = [NUMBERS.get(kind, kind) for kind in classes]
    return isinstance(value, tuple(accepted))
