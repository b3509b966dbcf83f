"""Which file system a path is on."""

from __future__ import annotations

from pathlib import Path


def file_system(path: Path) -> str:
    """The kind that `path` is, or will be, on, as in ext4, nfs4, lustre; "" where that is not known."""
    import psutil  # late: few commands ask

    try:
        mounts = psutil.disk_partitions(all=True)
    except OSError:
        return ""
    resolved = path.resolve()
    above = [mount for mount in mounts if resolved.is_relative_to(mount.mountpoint)]
    # Of several on one point the last is on top.
    return max(reversed(above), key=lambda mount: len(mount.mountpoint)).fstype if above else ""
