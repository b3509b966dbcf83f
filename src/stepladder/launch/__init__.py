"""Starting ranks. Imports no torch: it answers on a login node, and its processes are cheap.

Callable: `stepladder.launch(fn, nproc=2)` is `stepladder.launch.function.launch`. Importing anything below this
package makes `stepladder.launch` the package, so the package itself has to be what is called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        from stepladder.launch.function import launch

        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
