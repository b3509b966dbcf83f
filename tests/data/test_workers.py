"""How the processes that read a Dataset start."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from ranks import run_ranks
from stepladder.data import workers
from stepladder.data.sources import open_source
from stepladder.train.comm import Comm


@pytest.fixture
def python_3_14_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fork servers the default of multiprocessing, as Python 3.14 has it on Linux."""
    default = multiprocessing.context._default_context  # type: ignore[attr-defined]
    monkeypatch.setattr(default, "_default_context", multiprocessing.get_context("forkserver"))
    monkeypatch.setattr(default, "_actual_context", None)


@pytest.mark.usefixtures("python_3_14_default")
def test_a_dataset_that_cannot_be_pickled_is_read_by_workers_on_any_python() -> None:
    class Squares(Dataset[torch.Tensor]):  # a class in a function: no other process can import it
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(float(index**2))

    source = open_source(Squares(), torch.device("cpu"), seed=1, num_workers=1)
    requests = [(0, np.array([3, 1])), (0, np.array([7]))]
    batches: list[Any] = [batch.tolist() for _, batch in source.batches(requests)]
    assert batches == [[9.0, 1.0], [49.0]]


def read_by_a_worker_that_hangs_since_its_fork(comm: Comm) -> str:
    multiprocessing.set_start_method(None, force=True)  # as a launcher's ranks do
    os.register_at_fork(after_in_child=lambda: time.sleep(1000))
    workers.WORKER_START_TIMEOUT_S = 0.2
    source = open_source(list(range(8)), torch.device("cpu"), seed=1, num_workers=1)
    try:
        list(source.batches([(0, np.array([3, 1]))]))
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
def test_a_worker_that_hangs_since_its_fork_is_ended_and_reported() -> None:
    (error,) = run_ranks(read_by_a_worker_that_hangs_since_its_fork, 1)
    assert "exited unexpectedly" in error or "killed by signal" in error
