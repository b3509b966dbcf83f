"""Where a user's own files are, on every system as XDG has it on Linux; which file system a path is on."""

from __future__ import annotations

from pathlib import Path


def state_folder() -> Path:
    """`${XDG_STATE_HOME:-~/.local/state}/stepladder`: lessons passed, jobs submitted, the lab."""
    from platformdirs.unix import Unix  # late: 30 ms that most commands have no use for

    return Unix("stepladder").user_state_path


def config_folder() -> Path:
    """`${XDG_CONFIG_HOME:-~/.config}/stepladder`."""
    from platformdirs.unix import Unix

    return Unix("stepladder").user_config_path


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
