"""Read the `.metadata` pickle of a DCP checkpoint without running the code in it.

A pickle is a program: it calls functions and sets attributes. `Interpreter` executes it without
Python's unpickler. It knows only the instructions that build numbers, strings, tuples, lists,
dictionaries and objects. It imports nothing and calls nothing: a class that the file names is only
a name, and an object of such a class is a `PickledObject`, which holds its fields. All other
instructions, names and arguments are refused with ValueError.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
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
# The instructions whose argument is a number or a string.
LITERALS = (
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
)  # fmt: skip
# What makes the value of an instruction without an argument.
CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
# How many items an instruction takes from the stack.
NUM_ITEMS = {
    "TUPLE1": 1,
    "TUPLE2": 2,
    "TUPLE3": 3,
    "APPEND": 1,
    "SETITEM": 2,
    "STACK_GLOBAL": 2,
    "NEWOBJ": 2,
    "REDUCE": 2,
    "BUILD": 2,
}
TAKE_MARKED_ITEMS = ("TUPLE", "APPENDS", "SETITEMS")  # all since the last MARK


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


class Interpreter:
    """Executes the instructions of a pickle that describe tensors."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.outer_stacks: list[list[Any]] = []  # one for each open MARK
        self.memo: dict[int, Any] = {}
        self.instructions = self.make_instructions()

    def run(self, data: bytes) -> Any:
        """Return the described value. Raises ValueError at the first refused instruction."""
        try:
            for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
                if opcode.name == "STOP":
                    return self.stack.pop()
                execute = self.instructions.get(opcode.name)
                if execute is None:
                    raise ValueError(
                        f"it has the instruction {opcode.name}, which describes no tensor"
                    )
                execute(self.take_operand(opcode.name, argument))
        except (IndexError, KeyError) as error:
            raise ValueError("its instructions do not fit together") from error
        raise ValueError("it ends too early")

    def make_instructions(self) -> dict[str, Callable[[Any], object]]:
        """Return the function of each known instruction, which takes its operand."""
        return {
            **dict.fromkeys((*LITERALS, *CONSTANTS), self.push),
            **dict.fromkeys(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"), self.push),
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), self.memoize),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), self.recall),
            **dict.fromkeys(("APPEND", "APPENDS"), self.extend),
            **dict.fromkeys(("SETITEM", "SETITEMS"), self.set_items),
            "MARK": self.open_mark,
            "GLOBAL": self.push_global,
            "STACK_GLOBAL": self.push_name,
            "NEWOBJ": self.push_object,
            "REDUCE": self.push_result,
            "BUILD": self.set_fields,
        }

    def take_operand(self, name: str, argument: Any) -> Any:
        """Return what an instruction takes: items of the stack, a constant, or its own argument."""
        if name in NUM_ITEMS:
            return self.pop_many(NUM_ITEMS[name])
        if name in TAKE_MARKED_ITEMS:
            return tuple(self.close_mark())
        if name in CONSTANTS:
            return CONSTANTS[name]()
        return argument

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def memoize(self, number: int | None) -> None:
        """Remember the last value of the stack by a number, or by the next one if that is None."""
        self.memo[len(self.memo) if number is None else number] = self.stack[-1]

    def recall(self, number: int) -> None:
        self.push(self.memo[number])

    def push_global(self, text: str) -> None:
        self.push(_GlobalName(text))

    def open_mark(self, _: None) -> None:
        self.outer_stacks.append(self.stack)
        self.stack = []

    def close_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.outer_stacks.pop()
        return items

    def pop_many(self, count: int) -> tuple[Any, ...]:
        return tuple(reversed([self.stack.pop() for _ in range(count)]))

    def extend(self, items: tuple[Any, ...]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("it appends to what is no list")
        target.extend(items)

    def set_items(self, items: tuple[Any, ...]) -> None:
        target = self.stack[-1]
        keys = items[::2]
        # Python hashes a tuple within tuples recursively, without a limit: no tuple is a key.
        has_allowed_keys = all(type(key) in (str, PickledObject) for key in keys)
        if type(target) is not dict or len(items) % 2 or not has_allowed_keys:
            raise ValueError(
                "it sets items of what is no dictionary, or by keys that describe no tensor"
            )
        target.update(zip(keys, items[1::2], strict=True))

    def push_name(self, parts: tuple[Any, ...]) -> None:
        if [type(part) for part in parts] != [str, str]:
            raise ValueError("it asks for a class by what is no text")
        self.push_global(" ".join(parts))

    def push_object(self, parts: tuple[Any, ...]) -> None:
        kind, arguments = parts
        is_known_class = type(kind) is _GlobalName and kind.text in FIELDS
        if not is_known_class or type(arguments) is not tuple or arguments:
            raise ValueError("it makes an object that describes no tensor")
        self.push(PickledObject(kind.text))

    def push_result(self, parts: tuple[Any, ...]) -> None:
        function, arguments = parts
        if type(function) is not _GlobalName or type(arguments) is not tuple:
            raise ValueError("it calls what is no function")
        self.push(_evaluate_call(function.text, arguments))

    def set_fields(self, parts: tuple[Any, ...]) -> None:
        target, state = parts
        if type(target) is not PickledObject:
            raise ValueError("it sets attributes of what describes no tensor")
        target.set_fields(state)
        self.push(target)
