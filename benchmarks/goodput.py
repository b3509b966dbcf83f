"""What part of the time goes into steps that count, when a process is killed every five seconds?

    python benchmarks/goodput.py --torchft BIN [--turns N] [--stored FILE] [--write]

BIN: the bin folder of an environment that sees this one's torch, by a .pth file which names its
site-packages, and where `pip install --no-deps torchft==0.2.0` and `pip install
opentelemetry-exporter-otlp-proto-http` were typed.

The mlp recipe on three processes, in four ways: ours with `--on-loss continue` and `--on-loss
restart`, a script with DDP that torchrun restarts, and one with torchft's manager
(goodput_rivals.py). In a turn each way trains DISTURBED seconds, in which a process chosen by
chance is killed with SIGKILL at every fifth (two minutes in four turns), and UNDISTURBED ones, half
of them before and half after, since a machine's pace drifts. Goodput: the steps of the disturbed
time that count, in parts of those that the undisturbed pace would make in it: the median of all
halves of all turns, for other work on the machine slows some of them. A step that is trained again
counts once, one without some of its samples in part. Those that restart save every N steps, the
best of EVERY by a trial."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
from goodput_rivals import (
    FEATURES,
    GLOBAL_BATCH,
    HIDDEN,
    LEARNING_RATE,
    MICROBATCH,
    NPROC,
    RECORD,
    SAMPLES,
)
from report import Report, table

from stepladder.core.address import find_free_port
from stepladder.rank.progress import NUM_SLOTS, STEP
from stepladder.storage.audit import audit

UNDISTURBED = 10.0
DISTURBED = 30.0
BETWEEN_KILLS = 5.0
TRIAL_KILLS = 2
EVERY = [20, 50, 250]
SHARE = GLOBAL_BATCH // NPROC
# of torchft's lighthouse: the best of four that were tried
HEARTBEAT_MS = 500
JOIN_MS = 100
TICK_MS = 10
STEPS_TO_WARM = 100
LAST = 200  # steps whose loss is compared with the unbroken run's
SECONDS_TO_START = 60.0
SECONDS_TO_STOP = 30.0
LEAST = 0.95
LEAST_RATIO = 1.5
TRIED = (
    "to restart all, to go on in place, a new process at once or when the others go on,"
    " to free the broken group at once"
)
RIVALS = Path(__file__).with_name("goodput_rivals.py")
JOB = [
    "mlp", "--sync", "exact", "--samples", SAMPLES, "--global-batch", GLOBAL_BATCH, "--microbatch", MICROBATCH,
    "--lr", LEARNING_RATE, "--features", FEATURES, "--hidden", HIDDEN, "--epochs", 100_000,
]  # fmt: skip


class Way(ABC):
    """One way to train on, for one turn. every: steps between what it saves, where it restarts from
    that.

    Its processes' output and files are in `folder`.  disturbed: the steps at which kills begin and
    end."""

    disturbed = 0, 0

    def __init__(self, folder: Path, every: int) -> None:
        self.folder = folder
        self.every = every
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        self.said = (folder / "said").open("w")
        self.started: list[psutil.Popen] = []
        self.start()

    def open(self, *command: object, **env: str) -> psutil.Popen:
        process = psutil.Popen(
            list(map(str, command)),
            env=self.env | env,
            stdout=self.said,
            stderr=self.said,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    @abstractmethod
    def start(self) -> None:
        """Begin to train."""

    @abstractmethod
    def ranks(self) -> list[psutil.Process]:
        """Return the processes that train, or are about to."""

    @abstractmethod
    def progress(self) -> list[tuple[int, int]]:
        """Attempt and step of each process."""

    def step(self) -> int:
        """Return the step of the process that is the furthest in the last attempt."""
        return max(self.progress(), default=(0, 0))[1]

    def is_whole(self) -> bool:
        """Whether all processes take the same step, or nearly."""
        places = self.progress()
        attempt, step = max(places, default=(0, 0))
        return len([1 for position in places if position >= (attempt, step - 1)]) == NPROC

    def poll(self) -> None:
        """Called often."""
        return

    def close(self) -> dict[str, Any]:
        """End it. Samples lost and repeated, steps done again, and the mean loss of the last steps."""
        for process in self.started:
            with suppress(psutil.NoSuchProcess):
                for child in [*process.children(recursive=True), process]:
                    child.kill()
            process.wait()
        self.said.close()
        return self.account()

    @abstractmethod
    def account(self) -> dict[str, Any]: ...


class Ours(Way):
    on_loss = "continue"

    def start(self) -> None:
        saves = ["--snapshot-every", self.every] if self.every else []
        command = [sys.executable, "-m", "stepladder", "train", *JOB, "--nproc", NPROC, *saves]
        argv = "--on-loss", self.on_loss, "--max-restarts", 1000, "--run-dir", self.folder / "run"
        self.process = self.open(*command, *argv)

    def ranks(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            below = self.process.children(recursive=True)
            return [
                process for process in below if process.ppid() != self.process.pid
            ]  # the fork server's
        return []

    def progress(self) -> list[tuple[int, int]]:
        for file in self.folder.glob("stepladder*/**/progress"):
            with suppress(OSError):
                return [
                    (0, step) for step in memoryview(file.read_bytes()).cast("q")[STEP::NUM_SLOTS]
                ]
        return []

    def close(self) -> dict[str, Any]:
        """It stops at a step's end, and writes its last lines."""
        self.process.send_signal(signal.SIGTERM)
        with suppress(psutil.TimeoutExpired):
            self.process.wait(SECONDS_TO_STOP)
        return super().close()

    def account(self) -> dict[str, Any]:
        audited = audit(self.folder / "run")
        counts = {"lost": audited.lost, "repeated": audited.repeated, "again": audited.superseded}
        return counts | last_of(losses_of(self.folder / "run"))


