"""Each kind of job of adversary_kinds.py, trained with --sync exact in five ways.

All five must give one hash of the weights and the same metrics.jsonl, or be refused by name.

    python benchmarks/adversary.py [--only NAME ...] [--write]
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from report import Report, table

from stepladder.core.errors import to_one_line
from stepladder.rank.exchange_choice import EXCHANGE_VARIABLE, MEMORY_EXCHANGE

TITLE = "Ordinary jobs with --sync exact: one hash in five ways, or refused by name"
FINDINGS = """## Found broken and repaired

Different hashes without a word, before: mixup and other draws from `random` and `np.random` (also for some microbatches only, from a later
step on, and in metrics); weights that the loss, a hook or a metric changes; generators that the job or its Dataset owns, the time, counters,
queues and carried states; Sources that draw. A traceback, before: models of float64, bfloat16, float16 or complex numbers; sparse gradients and
SparseAdam; SyncBatchNorm; named tuples; batch norm that some microbatches skip (wrong statistics); with `--shard full` second derivatives, parts
of a model that are called outside of its forward, and weights of several types.

Three later trials found different hashes without a word for: gradients that a hook changes, metrics and derived values with state, a loss or a `build`
that asks for the number of ranks, `hash` of a text, random numbers at the top of the file, global variables of optimizers and schedules, parameters in the
order of a set, what is kept of the first samples (a mean, numbers of labels, augmentations), a number that a step hook moves, a loss that reads the
optimizer's state with `--shard`, collectives in the loss, a model outside of the job that metrics alone use, a critic that the loss trains.

A fourth trial, of 95 other kinds, ended 36 times in another hash without a word, 31 times after a resume: state of an optimizer in another type than its weight; what
a step keeps on weights and layers, in iterators, queues, namespaces, other modules and behind decorators; one memory for two state tensors; a `build` that asks
whether there is a process group; random numbers of a step hook. Seven of them are left, in a `threading.local`, a context variable, a cache of functools, a file, a
database, the environment and the middle of a long dict. A buffer that a step hook moves was refused, and is right.

A fifth trial, of 145 other kinds and 19 left from the fourth, ended 17 times in another hash without a word: state of a loss, of `collate` or of a metric that acts late
(a history, a queue, a counter: compared now also in steps 1, 2, 4, 8, ..., in each epoch and at each snapshot), a subclass of batch norm with a forward of its own, data that
workers read by a schedule, a schedule that sets a layer's attribute or whose `state_dict` forgets one, hooks that write buffers or frozen weights, and numbers of NumPy
in 32 bits. Refused without need or with a wrong line were frozen weights that a `state_dict` leaves out, metrics that write weights and restore them, weights of float8, and a buffer that grows.

A sixth trial, of 74 other kinds, ended 8 times in another hash without a word, and once with a traceback: with `--shard full`, gradients that depend on a counter (compared now as elsewhere);
a function of `LambdaLR` that sets an attribute of a layer, or is a method that counts; samples that change slowly, as sequences that grow with the number of reads or a small cache of
augmentations (the first microbatch of an attempt is read again now, also at each snapshot); `LambdaLR` with a method of a list. Two are left: the last two of the last paragraph.

A seventh trial, of 136 other kinds, ended 7 times in another hash without a word, and 5 times with a traceback: a `build` that draws from a generator without a seed, or seeds by the
process number (those of NumPy follow the seed now, and other values on another rank are refused); what a `state_dict` has besides weights and buffers; sparse, expanded and
quantized buffers. NumPy's mask of numbers was left out. A metric that is NaN was refused, and parameters that a schedule adds not before the resume. Two are left: a counter and a
generator of the job's own that act on rare samples. Of 178 files 13 were misread: CSV that was joined from two files, or not written to its end; a copy of a file; rows of HDF5 that were
never written; tensors of safetensors with holes between them; fractions as tokens; an array in a tar file with bytes after it. One of Arrow, with an offset out of its memory, was a traceback. A
byte order mark before a CSV file with `header=` became part of its first value. Copies below 4 KB are still read.

