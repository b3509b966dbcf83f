"""`stepladder.launch(fn, nproc=2)`: ranks from Python, also from a notebook's cell.

The ranks are started by a separate launcher process, `main` here: nothing of the caller's process,
which may have used torch already, is forked. Function, arguments and values travel in files in
memory, so that a value does not depend on a temporary directory with space for it.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle

from stepladder.core.arguments import validate_arguments
from stepladder.core.errors import BAD_INPUT, INTERRUPTED, InputError
from stepladder.core.process_count import parse_process_count, validate_process_count
from stepladder.core.tracebacks import OWN_PREFIXES
from stepladder.launcher.local.outcome import Failure, Raised
from stepladder.launcher.local.supervisor import run_local
from stepladder.launcher.options import Options
from stepladder.launcher.run import make_script_group
from stepladder.launcher.script import Script
from stepladder.launcher.stdin import END_WITH_STDIN_VARIABLE, end_with_stdin
from stepladder.rank.open_file import MemoryFile
from stepladder.rank.separate_training import ONE_TRAINING_VARIABLE, refuse_separate_training

LAUNCHER_CODE = f"import sys; from {__name__} import main; sys.exit(main(*sys.argv[1:]))"


class RankFailed(RuntimeError):
    """A rank of `launch` failed.

    The rank's own exception is the cause, if it could be pickled.

    Args:
        rank: The rank that failed, or None.
    """

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


@dataclass(frozen=True)
class _CallFiles:
    """The paths of a call's files, which its launcher and its ranks open.

    Args:
        call: The pickled sys.path, function and arguments.
        failure: The exception of the launcher for the caller, pickled.
        results: For each rank the pickled (value, None) or (None, exception). The file is empty if
            there is neither.
    """

    call: str
    failure: str
    results: list[str]


@dataclass(frozen=True)
class _FunctionCall(Script):
    """A function in a file, which the ranks run in place of a script.

    Args:
        name: The paths of its files, as JSON.
    """

    kind: str = "function"

    def work(self) -> int:
        """Call the function, and write its value or its exception to the rank's file."""
        self.become_main()
        refuse_separate_training("launch(..., independent=True)")
        files = _CallFiles(**json.loads(self.name))
        result_file = Path(files.results[int(os.environ["RANK"])])
        sys.path[:], call = pickle.loads(Path(files.call).read_bytes())
        function, args = cloudpickle.loads(call)
        try:
            value = function(*args)
        except Exception as error:
            with suppress(Exception):  # if it cannot be pickled, the caller gets its text only
                result_file.write_bytes(cloudpickle.dumps((None, error)))
            raise
        result_file.write_bytes(cloudpickle.dumps((value, None)))
        return 0


def _write_failure(path: str, failure: Failure) -> None:
    """Write a failure to a file, for the caller to raise, and print nothing."""
    trace = failure.error.trace if isinstance(failure, Raised) else ""
    text = "\n".join(filter(None, [failure.text, failure.cause, trace]))
    Path(path).write_bytes(pickle.dumps(RankFailed(text, failure.rank)))


@validate_arguments
def launch(
    function: Callable[..., Any],
    *args: Any,
    nproc: int | str = 1,
    timeout: float = 600.0,
    independent: bool = False,
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
        independent: Each rank trains a model of its own, without the others.

    Returns:
        The value of each rank; rank 0 comes first.

    Raises:
        RankFailed: A rank failed. The error has the traceback of the first rank that failed.
        InputError: `nproc` is not a number of processes, or is too large.
    """  # noqa: DOC501 - read_failure makes a RankFailed
    rank_count = parse_process_count(str(nproc))
    validate_process_count(rank_count)
    names = ["call", "failure", *(f"rank {rank}" for rank in range(rank_count))]
    memory_files = [MemoryFile(name) for name in names]  # each is closed with its object
    call_path, failure_path, *result_paths = [str(file.path) for file in memory_files]
    files = _CallFiles(call_path, failure_path, result_paths)
    Path(call_path).write_bytes(pickle.dumps((sys.path, cloudpickle.dumps((function, args)))))
    code = _run_launcher(files, rank_count, timeout, independent)
    if code:
        raise _read_failure(files, code)
    return [_read_pickle(path, (None, None))[0] for path in result_paths]


def _run_launcher(files: _CallFiles, rank_count: int, timeout: float, independent: bool) -> int:
    """Run the launcher process, print its output, and return its exit code."""
    # Where both packages are installed, their folders are in one folder.
    package_parents = {Path(prefix).parent: None for prefix in OWN_PREFIXES}
    users_path = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [*map(str, package_parents), users_path]))
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER_CODE, json.dumps(asdict(files)), str(timeout)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "PYTHONPATH": path,
            END_WITH_STDIN_VARIABLE: "1",
            ONE_TRAINING_VARIABLE: "" if independent else "1",
        },
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


def _read_failure(files: _CallFiles, code: int) -> RankFailed | InputError:
    """Return the exception for the caller.

    Args:
        files: The files of the call.
        code: The launcher's exit code, for a launcher that has written no failure.
    """
    text = f"the launcher ended with exit code {code}"
    failure: RankFailed | InputError = _read_pickle(files.failure, RankFailed(text))
    if isinstance(failure, RankFailed) and failure.rank is not None:
        with suppress(Exception):  # its class may be missing here: the text has its name
            _, failure.__cause__ = _read_pickle(files.results[failure.rank], (None, None))
    return failure


def _read_pickle(path: str, default: Any) -> Any:
    """Return the object in a file, or `default` if the file is empty."""
    data = Path(path).read_bytes()
    return cloudpickle.loads(data) if data else default


def main(files_json: str, timeout: str) -> int:
    """Run the ranks in the launcher process, and return its exit code."""
    end_with_stdin()
    files = _CallFiles(**json.loads(files_json))
    rank_count = len(files.results)
    group = make_script_group(
        _FunctionCall(files_json),
        Options(timeout=float(timeout)),
        rank_count,
        alone=rank_count == 1,
        report_failure=partial(_write_failure, files.failure),
    )
    try:
        return run_local(group, rank_count)
    except KeyboardInterrupt:
        return INTERRUPTED
    except InputError as error:
        Path(files.failure).write_bytes(pickle.dumps(error))
        return BAD_INPUT
