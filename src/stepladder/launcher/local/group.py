"""The ranks of one node, under a parent without torch: started together, looked at, ended together.

Ranks are forked from a server process that has imported torch and run none of it (a fork after a
parallel operation would hang), so N ranks cost one import, and a restart costs none."""

from __future__ import annotations

import fcntl
import math
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from stepladder.core.address import free_port, on_this_machine
from stepladder.core.console import say
from stepladder.core.errors import DONE, is_failure
from stepladder.core.scratch import scratch
from stepladder.core.surroundings import refuse_few_files, refuse_open_fork_server
from stepladder.launcher.diagnose.hang import Explanation, explain
from stepladder.launcher.diagnose.seen import Rank
from stepladder.launcher.local.council import Council
from stepladder.launcher.local.group_spec import GroupSpec
from stepladder.launcher.local.judge import Judge
from stepladder.launcher.local.monitor import SECONDS_BETWEEN_LOOKS, Limits, Monitor
from stepladder.launcher.local.outcome import Evidence, Outcome, conclude, oom_kills
from stepladder.launcher.local.rank_process import RankProcess, start_process
from stepladder.launcher.local.server_watch import ServerWatch, continue_server
from stepladder.launcher.local.session_guard import SessionGuard
from stepladder.launcher.local.survivors import Survivors
from stepladder.rank.error_record import ErrorKind, RankError
from stepladder.rank.keepsake import new_mailbox, take_all
from stepladder.rank.lifecycle import Shared, rank_main
from stepladder.rank.membership import JOINS
from stepladder.rank.open_file import MemoryFile, OpenFile
from stepladder.rank.segment import new_segment

FORK_SERVER = "stepladder.launcher.local.fork_server"
SECONDS_BETWEEN_WORDS = 0.02  # of other nodes
SECONDS_FOR_OTHERS = (
    0.5  # after the first failure: the cause may be a moment behind its consequences
)
SECONDS_FOR_ALL_TO_LEAVE = (
    10.0  # after a failure of all: the first rank may have a snapshot to write to its end
)
SECONDS_TO_END = 5.0  # after SIGTERM, for ranks of a script that another one's failure ends


