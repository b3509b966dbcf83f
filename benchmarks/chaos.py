"""python benchmarks/chaos.py [--trials N] [--write]

Does a run that is killed at random moments end with the weights of the unbroken run, each sample
trained once?

The job is the mlp recipe in exact mode on three ranks. Each trial is a run of its own, in which
ranks are killed with SIGKILL: at a random step, inside a snapshot, or twice, the second time while
the ranks come up again. Then one run directory is continued on several world sizes, ranks are
stopped with SIGSTOP, and of three nodes (three agents on this machine) each is killed in turn and
replaced, the one that serves the rendezvous among them. All of these restart from a snapshot;
chaos_in_place.py kills ranks whose others go on."""

from __future__ import annotations

import argparse
import random
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

import psutil
from chaos_runs import (
    NPROC,
    SECONDS,
    SNAPSHOT_EVERY,
    STEPS,
    Command,
    Trial,
    examine,
    keep_if_bad,
    started,
    unbroken,
    verdict,
)
from report import Report, table

SIZES = [1, 2, 4, 3, 8, 1]
TIMEOUT = 3


def kill(command: Command, rank: int | None = None) -> None:
    """SIGKILL for that rank, or for a random one."""
    with suppress(IndexError, psutil.NoSuchProcess):
        ranks = command.ranks()
        (random.choice(ranks) if rank is None else ranks[rank]).kill()


def at_a_random_step(command: Command) -> None:
    step = random.randrange(STEPS - 8)  # near the end it could be over before the kill
    command.wait_for(lambda: len(command.ranks()) == NPROC and command.step() >= step)
    time.sleep(random.uniform(0, 0.01) if step else random.uniform(0, 1))
    kill(command)


def in_a_snapshot(command: Command) -> None:
    """While a file of a snapshot is being written; rank 0 writes it."""
    step = random.randrange(SNAPSHOT_EVERY, STEPS - SNAPSHOT_EVERY)
    command.wait_for(lambda: command.step() >= step)
    command.wait_for(lambda: any(command.run_dir.glob("snapshots/*.tmp")))
    kill(command, random.choice([0, None]))


def in_a_restart(command: Command) -> None:
    """A second kill while the ranks come up again."""
    at_a_random_step(command)
    before = {p.pid for p in command.ranks()}
    command.wait_for(lambda: not before & {p.pid for p in command.ranks()} and command.ranks())
    time.sleep(random.uniform(0, 0.5))
    kill(command)


def trial(
    folder: Path, reference: str, break_it: Callable[[Command], None], *flags: object
) -> Trial:
    began = time.monotonic()
    with started(folder, "--nproc", NPROC, "--on-loss", "restart", *flags) as command:
        break_it(command)
        return examine(command, reference, began)


def stop_a_rank(command: Command) -> None:
    step = random.randrange(1, STEPS)
    command.wait_for(lambda: command.step() >= step)
    with suppress(IndexError, psutil.NoSuchProcess):
        random.choice(command.ranks()).suspend()


