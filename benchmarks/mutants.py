"""python benchmarks/mutants.py [--sample 300] [--seed 0] [--only NAME,...] [--write]

Do the tests notice? A seeded sample of mutants of the modules that must not be wrong, each run
against the tests of its own module. A mutant is the module with one place changed: an operator, a
number, a condition, a decorator.

cosmic-ray knows the places and makes the changes. What is ours is the sample, so that it can be had
again, and the fork of a process that has imported torch, so that a mutant costs its tests and no
start. Mutants live in copies of src and tests in a temporary folder. Verdicts are kept in
build/mutants.jsonl: a run that was broken off goes on. A verdict counts until the module changes,
and that of a survivor until its tests do."""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from report import Report, table

REPOSITORY = Path(__file__).parent.parent
KNOWN = REPOSITORY / "benchmarks" / "mutants.toml"
VERDICTS = REPOSITORY / "build" / "mutants.jsonl"
WANTED = 0.95  # killed, of those that are not shown to be equivalent
HANGS = 120  # seconds of one test, which takes a few
MEMORY = 8 << 30  # bytes that a mutant may take before it ends by itself
LEDGER = ["storage/test_audit.py", "storage/test_audit_tampering.py", "storage/test_audit_size.py"]
SNAPSHOT = [
    "storage/test_snapshot.py",
    "storage/test_snapshot_damage.py",
    "storage/test_snapshot_killed.py",
    "storage/test_snapshot_parts.py",
    "storage/test_shared_directory.py",
]

MODULES = {  # source, and its tests, the quickest first
    "plan": (
        "core/plan.py",
        ["core/test_plan.py", "core/test_order.py", "core/test_length_pools.py"],
    ),
    "order": ("core/order.py", ["core/test_order.py", "core/test_feistel.py", "core/test_plan.py"]),
    "tree": (
        "train/sync/exact.py",
        ["train/test_exact.py", "train/test_recompute_check.py", "train/test_shared_memory.py"],
    ),
    "binary_tree": ("train/sync/binary_tree.py", ["train/test_exact.py"]),
    "evaluate": ("train/evaluation.py", ["train/test_evaluate.py"]),
    "snapshot": ("storage/snapshot.py", SNAPSHOT),
    "snapshot_store": ("storage/snapshot_store.py", SNAPSHOT),
    "ledger": ("storage/ledger.py", LEDGER),
    "ledger_plan": ("storage/ledger_plan.py", ["storage/test_ledger_plan.py", *LEDGER]),
    "ledger_attempts": ("storage/ledger_attempts.py", LEDGER),
    "ledger_rank_reader": ("storage/ledger_rank_reader.py", LEDGER),
    "audit": ("storage/audit.py", LEDGER),
    "lock": ("storage/lock.py", ["storage/test_lock.py", "storage/test_run_dir.py"]),
    "run_dir": (
        "storage/run_dir.py",
        ["storage/test_run_dir.py", "storage/test_run_dir_access.py", "storage/test_lock.py"],
    ),
    "metrics_file": (
        "storage/metrics_file.py",
        ["storage/test_metrics_file.py", "storage/test_run_dir.py"],
    ),
    "run_dir_access": (
        "storage/run_dir_access.py",
        [
            "storage/test_run_dir_access.py",
            "storage/test_shared_directory.py",
            "storage/test_faults.py",
        ],
    ),
    "run_files": ("storage/run_files.py", ["storage/test_run_dir.py"]),
    "run_config": ("storage/run_config.py", ["storage/test_run_config.py"]),
}


