"""`import` of folders that a stranger has made: no code of theirs runs, and each refusal is one
line.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import sys
from collections.abc import Callable
from contextlib import chdir
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

import pickles as p
import stepladder.cli
from stepladder.storage.snapshot import read_newest_snapshot
from stepladder.tools import dcp_pickle

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
LAYOUT = p.name("torch.serialization", "_get_layout")
SYSTEM = p.name("os", "system")


class Runs:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, (COMMAND,)


@pytest.fixture
def imported(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[], tuple[int, str]]:
    """Return a function that imports the folder `theirs`, which has good weights but no .metadata.

    The function returns the exit code and the output.
    """
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)
    Path("theirs").mkdir()
    for key, tensor in WEIGHTS.items():
        torch.save(tensor, f"theirs/{key}.distcp")

    def type_it() -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            stepladder.cli.main(["import", "theirs", "--run-dir", "new", "job.py"])
        sys.modules.pop("job", None)
        assert isinstance(ended.value.code, int)
        return ended.value.code, "".join(capsys.readouterr())

    return type_it


Import = Callable[[], tuple[int, str]]


def stored(**fields: Any) -> dict[Any, Any]:
    return p.storage_of(Path("theirs"), WEIGHTS, **fields)


def write_metadata(
    planner: bytes = p.NONE, state_dict: bytes | None = None, storage: bytes | None = None
) -> None:
    described = state_dict or p.value(p.descriptions(WEIGHTS))
    data = p.metadata(described, storage or p.value(stored()), planner)
    Path("theirs/.metadata").write_bytes(data)


def assert_refused(ended: tuple[int, str], reason: str) -> None:
    code, text = ended
    assert (code, text.count("\n")) == (2, 1), text
    assert text.startswith("error: theirs ") and reason in text and ". HINT: " in text
    assert not Path("called").exists() and not Path("new").exists()


def test_the_folder_is_imported_where_nothing_is_planted(imported: Import) -> None:
    write_metadata(p.value({"weight": ("weight",)}))
    assert imported()[0] == 0
    assert torch.equal(read_newest_snapshot(Path("new")).tensors()["weight"], WEIGHTS["weight"])


def armed_layout() -> bytes:
    """Return BUILD on torch's function, which then returns descriptions of good tensors."""
    pairs = [*p.descriptions(WEIGHTS).items()]
    return LAYOUT + p.value(({"cache": {"x": pairs}}, {"__defaults__": ("x",)})) + p.BUILD


def test_a_function_in_place_of_a_method_runs_nothing(imported: Import) -> None:
    """`items()` would describe tensors to a check, and torch would then unpickle bytes."""
    with io.BytesIO() as file:
        torch.save(Runs(), file)
        Path("theirs/code.distcp").write_bytes(file.getvalue())
    entries = p.dictionary({key: p.value(BytesStorageMetadata()) for key in WEIGHTS})
    as_bytes = entries[len(p.EMPTY_DICT) :]
    ordered = p.name("collections", "OrderedDict") + p.EMPTY_TUPLE + p.REDUCE + as_bytes
    ordered += p.dictionary({"items": LAYOUT}) + p.BUILD
    length = Path("theirs/code.distcp").stat().st_size
    infos = stored(relative_path="code.distcp", length=length)
    storage = {MetadataIndex(index.fqn): info for index, info in infos.items()}
    write_metadata(state_dict=armed_layout() + p.POP + ordered, storage=p.value(storage))
    assert_refused(imported(), "it sets attributes of what describes no tensor")


