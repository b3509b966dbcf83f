"""python lessons/16-streaming/create_mnist_h5.py --data_dir data/mnist --h5 data/mnist.h5
--chunk_rows 128

MNIST as one HDF5 file: images (n, height, width) and labels (n,) as bytes, the training part in
chunks of rows. A chunk is what a reader gets in one go. Where MNIST is not there: scikit-learn's
digits, and it says so."""

import argparse
import gzip
from pathlib import Path

import h5py
import numpy as np
from sklearn.datasets import load_digits


def read_idx(path):
    """MNIST's own format: a magic number, as many sizes as it has dimensions, then one byte per
    value.
    """
    data = gzip.decompress(path.read_bytes())
    sizes = np.frombuffer(data, ">i4", count=data[3], offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(sizes).copy()


def load_images(data_dir):
    """Arrays by name, and what they are."""
    if (data_dir / "train-images-idx3-ubyte.gz").exists():
        names = {"images": "train-images-idx3", "labels": "train-labels-idx1"}
        names |= {"test_images": "t10k-images-idx3", "test_labels": "t10k-labels-idx1"}
        return {
            key: read_idx(data_dir / f"{name}-ubyte.gz") for key, name in names.items()
        }, "MNIST"
    digits = load_digits()
    images, labels = (digits.images * 255 / 16).astype(np.uint8), digits.target.astype(np.uint8)
    train, test = slice(None, -360), slice(-360, None)
    arrays = {
        "images": images[train],
        "labels": labels[train],
        "test_images": images[test],
        "test_labels": labels[test],
    }
    return arrays, f"no MNIST in {data_dir}: scikit-learn's digits"


def create(data_dir, path, chunk_rows):
    """Write the file, unless it is there. Returns what it is, in words."""
    if path.exists():
        return f"{path}, made before"
    arrays, what = load_images(data_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    with h5py.File(aside, "w") as file:
        for name, array in arrays.items():
            rows = min(chunk_rows, len(array))
            file.create_dataset(name, data=array, chunks=(rows, *array.shape[1:]))
    aside.replace(path)  # whole or absent
    return f"{path}, {what}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", type=Path, default=Path("data/mnist"))
    parser.add_argument("--h5", type=Path, default=Path("data/mnist.h5"))
    parser.add_argument("--chunk_rows", type=int, default=128)
    args = parser.parse_args()
    print(create(args.data_dir, args.h5, args.chunk_rows))
