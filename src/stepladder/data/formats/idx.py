"""Readers for IDX, the format of the MNIST files: a big-endian header, then one byte a value."""

from __future__ import annotations

import gzip
import math
import shlex
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from stepladder.core.errors import InputError, get_reason
from stepladder.core.typed_file import open_to_read
from stepladder.data.disk import gz_or_plain

LABELS, IMAGES = 2049, 2051
GZIP_MAGIC = b"\x1f\x8b"
HEADER_BYTES = 64
MOST_PACKED = 1032  # times as small gzip makes what is all zeros
MNIST_FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


@dataclass(frozen=True)
class Mnist:
    """The four arrays, all uint8: images (n, rows, columns) of 0..255, labels (n,) of 0..9."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def read_idx(path: Path) -> np.ndarray:
    """Read one IDX file, gzip'd or plain (told apart by content): a writable uint8 array.

    Images come as (n, rows, columns), labels as (n,). InputError names the file when it is
    missing, damaged, of another kind, or holds more or fewer bytes than its header says.
    """
    with reading(path), open_plain(path) as stream:
        data = stream.read(HEADER_BYTES)
        shape, start = read_header(data, path)
        data += stream.read(max(0, start + math.prod(shape) - len(data)) + 1)
    if len(data) - start != math.prod(shape):
        raise damaged(
            path,
            f"its header says {' x '.join(map(str, shape))} = {math.prod(shape)} bytes of data "
            f"but it holds {'more' if len(data) - start > math.prod(shape) else len(data) - start}",
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path} is missing", get_hint(path.parent)) from None
    except EOFError:
        raise damaged(path, "the gzip data ends early") from None
    except (gzip.BadGzipFile, zlib.error, struct.error) as error:
        raise damaged(path, f"the gzip data is corrupt, {error}") from error
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {path}: {get_reason(error)}", get_hint(path.parent)
        ) from error


def open_plain(path: Path) -> IO[bytes]:
    """The uncompressed bytes of a file, gzip'd or not."""
    stream = open_to_read(path)
    packed = stream.read(2) == GZIP_MAGIC
    stream.close()
    return gzip.open(path, "rb") if packed else open_to_read(path)  # type: ignore[return-value]


def read_header(data: bytes, path: Path) -> tuple[tuple[int, ...], int]:
    """The shape, and the offset where the values start."""
    magic = int.from_bytes(data[:4], "big")
    if len(data) >= 8 and magic not in (LABELS, IMAGES):
        raise damaged(
            path, f"its magic number is {magic}, not {IMAGES} (images) or {LABELS} (labels)"
        )
    dims = magic & 0xFF
    start = 4 + 4 * dims
    if len(data) < max(8, start):
        raise damaged(path, f"{len(data)} bytes are too few for an IDX header")
    shape = struct.unpack_from(f">{dims}I", data, 4)
    if math.prod(shape) > MOST_PACKED * (size := path.stat().st_size):
        said = " x ".join(map(str, shape))
        raise damaged(
            path, f"its header says {said} bytes of data, more than {size} bytes of a file can hold"
        )
    return shape, start


def read_mnist(data_dir: Path) -> Mnist:
    """Read the four MNIST files in data_dir, each with or without `.gz`.

    InputError names the file that is missing or damaged, that holds images where labels belong,
    whose labels leave 0..9, or whose count differs from its images' count.
    """
    paths = mnist_paths(data_dir)
    data = {part: read_idx(path) for part, path in paths.items()}
    for images, labels in (("train_images", "train_labels"), ("test_images", "test_labels")):
        check_pair(data[images], data[labels], paths[images], paths[labels])
    return Mnist(**data)


def has_mnist(data_dir: Path) -> bool:
    """Whether any of the four files is there."""
    return gz_or_plain(data_dir, *MNIST_FILES.values()) is not None


def mnist_paths(data_dir: Path) -> dict[str, Path]:
    """Where the four files are, by field of Mnist. InputError names the first that is missing."""
    if not data_dir.is_dir():
        raise InputError(f"there is no folder {data_dir}", get_hint(data_dir))
    paths = {}
    for part, name in MNIST_FILES.items():
        path = gz_or_plain(data_dir, name)
        if path is None:
            raise InputError(f"{data_dir / name}.gz is missing", get_hint(data_dir))
        paths[part] = path
    return paths


def check_pair(
    images: np.ndarray, labels: np.ndarray, images_path: Path, labels_path: Path
) -> None:
    if images.ndim != 3:
        raise damaged(images_path, "it holds labels, images belong here")
    if labels.ndim != 1:
        raise damaged(labels_path, "it holds images, labels belong here")
    if len(images) != len(labels):
        raise damaged(labels_path, f"it holds {len(labels)} labels for {len(images)} images")
    if labels.size and labels.max() > 9:
        raise damaged(labels_path, f"it holds the label {labels.max()}, labels are 0 to 9")


def damaged(path: Path, what: str) -> InputError:
    return InputError(f"cannot use {path}: {what}", get_hint(path.parent))


def get_hint(data_dir: Path) -> str:
    return f"stepladder data get mnist --data-dir {shlex.quote(str(data_dir))}"
