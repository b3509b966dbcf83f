"""python lessons/17-streaming/create_mnist_h5.py --data_dir data/mnist --h5 data/mnist.h5

MNIST as one HDF5 file: images (n, height, width) and labels (n,) as bytes, the training part in
chunks of rows. A chunk is read in one operation. Without MNIST it is scikit-learn's digits, and the
program says so."""

import argparse
import gzip
import sys
from pathlib import Path

import h5py
import numpy as np


def read_idx(path):
    """Read MNIST's format: a magic number, a size for each dimension, then a byte per value."""
    data = gzip.decompress(path.read_bytes())
    sizes = np.frombuffer(data, ">i4", count=data[3], offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(sizes).copy()


def load_images(data_dir):
    """Return arrays by name, and the name of the data set."""
    if (data_dir / "train-images-idx3-ubyte.gz").exists():
        names = {"images": "train-images-idx3", "labels": "train-labels-idx1"}
        names |= {"test_images": "t10k-images-idx3", "test_labels": "t10k-labels-idx1"}
        arrays = {key: read_idx(data_dir / f"{name}-ubyte.gz") for key, name in names.items()}
        return arrays, "MNIST"
    try:
        from sklearn.datasets import load_digits  # takes a second to import
    except ModuleNotFoundError:
        sys.exit(
            f"error: no MNIST in {data_dir}, and no scikit-learn, which has small digits."
            " HINT: pip install scikit-learn, or stepladder data get mnist"
        )
    digits = load_digits()
    images = (digits.images * 255 / 16).astype(np.uint8)
    labels = digits.target.astype(np.uint8)
    arrays = {
        "images": images[:-360],
        "labels": labels[:-360],
        "test_images": images[-360:],
        "test_labels": labels[-360:],
    }
    return arrays, f"no MNIST in {data_dir}: scikit-learn's digits"


def create(data_dir, path, chunk_rows):
    """Write the file, unless it exists. Return a description of it."""
    if path.exists():
        return f"{path}, made before"
    arrays, name = load_images(data_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with h5py.File(temporary, "w") as file:
        for key, array in arrays.items():
            rows = min(chunk_rows, len(array))
            file.create_dataset(key, data=array, chunks=(rows, *array.shape[1:]))
    temporary.replace(path)  # so that the file is complete or absent
    return f"{path}, {name}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", type=Path, default=Path("data/mnist"))
    parser.add_argument("--h5", type=Path, default=Path("data/mnist.h5"))
    parser.add_argument("--chunk_rows", type=int, default=128)
    args = parser.parse_args()
    print(create(args.data_dir, args.h5, args.chunk_rows))
