"""Packages that few commands need, which are installed as extras."""

from __future__ import annotations

import importlib
from types import ModuleType

from stepladder.core.errors import InputError


def import_extra(module: str, problem: str, extra: str) -> ModuleType:
    """Import a module of a package that may be missing.

    Args:
        module: The name of the module.
        problem: What needs which package, for the error.
        extra: The extra that brings the package.

    Returns:
        The module.

    Raises:
        InputError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(problem, f"pip install 'stepladder[{extra}]'") from error
