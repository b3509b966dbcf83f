"""Rules for the snapshots that the script saves and loads."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import groupby
from pathlib import PurePath

from stepladder.core.numbers import format_count
from stepladder.tools.check.events import (
    Backward,
    BeforeStep,
    EnoughPasses,
    FileMove,
    FileWrite,
    Forward,
    Load,
    OptimizerStep,
    PathSearch,
    Save,
    ScheduleStep,
    StateDictLoad,
)
from stepladder.tools.check.recording import RankLog, group_events
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, run_rule
from stepladder.tools.check.rules.model import is_sharded
from stepladder.tools.check.script_source import locations_of
from stepladder.tools.findings.finding import Finding, Severity
from stepladder.tools.probe.events import CodeLine, ProbeEvent

PICKLE_LOADS = ("pickle.load", "dill.load", "joblib.load", "cPickle.load")
LOADS = ("torch.load", *PICKLE_LOADS)
SNAPSHOT_PARTS = ("optimizer", "schedule", "random", "position")
MAX_KEYS_SHOWN = 8
SECOND = re.compile(r"(?<!\d)1\d{9}(?!\d)")  # ranks that start together name it alike
STATELESS_OPTIMIZER = "the optimizer (it has no state as it is: momentum would be lost)"
Writers = dict[str, dict[int, ProbeEvent]]  # of each path, by rank


def renamed_paths(log: RankLog) -> dict[str, str]:
    """Return the final path of each file that is written under another name and then renamed."""
    return {event.source: event.target for event in log.select(FileMove)}


def file_name(event: Save | Load) -> str:
    return PurePath(event.path).name


@run_rule("many-writers")
def many_writers(evidence: RunEvidence) -> Findings:
    """Find files that several ranks write, and do not lock."""
    locked = {event.path for _, event in evidence.run.select(FileWrite) if event.locked}
    snapshots: Writers = defaultdict(dict)
    others: Writers = defaultdict(dict)
    for log in evidence.ranks:
        renamed = renamed_paths(log)
        for event in log.select(Save):
            snapshots[str(renamed.get(event.path, event.path))][log.rank] = event
        for written in log.select(FileWrite):
            if written.path not in locked:
                others[SECOND.sub("*", written.path)].setdefault(log.rank, written)
    found = list(files_of_several(evidence, snapshots, "error"))
    yield from found or files_of_several(evidence, others, "note")


def files_of_several(evidence: RunEvidence, writers: Writers, severity: Severity) -> Findings:
    """Find the first file that several ranks write."""
    for path, events in writers.items():
        if path and len(events) > 1 and not path.startswith("/dev/"):
            ranks = sorted(events)
            text = f"ranks {' and '.join(map(str, ranks[:4]))} write {PurePath(path).name}"
            if not evidence.run.is_single_process and evidence.run.asks_for_local_rank:
                text += "; each of them plays local rank 0 of a node of its own"
            yield evidence.finding("many-writers", events[ranks[0]].at, text, severity=severity)
            return


@run_rule("resume-epoch")
def resumed_in_run(evidence: RunEvidence) -> Findings:
    """Find a script that resumes from its snapshot in the same process, and repeats an epoch."""
    log = evidence.rank_0
    renamed = renamed_paths(log)
    spans = spans_of_training(log)
    for index, (load, _) in enumerate(spans):
        saves = [
            (save, rows)
            for save, rows in spans[:index]
            if isinstance(load, Load)
            and isinstance(save, Save)
            and renamed.get(save.path, save.path) == load.path
        ]
        epochs = [rows for _, rows in saves]
        if len(epochs) < 2 or not all(epochs) or len(set(epochs)) < len(epochs):
            continue
        resumed = next((rows for _, rows in spans[index + 1 :] if rows), ())
        if isinstance(load, Load) and resumed == epochs[-1]:
            yield evidence.finding(
                "resume-epoch",
                saves[-1][0].at,
                f"{file_name(load)} was written {len(saves)} times, and is loaded again in the "
                f"same run; what is trained then begins with the batch that the last of these "
                f"epochs began with",
            )
            return


def spans_of_training(log: RankLog) -> list[tuple[Save | Load | None, tuple[str, ...]]]:
    """Return each save and load, and None at the end, with the first rows that are trained before.

    That is since the save or load before; no rows where nothing is trained between them.
    """
    spans: list[tuple[Save | Load | None, tuple[str, ...]]] = []
    rows: tuple[str, ...] | None = None
    for event in log.select(Forward, Save, Load):
        if isinstance(event, Save | Load):
            spans.append((event, rows or ()))
            rows = None
        elif isinstance(event, Forward) and event.grad and rows is None:
            rows = tuple(event.rows)
    return [*spans, (None, rows or ())]


@run_rule("in-place-snapshot")
def in_place(evidence: RunEvidence) -> Findings:
    """Find snapshots that are written over the only copy."""
    logs = [*evidence.ranks, *evidence.run.other_processes]
    for log in logs:
        for path, saves in saves_in_place(log).items():
            was_there = is_older_than_all_saves(logs, path)
            is_file = not path.startswith("/dev/")
            text = describe_overwriting(log, saves, was_there) if is_file else ""
            if text:
                yield evidence.finding("in-place-snapshot", saves[0].at, text, log.rank)
                return


def saves_in_place(log: RankLog) -> dict[str, list[Save]]:
    """Return the saves by path, without files that are renamed afterwards, and open files."""
    renamed = renamed_paths(log)
    saves = [e for e in log.select(Save) if e.path and e.path not in renamed and not e.opened]
    return group_events(saves, "path")


def is_older_than_all_saves(logs: list[RankLog], path: str) -> bool:
    """Return whether a process of each rank that saves a file has found it there.

    Of ranks that save it at once, all but the first may find it, or none. The processes of one
    rank take turns.
    """
    found_by_rank: dict[int, list[bool]] = defaultdict(list)
    for log in logs:
        found_by_rank[log.rank] += [e.existed for e in log.select(Save) if e.path == path][:1]
    return all(any(found) for found in found_by_rank.values() if found)


def describe_overwriting(log: RankLog, saves: list[Save], was_there: bool) -> str:
    """Return how these saves of one path endanger the only copy; empty where they do not.

    Args:
        log: The events of the process that saves.
        saves: Its saves.
        was_there: Whether the file was there before all of them.
    """
    first = saves[0]
    overwriting = [event for event in saves[1:] if event.existed and not event.copied]
    if was_there:
        overwriting.append(first)
    if overwriting:
        return (
            f"{file_name(first)} is written {format_count(len(saves), 'time')}, "
            f"{format_count(len(overwriting), 'time')} over the only copy"
        )
    is_snapshot = first.model and not first.bare
    is_resumed_from = first.path in paths_searched_before(log, first)
    is_trained_after = any(e.n > first.n for e in log.select(Backward, EnoughPasses))
    if is_snapshot and is_resumed_from and is_trained_after:
        return f"{file_name(first)}, from which the script goes on, is written in place"
    return ""


def paths_searched_before(log: RankLog, event: Save) -> set[str]:
    """Return the paths that the script has looked for before an event, to resume from them."""
    searches: list[PathSearch | Load] = [*log.select(PathSearch), *log.select(Load)]
    earlier = [search for search in searches if search.n < event.n]
    return {search.path for search in earlier}


@run_rule("incomplete-snapshot", "incomplete-snapshot.random")
def incomplete(evidence: RunEvidence) -> Findings:
    """Find snapshots without a part of the training's state."""
    for log in evidence.ranks:
        if not log.select(OptimizerStep):
            continue
        for saves in snapshots_of(log):
            finding = missing_parts(evidence, log, saves)
            if finding:
                yield finding
                return