NO_ATTRIBUTES = "it sets attributes of what describes no tensor"
NO_FIELD = "it sets what is no field of "
ORDERED_DICT = p.name("collections", "OrderedDict")
CHUNK = p.name(p.OF_METADATA, "ChunkStorageMetadata")
PROPERTIES = p.name(p.OF_METADATA, "TensorProperties") + p.EMPTY_TUPLE + p.NEWOBJ
GETATTR = p.name("builtins", "getattr")
SETATTR_STATE = p.dictionary({"__setattr__": LAYOUT})
PLANTED = {
    "BUILD on a function": (armed_layout(), NO_ATTRIBUTES),
    "BUILD on a function, by slots": (
        LAYOUT + p.value((None, {"__defaults__": (1,)})) + p.BUILD,
        NO_ATTRIBUTES,
    ),
    "BUILD on a class": (CHUNK + SETATTR_STATE + p.BUILD, NO_ATTRIBUTES),
    "BUILD on an enum's class": (
        p.name(p.OF_METADATA, "_MEM_FORMAT_ENCODING") + SETATTR_STATE + p.BUILD,
        NO_ATTRIBUTES,
    ),
    "BUILD on a dict": (p.EMPTY_DICT + SETATTR_STATE + p.BUILD, NO_ATTRIBUTES),
    "BUILD on an OrderedDict": (
        ORDERED_DICT + p.EMPTY_TUPLE + p.REDUCE + p.dictionary({"items": LAYOUT}) + p.BUILD,
        NO_ATTRIBUTES,
    ),
    "BUILD on a list": (p.EMPTY_LIST + SETATTR_STATE + p.BUILD, NO_ATTRIBUTES),
    "BUILD on a torch.Size": (p.value(torch.Size([1])) + SETATTR_STATE + p.BUILD, NO_ATTRIBUTES),
    "BUILD on a dtype": (p.name("torch", "float32") + SETATTR_STATE + p.BUILD, NO_ATTRIBUTES),
    "BUILD on a function from the memo": (
        LAYOUT + b"q\x07" + p.POP + b"h\x07" + SETATTR_STATE + p.BUILD,
        "POP",
    ),
    "BUILD with another field": (p.made("ChunkStorageMetadata", SETATTR_STATE), NO_FIELD),
    "BUILD with __class__": (
        p.made("ChunkStorageMetadata", p.dictionary({"__class__": CHUNK})),
        NO_FIELD,
    ),
    "BUILD with __setstate__": (
        p.made("StorageMeta", p.dictionary({"__setstate__": SYSTEM})),
        "os.system",
    ),
    "BUILD with slots": (p.made("MetadataIndex", p.value((None, {"fqn": "x"}))), NO_FIELD),
    "BUILD by TensorProperties.__setstate__": (PROPERTIES + p.value((1, 2)) + p.BUILD, NO_FIELD),
    "BUILD by an OrderedDict": (
        p.made("StorageMeta", ORDERED_DICT + p.MARK + LAYOUT + b"t" + p.REDUCE),
        "it calls collections.OrderedDict",
    ),
    "BUILD twice": (p.made("StorageMeta", p.EMPTY_DICT) + p.EMPTY_DICT + p.BUILD, "twice"),
    "REDUCE of os.system": (SYSTEM + p.value((COMMAND,)) + p.REDUCE, "it asks for os.system"),
    "REDUCE of a dotted name": (
        p.name("pathlib", "PosixPath.touch") + p.value(("called",)) + p.REDUCE,
        "it asks for pathlib.PosixPath.touch",
    ),
    "REDUCE of a class": (CHUNK + p.value(((0,), (1,))) + p.REDUCE, "it calls "),
    "REDUCE of a text": (p.value("x") + p.EMPTY_TUPLE + p.REDUCE, "it calls what is no function"),
    "REDUCE of OrderedDict, filled": (
        ORDERED_DICT + p.value(([("a", 1)],)) + p.REDUCE,
        "it calls ",
    ),
    "REDUCE of Size, not of numbers": (
        p.name("torch", "Size") + p.value((("a",),)) + p.REDUCE,
        "it calls ",
    ),
    "REDUCE of a layout by a number": (LAYOUT + p.value((1,)) + p.REDUCE, "it calls "),
    "REDUCE with a list": (
        LAYOUT + p.value(["torch.strided"]) + p.REDUCE,
        "it calls what is no function",
    ),
    "REDUCE of getattr on a class": (
        GETATTR + p.MARK + CHUNK + p.value("__init__") + b"t" + p.REDUCE,
        "it calls builtins.getattr",
    ),
    "REDUCE of getattr on a function": (
        GETATTR + p.MARK + LAYOUT + p.value("__globals__") + b"t" + p.REDUCE,
        "it calls builtins.getattr",
    ),
    "STACK_GLOBAL": (p.value("builtins") + p.value("eval") + b"\x93", "it asks for builtins.eval"),
    "STACK_GLOBAL of no text": (p.value(1) + p.value(2) + b"\x93", "do not fit together"),
    "INST": (p.MARK + p.value(COMMAND) + b"ios\nsystem\n", "INST"),
    "INST of a known class": (f"(i{p.OF_METADATA}\nStorageMeta\n".encode(), "INST"),
    "OBJ": (p.MARK + LAYOUT + p.value("torch.strided") + p.OBJ, "OBJ"),
    "NEWOBJ with arguments": (
        CHUNK + p.value((1, 2)) + p.NEWOBJ,
        "it makes an object that describes no tensor",
    ),
    "NEWOBJ of a function": (
        LAYOUT + p.EMPTY_TUPLE + p.NEWOBJ,
        "it makes an object that describes no tensor",
    ),
    "NEWOBJ_EX": (CHUNK + p.EMPTY_TUPLE + p.EMPTY_DICT + p.NEWOBJ_EX, "NEWOBJ_EX"),
    "EXT1": (b"\x82\x01", "EXT1"),
    "EXT2": (b"\x83\x01\x01", "EXT2"),
    "EXT4": (b"\x84\x01\x01\x01\x01", "EXT4"),
    "PERSID": (b"Psomething\n", "PERSID"),
    "BINPERSID": (p.value("something") + p.BINPERSID, "BINPERSID"),
    "SETITEM on a function": (
        LAYOUT + p.value("a") + p.value(1) + p.SETITEM,
        "it sets items of what is no dict",
    ),
    "SETITEM on a list": (
        p.EMPTY_LIST + p.value(0) + p.value(1) + p.SETITEM,
        "it sets items of what is no dict",
    ),
    "SETITEMS by a deep tuple": (
        p.EMPTY_DICT + p.EMPTY_TUPLE + b"\x85" * 10**6 + p.NONE + p.SETITEM,
        "by keys that describe no tensor",
    ),
    "APPEND to a function": (LAYOUT + p.value(1) + p.APPEND, "it appends to what is no list"),
    "APPEND to a dict": (p.EMPTY_DICT + p.value(1) + p.APPEND, "it appends to what is no list"),
    "FROZENSET": (p.MARK + p.FROZENSET, "FROZENSET"),
    "NEXT_BUFFER": (b"\x97", "NEXT_BUFFER"),
    "an instruction that pickle has not": (b"\xff", "unknown"),
    "nothing on the stack": (b"t" * 9, "do not fit together"),
    "a memo that is empty": (b"h\x99", "do not fit together"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_pickle_that_does_more_than_describe_is_refused(imported: Import, kind: str) -> None:
    planted, reason = PLANTED[kind]
    write_metadata(planner=planted)
    assert_refused(imported(), reason)


def test_a_pickle_that_is_cut_is_refused(imported: Import) -> None:
    write_metadata()
    data = Path("theirs/.metadata").read_bytes()
    for length in range(0, len(data), 40):
        Path("theirs/.metadata").write_bytes(data[:length])
        assert_refused(imported(), "cannot be read: ")


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"relative_path": "../outside"}, "leads out of the folder, to ../outside"),
        ({"relative_path": "/etc/passwd"}, "leads out of the folder, to /etc/passwd"),
        ({"relative_path": ".."}, "leads out of the folder"),
        ({"relative_path": "."}, "leads out of the folder"),
        ({"relative_path": ""}, "leads out of the folder"),
        ({"relative_path": "link"}, "leads out of the folder, to link"),
        ({"relative_path": 3}, "relative_path is int"),
        ({"relative_path": "nowhere"}, "No such file"),
        ({"relative_path": "a\0b"}, "null"),
        ({"offset": -1}, "before its begin"),
        ({"offset": 2**40}, "weight.distcp: "),
        ({"offset": True}, "offset is bool"),
        ({"length": 17}, "weight.distcp: "),
        ({"transform_descriptors": ["zstd"]}, "weight.distcp is compressed"),
    ],
)
def test_a_place_that_holds_no_tensor_is_refused(
    imported: Import, fields: dict[str, Any], reason: str
) -> None:
    torch.save(WEIGHTS["weight"], "outside")
    Path("theirs/link").symlink_to(Path("outside").absolute())
    write_metadata(storage=p.value(stored(**fields)))
    assert_refused(imported(), reason)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_piece_that_holds_code_is_refused(imported: Import, zipped: bool) -> None:
    torch.save(Runs(), "theirs/weight.distcp", _use_new_zipfile_serialization=zipped)
    write_metadata()
    assert_refused(imported(), "weight.distcp: Weights only load failed")


