"""Read the `.metadata` pickle of a DCP checkpoint without running the code in it.

A pickle is a program: it calls functions and sets attributes. `read_description` executes only the
instructions that build numbers, strings, tuples, lists, dictionaries and objects. It imports
nothing and calls nothing: a class that the file names is only a name, and an object of such a class
is a `PickledObject`, which holds its fields. All other instructions, names and arguments are
refused with ValueError.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import torch

MAX_DIMENSIONS = 64  # torch's own limit

DCP_PACKAGE = "torch.distributed.checkpoint."
METADATA_CLASS = DCP_PACKAGE + "metadata Metadata"
TENSOR_CLASS = DCP_PACKAGE + "metadata TensorStorageMetadata"
PROPERTIES_CLASS = DCP_PACKAGE + "metadata TensorProperties"
CHUNK_CLASS = DCP_PACKAGE + "metadata ChunkStorageMetadata"
INDEX_CLASS = DCP_PACKAGE + "metadata MetadataIndex"
STORAGE_CLASS = DCP_PACKAGE + "filesystem _StorageInfo"
MEMORY_FORMAT = DCP_PACKAGE + "metadata _MEM_FORMAT_ENCODING"
SIZE = "torch Size"
LAYOUT = "torch.serialization _get_layout"
ORDERED_DICT = "collections OrderedDict"
# The first releases of Python 3.11 (Debian 12 has one) pickle a member of an enum by getattr. The
# second name is Python 2's, which pickle's protocol 2 writes.
GETATTR = {"builtins getattr", "__builtin__ getattr"}
PATHS = {
    f"{module} {kind}Path"
    for module in ("pathlib", "pathlib._local")
    for kind in ("Posix", "Windows")
}

# The fields that an object of each class may have.
FIELDS: dict[str, set[str]] = {
    METADATA_CLASS: {
        "state_dict_metadata",
        "planner_data",
        "storage_data",
        "storage_meta",
        "version",
    },
    TENSOR_CLASS: {"properties", "size", "chunks"},
    PROPERTIES_CLASS: set(),  # its state is a tuple of PROPERTY_COUNTS values, which are not used
    CHUNK_CLASS: {"offsets", "sizes"},
    DCP_PACKAGE + "metadata BytesStorageMetadata": set(),
    INDEX_CLASS: {"fqn", "offset", "index"},
    DCP_PACKAGE + "metadata StorageMeta": {"checkpoint_id", "save_id", "load_id", "modules"},
    STORAGE_CLASS: {"relative_path", "offset", "length", "transform_descriptors"},
}
PROPERTY_COUNTS = (5, 6)  # torch 2.15 writes the strides as well
DTYPES = {f"torch {name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
ALLOWED_NAMES = {*FIELDS, *DTYPES, *PATHS, MEMORY_FORMAT, SIZE, LAYOUT, ORDERED_DICT, *GETATTR}
PythonUnpickler: Any = pickle._Unpickler  # the one in C does not let a subclass replace BUILD
# The instructions that build numbers, strings and containers, as Python's unpickler executes them.
PLAIN_INSTRUCTIONS = (
    "PROTO", "FRAME", "STOP", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
    "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "EMPTY_TUPLE",
    "EMPTY_LIST", "EMPTY_DICT", "MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINPUT",
    "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL",
)  # fmt: skip


class _GlobalName:
    """The name of a class or function, "module name"; never the class or function itself."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        if text not in ALLOWED_NAMES:
            raise ValueError(f"it asks for {text.replace(' ', '.')}, which describes no tensor")
        self.text = text