class OursRestarted(Ours):
    on_loss = "restart"


class Rival(Way):
    """What goodput_rivals.py writes down."""

    def records(self) -> list[tuple[int, int, int, int, float]]:
        """Rank, attempt, step from 0, samples, loss."""
        records = []
        for rank in range(NPROC):
            data = (self.folder / f"steps-{rank}").read_bytes()
            complete = data[: len(data) // RECORD.size * RECORD.size]
            records += [(rank, *record) for record in RECORD.iter_unpack(complete)]
        return records

    def progress(self) -> list[tuple[int, int]]:
        positions = []
        for file in self.folder.glob("steps-*"):
            with file.open("rb") as opened:
                if end := opened.seek(0, os.SEEK_END) // RECORD.size * RECORD.size:
                    opened.seek(end - RECORD.size)
                    positions.append(RECORD.unpack(opened.read(RECORD.size))[:2])
        return positions


class Torchrun(Rival):
    def start(self) -> None:
        flags = (
            "--standalone",
            "--nproc-per-node",
            NPROC,
            "--max-restarts",
            1000,
            "--monitor-interval",
            0.1,
        )
        script = RIVALS, "torchrun", self.folder, "--every", self.every
        torchrun = sys.executable, "-m", "torch.distributed.run", *flags, *script
        # Else ranks find the addresses of the dead in its agent's store, and most restarts fail.
        self.process = self.open(*torchrun, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    def ranks(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [
                process
                for process in self.process.children()
                if process.status() != psutil.STATUS_ZOMBIE
            ]
        return []

    def account(self) -> dict[str, Any]:
        """A share is written down before it is sent, so each step but the last is whole, or is
        tried again.
        """
        records = self.records()
        tried = sorted({(attempt, step) for _, attempt, step, _, _ in records})
        last = {step: attempt for attempt, step in tried}
        end = tried[-1][1]
        shares: dict[int, list[float]] = {step: [] for step in range(end)}
        for _, attempt, step, _, loss in records:
            if step < end and last[step] == attempt:
                shares[step].append(loss)
        missing = [NPROC - len(share) for share in shares.values()]
        return {
            "lost": sum(max(0, number) for number in missing) * SHARE,
            "repeated": sum(max(0, -number) for number in missing) * SHARE,
            "again": len(tried) - len(last),
            **last_of({step + 1: sum(share) / GLOBAL_BATCH for step, share in shares.items()}),
        }


class Torchft(Rival):
    """Each process is started again as soon as it has ended."""

    programs = Path()

    def start(self) -> None:
        self.address = f"127.0.0.1:{find_free_port()}"
        limits = (
            "--join_timeout_ms",
            JOIN_MS,
            "--heartbeat_timeout_ms",
            HEARTBEAT_MS,
            "--quorum_tick_ms",
            TICK_MS,
        )
        self.open(
            self.programs / "torchft_lighthouse",
            "--bind",
            self.address,
            "--min_replicas",
            2,
            *limits,
        )
        self.replicas = [self.replica(rank) for rank in range(NPROC)]

    def replica(self, rank: int) -> psutil.Popen:
        command = self.programs / "python", RIVALS, "torchft", self.folder
        return self.open(*command, REPLICA=str(rank), TORCHFT_LIGHTHOUSE=f"http://{self.address}")

    def poll(self) -> None:
        for rank, process in enumerate(self.replicas):
            if process.poll() is not None:
                self.replicas[rank] = self.replica(rank)

    def ranks(self) -> list[psutil.Process]:
        return list(self.replicas)

    def account(self) -> dict[str, Any]:
        losses: dict[int, list[float]] = {}
        samples: dict[int, int] = {}
        redone = set()
        counted = set()
        repeated = 0
        for rank, _, step, used, loss in self.records():
            if not used:
                redone.add(step)
                continue
            repeated += (rank, step) in counted
            counted.add((rank, step))
            losses.setdefault(step, []).append(loss)
            samples[step] = max(used, samples.get(step, 0))
        return {
            "lost": sum(GLOBAL_BATCH - samples.get(step, 0) for step in range(*self.disturbed)),
            "repeated": repeated * SHARE,
            "again": len(redone),
            **last_of(
                {step + 1: sum(values) / len(values) / SHARE for step, values in losses.items()}
            ),
        }


WAYS: dict[str, type[Way]] = {
    "stepladder, --on-loss continue": Ours,
    "stepladder, --on-loss restart": OursRestarted,
    "torchrun": Torchrun,
    "torchft": Torchft,
}


def last_of(losses: dict[int, float]) -> dict[str, Any]:
    """steps: done in the end.  loss: mean of the last ones."""
    steps = max(losses)
    return {"steps": steps, "loss": mean_loss(losses, steps)}


def mean_loss(losses: dict[int, float], steps: int) -> float:
    return fmean(losses[step] for step in range(steps - LAST + 1, steps + 1) if step in losses)


def train(way: Way, undisturbed: float, kills: int, chance: random.Random) -> dict[str, Any]:
    """paces: steps a second while nothing happens, before and after the kills.

    done: steps in the time with kills.  seconds: that time.
    """
    try:
        paces = [undisturbed_pace(way, undisturbed / 2)]
        middle = time.monotonic()
        step = way.step()
        for number in range(kills):
            chosen = chance.randrange(NPROC)
            if ranks := way.ranks():
                ranks[chosen % len(ranks)].kill()
            until(way, middle + (number + 1) * BETWEEN_KILLS)
        seconds = time.monotonic() - middle
        done = way.step() - step
        way.disturbed = step, step + done
        paces.append(undisturbed_pace(way, undisturbed / 2))
    finally:
        result = way.close()
    return result | {"paces": paces, "done": done, "seconds": seconds, "kills": kills}


def undisturbed_pace(way: Way, seconds: float) -> float:
    """Steps a second, once it trains with all its processes again."""
    if not seconds:
        return 0.0
    until(way, time.monotonic() + SECONDS_TO_START, way.is_whole)
    aim = way.step() + STEPS_TO_WARM
    until(way, time.monotonic() + SECONDS_TO_START, lambda: way.step() >= aim)
    began = time.monotonic()
    step = way.step()
    until(way, began + seconds)
    return (way.step() - step) / (time.monotonic() - began)


def until(way: Way, deadline: float, condition: Callable[[], bool] = lambda: False) -> None:
    while time.monotonic() < deadline and not condition():
        way.poll()
        time.sleep(0.02)


def trained(
    kind: type[Way], every: int, undisturbed: float, kills: int, seed: str
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return train(kind(Path(folder), every), undisturbed, kills, random.Random(seed))


def best_every(kind: type[Way]) -> int:
    """Return the interval between snapshots, of EVERY, that does the most steps in a short trial."""
    return max(EVERY, key=lambda every: trained(kind, every, 0, TRIAL_KILLS, "trial")["done"])


def unbroken(steps: int) -> dict[int, float]:
    """The loss of each step of a run that nothing happens to."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        argv = "--nproc", 2, "--steps", steps, "--run-dir", run
        command = sys.executable, "-m", "stepladder", "train", *JOB, *argv
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
        return losses_of(run)


def losses_of(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def measured(
    turns: int, seed: int, stored: Path | None
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """What each way did in each turn, and how many steps lie between what it saves. stored: goes on
    with these.
    """
    results = (
        json.loads(stored.read_text()) if stored and stored.exists() else {"every": {}, "turns": []}
    )
    for kind in OursRestarted, Torchrun:
        if kind.__name__ not in results["every"]:
            results["every"][kind.__name__] = best_every(kind)
            keep(results, stored)
    kills = round(DISTURBED / BETWEEN_KILLS)
    while len(results["turns"]) < turns:
        results["turns"].append({
            name: trained(
                kind, results["every"].get(kind.__name__, 0), UNDISTURBED, kills, f"{seed}-{len(results['turns'])}"
            )
            for name, kind in WAYS.items()
        })  # fmt: skip
        keep(results, stored)
    return results["turns"], results["every"]


def keep(results: dict[str, Any], stored: Path | None) -> None:
    if stored:
        stored.write_text(json.dumps(results))


def rows(
    turns: list[dict[str, Any]], reference: dict[int, float]
) -> tuple[list[list[str]], dict[str, float]]:
    made = []
    goodput = {}
    for name in WAYS:
        results = [turn[name] for turn in turns]
        pace = median(half for result in results for half in result["paces"])
        complete = [result["done"] - result["lost"] / GLOBAL_BATCH for result in results]
        shares = [
            steps / pace / result["seconds"]
            for steps, result in zip(complete, results, strict=True)
        ]
        kills, seconds = (sum(result[key] for result in results) for key in ("kills", "seconds"))
        goodput[name] = fmean(shares)
        off = max(
            abs(result["loss"] / mean_loss(reference, result["steps"]) - 1) for result in results
        )
        made.append([
            name, f"{100 * goodput[name]:.1f} %", f"{min(shares) * 100:.1f} to {max(shares) * 100:.1f}",
            f"{(1 - goodput[name]) * seconds / kills:.2f}", f"{pace:.0f}",
            f"{sum(complete) / seconds:.0f}", str(kills),
            *(str(sum(result[key] for result in results)) for key in ("again", "lost", "repeated")),
            f"{off:.1e}" if off else "0",
        ])  # fmt: skip
    return made, goodput


COUNTED = 4  # the place of a row's steps/s with kills, after its name
HEADER = [
    "", "goodput", "by turn", "seconds lost to a kill", "steps/s undisturbed", "steps/s that count, with kills",
    "kills", "steps done again", "samples lost", "samples repeated", "loss, relative to the unbroken run's",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torchft", type=Path, required=True, metavar="BIN")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument(
        "--stored",
        type=Path,
        metavar="FILE",
        help="measure what is missing there; the report comes with --write",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    Torchft.programs = args.torchft.absolute()
    report = Report(
        "goodput.py", "A process killed every five seconds", ["torch", "stepladder"], "all"
    )
    turns, every = measured(args.turns, args.seed, args.stored)
    if args.stored and not args.write:
        return
    reference = unbroken(max(result["steps"] for turn in turns for result in turn.values()))
    made, goodput = rows(turns, reference)
    bars = bars_of(goodput, {name: float(cells[COUNTED]) for name, *cells in made})
    report.finish([table(HEADER, made), NOTES.format(**every), "\n".join(bars)], args.write)


def bars_of(goodput: dict[str, float], counted: dict[str, float]) -> list[str]:
    """counted: steps a second that count, with kills."""
    name, *rivals = [way for way, kind in WAYS.items() if kind is not OursRestarted]
    ours = goodput[name]
    best = max(rivals, key=goodput.__getitem__)
    ratio = ours / goodput[best]
    bars = [
        verdict(f"goodput {100 * ours:.1f} %", ours >= LEAST, f"at least {100 * LEAST:.0f} %"),
        verdict(
            f"{ratio:.2f} times the best other's, {best}'s",
            ratio >= LEAST_RATIO,
            f"at least {LEAST_RATIO}",
        ),
    ]
    if ratio < LEAST_RATIO:
        bars.append(f"- tried: {TRIED} (docs/log.md)")
    if goodput[best] * LEAST_RATIO > 1:
        bars.append(
            f"- there is no more than {1 / goodput[best]:.2f} times {100 * goodput[best]:.1f} % of a time"
        )
    best_rival = max(counted[rival] for rival in rivals)
    return [
        *bars,
        f"- steps that count in a second with kills: {counted[name] / best_rival:.1f} times the best other's",
    ]


def verdict(claim: str, passed: bool, limit: str) -> str:
    return f"- {'PASS' if passed else 'FAIL'}: {claim} (bar: {limit})"


NOTES = f"""\
The mlp recipe ({FEATURES}-{HIDDEN}-1, global batch {GLOBAL_BATCH}) on {NPROC} processes. Ours restarts from a
snapshot of every {{OursRestarted}} steps, torchrun's script from a file of every {{Torchrun}}: the best of
{", ".join(map(str, EVERY))} for each. torchft's lighthouse waits {JOIN_MS} ms for replicas, and takes one for dead
after {HEARTBEAT_MS} ms without a heartbeat (60,000 and 5,000 by default). One that has ended is started again,
and two are enough. What belongs to one that is down is lost, as torchft's DistributedSampler has it. The loss is
the mean of the last {LAST} steps, in the turn that differs most; 0: the same bits. One turn's goodput may be above
100 %: the machine's pace drifts by a tenth or more in minutes."""


if __name__ == "__main__":
    main()
