"""Imported by the process that ranks are forked from, before torch: a thread loads torch's libraries, while the
modules that come next are imported.

Python keeps all its threads waiting while it loads a library itself, torch's for 0.25 s; in a call of dlopen it
lets them run.
Only for torch's build without GPUs: of another one's libraries torch loads some first, by rules of its own. Where
it fails, torch loads them as it always does.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

# As torch/__init__.py has them: first what others look for by name, so all see its names.
LIBRARIES = ("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch_python.so", os.RTLD_LOCAL)


def load(folder: Path) -> None:
    """Into this process."""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, flags in LIBRARIES:
        if not dlopen(os.fsencode(folder / name), flags | os.RTLD_NOW):
            return


found = find_spec("torch")
if found is not None and found.origin is not None:
    of_torch = Path(found.origin).with_name("lib")
    if (of_torch / LIBRARIES[0][0]).exists() and not list(of_torch.glob("libc10_*.so")):
        with suppress(RuntimeError):  # there may be no more threads
            Thread(target=load, args=(of_torch,)).start()  # ends before a rank is forked, for torch waits for it