@pytest.mark.parametrize(
    "planted, reason",
    [
        ({"a": 1}, "holds what is no tensor"),
        (WEIGHTS["weight"].t(), "has another shape"),
        (WEIGHTS["weight"].to_sparse(), "holds what is no tensor"),
        (torch.empty(2, 3, device="meta"), "is damaged: "),
    ],
)
def test_a_piece_that_is_another_is_refused(imported: Import, planted: Any, reason: str) -> None:
    torch.save(planted, "theirs/weight.distcp")
    write_metadata()
    assert_refused(imported(), reason)


def test_a_tensor_whose_pieces_are_not_all_there_is_refused(imported: Import) -> None:
    described = p.descriptions(WEIGHTS)
    described["weight"].chunks[0].sizes = torch.Size([1, 3])
    write_metadata(state_dict=p.value(described))
    assert_refused(imported(), "the pieces of weight do not make up the whole tensor")
    write_metadata(storage=p.value(p.storage_of(Path("theirs"), {"bias": WEIGHTS["bias"]})))
    assert_refused(imported(), "does not say where the piece of weight at [0, 0] is stored")


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "folder"])
@pytest.mark.parametrize(
    "file", ["model.safetensors", "model.safetensors.index.json", ".metadata", "weight.distcp"]
)
def test_what_is_no_regular_file_is_refused(imported: Import, file: str, kind: str) -> None:
    if file.endswith(".distcp"):
        write_metadata()
    path = Path("theirs", file)
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as listening, chdir("theirs"):
            listening.bind(file)
    assert_refused(
        imported(),
        "cannot be read: " if file != "weight.distcp" or kind == "device" else "is damaged: ",
    )


