"""Torch's own tests of torch.distributed, from its wheel, started from one process that has loaded
them; `torch_tests.py` and tests/exchange run them.

torch starts two new interpreters for each of its tests. Here they are forked, which takes a tenth of
the time. The backend is gloo, or what `EXCHANGE=stepladder` puts in its place.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

# Read by torch's module when it is imported.
os.environ["BACKEND"] = "gloo"
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "120")

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

from stepladder.launcher.script import load_shared_memory_group
from stepladder.rank.torch_fixes_groups import make_groups_by

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__, "torch._dynamo"])


def use_exchange() -> None:
    """Put shared memory in gloo's place, as `stepladder run` does, if EXCHANGE asks for it."""
    if os.environ.get("EXCHANGE") == "stepladder":
        make_groups_by(load_shared_memory_group)


def run_in_rank(
    env: dict[str, str], target: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Run a rank of a test, with the variables that the test has set."""
    os.environ.update(env)
    use_exchange()
    target(*args, **kwargs)


def make_process(
    target: Callable[..., None], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> multiprocessing.process.BaseProcess:
    """Return the process of one rank, which torch starts."""
    env = dict(os.environ)
    return FORKS.Process(target=run_in_rank, name=name, args=(env, target, args, kwargs))


class TorchTests(TestDistBackend, DistributedTest._DistTestBase):
    """All tests of torch's module, on WORLD_SIZE ranks."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(make_process)


def list_tests() -> list[str]:
    """Return the names of all tests."""
    return [name for name in dir(TorchTests) if name.startswith("test_")]
