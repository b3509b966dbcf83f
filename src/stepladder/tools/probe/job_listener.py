"""Listen to the steps of a job's training, whose trainer marks them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from stepladder.train.phases import STEPPING


class JobListener:
    """Listens to the steps of a job's training. It is an observer of the rank's phases."""

    def before_step(self) -> None: ...

    def after_step(self) -> Any: ...

    def observe_part(self, mark: str) -> AbstractContextManager[Any]:
        """Return a context for a phase within or between the steps."""
        return nullcontext()

    def __call__(self, mark: str) -> AbstractContextManager[Any]:
        return self._observe_step() if mark == STEPPING.mark else self.observe_part(mark)

    @contextmanager
    def _observe_step(self) -> Iterator[None]:
        self.before_step()
        yield
        self.after_step()
