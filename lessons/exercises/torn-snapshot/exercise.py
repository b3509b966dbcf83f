"""Exercise torn-snapshot: the process is killed while it writes the only snapshot.

    python exercise.py          (or: stepladder learn check torn-snapshot)

A process saves step 1, and is killed (SIGKILL) in the middle of saving step 2. The next process
needs a snapshot to go on from."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

START = "fork" if sys.platform == "linux" else "spawn"


def save(state, path):
    """Write the snapshot to `path`, which may hold an older one."""
    torch.save(state, path)


# -- the check: leave it as it is ------------------------------------------------------------------


class Killed:
    """Kills the process when it is written."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


def save_one(path):
    save({"step": 1}, path)


def save_two(path):
    save({"weights": torch.zeros(1000), "step": Killed()}, path)


def main():
    context = mp.get_context(START)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "snapshot.pt")
        codes = []
        for target in (save_one, save_two):
            process = context.Process(target=target, args=(path,))
            process.start()
            process.join()
            codes.append(process.exitcode)
        size = path.stat().st_size if path.exists() else 0
        print(f"exit codes {codes}; {size} bytes in {path.name}")
        if codes != [0, -9]:
            sys.exit("not yet: the first process should save, and the second be killed meanwhile")
        try:
            step = torch.load(path)["step"]
        except (RuntimeError, EOFError, OSError) as error:
            print(f"torch.load: {error!r}")
            sys.exit("not yet: there is no snapshot to go on from")
        with path.open("rb") as old:  # as long as it is open, no other file has its number
            save({"step": 3}, path)
            is_written_over = os.path.samestat(os.fstat(old.fileno()), path.stat())
        if (step, torch.load(path)["step"]) != (1, 3):
            sys.exit(f"not yet: the file should have step 1 after the kill, then 3; it had {step}")
    if is_written_over:
        problem = "a kill between its first and its last byte leaves no snapshot"
        sys.exit(f"not yet: the bytes of {path.name} are written over, and {problem}")
    print("passed: the kill left the older snapshot complete")


if __name__ == "__main__":
    main()