def world_sizes(folder: Path, reference: str) -> Trial:
    """One run directory, a part of the steps on each size."""
    began = time.monotonic()
    for leg, size in enumerate(SIZES, 1):
        with started(folder, "--nproc", size, "--steps", STEPS * leg // len(SIZES)) as command:
            command.popen.wait(SECONDS)
    return examine(command, reference, began)


def nodes_in_turn(folder: Path, reference: str, epochs: int) -> Trial:
    """Three agents; after each quarter of the steps one is killed and replaced, so the store's is
    among them.
    """
    began = time.monotonic()
    flags = [
        "--nodes",
        "1:3",
        "--local-addr",
        "127.0.0.1",
        "--max-restarts",
        "20",
        "--timeout",
        "60",
    ]
    agents = [Command(folder, *flags, epochs=epochs) for _ in range(3)]
    try:
        for number in range(3):
            target = (number + 1) * epochs * STEPS // 3 // 4
            agents[number].wait_for(lambda: max(agent.step() for agent in agents) >= target)  # noqa: B023
            agents[number].popen.kill()
            agents.append(Command(folder, *flags, epochs=epochs))
        trials = [examine(agent, reference, began) for agent in agents]
        all_killed = all(agent.popen.returncode == -signal.SIGKILL for agent in agents[:3])
        return replace(
            trials[-1],
            same=trials[-1].same and all_killed,
            stderr="\n".join(trial.stderr for trial in trials),
        )
    finally:
        for agent in agents:
            agent.popen.kill()
            agent.popen.wait()


def row(name: str, trials: list[Trial]) -> list[str]:
    same = sum(t.same for t in trials)
    exact = sum(t.exact for t in trials)
    kills = sum(t.kills for t in trials)
    return [
        name,
        str(len(trials)),
        str(kills),
        str(same),
        str(exact),
        f"{median(t.seconds for t in trials):.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=50, help="runs with killed ranks")
    parser.add_argument("--stopped", type=int, default=3, help="runs with a stopped rank")
    parser.add_argument(
        "--nodes", type=int, default=1, help="runs on three nodes, each killed in turn"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    random.seed(args.seed)
    report = Report(
        "chaos.py", "Killed at random moments", ["torch", "stepladder"], cores_used="all"
    )
    with tempfile.TemporaryDirectory() as temporary:
        rows, bars = measure(args, Path(temporary))
    header = ["what happens to the run", "runs", "ranks killed", "weights of the unbroken run"]
    first = table([*header, "nothing lost or repeated", "seconds (median)"], rows)
    report.finish([first, "\n".join(bars)], args.write)


def measure(args: argparse.Namespace, root: Path) -> tuple[list[list[str]], list[str]]:
    folders = (root / str(number) for number in range(10**6))

    def fresh() -> Path:
        folder = next(folders)
        folder.mkdir()
        return folder

    reference = unbroken(fresh())
    kinds = [
        at_a_random_step,
        at_a_random_step,
        in_a_snapshot,
        in_a_restart,
    ]  # half of them at any moment
    killed: dict[Callable[[Command], None], list[Trial]] = {kind: [] for kind in kinds}
    for number in range(args.trials):
        kind = kinds[number % len(kinds)]
        killed[kind].append(keep_if_bad(trial(fresh(), reference, kind)))
    names = [
        "a rank killed at a random step",
        "a rank killed inside a snapshot",
        "killed, and again in the restart",
    ]
    rows = [
        row(name, trials) for name, trials in zip(names, killed.values(), strict=True) if trials
    ]
    every = [t for trials in killed.values() for t in trials]
    bars = [
        verdict(
            "killed, with the weights of the unbroken run", sum(t.same for t in every), len(every)
        ),
        verdict("killed, with no sample lost or repeated", sum(t.exact for t in every), len(every)),
    ]
    killed_trials = sum(t.kills > 0 for t in every)  # the others were over before the kill
    mark = "PASS" if killed_trials >= 0.9 * len(every) else "FAIL"
    bars.append(f"- {mark}: ranks were killed in {killed_trials} of {len(every)} runs")
    sizes = [keep_if_bad(world_sizes(fresh(), reference))]
    rows.append(row(f"world sizes {'-'.join(map(str, SIZES))}", sizes))
    stopped = [
        keep_if_bad(trial(fresh(), reference, stop_a_rank, "--timeout", TIMEOUT))
        for _ in range(args.stopped)
    ]
    named = sum("is stopped (SIGSTOP)" in t.stderr and t.same and t.exact for t in stopped)
    rows += [row(f"a rank stopped, --timeout {TIMEOUT}", stopped)] if stopped else []
    bars += [
        verdict("same weights on changing world sizes", sum(t.same and t.exact for t in sizes), 1),
        verdict("a stopped rank named, and recovered from", named, len(stopped)),
    ]
    if args.nodes:
        longer = unbroken(fresh(), epochs=30)
        nodes = [keep_if_bad(nodes_in_turn(fresh(), longer, epochs=30)) for _ in range(args.nodes)]
        rows.append(row("three nodes, each killed in turn", nodes))
        bars.append(
            verdict(
                "three nodes killed in turn", sum(t.same and t.exact for t in nodes), len(nodes)
            )
        )
    return rows, bars


if __name__ == "__main__":
    main()
