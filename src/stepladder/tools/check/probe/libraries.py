"""Which modules of libraries can be imported before the probe is attached, and which are others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType

LIBRARY_FOLDERS = ("/site-packages/", "/dist-packages/")
PROBED = "torch"  # what uses it may keep functions that the probe replaces
OWN_NAME = "stepladder"
DYNAMO = "torch._dynamo"  # keeps none, and takes as long to import as torch itself


def list_loaded_libraries() -> list[str]:
    """Return the loaded modules of libraries that do not use torch, in the order of import."""
    modules = {
        name: module
        for name, module in sys.modules.items()
        if any(folder in (getattr(module, "__file__", None) or "") for folder in LIBRARY_FOLDERS)
    }
    used: dict[str, set[str]] = {}
    for name, module in modules.items():
        used.setdefault(package_of(name), set()).update(packages_used(module))
    on_torch = {PROBED}
    while more := {package for package in used.keys() - on_torch if used[package] & on_torch}:
        on_torch |= more
    names = [name for name in modules if package_of(name) not in on_torch]
    return names + [DYNAMO] * (DYNAMO in modules)


def list_other_modules() -> dict[str, str]:
    """Return the file of each loaded module that may be the user's own."""
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    return {
        name: file
        for name, file in files.items()
        if file.endswith(".py")
        and package_of(name) not in {OWN_NAME, *sys.stdlib_module_names}
        and not any(folder in file for folder in LIBRARY_FOLDERS)
    }


def packages_used(module: ModuleType) -> Iterator[str]:
    """Yield the packages of the modules, functions and classes that a module names."""
    for value in vars(module).values():
        kind = type(value)  # isinstance would ask lazy objects for their class
        if issubclass(kind, ModuleType):
            yield package_of(value.__name__)
        elif issubclass(kind, FunctionType | type):
            yield package_of(str(value.__module__))


def package_of(module_name: str) -> str:
    return module_name.partition(".")[0]