An eighth trial, of 132 other kinds, ended 15 times in another hash without a word, and once with a traceback. Refused now is what a step keeps in objects of libraries (numbers of C or shared by processes, a text in
memory, a table, a large array), in a generator, in an optimizer's `defaults` or in its state under a word, or that a function in place of the step keeps. A line now names what each call of a loss changes, as a counter of
the loss, a parametrization, a forward hook or a function of autograd that acts after many calls. Three are left: the attribute of a logger, a semaphore, and a loss that clears the optimizer's momentum. Of 209 files and changes of
files, 5 were misread: files of Parquet, Arrow, HDF5 and NumPy joined into one, and a folder that lacks one of its numbered parts. An Arrow file cut while it was read ended the process with SIGBUS. Of 21 scripts that are not distributed, five were
trained twice without a word: one with a group for each rank (refused now), two in a process that the script starts, and two with an update written by hand.

A ninth trial, of 84 other kinds (three were no valid jobs for torch or `train`, and two trained nothing; written anew, they end as they should), ended twice in another hash: an average that the loss counts up for
metrics after 25 calls, which a line names, and which is left; and, with `--shard full`, a teacher of other weights that is called by `functional_call`, which is refused now. Twice it ended with a traceback: a step hook that computes with the weights (gradients are without a graph now), and an optimizer
around another one that does not call torch's `__init__`. An optimizer that asserts a closure ends with its own assertion. Of 181 files 2 were misread: a member of an NPZ file that is no array was left out, and
arrays `x.npy` and `y.npy` of a folder were read as rows of one. Identifiers above 2^53 beside fractions were rounded without a line. Left: NPZ in Fortran order is refused, and a shard of MDS of another length than `index.json`
says is refused by `data check` alone.

Not seen by `--sync exact`: state that changes no loss, gradient or metric in the microbatches that are computed again, as a noise that grows with every 40 calls, or a counter of rare samples (a line names both); what a loss
collects in an epoch for the next one, where one process is stopped within it and resumed; writes through `.data` or NumPy in another step than those; a hook that counts, and is
resumed before it acts; a loss that counts its samples up to those of an epoch, which it never reaches on several processes."""
ONE_HASH = "one hash"
HANG_S = 120
AFTER_FIRST_S = 60  # for the other ranks, once one has an outcome
STOP_AT_CALL = 30  # of rank 0's loss: within the second epoch


class Part(NamedTuple):
    """One start of the ranks: how many, how the state lies on them, and whether they are stopped."""

    ranks: int
    shard: str = "none"
    is_stopped: bool = False


WAYS: dict[str, list[Part]] = {
    "1": [Part(1)],
    "3": [Part(3)],
    "2, stopped, 1": [Part(2, is_stopped=True), Part(1)],
    "optimizer": [Part(2, "optimizer")],
    "full": [Part(2, "full")],
}
# Forked from a process that never ran torch: a fork after a parallel operation hangs in the child.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "stepladder.train.trainer"])


class Outcome(NamedTuple):
    """How one way ended: the hash of the weights and metrics, or the error."""

    hash: str = ""
    refused: str = ""
    failed: str = ""
    lost: str = ""
    trace: str = ""

    def describe(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        return self.failed or self.lost or ONE_HASH


class Task(NamedTuple):
    """A part of a way of one kind, as each rank gets it."""

    name: str
    part: Part
    run_dir: Path
    store: str


def serve(pipe: Any, rank: int, world_size: int) -> None:
    """Train what the pipe asks for, as one rank, and send each Outcome back."""
    import torch

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of data workers, as in a launch
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):  # the end of the run
            return
        pipe.send_bytes(pickle.dumps(train(task, rank, world_size)))


def train(task: Task, rank: int, world_size: int) -> Outcome:
    """Train a kind as one rank."""
    import torch
    from adversary_kinds import KINDS

    from stepladder import InputError, Settings, Trainer, World
    from stepladder.core.errors import PeerLost
    from stepladder.core.host_generators import seed_host
    from stepladder.train.pretended_ranks import pretend_one_rank
    from stepladder.train.process_group import process_group

    os.environ[EXCHANGE_VARIABLE] = MEMORY_EXCHANGE
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    seed_host(0)
    torch.manual_seed(0)
    kind = KINDS[task.name]
    values = {"epochs": 3, "global_batch": 24, "shard": task.part.shard, **kind.settings}
    world = World(rank, world_size, rank, world_size, task.store, "adversary")
    try:
        settings = Settings(task.run_dir, sync="exact", progress=False, **values)
        with pretend_one_rank():  # as `stepladder train` does
            job = kind.build()
        if task.part.is_stopped and rank == 0:
            object.__setattr__(job, "loss", stop_at_call(job.loss))
        with process_group(world, torch.device("cpu"), timeout_seconds=HANG_S) as comm:
            Trainer(job, settings, comm=comm).fit()
        return Outcome(hash_run(task.run_dir)) if rank == 0 else Outcome()
    except InputError as error:
        return Outcome(refused=str(error))
    except PeerLost as error:
        return Outcome(lost=str(error))
    except BaseException as error:
        trace = traceback.format_exc()
        return Outcome(failed=f"{type(error).__name__}: {to_one_line(str(error))}", trace=trace)


def stop_at_call(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss that sends this process SIGTERM in one call, as a cluster stops a job."""
    calls = iter(range(STOP_AT_CALL))

    def stopping_loss(model: Any, batch: Any) -> Any:
        if next(calls, None) == STOP_AT_CALL - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(model, batch)

    return stopping_loss


