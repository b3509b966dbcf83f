"""Shared by the benchmark scripts: `stepladder` as a process of its own, as a user types it."""

import json
import subprocess
import sys
import tempfile
import time
from typing import Any


class Failed(Exception):
    """A command that gave no result: which one, and its last words."""


def result_of(*argv: object) -> tuple[dict[str, Any], float]:
    """`stepladder WORDS --json`: the object on its last line, and the seconds of the whole process.

    In an empty folder, which is gone afterwards: give absolute paths. Raises Failed.
    """
    command = [sys.executable, "-m", "stepladder", *map(str, argv), "--json"]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        seconds = time.perf_counter() - start
    if done.returncode != 0:
        last = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise Failed(
            f"stepladder {' '.join(command[3:])} ended with status {done.returncode}:\n{last}"
        )
    return json.loads(done.stdout.strip().splitlines()[-1]), seconds
