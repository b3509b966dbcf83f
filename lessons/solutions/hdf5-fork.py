"""Exercise hdf5-fork: DataLoader workers share one open file.

    python exercise.py          (or: stepladder learn check hdf5-fork)

The file is opened once. Then two workers are forked and read through the handle that they were born
with. Most rows are right. A few are those of another index."""

import sys
import tempfile

import h5py
import numpy as np
from torch.utils.data import DataLoader, Dataset

NUM_ROWS = 1024


def open_file(path):
    return h5py.File(path, "r", driver="stdio")  # the C library's files: one position in each


class Rows(Dataset):
    """The rows of an HDF5 file."""

    def __init__(self, path):
        self.path = path
        self.file = None

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        if self.file is None:
            self.file = open_file(self.path)
        return index, self.file["x"][index]


# -- the check: leave it as it is ------------------------------------------------------------------


def read(rows):
    """One epoch with two forked workers: how many rows came, and how many of them were those of
    another index.
    """
    seen, wrong = 0, 0
    for index, found in DataLoader(
        rows, batch_size=16, num_workers=2, multiprocessing_context="fork"
    ):
        seen += len(index)
        wrong += int((found != index[:, None]).any(1).sum())
    return seen, wrong


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/rows.h5"
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(NUM_ROWS)[:, None].repeat(1024, 1)
        rows = Rows(path)
        shared = h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE) > 0
        for epoch in range(20 if shared else 1):  # it needs an unlucky moment: wait for one
            try:
                seen, wrong = read(rows)
            except OSError as error:  # HDF5 itself read in the wrong place
                sys.exit(f"not yet: {error}: the workers read through one open file")
            print(f"epoch {epoch}: {seen} rows, {wrong} of them wrong", flush=True)
            if wrong:
                sys.exit(
                    f"not yet: {wrong} rows are of another index: the workers read through one open file"
                )
    if shared:
        sys.exit(
            "not yet: no row was wrong this time, and yet the workers read through one open file"
        )
    if seen != NUM_ROWS:
        sys.exit(f"not yet: there are {NUM_ROWS} rows, {seen} came")
    print("passed: every worker opened the file itself")


if __name__ == "__main__":
    main()