def missing_parts(evidence: RunEvidence, log: RankLog, saves: list[Save]) -> Finding | None:
    """Return the finding of one snapshot, which consists of these saves, that misses a part."""
    models = [event for event in saves if event.model]
    if not models:
        return None
    model = models[0]
    has = {part: any(getattr(event, part) for event in saves) for part in SNAPSHOT_PARTS}
    path = model.path
    paths = {path, renamed_paths(log).get(path, path)}
    is_looked_for = not paths_searched_before(log, model).isdisjoint(paths)
    may_be_read = (is_looked_for or has["position"]) and has_load_for_a_resume(evidence)
    is_snapshot = has["optimizer"] or has["schedule"] or may_be_read
    missing = names_of_missing(log, has)
    if misses_other_parts(evidence, saves):
        missing.append("the other ranks' parts of the optimizer's state")
    if not is_snapshot or not missing:
        return None
    rule = "incomplete-snapshot"
    if missing == ["random state"]:
        rule = "incomplete-snapshot.random"
    return evidence.finding(
        rule,
        model.at,
        f"{file_name(model)} holds {describe_content(model, has)}; missing: {', '.join(missing)}",
        log.rank,
        "note" if missing == [STATELESS_OPTIMIZER] else None,
    )


def has_load_for_a_resume(evidence: RunEvidence) -> bool:
    """Return whether the script has trained after a load, or may do so in another run.

    A file that is loaded by no such call is an export, or for a test at the end.
    """
    loads = evidence.run.select(Load)
    trained = {log.rank: log.select(Backward, OptimizerStep) for log in evidence.ranks}
    ends = {rank: max((e.n for e in events), default=0) for rank, events in trained.items()}
    if any(event.n < ends[rank] for rank, event in loads):
        return True
    lines = {evidence.location(event.at) for _, event in loads}
    calls = [(f, c) for f, c in evidence.source.calls("load") if f.qualified_name(c.func) in LOADS]
    return any(lines.isdisjoint(locations_of(file, call)) for file, call in calls)


