"""Tests that fail on ranks, each with the first line that it must report as its docstring.

tests/tools/test_rank_tests.py runs them; pytest collects no file of this name by itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from stepladder import Comm
from stepladder.testing import assert_same_on_ranks


def add() -> None:
    dist.all_reduce(torch.ones(2))


@pytest.mark.ranks(2)
def test_one_rank(comm: Comm) -> None:
    """rank 1 of 2 failed: assert 1 == 0; rank 0 passed"""
    assert comm.world.rank == 0


@pytest.mark.ranks(2)
def test_all_alike(comm: Comm) -> None:
    """all 2 ranks failed: assert 2 == 3"""
    assert comm.world.world_size == 3


@pytest.mark.ranks(2)
def test_while_another_waits() -> None:
    """rank 0 of 2 failed: ValueError: no; rank 1 (was|failed: RuntimeError: rank 0 has gone)"""
    if dist.get_rank() == 0:
        raise ValueError("no")
    add()


@pytest.mark.ranks(3)
def test_two_of_three(comm: Comm) -> None:
    """ranks 1, 2 of 3 failed: AssertionError: odd; rank 0 passed"""
    assert comm.world.rank == 0, "odd"


@pytest.mark.ranks(2)
def test_each_by_its_own_error(comm: Comm) -> None:
    """rank . of 2 failed: AssertionError: rank .; rank . failed: AssertionError: rank ."""
    raise AssertionError(f"rank {comm.world.rank}")


@pytest.mark.ranks(2)
def test_one_leaves_early(comm: Comm) -> None:
    """rank 1 .pid .*. ended well .exit code 0.; rank 0 .* in all_reduce, called by add"""
    if comm.world.rank == 0:
        add()


@pytest.mark.ranks(2)
def test_different_collectives() -> None:
    """.*rank . calls a different collective here than rank .: .*(all_reduce.*barrier|barrier.*all_red)"""
    if dist.get_rank() == 0:
        add()
    else:
        dist.barrier()


@pytest.mark.ranks(2)
def test_different_shapes() -> None:
    """.*rank . passes another size here than rank .: all_reduce"""
    dist.all_reduce(torch.ones(2 + dist.get_rank()))


@pytest.mark.ranks(2)
def test_exits() -> None:
    """rank 1 ended with exit code 3"""
    if dist.get_rank() == 1:
        os._exit(3)
    add()


@pytest.mark.ranks(2)
def test_calls_exit() -> None:
    """rank 1 ended with exit code 3"""
    if dist.get_rank() == 1:
        sys.exit(3)
    add()


@pytest.mark.ranks(2)
def test_killed() -> None:
    """rank 1 was killed by SIGKILL"""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    add()


@pytest.mark.ranks(2)
def test_crashes() -> None:
    """rank 0 was killed by SIGSEGV"""
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.ranks(2, timeout=2)
def test_sleeps() -> None:
    """not done after 2 s: all ranks are in test_sleeps.*time.sleep"""
    time.sleep(100)


@pytest.mark.ranks(2, timeout=2)
def test_one_computes_for_ever() -> None:
    """not done after 2 s: rank 1 .* test_one_computes_for_ever.* all_reduce"""
    while dist.get_rank() == 1:
        pass
    add()


@pytest.mark.ranks(2)
def test_both_receive() -> None:
    """all ranks wait in recv, called by test_both_receive"""
    dist.recv(torch.ones(1), 1 - dist.get_rank())


@pytest.mark.ranks(2, exchange="gloo")
def test_one_leaves_early_with_gloo() -> None:
    """rank 1 .* ended well .exit code 0.; rank 0 .* in all_reduce, called by add"""
    if dist.get_rank() == 0:
        add()


@pytest.mark.ranks(3)
def test_values_differ(comm: Comm) -> None:
    """all 3 ranks failed: AssertionError: rank 1 differs from rank 0: 1 of 4 values, the first at .2."""
    values = torch.zeros(4)
    values[2] = comm.world.rank == 1
    assert_same_on_ranks(values)


@pytest.fixture
def broken(num_ranks: int) -> Iterator[None]:
    if dist.get_rank() == 1:
        raise OSError("no port")
    yield


@pytest.mark.ranks(2)
def test_in_setup(broken: None) -> None:
    """rank 1 of 2 failed: OSError: no port; rank 0 passed"""


@pytest.fixture
def untidy(num_ranks: int) -> Iterator[None]:
    yield
    assert dist.get_rank() == 1, "left behind"


@pytest.mark.ranks(2)
def test_in_teardown(untidy: None) -> None:
    """rank 0 of 2 failed: AssertionError: left behind; rank 1 passed"""


@pytest.mark.ranks(2)
def test_one_skips() -> None:
    """rank 0 passed; rank 1 skipped"""
    if dist.get_rank() == 1:
        pytest.skip("not here")


@pytest.mark.ranks(2, exchange="gloo", group=False)
def test_without_a_group() -> None:
    """all 2 ranks failed: ValueError: Default process group has not been initialized"""
    dist.barrier()
