"""`stepladder.launch(fn, nproc=2)`: ranks from Python, a notebook's cell included.

The ranks belong to a launcher process of their own, `main` here: nothing of a notebook's process,
which may have run torch already, is forked. What travels lies in a folder between them."""

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
from stepladder.launcher.run import script_group
from stepladder.launcher.script import Script
from stepladder.launcher.stdin import ENDS_WITH_STDIN, end_with_stdin

MAIN = f"import sys; from {__name__} import main; sys.exit(main(*sys.argv[1:]))"
FUNCTION, FAILURE = "function.pkl", "failure.pkl"


class RankFailed(RuntimeError):
    """A rank of `launch` failed. rank: which, or None.  Its own exception is the cause, where it
    could travel.
    """

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


@dataclass(frozen=True)
class Call(Script):
    """A function in a file, as what the ranks run. name: the folder."""

    kind: str = "function"

    def work(self) -> int:
        self.become_main()
        folder, rank = Path(self.name), os.environ["RANK"]
        sys.path[:], travelling = pickle.loads((folder / FUNCTION).read_bytes())
        function, args = cloudpickle.loads(travelling)
        try:
            value = function(*args)
        except Exception as error:
            with suppress(Exception):  # not every exception can travel: its text does
                (folder / f"error-{rank}.pkl").write_bytes(cloudpickle.dumps(error))
            raise
        (folder / f"value-{rank}.pkl").write_bytes(cloudpickle.dumps(value))
        return 0


def leave_failure(folder: Path, failed: Failure) -> None:
    """For the caller, instead of showing it here."""
    trace = failed.error.trace if isinstance(failed, Raised) else ""
    text = "\n".join(filter(None, [failed.text, failed.cause, trace]))
    (folder / FAILURE).write_bytes(pickle.dumps(RankFailed(text, failed.rank)))


def launch(
    function: Callable[..., Any], *args: Any, nproc: int | str = 1, timeout: float = 600.0
) -> list[Any]:
    """`function(*args)` on `nproc` new processes; their values, in rank order.

    function: may be of a notebook's cell; it travels by value (cloudpickle), and so do its
    arguments and values. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set for
    each; what ranks print appears here. nproc: a number, or "auto", "gpu", "cpu".  timeout: seconds
    that a rank may stay stopped. Raises RankFailed with the first failing rank's traceback,
    InputError where `nproc` is none, or too many."""
    ranks = parse_process_count(str(nproc))
    validate_process_count(ranks)
    with tempfile.TemporaryDirectory(dir=get_scratch_folder()) as place:
        folder = Path(place)
        (folder / FUNCTION).write_bytes(
            pickle.dumps((sys.path, cloudpickle.dumps((function, args))))
        )
        house = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [house, os.environ.get("PYTHONPATH", "")]))
        with subprocess.Popen(
            [sys.executable, "-c", MAIN, place, str(ranks), str(timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, ENDS_WITH_STDIN: "1"},
            start_new_session=True,
        ) as launcher:
            try:
                assert launcher.stdout is not None
                for line in launcher.stdout:
                    print(line.decode(errors="replace"), end="", flush=True)
            except BaseException:  # the cell was interrupted
                launcher.kill()  # its ranks die with it
                raise
        if launcher.returncode:
            raise failure(folder, launcher.returncode)
        return [read_pickle(folder / f"value-{rank}.pkl") for rank in range(ranks)]


def failure(folder: Path, code: int) -> RankFailed | InputError:
    """The exception that tells the caller."""
    failed = read_pickle(folder / FAILURE) or RankFailed(
        f"the launcher ended with exit code {code}"
    )
    if isinstance(failed, RankFailed):
        failed.__cause__ = read_pickle(folder / f"error-{failed.rank}.pkl")
    return failed


def read_pickle(path: Path) -> Any:
    """None where there is none, or its class is not known here."""
    with suppress(Exception):
        return cloudpickle.loads(path.read_bytes())


def main(place: str, nproc: str, timeout: str) -> int:
    """The launcher process."""
    end_with_stdin()
    folder, ranks = Path(place), int(nproc)
    call = Call(place)
    group = script_group(
        call,
        Options(timeout=float(timeout)),
        ranks,
        alone=ranks == 1,
        report_failure=partial(leave_failure, folder),
    )
    try:
        return run_local(group, ranks)
    except InputError as error:
        (folder / FAILURE).write_bytes(pickle.dumps(error))
        return BAD_INPUT
