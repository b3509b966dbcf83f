"""`stepladder run`: ranks that are a script. One node under our own parent; several under torchelastic's agent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from stepladder.core.address import is_bindable, parse_endpoint
from stepladder.core.cores import count_cores, process_range, read_range
from stepladder.core.errors import InputError
from stepladder.core.world import World
from stepladder.launcher.diagnose.hang import Explanation
from stepladder.launcher.local.group import LocalGroup, Outcome, say
from stepladder.launcher.local.output import Output
from stepladder.launcher.local.ranks import Judge, run_local
from stepladder.launcher.nodes.rendezvous_flags import RendezvousFlags
from stepladder.launcher.options import Options
from stepladder.launcher.script import Script
from stepladder.launcher.topology import Topology

SECONDS_TO_END = 5.0  # after SIGTERM, for ranks that another one's failure ends
ONLY_FORWARDED = signal.SIGUSR1, signal.SIGUSR2  # Slurm's warnings: they end nothing


class ScriptGroup(LocalGroup):
    """Ranks that are a script. Each leads a session of its own, so that what it starts ends with it."""

    def __init__(self, script: Script, options: Options, nproc: int, alone: bool) -> None:
        # torch._dynamo: the first optimizer of a process imports it, which takes longer than torch itself.
        self.preloaded = ["stepladder.launcher.local.fork_server"] + [
            "torch",
            "torch._dynamo",
        ] * script.imports_torch
        os.environ["PYTHONUNBUFFERED"] = "1"
        self.script, self.options = script, options
        log_dir = options.log_dir
        self.output = Output(not alone, log_dir, options.is_shown) if log_dir or not alone else None
        self.asked = 0.0  # when the last signal came
        threads, end_after = max(1, count_cores() // nproc), options.end_after
        super().__init__(threads, options.timeout, explain_after=options.explain_after, end_after=end_after)

    def start(self, work: Any, args: Any, envs: list[dict[str, str]], attempt: str) -> None:
        super().start(work, args, [self._env(env) for env in envs], attempt)

    def _env(self, env: dict[str, str]) -> dict[str, str]:
        """What torchrun sets besides."""
        run_id = self.options.run_id
        alone = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
        env = alone | {
            "ROLE_NAME": self.options.role, "ROLE_RANK": env["RANK"], "ROLE_WORLD_SIZE": env["WORLD_SIZE"],
            "TORCHELASTIC_MAX_RESTARTS": str(self.options.max_restarts), "TORCHELASTIC_RUN_ID": run_id,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        } | env  # fmt: skip
        if self.options.master_port is not None and env["GROUP_WORLD_SIZE"] == "1":
            env["MASTER_PORT"] = str(self.options.master_port)
        if self.options.virtual_local_rank:  # each rank sees one GPU, as its first
            place = int(env["LOCAL_RANK"])
            gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            env |= {
                "LOCAL_RANK": "0",
                "CUDA_VISIBLE_DEVICES": gpus[place] if place < len(gpus) > 1 else str(place),
            }
        return env

    def _outputs(self, env: dict[str, str], file: Path) -> tuple[Path, Path] | None:
        if self.output is None:
            return None
        return self.output.open(file, int(env["RANK"]), int(env["LOCAL_RANK"]))

    def _wait(self, seconds: float) -> list[Any]:
        """What the ranks print meanwhile is shown, and does not shorten the wait: looks at them are counted."""
        until, ready = time.monotonic() + seconds, list[Any]()
        while not any(one in self.left for one in ready) and (left := until - time.monotonic()) >= 0:
            pipes = self.output.streams if self.output else {}
            ready = wait([*self.left, *pipes], left)
            if self.output:
                self.output.read(ready)
            if not ready:
                break
        return [self.left.pop(sentinel) for sentinel in ready if sentinel in self.left]

    def ask_to_stop(self, number: int, *_: Any) -> None:
        """A second Ctrl-C ends the wait for the ranks."""
        if self.stop_asked == number == signal.SIGINT and time.monotonic() - self.asked > 0.5:
            self.deadline = 0.0
        self.stop_asked, self.asked = number, time.monotonic()

    def tell_to_stop(self) -> None:
        if not self.told:
            self.told, self.deadline = True, min(self.deadline, time.monotonic() + self.options.shutdown_timeout)
            self.forward(self.stop_asked)

    def forward(self, number: int, *_: Any) -> None:
        """Hand a signal on to the ranks."""
        for process in self.left.values():
            with suppress(ProcessLookupError):  # it has ended this moment
                os.kill(process.pid, number)

    def _kill(self) -> None:
        """SIGTERM first, for scripts with something to put in order; then what is left of their sessions."""
        if not self.told:
            self.forward(signal.SIGTERM)
            self.deadline = time.monotonic() + SECONDS_TO_END
        while self.left and self._time_left() > 0:
            for process in self._wait(max(0.0, min(0.2, self._time_left()))):
                process.join()
        if self.told or any(process.exitcode for process in self.ranks):
            for process in self.ranks:  # also those that have ended: what they started may not have
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        super()._kill()
        self.left.clear()
        if self.output:
            self.output.drain()
            self.output.close()

    def _outcome(self, failed: list[int], still: Explanation | None) -> Outcome:
        outcome = super()._outcome(failed, still)
        if self.stop_asked and outcome.code == 1:
            return Outcome(1, text=f"stopped by {signal.Signals(self.stop_asked).name}")
        return outcome


class ScriptJudge(Judge):
    """A script's steps are not known, so a bug cannot be told from a fault: --max-restarts alone counts."""

    resuming = ""

    def is_bug(self, outcome: Outcome) -> bool:
        self.show(outcome)
        return False