def hash_run(run_dir: Path) -> str:
    """Return a hash of the weights and of metrics.jsonl, once the run is complete."""
    import json

    result = run_dir / "result.json"
    if not result.exists():
        return "not complete"
    weights = json.loads(result.read_text(encoding="utf-8"))["weights_sha256"]
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    return hashlib.sha256(weights.encode() + metrics).hexdigest()[:12]


class Ranks:
    """Processes that train one task after the other; new ones after a failure."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.processes: list[Any] = []
        self.pipes: list[Any] = []

    def start(self) -> None:
        for rank in range(self.world_size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=serve, args=(theirs, rank, self.world_size))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def stop(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            pipe.close()
            process.kill()
            process.join()
        self.processes.clear()
        self.pipes.clear()

    def run(self, name: str, part: Part, run_dir: Path) -> Outcome:
        """Train one part of a way, and return what its ranks say."""
        if not self.processes:
            self.start()
        with tempfile.TemporaryDirectory(prefix="adversary-", ignore_cleanup_errors=True) as folder:
            store = f"file://{folder}/store" if self.world_size > 1 else ""
            message = pickle.dumps(Task(name, part, run_dir, store))
            for pipe in self.pipes:
                pipe.send_bytes(message)
            outcome = self.collect()
        if not outcome.hash:
            self.stop()
        return outcome

    def collect(self) -> Outcome:
        """Return the ranks' outcome, at once if one has an error of its own, as a launcher does."""
        outcomes: list[Outcome] = []
        left = list(self.pipes)
        while left:
            ready = wait(left, HANG_S if not outcomes else AFTER_FIRST_S)
            if not ready:
                return Outcome(failed="hang")
            for pipe in ready:
                left.remove(pipe)
                outcome = receive(pipe)
                if outcome.refused or outcome.failed:
                    return outcome
                outcomes.append(outcome)
        best = max(outcomes, key=lambda outcome: (bool(outcome.lost), bool(outcome.hash)))
        return best if best.lost or best.hash else Outcome(failed="no hash")


def receive(pipe: Any) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return Outcome(failed="a rank died")
    return outcome


def run_way(name: str, way: str, pool: dict[int, Ranks]) -> Outcome:
    """Train a kind in one way, in a folder that is removed."""
    with tempfile.TemporaryDirectory(prefix="adversary-", ignore_cleanup_errors=True) as folder:
        run_dir = Path(folder) / "run"
        outcome = Outcome()
        for part in WAYS[way]:
            outcome = pool[part.ranks].run(name, part, run_dir)
            if not outcome.hash:
                break
        return outcome


