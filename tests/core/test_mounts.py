"""Which file system a path is on, as the kernel has it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from stepladder.core.mounts import file_system


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc here")
def test_the_nearest_mount_above_counts() -> None:
    assert file_system(Path("/proc/self/status")) == "proc"
    assert file_system(Path("/proc/no/such/file")) == "proc"


def test_of_several_on_one_point_the_last_is_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [("/", "ext4"), ("/data set", "nfs4"), ("/data set", "tmpfs"), ("/data", "xfs")]
    found = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)
    kinds = [file_system(Path(path)) for path in ("/data set/runs", "/data/runs", "/datasets")]
    assert kinds == ["tmpfs", "xfs", "ext4"]


def test_where_nobody_says_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(all: bool) -> None:
        raise PermissionError

    monkeypatch.setattr(psutil, "disk_partitions", refused)
    assert file_system(Path("/")) == ""
