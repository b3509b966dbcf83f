import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from stepladder.core.errors import InputError
from stepladder.data.idx import MNIST_FILES, read_idx, read_mnist

PIXELS = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
DIGITS = np.array([0, 9, 3, 3], dtype=np.uint8)
SHARED = Path(__file__).parents[3] / "shared" / "data" / "mnist"


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 2048 + array.ndim, *array.shape) + array.tobytes()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def mnist_folder(folder: Path, **changed: np.ndarray) -> Path:
    """A folder of small MNIST files, the test set as plain IDX."""
    arrays = {
        "train_images": PIXELS,
        "train_labels": DIGITS,
        "test_images": PIXELS,
        "test_labels": DIGITS,
    }
    for part, array in (arrays | changed).items():
        data = idx_bytes(array)
        name = MNIST_FILES[part]
        if part.startswith("train"):
            write(folder / f"{name}.gz", gzip.compress(data))
        else:
            write(folder / name, data)
    return folder


@pytest.mark.parametrize(
    "array", [PIXELS, DIGITS, PIXELS[:0]], ids=["images", "labels", "no images"]
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", ["x", "x.gz"])
def test_reads_by_content_not_by_name(tmp_path, array, pack, name):
    read = read_idx(write(tmp_path / name, pack(idx_bytes(array))))
    assert read.dtype == np.uint8
    assert read.flags.writeable
    np.testing.assert_array_equal(read, array)


GZ = gzip.compress(idx_bytes(PIXELS))
RAW = idx_bytes(PIXELS)
BAD = {
    "empty": (b"", "0 bytes are too few for an IDX header"),
    "half a header": (RAW[:10], "10 bytes are too few for an IDX header"),
    "magic": (
        b"\0\0\x0d\x03" + RAW[4:],
        r"magic number is 3331, not 2051 \(images\) or 2049 \(labels\)",
    ),
    "too short": (RAW[:-1], "says 4 x 2 x 3 = 24 bytes of data but it holds 23"),
    "too long": (RAW + b"!", "says 4 x 2 x 3 = 24 bytes of data but it holds more"),
    "huge count": (
        RAW[:4] + b"\xff" * 12 + RAW[16:],
        "4294967295 x .*more than 40 bytes of a file",
    ),
    "gzip cut": (GZ[:-9], "the gzip data ends early"),
    "gzip header cut": (GZ[:5], "the gzip data ends early"),
    "gzip checksum": (GZ[:-8] + b"\0\0\0\0" + GZ[-4:], "the gzip data is corrupt"),
    "gzip junk": (GZ[:10] + b"\xff" * 8 + GZ[18:], "the gzip data is corrupt"),
    "gzip tail": (GZ + b"tail", "the gzip data is corrupt"),
}


@pytest.mark.parametrize("data, message", BAD.values(), ids=BAD)
def test_damaged_file_is_named_with_what_is_wrong(tmp_path, data, message):
    path = write(tmp_path / "digits.gz", data)
    with pytest.raises(InputError, match=message) as caught:
        read_idx(path)
    assert str(path) in caught.value.problem
    assert caught.value.hint == f"stepladder data get mnist --data-dir {tmp_path}"


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.gz is missing"):
        read_idx(tmp_path / "nothing.gz")


def test_folder_in_place_of_a_file(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*: Is a directory"):
        read_idx(tmp_path)


def test_read_mnist_with_and_without_gz(tmp_path):
    data = read_mnist(mnist_folder(tmp_path))
    np.testing.assert_array_equal(data.train_images, PIXELS)
    np.testing.assert_array_equal(data.test_labels, DIGITS)


def test_read_mnist_without_a_folder_hints_at_get(tmp_path):
    folder = tmp_path / "my data"
    with pytest.raises(InputError, match="there is no folder") as caught:
        read_mnist(folder)
    assert caught.value.hint == f"stepladder data get mnist --data-dir '{folder}'"


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte"])
def test_read_mnist_names_the_missing_file(tmp_path, name):
    (mnist_folder(tmp_path) / name).unlink()
    with pytest.raises(
        InputError, match=f"{name}.* is missing. HINT: stepladder data get mnist --data-dir"
    ):
        read_mnist(tmp_path)


def test_a_fifth_file_is_not_left_out(tmp_path):
    mnist_folder(tmp_path)
    (tmp_path / "notes-ubyte.txt").write_text("")
    assert len(read_mnist(tmp_path).test_labels) == len(DIGITS)
    (tmp_path / "extra-images-idx3-ubyte.gz").write_bytes(b"")
    with pytest.raises(InputError, match=r"extra-images-idx3-ubyte\.gz is none of the four files"):
        read_mnist(tmp_path)


def test_a_file_and_a_compressed_one_must_be_the_same(tmp_path):
    mnist_folder(tmp_path)
    compressed = tmp_path / "train-images-idx3-ubyte.gz"
    plain = compressed.with_suffix("")
    content = gzip.decompress(compressed.read_bytes())
    plain.write_bytes(content)
    np.testing.assert_array_equal(read_mnist(tmp_path).train_images, PIXELS)
    plain.write_bytes(content[:-1] + b"\xfe")
    with pytest.raises(InputError, match=r"ubyte\.gz and .*ubyte differ. HINT: one of them"):
        read_mnist(tmp_path)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"train_labels": DIGITS[:3]}, "train-labels.*: it holds 3 labels for 4 images"),
        ({"test_labels": DIGITS + 1}, "t10k-labels.*: it holds the label 10, labels are 0 to 9"),
        ({"test_images": DIGITS}, "t10k-images.*: it holds labels, images belong here"),
        ({"train_labels": PIXELS}, "train-labels.*: it holds images, labels belong here"),
    ],
    ids=["counts", "range", "labels for images", "images for labels"],
)
def test_read_mnist_checks_the_files_against_each_other(tmp_path, changed, message):
    with pytest.raises(InputError, match=message):
        read_mnist(mnist_folder(tmp_path, **changed))


def test_bad_deflate_stream_is_what_zlib_reports(tmp_path):
    """The corrupt case above must stay one that zlib, not the checksum, finds."""
    with pytest.raises(zlib.error):
        gzip.decompress(BAD["gzip junk"][0])


@pytest.mark.skipif(
    not SHARED.is_dir(), reason="the real MNIST files are not beside the repository"
)
def test_real_mnist():
    data = read_mnist(SHARED)
    assert data.train_images.shape == (60000, 28, 28)
    assert data.test_images.shape == (10000, 28, 28)
    assert np.bincount(data.train_labels).tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949,
    ]  # fmt: skip