def run_script(script: Script, options: Options, topology: Topology, flags: RendezvousFlags) -> int:
    """`script` on this machine, alone or as one node of several. Returns the exit code. Raises InputError."""
    nproc, nodes = process_range(topology.nproc or "1"), read_range("--nodes", topology.nodes or "1")
    if nodes[1] > 1 and nproc[0] < nproc[1]:
        raise InputError(
            f"--nproc {topology.nproc} with --nodes {topology.nodes}: only one of them can be a range", "--nproc N"
        )
    if nodes[1] == 1:
        world = (
            World.detect() if not topology.nodes and not topology.nproc and "RANK" not in os.environ else World()
        )
        return be_rank(script, world) if world.world_size > 1 else run_on_one_node(script, options, nproc)
    spec = flags.rendezvous(topology, nodes, options)
    group = ScriptGroup(script, options, nproc[1], alone=False)
    with handling(group):
        forkserver.ensure_running()  # imports torch while this process does
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost store would print a page of C++ frames
        from stepladder.launcher.nodes.scripts import run_on_several_nodes  # torchelastic is torch

        return run_on_several_nodes(group, spec, nproc[1])


def run_on_one_node(script: Script, options: Options, nproc: tuple[int, int]) -> int:
    port = options.master_port
    if port is not None and not is_bindable("", port):
        raise InputError(f"--master-port {port} is in use", "leave it out for a free one, or another number")
    group = ScriptGroup(script, options, nproc[1], alone=nproc[1] == 1)
    with handling(group):
        return run_local(group, script.work, (), nproc[1], options.max_restarts, nproc[0], ScriptJudge())


def be_rank(script: Script, world: World) -> int:
    """`srun -n N stepladder run SCRIPT`: Slurm has started the ranks; the script asks for torchrun's variables."""
    if world.is_first:
        say(world.describe())
    host, port = parse_endpoint(world.init_method.removeprefix("tcp://"))
    os.environ |= {
        "RANK": str(world.rank), "WORLD_SIZE": str(world.world_size),
        "LOCAL_RANK": str(world.local_rank), "LOCAL_WORLD_SIZE": str(world.ranks_per_node),
        "MASTER_ADDR": host, "MASTER_PORT": str(port), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    command = script.command()
    os.execvp(command[0], command)


@contextmanager
def handling(group: ScriptGroup) -> Iterator[None]:
    """Signals reach the ranks; at the block's end nothing of the group is left."""
    wanted = dict.fromkeys(ONLY_FORWARDED, group.forward) | dict.fromkeys(group.options.signals, group.ask_to_stop)
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        group.close()
        for number, handler in before.items():
            signal.signal(number, handler)
