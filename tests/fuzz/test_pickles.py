"""`import` of checkpoints whose .metadata is a program: BUILD, REDUCE, EXT, persistent ids on each
known name.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

import pickles as p
from fuzzing import Fuzz
from stepladder.tools import dcp, dcp_pickle

pytestmark = pytest.mark.ranks

JOB = """
from dataclasses import dataclass
import torch
import stepladder

@dataclass
class Config:
    pass

def build(config):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return stepladder.Job(model, optimizer, lambda m, x: (m(x).sum(), len(x)), torch.ones(4, 3))
"""
WEIGHTS = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.tensor([7.0, 8.0])}
COMMAND = "touch called"
ATTRIBUTES = (
    "__class__",
    "__dict__",
    "__defaults__",
    "__code__",
    "__setstate__",
    "__reduce__",
    "cache",
    "items",
    "keys",
    "__getitem__",
    "fqn",
    "offset",
    "size",
    "chunks",
    "relative_path",
    "_value_",
    "__members__",
)
KNOWN = [p.name(*text.split()) for text in sorted(dcp_pickle.ALLOWED_NAMES)]
UNKNOWN = [
    p.name(*text)
    for text in (
        ("os", "system"), ("builtins", "eval"), ("pathlib", "PosixPath.touch"), ("torch", "load"),
        ("torch.serialization", "_get_layout.__globals__"), ("collections", "OrderedDict.fromkeys"),
    )
]  # fmt: skip

names = st.one_of(st.sampled_from(KNOWN), st.sampled_from(KNOWN), st.sampled_from(UNKNOWN))
plain = st.sampled_from(
    [COMMAND, "__init__", 0, -1, 2**70, None, True, 1.5, (), (1, 2), [], {}]
).map(p.value)
things = st.one_of(names, plain)
arguments = st.lists(things, max_size=3).map(lambda parts: p.MARK + b"".join(parts) + b"t")
states = st.one_of(
    st.dictionaries(st.sampled_from(ATTRIBUTES), things, max_size=3).map(p.dictionary),
    st.dictionaries(st.sampled_from(ATTRIBUTES), things, max_size=3).map(
        lambda entries: p.NONE + p.dictionary(entries) + b"\x86"  # state of slots
    ),
    things,
)
objects = st.one_of(
    names,
    names.map(lambda name: name + p.EMPTY_TUPLE + p.NEWOBJ),
    st.builds(lambda name, given: name + given + p.REDUCE, names, arguments),
    st.builds(lambda name, given: name + given + p.EMPTY_DICT + p.NEWOBJ_EX, names, arguments),
    st.builds(lambda name, given: p.MARK + name + given[1:-1] + p.OBJ, names, arguments),
)
instructions = st.one_of(
    st.builds(lambda target, state: target + state + p.BUILD, objects, states),
    st.builds(lambda target, given: target + given + p.REDUCE, objects, arguments),
    st.builds(lambda target, item: target + item + p.APPEND, objects, things),
    st.builds(lambda target, key, item: target + key + item + p.SETITEM, objects, things, things),
    st.builds(
        lambda code, state: b"\x82" + bytes([code]) + state + p.BUILD, st.integers(1, 255), states
    ),
    st.builds(lambda kept, state: kept + p.BINPERSID + state + p.BUILD, things, states),
    st.builds(
        lambda target, state: target + b"q\xf0h\xf0" + state + p.BUILD + p.APPEND, objects, states
    ),
    objects,
)


def write(folder: Path, place: str, planted: bytes) -> None:
    described = p.value(p.descriptions(WEIGHTS))
    stored = p.value(p.storage_of(folder, WEIGHTS))
    if place == "planner":
        data = p.metadata(described, stored, planted)
    elif place == "tensors":
        data = p.metadata(planted, stored)
    elif place == "storage":
        data = p.metadata(described, planted)
    elif place == "an entry":
        entries = {
            **{key: p.value(one) for key, one in p.descriptions(WEIGHTS).items()},
            "weight": planted,
        }
        data = p.metadata(p.dictionary(entries), stored)
    else:
        data = p.PROTOCOL + planted + p.STOP
    (folder / dcp.METADATA).write_bytes(data)


@pytest.mark.slow
def test_a_pickle_is_read_as_a_description_or_refused(fuzz: Fuzz) -> None:
    (fuzz.sandbox.cwd / "job.py").write_text(JOB)
    (fuzz.sandbox.cwd / "theirs").mkdir()
    for key, tensor in WEIGHTS.items():
        torch.save(tensor, fuzz.sandbox.cwd / "theirs" / f"{key}.distcp")
    fuzz.sandbox.give_to_stranger(fuzz.sandbox.cwd)
    prepared = fuzz.sandbox.keep()

    def attempt(case: tuple[str, bytes]) -> str:
        fuzz.sandbox.reset(prepared)
        write(fuzz.sandbox.cwd / "theirs", *case)
        ended = fuzz.sandbox.call(("import", "theirs", "--run-dir", "new", "job.py"))
        if any(path.endswith("called") for path in ended.new):
            raise ended.make_failure("code of the folder's maker has run")
        return ended.validate_end()

    places = st.sampled_from(["planner", "tensors", "storage", "an entry", "all"])
    fuzz.each(st.tuples(places, instructions), attempt)
