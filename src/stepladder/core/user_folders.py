"""Where a user's own files are, beside any run; on every system as XDG has it on Linux."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from platformdirs.unix import Unix


def state_folder() -> Path:
    """`${XDG_STATE_HOME:-~/.local/state}/stepladder`: lessons passed, jobs submitted, the lab."""
    return _folders().user_state_path


def config_folder() -> Path:
    """`${XDG_CONFIG_HOME:-~/.config}/stepladder`."""
    return _folders().user_config_path


def _folders() -> Unix:
    from platformdirs.unix import Unix  # late: 30 ms that most commands have no use for

    return Unix("stepladder")
