"""What rank 0 hands to the others comes back as it was, and is never code."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepladder.storage.snapshot import Snapshot
from stepladder.train.wire import from_bytes, to_bytes

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(min_size=1), inner))


@given(VALUES)
def test_values_come_back(value: object) -> None:
    assert from_bytes(to_bytes(value)) == value


@given(st.text(), st.dictionaries(st.text(), st.binary()), st.integers())
def test_a_snapshot_comes_back_among_others(name: str, files: dict[str, bytes], number: int) -> None:
    snapshot = Snapshot(name, {"step": 3}, files)
    assert from_bytes(to_bytes((number, b"before", snapshot, b"after"))) == [number, b"before", snapshot, b"after"]


@pytest.mark.parametrize("value", [object(), {1, 2}, Path("a"), [pickle.Pickler]])
def test_what_would_need_code_to_be_read_is_refused_by_its_type(value: object) -> None:
    with pytest.raises(TypeError, match="cannot go to others"):
        to_bytes(value)