def misses_other_parts(evidence: RunEvidence, saves: list[Save]) -> bool:
    """Return whether one rank alone saves an optimizer of sharded weights, so only its own part.

    FSDP gives the states of complete weights names. Without sharding the weights are equal.
    """
    ranks = evidence.ranks
    savers = {rank for rank, event in evidence.run.select(Save) if event.numbered}
    first_weights = {str(step.before) for log in ranks for step in log.select(BeforeStep)[:1]}
    is_one_part = is_sharded(ranks) and len(savers) == 1 and len(first_weights) > 1
    return is_one_part and any(event.numbered for event in saves)


def snapshots_of(log: RankLog) -> list[list[Save]]:
    """Return the saves of each snapshot: those with no training between them."""
    events = log.select(Save, Backward, OptimizerStep)
    groups = groupby(events, key=lambda event: isinstance(event, Save))
    return [[e for e in group if isinstance(e, Save)] for are_saves, group in groups if are_saves]


def describe_content(event: Save, has: dict[str, bool]) -> str:
    if event.bare:
        return "weights"
    keys = ", ".join(event.keys[:MAX_KEYS_SHOWN])
    return keys or ", ".join(["model", *(part for part in SNAPSHOT_PARTS if has[part])])


def names_of_missing(log: RankLog, has: dict[str, bool]) -> list[str]:
    uses_random_numbers = any(event.drops for event in log.select(Forward))
    names = {
        "optimizer": describe_optimizer(log),
        "schedule": "the schedule" if log.select(ScheduleStep) else "",
        "position": "the position (epoch or step)",
        "random": "random state" if uses_random_numbers else "",
    }
    return [name for part, name in names.items() if name and not has[part]]


def describe_optimizer(log: RankLog) -> str:
    """Return what is lost with the optimizer."""
    steps = log.select(OptimizerStep)
    states = [event.state for event in steps if event.after]
    if any(any(state.values()) for state in states):
        return "the optimizer (it has state: momentum or moments)"
    has_one_rate = len({str(event.lr) for event in steps}) == 1
    return STATELESS_OPTIMIZER if states and has_one_rate else "the optimizer"


@run_rule("module-prefix")
def module_prefix(evidence: RunEvidence) -> Findings:
    """Find state dicts that do not fit because of the wrapper's prefix `module.`."""
    loads = evidence.run.select(StateDictLoad)
    others = evidence.run.other_processes
    loads += [(-1, event) for log in others for event in log.select(StateDictLoad)]
    for rank, event in loads:
        if event.more or event.fewer:
            owners = ("file", "model") if event.more else ("model", "file")
            hides = ", and strict=False hides it" if event.strict in (False, "False") else ""
            yield evidence.finding(
                "module-prefix",
                event.at,
                f"0 of {event.own} tensors are found in the file: the {owners[0]}'s keys begin "
                f"with module. and the {owners[1]}'s do not{hides}",
                rank,
            )
            return


@run_rule("unsafe-load")
def unsafe_load(evidence: RunEvidence) -> Findings:
    """Find loads that run code from the file."""
    pickled = [event for _, event in evidence.run.select(Save) if event.opened]
    for file, call in evidence.source.calls("load") if pickled else ():
        name = file.qualified_name(call.func)
        if name in PICKLE_LOADS:
            line = CodeLine(file.name, call.lineno)
            text = f"{name} of what {file_name(pickled[0])} holds: weights"
            yield evidence.finding("unsafe-load", line, text)
            return
    for rank, event in evidence.run.select(Load):
        if event.weights_only == "False" and event.at:
            yield evidence.finding(
                "unsafe-load",
                event.at,
                f"{file_name(event)} is loaded with weights_only=False",
                rank,
            )