def find_problems(name: str, outcomes: dict[str, Outcome]) -> list[str]:
    """Return what differs from what the kind says must happen; empty if nothing does."""
    from adversary_kinds import KINDS

    problems = []
    hashes = {}
    for way, outcome in outcomes.items():
        expected = KINDS[name].expected(way)
        if outcome.failed or outcome.lost:
            problems.append(f"{way}: {outcome.failed or outcome.lost}")
        elif bool(expected) != bool(outcome.refused) or expected not in outcome.refused:
            problems.append(f"{way}: {outcome.describe()} instead of {expected or ONE_HASH}")
        elif outcome.hash:
            hashes[way] = outcome.hash
    if len(set(hashes.values())) > 1:
        problems.append(f"different hashes: {hashes}")
    return problems


def run_kind(
    name: str, pool: dict[int, Ranks], ways: Sequence[str] = tuple(WAYS)
) -> tuple[dict[str, Outcome], list[str]]:
    outcomes = {way: run_way(name, way, pool) for way in ways}
    return outcomes, find_problems(name, outcomes)


@contextmanager
def rank_pool() -> Iterator[dict[int, Ranks]]:
    """Provide the ranks of all ways by their number, for the length of the block."""
    pool = {world_size: Ranks(world_size) for world_size in (1, 2, 3)}
    try:
        yield pool
    finally:
        for ranks in pool.values():
            ranks.stop()


def main() -> int:
    from adversary_kinds import KINDS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="kinds whose name has one of these")
    parser.add_argument("--write", action="store_true", help="write results/adversary.md")
    parser.add_argument(
        "--skip", nargs="+", default=[], help="no kinds whose name has one of these"
    )
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--minutes", type=float, default=60, help="start no kind after this time")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    args = parser.parse_args()
    names = [name for name in KINDS if not args.only or any(text in name for text in args.only)]
    rows = []
    wrong = 0
    end = time.perf_counter() + 60 * args.minutes
    with rank_pool() as pool:
        for name in names:
            begin = time.perf_counter()
            if begin > end:
                break
            outcomes, problems = run_kind(name, pool, args.ways)
            seconds = time.perf_counter() - begin
            sign = "FAIL" if problems else "ok  "
            print(f"{sign} {name} ({seconds:.1f} s)", *problems, sep="\n    ", flush=True)
            if args.trace:
                print(*{outcome.trace for outcome in outcomes.values()}, sep="\n")
            wrong += bool(problems)
            rows.append((name, outcomes, problems))
    write_report(rows, wrong, args.write)
    return 1 if wrong else 0


def write_report(
    rows: list[tuple[str, dict[str, Outcome], list[str]]], wrong: int, write: bool
) -> None:
    """Print the page of all outcomes; with `write`, save it."""
    from adversary_kinds import KINDS

    report = Report("adversary.py", TITLE, ["stepladder", "torch", "numpy"], "2")
    lines = [
        [name, summarize(outcomes), "no" if problems else "yes"]
        for name, outcomes, problems in rows
    ]
    refused = sum(all(outcome.refused for outcome in outcomes.values()) for _, outcomes, _ in rows)
    summary = (
        f"{len(rows)} of {len(KINDS)} kinds of jobs, each in {len(WAYS)} ways: on one process; on three; on two, stopped"
        " in the second epoch and resumed on one; on two with `--shard optimizer`; on two with"
        f" `--shard full`. {refused} are refused in each way. {wrong} had another outcome than"
        " adversary_kinds.py says."
    )
    header = ["kind", "outcome", "as expected"]
    report.finish([summary, FINDINGS, table(header, lines)], write)


def summarize(outcomes: dict[str, Outcome]) -> str:
    """Return the outcomes of a kind in a few words: what all ways have in common, and the others."""
    by_text: dict[str, list[str]] = {}
    for way, outcome in outcomes.items():
        text = outcome.describe().split(". HINT")[0].replace("|", "/")
        if len({each.hash for each in outcomes.values()} - {""}) > 1 and outcome.hash:
            text = f"the hash {outcome.hash}"
        by_text.setdefault(text, []).append(way)
    if len(by_text) == 1:
        return next(iter(by_text))
    return "; ".join(f"{', '.join(those)}: {text}" for text, those in by_text.items())


if __name__ == "__main__":
    sys.exit(main())
