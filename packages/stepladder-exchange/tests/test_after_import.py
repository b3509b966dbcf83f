"""A function is called after the import of a module, however often Python has asked for it."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec

import pytest

from stepladder_exchange.after_import import call_after_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that can be imported, and has not been."""
    name = "imported_by_this_test"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield name
    sys.modules.pop(name, None)


def test_a_library_that_asks_for_a_module_before_its_import_hides_nothing(module):
    values = []
    call_after_import(module, lambda loaded: values.append(loaded.value))
    assert find_spec(module) is not None
    assert find_spec(module) is not None
    assert values == []
    loaded = importlib.import_module(module)
    importlib.reload(loaded)
    assert values == [1]


def test_a_module_that_is_imported_already_is_taken_at_once(module):
    loaded = importlib.import_module(module)
    values = []
    call_after_import(module, values.append)
    assert values == [loaded]


def test_an_import_that_fails_is_waited_for_again(module, tmp_path):
    file = tmp_path / f"{module}.py"
    source = file.read_text()
    file.write_text("raise ImportError('not yet')\n")
    values = []
    call_after_import(module, lambda loaded: values.append(loaded.value))
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(module)
    file.write_text(f"{source}\n\n")
    importlib.invalidate_caches()
    importlib.import_module(module)
    assert values == [1]
