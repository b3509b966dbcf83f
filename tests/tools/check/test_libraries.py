"""What a later start may have imported before the probe is attached."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from stepladder.tools.check.probe.libraries import list_loaded_libraries

SITE = Path(sys.prefix) / "lib" / "site-packages"


def load(monkeypatch: pytest.MonkeyPatch, name: str, **values: object) -> None:
    module = ModuleType(name)
    vars(module).update(values, __file__=str(SITE / f"{name}.py"))
    monkeypatch.setitem(sys.modules, name, module)


def test_what_uses_torch_and_what_uses_that_are_left_to_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load(monkeypatch, "plain")
    load(monkeypatch, "on_torch", sum=torch.sum, randn=torch.nn.Linear)
    load(monkeypatch, "on_that", library=sys.modules["on_torch"])
    load(monkeypatch, "of_the_user")
    sys.modules["of_the_user"].__file__ = str(Path.cwd() / "of_the_user.py")
    names = list_loaded_libraries()
    assert "plain" in names
    assert not {"on_torch", "on_that", "of_the_user", "torch"}.intersection(names)
