"""Read checkpoints of torch.distributed.checkpoint (DCP) without running what their maker wrote
into them.

`.metadata` is a pickle, and a pickle is a program: it calls functions and sets attributes.
`Interpreter` executes it without Python's unpickler. It knows only the instructions that build
numbers, texts, tuples, lists, dictionaries and objects. It imports nothing and calls nothing: a
class that the file names is only a name, and an object of such a class is a `PickledObject`, which
holds its fields. All other instructions, names and arguments are refused.

The tensors themselves are read by `torch.load(weights_only=True)`, which has an allow-list of its
own."""

from __future__ import annotations

import io
import math
import os
import pickletools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch

from stepladder.core import typed_file
from stepladder.core.errors import get_reason

Kind = TypeVar("Kind")
METADATA = ".metadata"
MAX_METADATA_BYTES = 2**30
MAX_DIMENSIONS = 64  # torch's own limit

OF_CHECKPOINT = "torch.distributed.checkpoint."
ENTRY = OF_CHECKPOINT + "metadata Metadata"
TENSOR = OF_CHECKPOINT + "metadata TensorStorageMetadata"
PROPERTIES = OF_CHECKPOINT + "metadata TensorProperties"
CHUNK = OF_CHECKPOINT + "metadata ChunkStorageMetadata"
INDEX = OF_CHECKPOINT + "metadata MetadataIndex"
STORAGE = OF_CHECKPOINT + "filesystem _StorageInfo"
MEMORY_FORMAT = OF_CHECKPOINT + "metadata _MEM_FORMAT_ENCODING"
SIZE, LAYOUT, ORDERED_DICT = (
    "torch Size",
    "torch.serialization _get_layout",
    "collections OrderedDict",
)
# The first Pythons 3.11, Debian 12's among them, pickle a member of an enum by it. The second name
# is Python 2's: pickle's protocol 2 writes that one.
GETATTR = {"builtins getattr", "__builtin__ getattr"}
PATHS = {
    f"{module} {kind}Path"
    for module in ("pathlib", "pathlib._local")
    for kind in ("Posix", "Windows")
}

