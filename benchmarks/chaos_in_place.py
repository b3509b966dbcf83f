"""python benchmarks/chaos_in_place.py [--kills N] [--nodes N] [--write]

Ranks are killed, and the others go on in place: how long until the next step, and is it still the
unbroken run?

The job is chaos.py's. Each run on two, three or four processes loses one rank after the other, any
of them, with `--on-loss continue`; then runs on three nodes (three agents on this machine) lose a
node."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median

import psutil
from chaos_runs import Command, Trial, examine, keep_if_bad, started, unbroken, verdict
from report import Report, table

from stepladder.storage.audit import audit

EPOCHS = 30
KILLS_PER_RUN = 6
MEDIAN_WAIT = 0.15
SECONDS_TO_GO_ON = 20.0
SECONDS_TO_JOIN = 20.0


@dataclass
class Survived:
    """One run. waits: seconds from each kill until a step after it was done; inf where none came.
    groups: until the others had formed a group.  joins: until another process was in the lost one's
    place."""

    trial: Trial
    kills: int
    waits: list[float] = field(default_factory=list)
    groups: list[float] = field(default_factory=list)
    joins: list[float] = field(default_factory=list)
    superseded: int = 0
    attempts: int = 1

    @property
    def is_whole(self) -> bool:
        return self.trial.is_whole and not self.superseded and self.attempts == 1

    def keep_folder(self) -> None:
        self.trial.keep_folder()


def killed_in_turn(folder: Path, reference: str, nproc: int, kills: int) -> Survived:
    """A run that loses `kills` ranks, each when the one before has been replaced."""
    began = time.monotonic()
    killed = 0.0
    waits = list[float]()
    groups = list[float]()
    joins = list[float]()
    flags = "--nproc", nproc, "--on-loss", "continue"
    with started(folder, *flags, epochs=EPOCHS) as command:
        for number in range(kills):
            joined = lambda: command.err.read_text().count("has joined")  # noqa: E731
            deadline = time.monotonic() + SECONDS_TO_JOIN
            command.wait_for(lambda: joined() >= number or time.monotonic() > deadline)  # noqa: B023
            if number and joined() >= number:
                joins.append(time.monotonic() - killed)
            step = command.step() + random.randrange(1, 12)
            command.wait_for(lambda: len(command.ranks()) == nproc and command.step() >= step)  # noqa: B023
            if not command.running:
                break
            killed = time.monotonic()
            kill = random.choice(command.ranks()).kill
            group, step_done = seconds_to_go_on(command, kill)
            groups.append(group)
            waits.append(step_done)
        trial = examine(command, reference, began)
        audited = audit(command.run_dir)
        return Survived(
            trial, len(waits), waits, groups, joins, audited.superseded, audited.attempts
        )


def node_killed(folder: Path, reference: str) -> Survived:
    """A run on three nodes, agents on this machine, that loses one with all its ranks, and not the
    rendezvous.
    """
    began = time.monotonic()
    flags = "--nodes", "1:3", "--local-addr", "127.0.0.1", "--timeout", 60
    with ExitStack() as stack:
        agents = [stack.enter_context(started(folder, *flags, epochs=EPOCHS)) for _ in range(3)]
        run_dir = agents[0].run_dir
        meeting = lambda: sum("nodes 3, ranks 3" in agent.err.read_text() for agent in agents)  # noqa: E731
        agents[0].wait_for(lambda: meeting() and max(agent.step() for agent in agents) > 20)
        port = json.loads((run_dir / "rendezvous.json").read_text())["port"]
        victim = random.choice([agent for agent in agents if not serves(agent.process, port)])
        staying = next(agent for agent in agents if agent is not victim)
        group, wait = seconds_to_go_on(staying, victim.process.kill)
        trials = [examine(agent, reference, began) for agent in agents if agent is not victim]
        audited = audit(run_dir)
        return Survived(trials[0], 1, [wait], [group], [], audited.superseded, audited.attempts)


def serves(process: psutil.Process, port: int) -> bool:
    """Whether it listens there."""
    connections = process.net_connections("tcp")
    return any(
        connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        for connection in connections
    )


def seconds_to_go_on(command: Command, kill: Callable[[], None]) -> tuple[float, float]:
    """Kill; until some other rank is in a new group, and until it has done a whole step with the
    others there.

    Each rank's ledger has a line for the new group, one when it has computed its share of the next
    step, and one for the step after, which it comes to when that next step is done."""
    ends = {path: path.stat().st_size for path in command.run_dir.glob("ledger/*.jsonl")}
    at = time.monotonic()
    group = inf
    with suppress(psutil.NoSuchProcess):
        kill()
    while command.running and time.monotonic() - at < SECONDS_TO_GO_ON:
        for path in command.run_dir.glob("ledger/*.jsonl"):
            with path.open() as file:
                file.seek(ends.get(path, 0))  # a rank killed in the first step may have had no file
                _, changed, after = file.read().partition('"group"')
            if changed:
                group = min(group, time.monotonic() - at)
            if changed and after.count("\n") >= 3:
                return group, time.monotonic() - at
        time.sleep(0.001)
    return group, inf


def row(name: str, runs: list[Survived]) -> list[str]:
    waits, groups, joins = (
        [seconds for run in runs for seconds in getattr(run, name)]
        for name in ("waits", "groups", "joins")
    )
    complete = sum(run.is_whole for run in runs)
    superseded = sum(run.superseded for run in runs)
    return [
        name, str(len(waits)), f"{median(groups):.3f}", f"{median(waits):.3f}", f"{max(waits):.3f}",
        f"{median(joins):.2f}" if joins else "", f"{complete} of {len(runs)}", str(superseded),
    ]  # fmt: skip


HEADER = [
    "processes", "killed", "seconds to the new group (median)", "to the next step (median)", "(most)",
    "to a process in its place (median)",
    "runs with the unbroken run's weights, nothing lost or repeated, one attempt", "steps rolled back",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=102, help="of ranks")
    parser.add_argument("--nodes", type=int, default=8, help="runs on three nodes that lose one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    random.seed(args.seed)
    report = Report(
        "chaos_in_place.py", "Killed, and going on in place", ["torch", "stepladder"], "all"
    )
    with tempfile.TemporaryDirectory() as folder:
        rows, bars = measure(Path(folder), args.kills, args.nodes)
    report.finish([table(HEADER, rows), "\n".join(bars)], args.write)


def measure(root: Path, kills: int, nodes: int) -> tuple[list[list[str]], list[str]]:
    """Runs of six kills each, as many on two processes as on three and on four; then runs on nodes."""
    (root / "reference").mkdir()
    reference = unbroken(root / "reference", EPOCHS)
    runs: dict[int, list[Survived]] = {2: [], 3: [], 4: []}
    for number in range(-(-kills // KILLS_PER_RUN)):
        (folder := root / str(number)).mkdir()
        nproc = 2 + number % 3
        runs[nproc].append(keep_if_bad(killed_in_turn(folder, reference, nproc, KILLS_PER_RUN)))
    node_runs = []
    for number in range(nodes):
        (folder := root / f"node-{number}").mkdir()
        node_runs.append(keep_if_bad(node_killed(folder, reference)))
    every = [run for some in runs.values() for run in some]
    waits, of_nodes = ([wait for run in some for wait in run.waits] for some in (every, node_runs))
    bars = [
        verdict("runs as if unbroken", sum(run.is_whole for run in every), len(every)),
        verdict("kills with a step within a second", sum(wait <= 1 for wait in waits), len(waits)),
        f"- {'PASS' if median(waits) <= MEDIAN_WAIT else 'FAIL'}: {median(waits):.3f} s to the next step (median;"
        f" bar: at most {MEDIAN_WAIT})",
        verdict(
            "a node lost: runs as if unbroken",
            sum(run.is_whole for run in node_runs),
            len(node_runs),
        ),
        verdict(
            "a node lost: a step within 1.5 s", sum(wait <= 1.5 for wait in of_nodes), len(of_nodes)
        ),
    ]
    rows = [row(str(nproc), some) for nproc, some in runs.items() if some]
    return [*rows, *([row("3 nodes of one, a whole node", node_runs)] if node_runs else [])], bars


if __name__ == "__main__":
    main()