@dataclass(frozen=True)
class Mutant:
    """One change. line: counted from 1.  was, becomes: the line before and after, without its
    indentation.
    """

    module: str
    operator: str
    occurrence: int
    line: int
    was: str
    becomes: str

    def code(self, source: str) -> str:
        changed = mutate_code(source, get_operator(f"core/{self.operator}")(), self.occurrence)
        assert isinstance(changed, str)
        return changed


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. how: failed (its tests), hung, or survived.  source, tests: their
    digests.
    """

    mutant: Mutant
    how: str
    seconds: float
    source: str
    tests: str


# -- which mutants ---------------------------------------------------------------------------------


def places_of(module: str, chooser: random.Random) -> list[list[tuple[str, int]]]:
    """The changes that are possible at each place of a module, in an order by chance. Left out are
    annotations, which nobody evaluates, so that no test can see them.
    """
    source = path_of(module).read_text()
    ignored = annotations(source)
    nodes = list(ast_nodes(get_ast(source)))
    places: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments():
            continue
        made = operator()
        positions = [position[0] for node in nodes for position in made.mutation_positions(node)]
        for occurrence, position in enumerate(positions):
            if not any(first <= position < last for first, last in ignored):
                places.setdefault(position, []).append((name, occurrence))
    order = sorted(places)
    chooser.shuffle(order)
    return [places[position] for position in order]


def mutants_at(
    module: str, places: list[list[tuple[str, int]]], chooser: random.Random
) -> Iterator[Mutant]:
    """One mutant per place, as far as one compiles: nobody could commit another.

    Of the changes that are possible at a place, up to eleven for an arithmetic operator, the seed
    chooses one: a sample of changes would be one of arithmetic.
    """
    source = path_of(module).read_text()
    for changes in places:
        mutant = first_that_compiles(module, source, changes, chooser)
        if mutant:
            yield mutant


def first_that_compiles(
    module: str, source: str, changes: list[tuple[str, int]], chooser: random.Random
) -> Mutant | None:
    for name, occurrence in chooser.sample(changes, len(changes)):
        changed = mutate_code(source, get_operator(name)(), occurrence)
        try:
            if changed is None or ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
                continue
        except SyntaxError:
            continue
        before = source.splitlines()
        after = changed.splitlines()
        line = next(n for n, (a, b) in enumerate(zip(before, [*after, ""], strict=False)) if a != b)
        cut = len(after) - len(
            before
        )  # a removed decorator takes its line with it, and a blank one before
        line = next(n for n in range(line, len(before)) if before[n].strip())
        becomes = after[line].strip() if cut == 0 else "(removed)"
        return Mutant(
            module, name.removeprefix("core/"), occurrence, line + 1, before[line].strip(), becomes
        )
    return None


def annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations begin and end, as (line, column)."""
    annotated: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            annotated.append(node.annotation)
        elif isinstance(node, ast.FunctionDef) and node.returns:
            annotated.append(node.returns)
    return [
        ((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0)) for n in annotated
    ]


def sample(modules: list[str], seed: int, size: int) -> list[Mutant]:
    """Of each module in proportion to its places. It depends on the seed and the modules alone."""
    choosers = {module: random.Random(f"{seed}/{module}") for module in modules}
    places = {module: places_of(module, choosers[module]) for module in modules}
    total = sum(map(len, places.values()))
    chosen = []
    for module in modules:
        wanted = round(size * len(places[module]) / total)
        chosen += islice(mutants_at(module, places[module], choosers[module]), wanted)
    return chosen


# -- running them ----------------------------------------------------------------------------------