# The fields that an object of each class may have.
FIELDS: dict[str, set[str]] = {
    ENTRY: {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"},
    TENSOR: {"properties", "size", "chunks"},
    PROPERTIES: set(),  # its state is a tuple of NUM_PROPERTIES values, which nothing here needs
    CHUNK: {"offsets", "sizes"},
    OF_CHECKPOINT + "metadata BytesStorageMetadata": set(),
    INDEX: {"fqn", "offset", "index"},
    OF_CHECKPOINT + "metadata StorageMeta": {"checkpoint_id", "save_id", "load_id", "modules"},
    STORAGE: {"relative_path", "offset", "length", "transform_descriptors"},
}
NUM_PROPERTIES = (5, 6)  # torch 2.15 writes the strides as well
DTYPES = {f"torch {name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
NAMES = {*FIELDS, *DTYPES, *PATHS, MEMORY_FORMAT, SIZE, LAYOUT, ORDERED_DICT, *GETATTR}


class GlobalName:
    """The name of a class or function, "module name"; never the class or function itself."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        if text not in NAMES:
            raise ValueError(f"it asks for {text.replace(' ', '.')}, which describes no tensor")
        self.text = text


class PickledObject:
    """An object that the file describes: the name of its class, and its fields once they are set."""

    __slots__ = ("fields", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fields: dict[str, Any] | None = None

    def set_fields(self, state: Any) -> None:
        """Raise ValueError unless `state` is what pickle writes for an object of this class."""
        if self.fields is not None:
            raise ValueError(f"it sets the fields of one {self.kind.split()[1]} twice")
        if self.kind == PROPERTIES and type(state) is tuple and len(state) in NUM_PROPERTIES:
            self.fields = {}
        elif (
            type(state) is dict
            and all(type(name) is str for name in state)
            and state.keys() <= FIELDS[self.kind]
        ):
            self.fields = dict(state)
        else:
            raise ValueError(f"it sets what is no field of {self.kind.split()[1]}")


def result_of_call(name: str, arguments: tuple[Any, ...]) -> Any:
    """Return what a call gives that pickle writes for a known value, without calling anything.

    Values that nothing here needs, such as layouts and paths, become None. Raises ValueError for
    other calls."""
    kinds = [type(argument) for argument in arguments]
    if name == SIZE and kinds == [tuple] and is_shape(arguments[0]):
        return arguments[0]
    if name == ORDERED_DICT and not kinds:
        return {}
    if (name, kinds) in ((LAYOUT, [str]), (MEMORY_FORMAT, [int])):
        return None
    if name in PATHS and all(kind is str for kind in kinds):
        return None
    if name in GETATTR and kinds == [GlobalName, str] and arguments[0].text == MEMORY_FORMAT:
        return None
    raise ValueError(f"it calls {name.replace(' ', '.')} with arguments that describe no tensor")


def is_shape(value: Any) -> bool:
    """Return whether the value is a tuple of at most 64 numbers from 0 up."""
    is_tuple = type(value) is tuple and len(value) <= MAX_DIMENSIONS
    return is_tuple and all(type(size) is int and 0 <= size < 2**63 for size in value)


class Interpreter:
    """Executes the instructions of a pickle that describe tensors."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.outer_stacks: list[list[Any]] = []  # one for each MARK that is open
        self.memo: dict[int, Any] = {}
        self.instructions = self.make_instructions()

    def run(self, data: bytes) -> Any:
        """Return what the pickle describes. Raises ValueError, which says what it asks for that is
        refused.
        """
        try:
            for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
                if opcode.name == "STOP":
                    return self.stack.pop()
                if opcode.name not in self.instructions:
                    raise ValueError(
                        f"it has the instruction {opcode.name}, which describes no tensor"
                    )
                self.instructions[opcode.name](argument)
        except (IndexError, KeyError) as error:
            raise ValueError("its instructions do not fit together") from error
        raise ValueError("it ends too early")

    def make_instructions(self) -> dict[str, Callable[[Any], object]]:
        """Return what to do at each known instruction; the functions take the instruction's
        argument.
        """
        literals = (
            "BININT",
            "BININT1",
            "BININT2",
            "LONG1",
            "LONG4",
            "BINFLOAT",
            "SHORT_BINUNICODE",
            "BINUNICODE",
            "BINUNICODE8",
        )
        return {
            **dict.fromkeys(literals, self.push),
            **dict.fromkeys(("PROTO", "FRAME"), lambda value: None),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self.memoize),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda number: self.push(self.memo[number])),
            "MEMOIZE": lambda _: self.memoize(len(self.memo)),
            "NONE": lambda _: self.push(None),
            "NEWTRUE": lambda _: self.push(True),
            "NEWFALSE": lambda _: self.push(False),
            "EMPTY_TUPLE": lambda _: self.push(()),
            "EMPTY_LIST": lambda _: self.push([]),
            "EMPTY_DICT": lambda _: self.push({}),
            "MARK": lambda _: self.open_mark(),
            "TUPLE": lambda _: self.push(tuple(self.close_mark())),
            "TUPLE1": lambda _: self.push(self.pop_many(1)),
            "TUPLE2": lambda _: self.push(self.pop_many(2)),
            "TUPLE3": lambda _: self.push(self.pop_many(3)),
            "APPEND": lambda _: self.extend(self.pop_many(1)),
            "APPENDS": lambda _: self.extend(self.close_mark()),
            "SETITEM": lambda _: self.set_items(self.pop_many(2)),
            "SETITEMS": lambda _: self.set_items(self.close_mark()),
            "GLOBAL": lambda text: self.push(GlobalName(text)),
            "STACK_GLOBAL": lambda _: self.push_name(self.pop_many(2)),
            "NEWOBJ": lambda _: self.push_record(self.pop_many(2)),
            "REDUCE": lambda _: self.push_result(self.pop_many(2)),
            "BUILD": lambda _: self.set_fields(self.pop_many(2)),
        }

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def memoize(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def open_mark(self) -> None:
        self.outer_stacks.append(self.stack)
        self.stack = []

    def close_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.outer_stacks.pop()
        return items

    def pop_many(self, count: int) -> tuple[Any, ...]:
        return tuple(reversed([self.stack.pop() for _ in range(count)]))

    def extend(self, items: tuple[Any, ...] | list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("it appends to what is no list")
        target.extend(items)

    def set_items(self, items: tuple[Any, ...] | list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        # Python hashes a tuple within tuples recursively, without a limit: no tuple is a key.
        if (
            type(target) is not dict
            or len(items) % 2
            or not all(type(key) in (str, PickledObject) for key in keys)
        ):
            raise ValueError(
                "it sets items of what is no dictionary, or by keys that describe no tensor"
            )
        target.update(zip(keys, items[1::2], strict=True))

    def push_name(self, parts: tuple[Any, ...]) -> None:
        if [type(part) for part in parts] != [str, str]:
            raise ValueError("it asks for a class by what is no text")
        self.push(GlobalName(" ".join(parts)))

    def push_record(self, parts: tuple[Any, ...]) -> None:
        kind, arguments = parts
        if (
            type(kind) is not GlobalName
            or kind.text not in FIELDS
            or type(arguments) is not tuple
            or arguments
        ):
            raise ValueError("it makes an object that describes no tensor")
        self.push(PickledObject(kind.text))

    def push_result(self, parts: tuple[Any, ...]) -> None:
        function, arguments = parts
        if type(function) is not GlobalName or type(arguments) is not tuple:
            raise ValueError("it calls what is no function")
        self.push(result_of_call(function.text, arguments))

    def set_fields(self, parts: tuple[Any, ...]) -> None:
        target, state = parts
        if type(target) is not PickledObject:
            raise ValueError("it sets attributes of what describes no tensor")
        target.set_fields(state)
        self.push(target)


class StoredPiece(NamedTuple):
    """The bytes of a file that `torch.save` wrote for one piece of a tensor."""

    file: str
    start: int
    length: int


class Checkpoint:
    """A folder that torch.distributed.checkpoint has written.

    Attributes:
        tensors: Each tensor's record. What else the checkpoint holds is a pickle, and is left out.
        shapes: Their shapes.
    """

    def __init__(self, folder: Path) -> None:
        """Raise OSError or ValueError where the folder holds no checkpoint of tensors."""
        self.folder = folder
        metadata = fields_of(
            Interpreter().run(typed_file.read_file(folder / METADATA, MAX_METADATA_BYTES)), ENTRY
        )
        records = checked(metadata.get("state_dict_metadata"), dict, "state_dict_metadata")
        self.tensors = {
            checked(name, str, "a tensor's name"): fields_of(record, TENSOR)
            for name, record in records.items()
            if type(record) is not PickledObject or record.kind == TENSOR
        }
        self.files: set[str] = set()  # which were seen to lie in the folder
        self.shapes = {
            name: list(shape_of(fields, "size")) for name, fields in self.tensors.items()
        }
        self.pieces: dict[tuple[str, tuple[int, ...]], StoredPiece] = {}
        for index, info in checked(metadata.get("storage_data"), dict, "storage_data").items():
            fields = fields_of(index, INDEX)
            if fields.get("offset") is not None:  # without one it is no tensor
                name = checked(fields.get("fqn"), str, "a tensor's name")
                self.pieces[name, shape_of(fields, "offset")] = self.make_piece(
                    fields_of(info, STORAGE)
                )

    def make_piece(self, fields: Mapping[str, Any]) -> StoredPiece:
        """Raise ValueError where the record's file lies outside of the folder."""
        file = checked(fields.get("relative_path"), str, "relative_path")
        if file not in self.files:
            self.check_file(file)
            self.files.add(file)
        if fields.get("transform_descriptors"):
            raise ValueError(
                f"{file} is compressed or encrypted by an extension of torch, which is not read here"
            )
        start = checked(fields.get("offset"), int, "offset")
        length = checked(fields.get("length"), int, "length")
        if start < 0 or length < 0:
            raise ValueError(f"{METADATA} gives {file} a section before its begin")
        return StoredPiece(file, start, length)

    def check_file(self, file: str) -> None:
        """Raise ValueError where a name is a path, or that of a link that leads out of the folder."""
        if (
            Path(file).name != file
            or (self.folder / file).resolve().parent != self.folder.resolve()
        ):
            raise ValueError(f"{METADATA} leads out of the folder, to {file}")

    def read(self, name: str, target: torch.Tensor) -> None:
        """Copy a tensor into one of its shape, piece by piece.

        Raises OSError or ValueError where a piece is missing, damaged, or is no tensor.
        """
        chunks = [
            fields_of(chunk, CHUNK)
            for chunk in checked(self.tensors[name].get("chunks"), list, "chunks")
        ]
        pieces = {shape_of(chunk, "offsets"): shape_of(chunk, "sizes") for chunk in chunks}
        if sum(map(math.prod, pieces.values())) != target.numel():
            raise ValueError(f"the pieces of {name} do not make up the whole tensor")
        for offsets, sizes in pieces.items():
            if (name, offsets) not in self.pieces or len(offsets) != target.ndim:
                raise ValueError(
                    f"{METADATA} does not say where the piece of {name} at {list(offsets)} is stored"
                )
            tensor = load_piece(self.folder, self.pieces[name, offsets])
            section = target[
                tuple(slice(lo, lo + size) for lo, size in zip(offsets, sizes, strict=True))
            ]
            if tensor.shape != section.shape or section.shape != sizes:
                raise ValueError(
                    f"the piece of {name} at {list(offsets)} has another shape than {METADATA} says"
                )
            section.copy_(tensor)


def fields_of(value: Any, kind: str) -> dict[str, Any]:
    """Return the fields of a record of the kind. Raises ValueError for anything else."""
    if type(value) is not PickledObject or value.kind != kind:
        raise ValueError(f"{METADATA} describes no checkpoint")
    return value.fields or {}


def checked(value: Any, kind: type[Kind], label: str) -> Kind:
    """Return the value if it is exactly of the kind. Raises ValueError."""
    if not isinstance(value, kind) or type(value) is not kind:
        raise ValueError(f"{METADATA} describes no checkpoint: {label} is {type(value).__name__}")
    return value


def shape_of(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the field if it is a shape or an offset. Raises ValueError."""
    value = fields.get(name)
    if not is_shape(value):
        raise ValueError(f"{METADATA} describes no checkpoint: {name} is no shape")
    return checked(value, tuple, name)


class Section(io.RawIOBase):
    """A section of a file, as a file of its own."""

    def __init__(self, file: BinaryIO, piece: StoredPiece) -> None:
        self.file = file
        self.piece = piece
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.piece.length}[
            whence
        ]
        self.position = max(origin + offset, 0)
        return self.position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self.file.seek(self.piece.start + self.position)
        count = self.file.readinto(view[: max(self.piece.length - self.position, 0)])  # type: ignore[attr-defined]
        self.position += count
        return int(count)


def load_piece(folder: Path, piece: StoredPiece) -> torch.Tensor:
    """Return the tensor of a piece. Raises OSError, or ValueError where there is none."""
    try:
        with typed_file.open_to_read(folder / piece.file) as file:
            if piece.start + piece.length > os.fstat(file.fileno()).st_size:
                raise ValueError("it is cut")
            tensor = torch.load(Section(file, piece), map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    except OSError:
        raise
    except (
        Exception
    ) as error:  # the bytes are a stranger's: torch meets them with exceptions of all kinds
        raise ValueError(f"{piece.file}: {get_reason(error)}") from error
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise ValueError(f"{piece.file} holds what is no tensor")
    return tensor