class PickledObject:
    """An object that the file describes: the name of its class, and its fields, once set."""

    __slots__ = ("fields", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fields: dict[str, Any] | None = None

    def set_fields(self, state: Any) -> None:
        """Raise ValueError unless `state` is what pickle writes for an object of this class."""
        if self.fields is not None:
            raise ValueError(f"it sets the fields of one {self.kind.split()[1]} twice")
        if self.kind == PROPERTIES_CLASS and type(state) is tuple and len(state) in PROPERTY_COUNTS:
            self.fields = {}
        elif self._is_dict_of_known_fields(state):
            self.fields = dict(state)
        else:
            raise ValueError(f"it sets what is no field of {self.kind.split()[1]}")

    def _is_dict_of_known_fields(self, state: Any) -> bool:
        if type(state) is not dict or not all(type(name) is str for name in state):
            return False
        return state.keys() <= FIELDS[self.kind]


def _evaluate_call(name: str, arguments: tuple[Any, ...]) -> Any:
    """Return the result of a call that pickle writes for a known value, without calling anything.

    Values that are not used, such as layouts and paths, become None. Raises ValueError for all
    other calls.
    """
    kinds = [type(argument) for argument in arguments]
    if name == SIZE and kinds == [tuple] and is_shape(arguments[0]):
        return arguments[0]
    if name == ORDERED_DICT and not kinds:
        return {}
    if (name, kinds) in ((LAYOUT, [str]), (MEMORY_FORMAT, [int])):
        return None
    if name in PATHS and all(kind is str for kind in kinds):
        return None
    if name in GETATTR and kinds == [_GlobalName, str] and arguments[0].text == MEMORY_FORMAT:
        return None
    raise ValueError(f"it calls {name.replace(' ', '.')} with arguments that describe no tensor")


def is_shape(value: Any) -> bool:
    """Return whether the value is a tuple of at most MAX_DIMENSIONS sizes, none negative."""
    is_tuple = type(value) is tuple and len(value) <= MAX_DIMENSIONS
    return is_tuple and all(type(size) is int and 0 <= size < 2**63 for size in value)


class _Instructions(dict[int, Any]):
    """The functions that execute the known instructions, by their codes."""

    def __missing__(self, code: int) -> Any:
        names = {opcode.code: opcode.name for opcode in pickletools.opcodes}
        name = names.get(chr(code), "of an unknown code")
        raise ValueError(f"it has the instruction {name}, which describes no tensor")


class _DescriptionUnpickler(PythonUnpickler):  # type: ignore[misc]
    """Executes the instructions of a pickle that describe tensors."""

    dispatch = _Instructions(
        (code[0], PythonUnpickler.dispatch[code[0]])
        for code in (getattr(pickle, name) for name in PLAIN_INSTRUCTIONS)
    )

    def find_class(self, module: str, name: str) -> _GlobalName:
        return _GlobalName(f"{module} {name}")

    def load_append(self) -> None:
        self.extend([self.stack.pop()])

    dispatch[pickle.APPEND[0]] = load_append

    def load_appends(self) -> None:
        self.extend(self.pop_mark())

    dispatch[pickle.APPENDS[0]] = load_appends

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("it appends to what is no list")
        target.extend(items)

    def load_setitem(self) -> None:
        value = self.stack.pop()
        self.set_items([self.stack.pop(), value])

    dispatch[pickle.SETITEM[0]] = load_setitem

    def load_setitems(self) -> None:
        self.set_items(self.pop_mark())

    dispatch[pickle.SETITEMS[0]] = load_setitems

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        keys = items[::2]
        # Python hashes a tuple within tuples recursively, without a limit: no tuple is a key.
        has_allowed_keys = all(type(key) in (str, PickledObject) for key in keys)
        if type(target) is not dict or len(items) % 2 or not has_allowed_keys:
            raise ValueError(
                "it sets items of what is no dictionary, or by keys that describe no tensor"
            )
        target.update(zip(keys, items[1::2], strict=True))

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        kind = self.stack.pop()
        is_known_class = type(kind) is _GlobalName and kind.text in FIELDS
        if not is_known_class or type(arguments) is not tuple or arguments:
            raise ValueError("it makes an object that describes no tensor")
        self.stack.append(PickledObject(kind.text))

    dispatch[pickle.NEWOBJ[0]] = load_newobj

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack.pop()
        if type(function) is not _GlobalName or type(arguments) is not tuple:
            raise ValueError("it calls what is no function")
        self.stack.append(_evaluate_call(function.text, arguments))

    dispatch[pickle.REDUCE[0]] = load_reduce

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is not PickledObject:
            raise ValueError("it sets attributes of what describes no tensor")
        target.set_fields(state)

    dispatch[pickle.BUILD[0]] = load_build


def read_description(data: bytes) -> Any:
    """Return the value that a pickle describes. Raises ValueError at the first refused part."""
    try:
        return _DescriptionUnpickler(io.BytesIO(data)).load()
    except ValueError:
        raise
    except Exception as error:  # of any kind: the data may come from anybody
        raise ValueError("its instructions do not fit together") from error
