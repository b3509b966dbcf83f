"""How the processes that read a Dataset start."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from stepladder.data.sources import open_source


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