class LocalGroup:
    """The ranks of one node. work: what each of them does; it gives their exit code."""

    def __init__(
        self,
        work: Callable[[], Any],
        threads: int,
        limits: Limits | None = None,
        spec: GroupSpec | None = None,
    ) -> None:
        self.work, self.limits, self.spec = work, limits or Limits(), spec or GroupSpec()
        self.judge, self.output = Judge(has_steps=not self.spec.is_script), self.spec.output
        refuse_open_fork_server()
        self.scratch = Path(tempfile.mkdtemp(dir=scratch()))
        # The fork server takes its environment from here; a rank cannot set it before torch is
        # loaded.
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([FORK_SERVER, *self.spec.preloaded])
        self.mailbox = new_mailbox()  # holds the lock of the run directory while no rank does
        self.segment: OpenFile | None = None  # that its ranks share
        self.stop_asked, self.asked_at = 0, 0.0  # the signal that asked, and when
        self.oom_kills = oom_kills()
        self.least: int | None = None  # go on without a rank that fails again, with so many or more
        self.council: Council | None = None  # of several nodes, at each start
        self.server_watch = ServerWatch()
        self.session_guard: SessionGuard | None = None  # of a script's ranks
        self._begin(range(0), 0)

    def run(self, nproc: int, attempt: int = 0) -> Outcome:
        """Ranks 0 .. nproc-1 of this node alone, to their end."""
        self.start_alone(nproc, attempt)
        while not self.poll():
            pass
        return self.end()

    def start_alone(self, nproc: int, attempt: int = 0) -> None:
        self.start(
            range(nproc),
            str(attempt),
            {
                "WORLD_SIZE": str(nproc),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                **on_this_machine(),
            },
        )

    def _begin(self, ranks: Sequence[int], world_size: int) -> None:
        self.monitor = Monitor(self.scratch / "progress", ranks, self.limits, world_size)
        self.errors = MemoryFile("errors")  # of these ranks
        self.members: list[RankProcess] = []
        self.left: dict[Any, RankProcess] = {}  # by what becomes ready when it ends
        self.deadline, self.told = math.inf, False
        self.survivors = Survivors(self.judge, self._replace, self._ask_to_leave, self.council)
        self.survivors.least, self.survivors.let_go = self.least, self.let_go

    def start(
        self, ranks: Sequence[int], attempt: str, shared: dict[str, str], joins: bool = False
    ) -> None:
        """This node's ranks. attempt: names their files.  shared: the variables that all ranks are
        given alike.

        joins: those of other nodes train already.
        """
        refuse_few_files(len(ranks))
        world_size = int(shared["WORLD_SIZE"])
        self._begin(ranks, world_size)
        self.segment = new_segment(world_size) if world_size == len(ranks) and not joins else None
        self.attempt, self.shared = attempt, shared | {"LOCAL_WORLD_SIZE": str(len(ranks))}
        for local_rank, rank in enumerate(ranks):
            own = self._of_one_that_joins(rank) if joins else {"RANK": str(rank)}
            self.members.append(member := self._start_rank(rank, local_rank, own))
            self.monitor.pids.append(member.pid)
            if joins:
                self.survivors.joining[rank] = member

    def _start_rank(self, rank: int, local_rank: int, own: dict[str, str]) -> RankProcess:
        name = f"attempt-{self.attempt}.rank-{rank}"
        given = {"LOCAL_RANK": str(local_rank), **self.shared, **own}
        env = self.spec.environment(given) | self.monitor.env(rank, local_rank)
        with self.survivors.wire(rank) as wire, self.output.open(name, rank, local_rank) as pipes:
            theirs = wire if self.spec.goes_on else None
            args = (
                self.work,
                env,
                self.errors.path,
                pipes,
                Shared(self.mailbox, theirs, self.segment),
            )
            process = self.context.Process(target=rank_main, args=(*args, self.spec.is_script))
            continue_server()
            start_process(process)
        member = RankProcess(rank, local_rank, process, self.errors.path)
        self.left[process.sentinel] = member  # before the next: a signal may be handed on now
        if self.spec.is_script:
            self.session_guard = self.session_guard or SessionGuard(self.context)
            self.session_guard.add(member.pid)
        return member

    def poll(self) -> bool:
        """Wait a moment. True when all ranks have ended, or one has failed and the others had a
        moment.
        """
        if self.stop_asked:
            self.tell_to_stop()
        for member in self._wait():
            self.monitor.ended[self.members.index(member)] = member.process.exitcode
            if is_failure(member.process.exitcode) and not self._do_without(member):
                self.end_within(SECONDS_FOR_ALL_TO_LEAVE if member.ends_all else SECONDS_FOR_OTHERS)
        if not self.survivors.look({one.rank for one in self.left.values()}):
            self.end_within(0)
        if not self.survivors.waits and (line := self.monitor.look(self._alive())):
            say(line)
        if line := self.server_watch.look():
            say(line)
        if self.monitor.has_begun:
            self.output.begin()
        return (
            not (self.left or self.survivors.fallen)
            or self._time_left() <= 0
            or self.monitor.overdue
        )

    def _wait(self) -> list[RankProcess]:
        """Those that have ended, once there is one, for a moment at most.

        What ranks print meanwhile is shown, and does not shorten the wait: looks at them are
        counted."""
        longest = SECONDS_BETWEEN_WORDS if self.survivors.waits else SECONDS_BETWEEN_LOOKS
        seconds, ready = max(0.0, min(longest, self._time_left())), list[Any]()
        until = time.monotonic() + seconds
        while (
            not any(one in self.left or one in self.survivors.heard for one in ready)
            and (left := until - time.monotonic()) >= 0
        ):
            ready = wait([*self.left, *self.output.streams, *self.survivors.heard], left)
            self.output.read(ready)
            self.survivors.hear(ready)
            if not ready:
                break
        ended = [self.left.pop(sentinel) for sentinel in ready if sentinel in self.left]
        for member in ended:
            member.process.join()
        return ended

    def _do_without(self, member: RankProcess) -> bool:
        """Whether the others may go on in place."""
        if not self.spec.goes_on or self.stop_asked or self.deadline < math.inf:
            return False
        if self.monitor.mismatch() is not None:  # the job's code is wrong, on all ranks
            return False
        return self.survivors.go_on_without(member, {one.rank for one in self.left.values()})

    def _replace(self, member: RankProcess, rank: int) -> RankProcess:
        """A new process in a lost one's place. It gets the state from the others, not from a
        snapshot.
        """
        started = self._start_rank(rank, member.local_rank, self._of_one_that_joins(rank))
        self.members[member.local_rank] = started
        self.monitor.replace(member.local_rank, rank, started.pid)
        return started

    @staticmethod
    def _of_one_that_joins(rank: int) -> dict[str, str]:
        return {"RANK": "0", "WORLD_SIZE": "1", JOINS: str(rank)}

    def _ask_to_leave(self, rank: int) -> None:
        self.monitor.ask_to_regroup(
            next(one.local_rank for one in self.members if one.rank == rank)
        )

    def end_within(self, seconds: float) -> None:
        """What is left of the group after so many seconds is overdue."""
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def _time_left(self) -> float:
        return self.deadline - time.monotonic()

    def _alive(self) -> list[int]:
        """Local ranks."""
        return [
            local_rank
            for local_rank, member in enumerate(self.members)
            if member.process.is_alive()
        ]

    def ask_to_stop(self, number: int, *_: Any) -> None:
        """Ranks will be told, and stop together at a step's end. A signal handler: it only sets
        flags.

        A second Ctrl-C ends the wait for ranks that do not see it themselves.
        """
        again = (
            self.stop_asked == number == signal.SIGINT and time.monotonic() - self.asked_at > 0.5
        )
        if again and self.spec.is_script:
            self.deadline = 0.0
        self.stop_asked, self.asked_at = number, time.monotonic()

    def tell_to_stop(self) -> None:
        """Let the ranks stop, not for ever."""
        if not self.told:
            self.told = True
            self.end_within(self.spec.patience())
            self.forward(self.stop_asked if self.spec.is_script else signal.SIGTERM)

    def forward(self, number: int, *_: Any) -> None:
        for member in self.left.values():
            member.send(number)

    def end(self) -> Outcome:
        """End the ranks that are left, and say how it went."""
        codes = {member.rank: member.process.exitcode for member in self._counted}
        failed = any(is_failure(code) for code in codes.values() if code is not None)
        explanation = self._explain() if failed or self.monitor.overdue else None
        self._kill()
        return conclude(
            Evidence(
                codes,
                self._errors(),
                explanation,
                was_first=self.monitor.explanation is not None or self.monitor.has_dumps,
                mismatch=self.monitor.mismatch() if failed else None,
                out_of_memory=oom_kills() > self.oom_kills,
                interrupted_by=self.stop_asked if self.spec.is_script else 0,
            )
        )

    def _errors(self) -> list[RankError]:
        return [error for member in self._counted if (error := member.error)]

    @property
    def _counted(self) -> list[RankProcess]:
        """Those whose end is everybody's."""
        return [member for member in self.members if member.rank not in self.survivors.lost]

    def _explain(self) -> Explanation | None:
        """Why nothing moved, where the end may come of that."""
        errors, codes = self._errors(), [member.process.exitcode for member in self.members]
        left = DONE in codes and any(error.is_consequence for error in errors)
        if left or -signal.SIGABRT in codes:
            return explain(self.seen(), self.monitor.all_here)
        gave_up = self.monitor.has_dumps or any(
            error.kind == ErrorKind.PEER_SILENT for error in errors
        )
        if self.monitor.overdue or gave_up:
            return self.monitor.explanation or self.monitor.explain(self._alive())
        return None

    def seen(self) -> list[Rank]:
        """The ranks, where they are or have ended."""
        return self.monitor.look_into(
            self._alive(), {error.rank: error.trace for error in self._errors()}
        )

    def _kill(self) -> None:
        """After it, no rank is left."""
        if self.spec.is_script:
            self._end_sessions()
        for member in self.members:
            if member.process.is_alive():
                member.process.kill()
        for member in self.members:
            member.process.join()
        self.left.clear()
        if self.segment is not None:
            self.segment.close()
            self.segment = None
        self.survivors.close()
        self.output.end_attempt()

    def _end_sessions(self) -> None:
        """Scripts are asked first; what one has started ends with it, unless all went well."""
        if not self.told and self.left:
            self.forward(signal.SIGTERM)
            self.deadline = time.monotonic() + SECONDS_TO_END
        while self.left and self._time_left() > 0:
            self._wait()
        if self.told or any(member.process.exitcode for member in self.members):
            for (
                member
            ) in self.members:  # also those that have ended: what they started may not have
                member.send(signal.SIGKILL, to_session=True)

    def let_go(self) -> None:
        """Release the locks that ranks of this group held: others may take them."""
        for file in take_all(self.mailbox):
            fcntl.flock(file, fcntl.LOCK_UN)  # also where a forked worker that hangs has it open
            os.close(file)

    def close(self) -> None:
        """Leave nothing behind but the ranks' output, where it is kept."""
        if self.left:
            self._kill()
        self.let_go()
        for end in self.mailbox:
            end.close()
        self.output.close()
        if self.session_guard is not None:
            self.session_guard.close()
        shutil.rmtree(self.scratch, ignore_errors=True)
