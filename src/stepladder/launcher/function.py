"""`stepladder.launch(fn, nproc=2)`: ranks from Python, also from a notebook's cell.

The ranks are started by a separate launcher process, `main` here: nothing of the caller's process,
which may have used torch already, is forked. Function, arguments and values travel in files of a
temporary folder.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle

from stepladder.core.errors import BAD_INPUT, InputError
from stepladder.core.process_count import parse_process_count, validate_process_count
from stepladder.core.scratch import get_scratch_folder
from stepladder.launcher.local.outcome import Failure, Raised
from stepladder.launcher.local.supervisor import run_local
from stepladder.launcher.options import Options
from stepladder.launcher.run import make_script_group
from stepladder.launcher.script import Script
from stepladder.launcher.stdin import END_WITH_STDIN_VARIABLE, end_with_stdin

LAUNCHER_CODE = f"import sys; from {__name__} import main; sys.exit(main(*sys.argv[1:]))"
FUNCTION_FILE = "function.pkl"
FAILURE_FILE = "failure.pkl"


class RankFailed(RuntimeError):
    """A rank of `launch` failed.

    The rank's own exception is the cause, if it could be pickled.

    Attributes:
        rank: The rank that failed, or None.
    """

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


@dataclass(frozen=True)
class FunctionCall(Script):
    """A function in a file, which the ranks run in place of a script.

    Attributes:
        name: The folder of the file.
    """

    kind: str = "function"

    def work(self) -> int:
        """Call the function, and write its value or its exception to the folder."""
        self.become_main()
        folder = Path(self.name)
        rank = os.environ["RANK"]
        sys.path[:], call = pickle.loads((folder / FUNCTION_FILE).read_bytes())
        function, args = cloudpickle.loads(call)
        try:
            value = function(*args)
        except Exception as error:
            with suppress(Exception):  # if it cannot be pickled, the caller gets its text only
                (folder / f"error-{rank}.pkl").write_bytes(cloudpickle.dumps(error))
            raise
        (folder / f"value-{rank}.pkl").write_bytes(cloudpickle.dumps(value))
        return 0


def write_failure(folder: Path, failure: Failure) -> None:
    """Write a failure to the folder, for the caller to raise, and print nothing."""
    trace = failure.error.trace if isinstance(failure, Raised) else ""
    text = "\n".join(filter(None, [failure.text, failure.cause, trace]))
    (folder / FAILURE_FILE).write_bytes(pickle.dumps(RankFailed(text, failure.rank)))


def launch(
    function: Callable[..., Any], *args: Any, nproc: int | str = 1, timeout: float = 600.0
) -> list[Any]:
    """Return the values of `function(*args)` on `nproc` new processes, in rank order.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set for each process. What the
    ranks print appears here.

    Args:
        function: The function to call. It may be defined in a notebook's cell, because the
            function, its arguments and its values are pickled by value (with cloudpickle).
        *args: The arguments of the function.
        nproc: A number of processes, or "auto", "gpu" or "cpu".
        timeout: The number of seconds that a rank may stay stopped.

    Returns:
        The value of each rank; rank 0 comes first.

    Raises:
        RankFailed: A rank failed. The error has the traceback of the first rank that failed.
        InputError: `nproc` is not a number of processes, or is too large.
    """  # noqa: DOC501 - read_failure makes a RankFailed
    rank_count = parse_process_count(str(nproc))
    validate_process_count(rank_count)
    with tempfile.TemporaryDirectory(dir=get_scratch_folder()) as folder_name:
        folder = Path(folder_name)
        call = cloudpickle.dumps((function, args))
        (folder / FUNCTION_FILE).write_bytes(pickle.dumps((sys.path, call)))
        code = run_launcher(folder, rank_count, timeout)
        if code:
            raise read_failure(folder, code)
        return [read_pickle(folder / f"value-{rank}.pkl") for rank in range(rank_count)]


def run_launcher(
    folder: Path,
    rank_count: int,
    timeout: float,
) -> int:
    """Run the launcher process, print its output, and return its exit code."""
    package_parent = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH", "")]))
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER_CODE, str(folder), str(rank_count), str(timeout)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": path, END_WITH_STDIN_VARIABLE: "1"},
        start_new_session=True,
    ) as launcher:
        try:
            assert launcher.stdout is not None
            for line in launcher.stdout:
                print(line.decode(errors="replace"), end="", flush=True)
        except BaseException:  # the cell was interrupted
            launcher.kill()  # its ranks die with it
            raise
    return launcher.returncode


def read_failure(folder: Path, code: int) -> RankFailed | InputError:
    """Return the exception for the caller.

    Args:
        folder: The folder of the launcher.
        code: The launcher's exit code, for a launcher that has written no failure.
    """
    failure: RankFailed | InputError | None = read_pickle(folder / FAILURE_FILE)
    if failure is None:
        failure = RankFailed(f"the launcher ended with exit code {code}")
    if isinstance(failure, RankFailed):
        failure.__cause__ = read_pickle(folder / f"error-{failure.rank}.pkl")
    return failure


def read_pickle(path: Path) -> Any:
    """Return an object from a file, or None if the file or the object's class is missing."""
    with suppress(Exception):
        return cloudpickle.loads(path.read_bytes())


def main(folder_name: str, nproc: str, timeout: str) -> int:
    """Run the ranks in the launcher process, and return its exit code."""
    end_with_stdin()
    folder = Path(folder_name)
    rank_count = int(nproc)
    options = Options(timeout=float(timeout))
    group = make_script_group(
        FunctionCall(folder_name),
        options,
        rank_count,
        alone=rank_count == 1,
        report_failure=partial(write_failure, folder),
    )
    try:
        return run_local(group, rank_count)
    except InputError as error:
        (folder / FAILURE_FILE).write_bytes(pickle.dumps(error))
        return BAD_INPUT
