"""One place for the user's own files: the variable's, or the usual one in the home."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stepladder.core.user_folders import config_folder, state_folder


@pytest.mark.parametrize(
    "folder, variable, usual",
    [(state_folder, "XDG_STATE_HOME", ".local/state"), (config_folder, "XDG_CONFIG_HOME", ".config")],
)
@pytest.mark.parametrize("value", [None, "", "/elsewhere"])
def test_the_variable_counts_where_it_says_something(
    folder: Callable[[], Path], variable: str, usual: str, value: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(variable, raising=False)
    if value is not None:
        monkeypatch.setenv(variable, value)
    assert folder() == (Path(value) if value else tmp_path / usual) / "stepladder"
    assert list(tmp_path.iterdir()) == [], "asking makes no folder"
