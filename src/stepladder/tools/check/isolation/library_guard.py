"""The guard of libraries that write files in C or Rust, which no audit event reports.

Each function is wrapped after its library is imported. Those of torch are among the hooks of the
probe.
"""

from __future__ import annotations

import sys

from stepladder.core.after_import import AfterImport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def attach(guard_path: Callable[..., None]) -> None:
    """Have `guard_path` called with the path before a library writes it."""

    def guard_safetensors(module: Any) -> None:
        wrap(module, "serialize_file", 1, lambda path, *_: guard_path(path))

    def guard_h5py(module: Any) -> None:
        def check_mode(path: Any, mode: str = "r", *_: Any) -> None:
            if mode != "r":
                guard_path(path)

        wrap(module, "make_fid", 0, check_mode)

    callbacks: dict[str, Callable[[Any], None]] = {
        "safetensors": guard_safetensors,
        "h5py._hl.files": guard_h5py,
    }
    sys.meta_path.insert(0, AfterImport(callbacks))


def wrap(module: Any, name: str, first: int, check: Callable[..., Any]) -> None:
    """Have `check` called before each call of a function, with its arguments from the first on."""
    original = getattr(module, name)

    def check_and_call(*args: Any, **kwargs: Any) -> Any:
        all_args = (*args, *kwargs.values())
        check(*all_args[first:])
        return original(*args, **kwargs)

    setattr(module, name, check_and_call)
