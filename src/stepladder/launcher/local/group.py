"""The ranks of one node, under a parent without torch: started together, looked at, ended together.

Ranks are forked from a server process that has imported torch and run none of it (a fork after a parallel
operation would hang), so N ranks cost one import, and a restart costs none.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from stepladder.core.address import is_bindable
from stepladder.core.errors import InputError
from stepladder.launcher.diagnose.cause import oom_kills
from stepladder.launcher.diagnose.hang import Explanation
from stepladder.launcher.local.monitor import SECONDS_BETWEEN_LOOKS, Watch
from stepladder.rank.exit_record import STOPPED
from stepladder.rank.lifecycle import RankError, rank_main
from stepladder.rank.preemption import SECONDS_TO_LEAVE, seconds_left

# torch._dynamo: the first optimizer of a process imports it, which takes longer than torch itself.
PRELOADED = ["stepladder.launcher.local.fork_server", "torch", "torch._dynamo", "stepladder.train.trainer"]
SECONDS_FOR_OTHERS = 0.5  # after the first failure: the cause may be a moment behind its consequences
SECONDS_TO_LEAVE_TOO = 10.0  # after a failure of all: the first rank may have a snapshot to write to its end
SECONDS_TO_STOP = 30.0


@dataclass(frozen=True)
class Outcome:
    """How a group of ranks ended. code: 0, 1, 2 or 75.  rank, signal, error: the first failure's.

    text: says it all, where none of these is the cause.  exit: the first failure's exit code, without an error.
    out_of_memory: the kernel killed for memory meanwhile.
    """

    code: int
    rank: int | None = None
    signal: int | None = None
    error: RankError | None = None
    text: str = ""
    exit: int | None = None
    out_of_memory: bool = False

    def describe(self) -> str:
        if self.text:
            return self.text
        if self.error is not None:
            at = "" if self.error.step is None else f" at step {self.error.step}"
            first = self.error.text.partition("\n")[0][:200]  # empty for a plain `assert`
            return f"rank {self.rank} failed{at}: {self.error.name}: {first}".rstrip(": ")
        if self.signal is not None:
            return f"rank {self.rank} was killed by {signal.Signals(self.signal).name}"
        return f"rank {self.rank} ended {'early' if self.exit is None else f'with exit code {self.exit}'}"


class LocalGroup:
    """The ranks of one node. timeout: seconds that one of them may stay stopped, or that nothing may move.

    explain_after: seconds without movement until it is said why; None: as `Watch` has it.  end_after: as there.
    """

    preloaded = PRELOADED

    def __init__(
        self,
        threads: int,
        timeout: float = 600.0,
        log_dir: Path | None = None,
        explain_after: float | None = None,
        end_after: float | None = None,
    ) -> None:
        self.timeout, self.log_dir = timeout, log_dir
        self.explain_after, self.end_after = explain_after, end_after
        self.scratch = Path(tempfile.mkdtemp(prefix="stepladder-"))
        # The fork server takes its environment from here; a rank cannot set it before torch is loaded.
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(self.preloaded)
        self.stop_asked: int = 0  # the signal that asked
        self.oom_kills = oom_kills()
        self._begin([], "0", 0)

    def warm_up(self) -> None:
        """Begin to import torch where ranks are forked from, while this process does something else."""
        forkserver.ensure_running()

    def run(self, work: Callable[..., Any], args: tuple[Any, ...], nproc: int, attempt: int) -> Outcome:
        """`work(*args)` on ranks 0 .. nproc-1, to their end. One failure ends all within seconds."""
        self.start(work, args, ranks_of_one_node(nproc, attempt), str(attempt))
        while not self.poll():
            pass
        return self.end()

    def _begin(self, numbers: list[int], attempt: str, world_size: int) -> None:
        self.files = [self.scratch / f"attempt-{attempt}.rank-{rank}" for rank in numbers]
        file = self.scratch / "progress"
        self.watch = Watch(file, numbers, self.timeout, self.explain_after, world_size, self.end_after)
        self.ranks: list[Any] = []
        self.left: dict[Any, Any] = {}
        self.deadline, self.told = math.inf, False

    def start(
        self, work: Callable[..., Any], args: tuple[Any, ...], envs: list[dict[str, str]], attempt: str
    ) -> None:
        """One rank for each environment, which says who it is. attempt: names their files."""
        self._begin([int(env["RANK"]) for env in envs], attempt, int(envs[0]["WORLD_SIZE"]))
        for place, (env, file) in enumerate(zip(envs, self.files, strict=True)):
            arguments = (work, args, env | self.watch.env(place), error_file(file), self._outputs(env, file))
            process = self.context.Process(target=rank_main, args=arguments)
            process.start()
            self.ranks.append(process)
            self.left[process.sentinel] = process  # before the next is started: a signal may be handed on now
            self.watch.pids.append(process.pid or 0)

    def _outputs(self, env: dict[str, str], file: Path) -> tuple[Path, Path] | None:
        """Where a rank's stdout and stderr go; None: to the launcher's own."""
        log = file.with_name(f"{file.name}.log")
        return None if env["RANK"] == "0" else (log, log)

    def poll(self) -> bool:
        """Wait a moment. True when all ranks have ended, or one has failed and the others had a moment."""
        if self.stop_asked:
            self.tell_to_stop()
        for process in self._wait(max(0.0, min(SECONDS_BETWEEN_LOOKS, self._time_left()))):
            process.join()
            if process.exitcode not in (0, STOPPED):
                wait = SECONDS_TO_LEAVE_TOO if self._ends_all(process) else SECONDS_FOR_OTHERS
                self.deadline = min(self.deadline, time.monotonic() + wait)
        if line := self.watch.look(self._alive()):
            say(line)
        return not self.left or self._time_left() <= 0 or self.watch.overdue

    def _ends_all(self, process: Any) -> bool:
        """Whether a rank's failure is one that the others have too, or notice, and then leave by themselves.

        Bad input is found by all at one place. A lost peer is another one's end, whose cause may not be written
        yet; and compiled code that aborts a rank breaks its connections, as another one may then say.
        """
        error = RankError.read(error_file(self.files[self.ranks.index(process)]))
        if error is None:
            return process.exitcode == -signal.SIGABRT
        return error.name == InputError.__name__ or (error.is_consequence and not error.is_timeout)

    def _wait(self, seconds: float) -> list[Any]:
        """The ranks that have ended, once there is one."""
        return [self.left.pop(sentinel) for sentinel in wait(list(self.left), seconds)]

    def _time_left(self) -> float:
        return self.deadline - time.monotonic()

    def _alive(self) -> list[int]:
        return [place for place, process in enumerate(self.ranks) if process.is_alive()]

    def tell_to_stop(self) -> None:
        """Let the ranks stop together at a step's end, with a snapshot; not for ever."""
        if not self.told:
            left = seconds_left() - SECONDS_TO_LEAVE  # of a batch job: a long step may use it up
            wait = max(SECONDS_TO_STOP, left) if math.isfinite(left) else SECONDS_TO_STOP
            self.told, self.deadline = True, min(self.deadline, time.monotonic() + wait)
            for process in self.left.values():
                with suppress(ProcessLookupError):  # it has ended this moment
                    os.kill(process.pid, signal.SIGTERM)

    def end(self) -> Outcome:
        """End the ranks that are left, and say how it went."""
        failed = [place for place, p in enumerate(self.ranks) if p.exitcode not in (None, 0, STOPPED)]
        errors = [e for file in self.files if (e := RankError.read(error_file(file)))]
        still = None
        if any(process.exitcode == -signal.SIGABRT for process in self.ranks):
            still = self.watch.explain(self._alive(), {e.rank: e.trace for e in errors})
        elif self.watch.overdue or self.watch.has_dumps or any(e.is_timeout for e in errors):
            still = self.watch.explanation or self.watch.explain(self._alive())
        self._kill()
        return self._outcome(failed, still)

    def _kill(self) -> None:
        """SIGTERM would be caught, or lost in a collective; snapshots are whole or absent, so SIGKILL is safe."""
        for process in self.ranks:
            if process.is_alive():
                process.kill()
        for process in self.ranks:
            process.join()

    def _outcome(self, failed: list[int], still: Explanation | None) -> Outcome:
        """The cause: bad input, a signal from outside, the earliest error, or who kept the others waiting."""
        codes, numbers = [process.exitcode for process in self.ranks], self.watch.ranks
        if not failed and not self.watch.overdue:
            late = "asked to stop, the ranks did not come to a step's end in time, and were ended"
            return Outcome(STOPPED) if STOPPED in codes else Outcome(1, text=late) if any(codes) else Outcome(0)
        errors = [e for file in self.files if (e := RankError.read(error_file(file)))]
        bad_input = [e for e in errors if e.name == InputError.__name__]
        if bad_input:
            return Outcome(2, bad_input[0].rank, None, bad_input[0])
        if still is not None and (self.watch.explanation is not None or self.watch.has_dumps):
            return Outcome(1, still.rank, text=still.sentence)  # said before anybody gave up, or left by NCCL
        causes = sorted((e for e in errors if not e.is_consequence), key=lambda e: e.time)
        if causes:
            return Outcome(1, causes[0].rank, None, causes[0])
        if failed and (found := self.watch.mismatch()):
            return Outcome(1, found.rank, text=f"{found.sentence}. Usual cause: {found.cause}")
        if still is not None and -signal.SIGABRT in codes and "aborted" in still.sentence:
            return Outcome(1, still.rank, text=f"{still.sentence}. Usual cause: {still.cause}")
        for place in failed:
            code = codes[place] or 0
            if code < 0:
                return Outcome(1, numbers[place], -code, out_of_memory=oom_kills() > self.oom_kills)
        if still is not None:
            return Outcome(1, still.rank, text=still.sentence)
        for place in failed:
            if numbers[place] not in {e.rank for e in errors}:
                return Outcome(1, numbers[place], exit=codes[place])
        return Outcome(1, numbers[failed[0]] if failed else None, None, next(iter(errors), None))

    def ask_to_stop(self, number: int, *_: Any) -> None:
        """The ranks will be told, and stop together at a step's end. A signal handler: it only sets a flag."""
        self.stop_asked = number

    def close(self) -> None:
        """Keep the ranks' output in the run directory where there is one, and leave nothing else behind."""
        self._kill()
        if self.log_dir is not None and self.log_dir.parent.is_dir():
            for path in self.scratch.glob("*.log"):
                if path.stat().st_size:
                    self.log_dir.mkdir(exist_ok=True)
                    with (
                        path.open("rb") as new,
                        (self.log_dir / path.name).open("ab") as log,
                    ):  # after earlier runs'
                        shutil.copyfileobj(new, log)
        shutil.rmtree(self.scratch, ignore_errors=True)


def ranks_of_one_node(nproc: int, attempt: int) -> list[dict[str, str]]:
    """The environment of ranks 0 .. nproc-1 of one node."""
    port = str(free_port())
    return [
        {
            "RANK": str(rank), "WORLD_SIZE": str(nproc), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": str(attempt),
        }
        for rank in range(nproc)
    ]  # fmt: skip


def error_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.error.json")


def say(text: str) -> None:
    """A line, or several as they are. In one piece: unbuffered, `print` writes a line and its end apart."""
    sys.stderr.write(f"stepladder: {text}\n" if "\n" not in text else f"{text}\n")
    sys.stderr.flush()


def free_port() -> int:
    """A TCP port that nobody listens on now, nor is given by Linux to others before rank 0 comes to it."""
    candidates = (20000 + secrets.randbelow(12000) for _ in range(1000))
    return next(port for port in candidates if is_bindable("", port))
