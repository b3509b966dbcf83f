"""Exercise hdf5-fork: DataLoader workers share one open file.

    python exercise.py          (or: stepladder learn check hdf5-fork)

The file is opened once, then two workers are forked and read through the handle they were born with. On many
set-ups nothing happens, on others a few rows are those of another index. `Handle` is h5py.File which knows
the process that opened it and refuses to serve another one.
"""

import os
import sys
import tempfile

import h5py
import numpy as np
from torch.utils.data import DataLoader, Dataset

NUM_ROWS = 256


class Handle(h5py.File):
    """An open file that serves only the process that opened it."""

    def __init__(self, path):
        super().__init__(path, "r")
        self.process = os.getpid()

    def __getitem__(self, name):
        if self.process != os.getpid():
            raise RuntimeError("handle of another process")
        return super().__getitem__(name)


class Rows(Dataset):
    """The rows of an HDF5 file."""

    def __init__(self, path):
        self.file = Handle(path)

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        return index, self.file["x"][index]


# -- the check: leave it as it is -------------------------------------------------------------------------


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/rows.h5"
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(NUM_ROWS)[:, None].repeat(64, 1)
        loader = DataLoader(Rows(path), batch_size=16, num_workers=2, multiprocessing_context="fork")
        open_before = h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE)
        seen, wrong = 0, 0
        try:
            for index, rows in loader:
                seen += len(index)
                wrong += int((rows != index[:, None]).any(1).sum())
        except RuntimeError as error:
            if "handle of another process" not in str(error):
                raise
            sys.exit("not yet: a worker reads through a handle that another process opened")
    print(f"{seen} rows, {wrong} of them wrong")
    if open_before:
        sys.exit("not yet: the file is open before there are workers, and forked workers inherit that")
    if seen != NUM_ROWS or wrong:
        sys.exit(f"not yet: {NUM_ROWS} rows, each with its own index in it; wrong are {wrong}")
    print("passed: every worker opened the file itself")


if __name__ == "__main__":
    main()