# -- what pickle writes by itself, also in other versions ---------------------------------------


class AsEarly311(pickle.Pickler):
    """Pickles members of enumerations by `getattr`, as the first Pythons 3.11 did, Debian 12's
    among them.
    """

    def reducer_override(self, thing: Any) -> Any:
        return (getattr, (type(thing), thing.name)) if isinstance(thing, Enum) else NotImplemented


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("pickler", [pickle.Pickler, AsEarly311])
def test_metadata_of_each_python_is_read(imported: Import, pickler: Any, protocol: int) -> None:
    meta = dcp_metadata.StorageMeta(Path("theirs").absolute(), "an id", None, ["a"])
    described = p.descriptions(WEIGHTS) | {"step": BytesStorageMetadata()}
    storage = stored() | {MetadataIndex("step"): next(iter(stored().values()))}
    planner = {"weight": ("weight",), "step": ("optimizer", 0, "step")}
    with Path("theirs/.metadata").open("wb") as file:
        pickler(file, protocol).dump(
            dcp_metadata.Metadata(described, planner, storage, meta, "1.0.0")
        )
    assert imported()[0] == 0
    assert torch.equal(read_newest_snapshot(Path("new")).tensors()["bias"], WEIGHTS["bias"])


def test_metadata_may_name_a_member_by_getattr_and_nothing_else() -> None:
    class Asks:
        def __init__(self, *arguments: Any) -> None:
            self.arguments = arguments

        def __reduce__(self) -> Any:
            return getattr, self.arguments

    format_kind = dcp_metadata._MEM_FORMAT_ENCODING
    assert dcp_pickle.read_description(
        pickle.dumps([Asks(format_kind, "TORCH_CHANNELS_LAST")])
    ) == [None]
    for arguments in (
        (dcp_metadata.Metadata, "__init__"),
        (format_kind, 3),
        (torch.serialization._get_layout, "cache"),
    ):
        with pytest.raises(ValueError, match="it calls builtins"):
            dcp_pickle.read_description(pickle.dumps([Asks(*arguments)]))


def test_the_path_of_each_python_is_known() -> None:
    for module in ("pathlib", "pathlib._local"):  # Python 3.13 has them in a module of its own
        for kind in ("PosixPath", "WindowsPath"):
            data = p.PROTOCOL + p.name(module, kind) + p.value(("a", "b")) + p.REDUCE + p.STOP
            assert dcp_pickle.read_description(data) is None
