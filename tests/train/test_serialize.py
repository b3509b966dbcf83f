"""What rank 0 hands to the others comes back as it was, and is never code."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepladder.core.world import World
from stepladder.storage.snapshot import Snapshot
from stepladder.train.comm import Comm
from stepladder.train.serialize import deserialize, serialize

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(min_size=1), inner)
)


@given(VALUES)
def test_values_come_back(value: object) -> None:
    assert deserialize(serialize(value)) == value


@given(st.text(), st.dictionaries(st.text(), st.binary()), st.integers())
def test_a_snapshot_comes_back_among_others(
    name: str, files: dict[str, bytes], number: int
) -> None:
    snapshot = Snapshot(name, {"step": 3}, files)
    assert deserialize(serialize((number, b"before", snapshot, b"after"))) == [
        number,
        b"before",
        snapshot,
        b"after",
    ]


@pytest.mark.parametrize("value", [object(), {1, 2}, Path("a"), [pickle.Pickler]])
def test_what_would_need_code_to_be_read_is_refused_by_its_type(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        serialize(value)


class Evil:
    """What a stranger would have a rank unpickle: it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return Path.touch, (self.mark,)


def rank(number: int, sent: bytes = b"") -> Any:
    """A rank that gets these bytes, or what it has sent itself."""
    world = World(rank=number, world_size=2)
    return SimpleNamespace(
        alone=False, world=world, broadcast_bytes=lambda message: message or sent
    )


def test_what_the_first_rank_says_to_all_is_no_pickle(tmp_path: Path) -> None:
    evil = Evil(tmp_path / "mark")
    with pytest.raises(ValueError):
        Comm.on_first(rank(1, pickle.dumps(evil)), lambda: None)
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        Comm.on_first(rank(0), lambda: evil)
    assert Comm.on_first(rank(0), lambda: [1]) == Comm.on_first(
        rank(1, serialize({"value": [1]})), lambda: None
    )
    assert not list(tmp_path.iterdir())
