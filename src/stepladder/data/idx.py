"""IDX files, the format of MNIST: a big-endian header, then one byte a value."""

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
from stepladder.data.local_files import find_gzip_or_plain

LABELS_MAGIC = 2049
IMAGES_MAGIC = 2051
GZIP_MAGIC = b"\x1f\x8b"
HEADER_BYTES = 64  # more than any header has
MAX_GZIP_RATIO = 1032  # of zeros, which gzip compresses best
MNIST_FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


@dataclass(frozen=True)
class _Mnist:
    """The four arrays of MNIST, all uint8.

    Images have the shape (n, rows, columns) and values in 0..255, labels the shape (n,) and values
    in 0..9.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def read_idx(path: Path) -> np.ndarray:
    """Read an IDX file, compressed by gzip or not; its content tells which.

    Returns:
        A writable uint8 array of images, shape (n, rows, columns), or of labels, shape (n,).

    Raises:
        InputError: The file is missing, damaged or of another kind, or its size does not agree with
            its header.
    """  # noqa: DOC501 - damage_error makes an InputError
    with report_errors(path), open_decompressed(path) as stream:
        data = stream.read(HEADER_BYTES)
        shape, start = read_header(data, path)
        size = math.prod(shape)
        data += stream.read(max(0, start + size - len(data)) + 1)
    stored_bytes = len(data) - start
    if stored_bytes != size:
        shape_text = " x ".join(map(str, shape))
        actual = "more" if stored_bytes > size else stored_bytes
        raise _damage_error(
            path, f"its header says {shape_text} = {size} bytes of data but it holds {actual}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()


@contextmanager
def report_errors(path: Path) -> Iterator[None]:
    """Raise the errors of reading an IDX file as InputError, with a hint how to fetch it again."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{path} is missing", download_hint(path.parent)) from None
    except EOFError:
        raise _damage_error(path, "the gzip data ends early") from None
    except (gzip.BadGzipFile, zlib.error, struct.error) as error:
        raise _damage_error(path, f"the gzip data is corrupt, {error}") from error
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {path}: {get_reason(error)}", download_hint(path.parent)
        ) from error


def open_decompressed(path: Path) -> IO[bytes]:
    """Return a stream of a file's bytes, decompressed if gzip has compressed it."""
    stream = open_to_read(path)
    is_compressed = stream.read(2) == GZIP_MAGIC
    stream.close()
    return gzip.open(path, "rb") if is_compressed else open_to_read(path)  # type: ignore[return-value]


def read_header(data: bytes, path: Path) -> tuple[tuple[int, ...], int]:
    """Return the shape of an IDX file's data, and the byte at which the data begin.

    Args:
        data: The first HEADER_BYTES of the file, decompressed.
        path: The file, for messages.

    Returns:
        The shape, and the offset of the first value in bytes.

    Raises:
        InputError: The bytes are not the header of images or labels, or promise more data than the
            file can hold.
    """  # noqa: DOC501 - damage_error makes an InputError
    magic = int.from_bytes(data[:4], "big")
    if len(data) >= 8 and magic not in (LABELS_MAGIC, IMAGES_MAGIC):
        raise _damage_error(
            path,
            f"its magic number is {magic}, not {IMAGES_MAGIC} (images) or {LABELS_MAGIC} (labels)",
        )
    dimensions = magic & 0xFF
    start = 4 + 4 * dimensions
    if len(data) < max(8, start):
        raise _damage_error(path, f"{len(data)} bytes are too few for an IDX header")
    shape = struct.unpack_from(f">{dimensions}I", data, 4)
    file_bytes = path.stat().st_size
    if math.prod(shape) > MAX_GZIP_RATIO * file_bytes:
        shape_text = " x ".join(map(str, shape))
        raise _damage_error(
            path,
            f"its header says {shape_text} bytes of data, more than {file_bytes} bytes of a file"
            " can hold",
        )
    return shape, start


# -- MNIST -----------------------------------------------------------------------------------------


def read_mnist(data_dir: Path) -> _Mnist:
    """Read the four MNIST files of a folder, each with or without `.gz`.

    Returns:
        The images and labels of the training and the test set.

    Raises:
        InputError: A file is missing or damaged, holds images in place of labels or the reverse,
            has labels outside of 0..9, or has another number of labels than of images.
    """
    paths = find_mnist_files(data_dir)
    arrays = {name: read_idx(path) for name, path in paths.items()}
    for split in ("train", "test"):
        images, labels = f"{split}_images", f"{split}_labels"
        _validate_pair(arrays[images], arrays[labels], paths[images], paths[labels])
    return _Mnist(**arrays)


def has_mnist_files(data_dir: Path) -> bool:
    """Return whether the folder has any of the four files."""
    return find_gzip_or_plain(data_dir, *MNIST_FILES.values()) is not None


def find_mnist_files(data_dir: Path) -> dict[str, Path]:
    """Return the paths of the four files by field of Mnist.

    Raises:
        InputError: One is missing, or a fifth one is there.
    """
    if not data_dir.is_dir():
        raise InputError(f"there is no folder {data_dir}", download_hint(data_dir))
    for other in sorted(data_dir.glob("[!.]*-ubyte*")):
        name = other.name.removesuffix(".gz")
        if name.endswith("-ubyte") and name not in MNIST_FILES.values():
            hint = f"a folder of its own for {other.name}"
            raise InputError(f"{other} is none of the four files of MNIST beside it", hint)
    paths = {}
    for field, name in MNIST_FILES.items():
        path = find_gzip_or_plain(data_dir, name)
        if path is None:
            raise InputError(f"{data_dir / name}.gz is missing", download_hint(data_dir))
        paths[field] = path
    return paths


def _validate_pair(
    images: np.ndarray, labels: np.ndarray, images_path: Path, labels_path: Path
) -> None:
    if images.ndim != 3:
        raise _damage_error(images_path, "it holds labels, images belong here")
    if labels.ndim != 1:
        raise _damage_error(labels_path, "it holds images, labels belong here")
    if len(images) != len(labels):
        raise _damage_error(labels_path, f"it holds {len(labels)} labels for {len(images)} images")
    if labels.size and labels.max() > 9:
        raise _damage_error(labels_path, f"it holds the label {labels.max()}, labels are 0 to 9")


def _damage_error(path: Path, problem: str) -> InputError:
    return InputError(f"cannot use {path}: {problem}", download_hint(path.parent))


def download_hint(data_dir: Path) -> str:
    return f"stepladder data get mnist --data-dir {shlex.quote(str(data_dir))}"
