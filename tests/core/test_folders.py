"""One place for the user's own files, the variable's or the usual one; the file system, as the
kernel has it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from stepladder.core.folders import get_config_folder, get_file_system, get_state_folder


@pytest.mark.parametrize(
    "folder, variable, usual",
    [
        (get_state_folder, "XDG_STATE_HOME", ".local/state"),
        (get_config_folder, "XDG_CONFIG_HOME", ".config"),
    ],
)
@pytest.mark.parametrize("value", [None, "", "/elsewhere"])
def test_the_variable_counts_where_it_says_something(
    folder: Callable[[], Path],
    variable: str,
    usual: str,
    value: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(variable, raising=False)
    if value is not None:
        monkeypatch.setenv(variable, value)
    assert folder() == (Path(value) if value else tmp_path / usual) / "stepladder"
    assert list(tmp_path.iterdir()) == [], "asking makes no folder"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc here")
def test_the_nearest_mount_above_counts() -> None:
    assert get_file_system(Path("/proc/self/status")) == "proc"
    assert get_file_system(Path("/proc/no/such/file")) == "proc"


def test_of_several_on_one_point_the_last_is_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [("/", "ext4"), ("/data set", "nfs4"), ("/data set", "tmpfs"), ("/data", "xfs")]
    partitions = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: partitions)
    kinds = [get_file_system(Path(path)) for path in ("/data set/runs", "/data/runs", "/datasets")]
    assert kinds == ["tmpfs", "xfs", "ext4"]


def test_where_nobody_says_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(all: bool) -> None:
        raise PermissionError

    monkeypatch.setattr(psutil, "disk_partitions", refused)
    assert get_file_system(Path("/")) == ""
