"""The fixture `slurm_cluster`: a real Slurm cluster for the tests of a session.

pytest imports this module in every session of an environment that has slurm-lab, so it imports the
rest of the package only when a test asks for the fixture.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from slurm_lab import Cluster, LabSize


@pytest.fixture(scope="session")
def slurm_cluster_size() -> LabSize:
    """Return the size of the cluster; define a fixture of this name to have another one."""
    from slurm_lab import LabSize

    return LabSize()


@pytest.fixture(scope="session")
def slurm_cluster(slurm_cluster_size: LabSize) -> Iterator[Cluster]:
    """Yield a running cluster, which all tests of the session share; without Slurm, skip the test.

    While it is up, this process has the variables that Slurm's commands need.
    """
    from slurm_lab import LabError, start_cluster
    from slurm_lab.prepare import validate_programs, validate_system

    try:
        validate_system()
        validate_programs(plain=True, accounting=slurm_cluster_size.accounting)
    except LabError as error:
        pytest.skip(str(error))
    with start_cluster(slurm_cluster_size) as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.env.items():
            patch.setitem(os.environ, name, value)
        yield cluster
