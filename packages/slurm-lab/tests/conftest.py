"""The cluster of these tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurm_lab import LabSize

sys.path.insert(0, str(Path(__file__).parent))  # for the helpers, whatever the import mode


@pytest.fixture(scope="session")
def slurm_cluster_size() -> LabSize:
    """Return a size that shows all that a cluster can have without slurmdbd."""
    return LabSize(nodes=2, gpus=2)