class Bench:
    """A copy of src and tests where one mutant at a time is run. The first run compiles it once for
    all.
    """

    def __init__(self, folder: Path, sources: dict[str, str]) -> None:
        """sources: of each module, as it is."""
        self.folder = folder
        self.sources = sources
        for name in ("src", "tests"):
            shutil.copytree(
                REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(REPOSITORY / "pyproject.toml", folder)

    def start(self, module: str, code: str | None) -> int:
        """Begin the module's tests on `code`, or on the module as it is. Returns a process id."""
        for name, source in self.sources.items():  # the last mutant was perhaps another module's
            target = self.folder / "src" / "stepladder" / MODULES[name][0]
            target.write_text(source if name != module or code is None else code)
            for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
                compiled.unlink()  # it goes by time and length, which may be the same
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(self._in_child(module, keep_compiled=code is None))
            finally:
                os._exit(70)
        return pid

    def _in_child(self, module: str, keep_compiled: bool) -> int:
        os.setsid()
        log = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.chdir(self.folder)
        source = str(self.folder / "src")
        sys.dont_write_bytecode = not keep_compiled
        os.environ |= {
            "PYTHONPATH": source,
            "PYTHONDONTWRITEBYTECODE": "" if keep_compiled else "1",
        }
        sys.path.insert(0, source)
        import pytest

        tests = [f"tests/{name}" for name in MODULES[module][1]]
        # By a thread, which ends the process: hypothesis would take a signal's exception for a
        # failing example, and look for a smaller one.
        settings = ["addopts=", f"timeout={HANGS}", "timeout_method=thread"]
        options = [
            "-xq",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
            *(f"-o{setting}" for setting in settings),
        ]
        return int(pytest.main([*tests, *options]))

    def stop(self, pid: int) -> int:
        """End what hangs, and all that it started. Returns its exit code."""
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@dataclass
class Running:
    bench: Bench
    mutant: Mutant
    pid: int
    started: float
    limit: float


def run_all(mutants: list[Mutant], workers: int, folder: Path) -> Iterator[Verdict]:
    """The mutants' verdicts, as they come."""
    modules = list(dict.fromkeys(mutant.module for mutant in mutants))
    sources = {
        module: path_of(module).read_text() for module in modules
    }  # they may be edited meanwhile
    digests = {module: (digest([path_of(module)]), digest(tests_of(module))) for module in modules}
    benches = [Bench(folder / str(number), sources) for number in range(workers)]
    limits = {module: 4 * slowest_run(benches, module) + 30 for module in modules}
    waiting = list(mutants)
    running = {}
    while waiting or running:
        while waiting and benches:
            mutant = waiting.pop(0)
            bench = benches.pop()
            pid = bench.start(mutant.module, mutant.code(sources[mutant.module]))
            running[os.pidfd_open(pid)] = Running(
                bench, mutant, pid, time.monotonic(), limits[mutant.module]
            )
        ends = min(job.started + job.limit for job in running.values())
        ready, *_ = select.select(list(running), [], [], max(0.0, ends - time.monotonic()))
        late = [fd for fd, job in running.items() if time.monotonic() > job.started + job.limit]
        for fd in {*ready, *late}:
            job = running.pop(fd)
            code = job.bench.stop(job.pid)
            os.close(fd)
            benches.append(job.bench)
            output = (job.bench.folder / "output").read_text(errors="replace")
            hung = fd not in ready or "Timeout ++" in output
            how = "survived" if code == 0 else "hung" if hung else "failed"
            yield Verdict(
                job.mutant, how, time.monotonic() - job.started, *digests[job.mutant.module]
            )


def slowest_run(benches: list[Bench], module: str) -> float:
    """Seconds of the module's tests, which must pass unchanged. All benches at once, as later."""
    start = time.monotonic()
    for bench, pid in [(bench, bench.start(module, None)) for bench in benches]:
        if os.waitpid(pid, 0)[1]:
            sys.exit(
                f"error: the tests of {module} fail without a change:\n{(bench.folder / 'output').read_text()}"
            )
    print(f"{module}: {time.monotonic() - start:.0f} s unchanged", file=sys.stderr)
    return time.monotonic() - start


def path_of(module: str) -> Path:
    return REPOSITORY / "src" / "stepladder" / MODULES[module][0]


def tests_of(module: str) -> list[Path]:
    return [REPOSITORY / "tests" / name for name in MODULES[module][1]]


def digest(files: list[Path]) -> str:
    return hashlib.blake2b(
        b"\0".join(file.read_bytes() for file in files), digest_size=8
    ).hexdigest()


# -- what is known, and the report -----------------------------------------------------------------


def stored_verdicts() -> dict[Mutant, Verdict]:
    """Those that still count: of an unchanged module, and of survivors only where its tests are
    unchanged too.
    """
    if not VERDICTS.exists():
        return {}
    lines = map(json.loads, VERDICTS.read_text().splitlines())
    records = [Verdict(Mutant(**line.pop("mutant")), **line) for line in lines]
    return {v.mutant: v for v in records if still_counts(v)}


def still_counts(verdict: Verdict) -> bool:
    module = verdict.mutant.module
    tests_count = verdict.how != "survived" or verdict.tests == digest(tests_of(module))
    return tests_count and verdict.source == digest([path_of(module)])


def known() -> list[dict[str, Any]]:
    """Survivors that somebody has looked at: file, was, becomes, why, and whether it is
    equivalent.
    """
    return tomllib.loads(KNOWN.read_text())["survivor"] if KNOWN.exists() else []


def explanation(mutant: Mutant, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
    of_mutant = (MODULES[mutant.module][0], mutant.was, mutant.becomes)
    return next((e for e in entries if (e["file"], e["was"], e["becomes"]) == of_mutant), None)


def outcome(verdict: Verdict, entries: list[dict[str, Any]]) -> str:
    """failed, hung, equivalent or survived."""
    entry = explanation(verdict.mutant, entries) if verdict.how == "survived" else None
    return "equivalent" if entry and entry["equivalent"] else verdict.how


def counts(verdicts: list[Verdict], entries: list[dict[str, Any]]) -> str:
    """A table: a line per module."""
    names = ["failed", "hung", "equivalent", "survived"]
    totals = {
        module: [outcome(v, entries) for v in verdicts if v.mutant.module == module]
        for module in MODULES
    }
    rows = [
        (f"`{MODULES[module][0]}`", outcomes) for module, outcomes in totals.items() if outcomes
    ]
    rows.append(("all", [outcome(v, entries) for v in verdicts]))
    cells = [[title, str(len(of)), *(str(of.count(name)) for name in names)] for title, of in rows]
    return table(["module", "mutants", "tests fail", "tests hang", "equivalent", "survive"], cells)


def survivors(verdicts: list[Verdict], entries: list[dict[str, Any]]) -> str:
    """One entry per survivor, with what is known of it."""
    lines = []
    for verdict in sorted(
        (v for v in verdicts if v.how == "survived"), key=lambda v: str(v.mutant)
    ):
        mutant = verdict.mutant
        entry = explanation(verdict.mutant, entries)
        kind = (
            "unexplained" if entry is None else "equivalent" if entry["equivalent"] else "survives"
        )
        why = f": {entry['why']}" if entry else ""
        lines.append(f"- {MODULES[mutant.module][0]}:{mutant.line}, {kind}{why}\n")
        lines.append(f"  ```diff\n  - {mutant.was}\n  + {mutant.becomes}\n  ```")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--sample", type=int, default=300, help="how many mutants (default 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=list(MODULES), help="plan,order,..."
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--write", action="store_true", help="save the report in benchmarks/results"
    )
    args = parser.parse_args()
    import torch.distributed  # noqa: F401  # so that no mutant's process has to

    page = Report(
        "mutants.py", "Do the tests notice?", ["torch", "pytest", "hypothesis", "cosmic-ray"], "all"
    )
    mutants = sample(args.only, args.seed, args.sample)
    verdicts = {
        mutant: verdict for mutant, verdict in stored_verdicts().items() if mutant in set(mutants)
    }
    VERDICTS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, VERDICTS.open("a") as log:
        missing = [mutant for mutant in mutants if mutant not in verdicts]
        for verdict in run_all(missing, args.workers, Path(folder)):
            verdicts[verdict.mutant] = verdict
            print(json.dumps(asdict(verdict)), file=log, flush=True)
            print(
                f"{len(verdicts)}/{len(mutants)} {verdict.how} {verdict.seconds:.0f} s {verdict.mutant}",
                file=sys.stderr,
            )
    entries = known()
    verdict_list = [verdicts[mutant] for mutant in mutants]
    outcomes = [outcome(verdict, entries) for verdict in verdict_list]
    of = len(outcomes) - outcomes.count("equivalent")
    rate = (of - outcomes.count("survived")) / max(1, of)
    unexplained = [
        v for v in verdict_list if v.how == "survived" and not explanation(v.mutant, entries)
    ]
    passed = rate >= WANTED and not unexplained
    line = (
        f"- {'PASS' if passed else 'FAIL'}: killed, of those not shown to be equivalent: {rate:.1%}"
        f" (bar: >= {WANTED:.0%}); survivors without an explanation: {len(unexplained)}"
    )
    note = f"The sample: one change at each of {len(mutants)} places, chosen by seed {args.seed}."
    page.finish(
        [
            note,
            counts(verdict_list, entries),
            line,
            "## Survivors",
            survivors(verdict_list, entries),
        ],
        args.write,
    )


if __name__ == "__main__":
    main()
