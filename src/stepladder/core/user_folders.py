"""Where a user's own files are, beside any run; on every system as XDG has it on Linux."""

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
