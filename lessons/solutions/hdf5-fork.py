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
    return h5py.File(path, "r", driver="stdio")  # C files, each with one position


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
    """Read an epoch with two forked workers; return the rows, and those that were wrong."""
    loader = DataLoader(rows, batch_size=16, num_workers=2, multiprocessing_context="fork")
    count = 0
    wrong = 0
    for index, values in loader:
        count += len(index)
        wrong += int((values != index[:, None]).any(1).sum())
    return count, wrong


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/rows.h5"
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(NUM_ROWS)[:, None].repeat(1024, 1)
        rows = Rows(path)
        objects = h5py.h5f.OBJ_FILE | h5py.h5f.OBJ_DATASET  # each keeps its file open
        shared = h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, objects) > 0
        for epoch in range(20 if shared else 1):  # the mistake needs an unlucky moment
            try:
                count, wrong = read(rows)
            except OSError as error:  # HDF5 itself read at the wrong position
                sys.exit(f"not yet: {error}: the workers read through one open file")
            print(f"epoch {epoch}: {count} rows, {wrong} of them wrong", flush=True)
            if wrong:
                problem = f"{wrong} rows are of another index"
                sys.exit(f"not yet: {problem}: the workers read through one open file")
    if shared:
        sys.exit("not yet: no row was wrong this time, but the workers read through one open file")
    if count != NUM_ROWS:
        sys.exit(f"not yet: there are {NUM_ROWS} rows, {count} came")
    print("passed: every worker opened the file itself")


if __name__ == "__main__":
    main()
