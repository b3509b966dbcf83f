"""The file of a best model: who chooses it, and whether the script goes on from it."""

from __future__ import annotations

import ast
from pathlib import PurePath

from stepladder.tools.check.events import Backward, Load, PathSearch, Save
from stepladder.tools.check.recording import RankLog
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, run_rule
from stepladder.tools.check.rules.metrics import (
    are_shares,
    events_until_training,
    has_collective_after,
    one_rank_metric,
)
from stepladder.tools.check.rules.source_patterns import has_load, is_on_line, resumes
from stepladder.tools.probe.events import CodeLine

LEAVES_A_FUNCTION = (
    ast.Return,
    ast.Raise,
)


@run_rule("one-rank-metric.best")
def best_of_one_rank(evidence: RunEvidence) -> Findings:
    """Find a file of the best model that is written after an evaluation of one rank's share."""
    if not evidence.has_several_ranks or next(one_rank_metric(evidence), None):
        return
    for passes in evidence.evaluation_passes():
        ranks_with_passes = list(zip(evidence.run.ranks, passes, strict=True))
        are_complete = all(one_pass.is_complete for one_pass in passes)
        if not are_complete or not are_shares(passes):
            continue
        if any(has_collective_after(log, one_pass) for log, one_pass in ranks_with_passes):
            continue
        following = events_until_training(*ranks_with_passes[0])
        saves = [event for event in following if isinstance(event, Save)]
        best = [save for save in saves if "best" in PurePath(save.path).name.lower()]
        if best:
            counts = [sum(batch.size for batch in one_pass.batches) for one_pass in passes]
            yield evidence.finding(
                "one-rank-metric.best",
                best[0].at,
                f"rank 0 evaluates {counts[0]} of {sum(counts)} samples, no collective follows, "
                f"and it writes {PurePath(best[0].path).name}",
                0,
            )
            return


def is_loaded_to_go_on(evidence: RunEvidence, log: RankLog, paths: set[str]) -> bool:
    """Return whether the training begins with what one of these files holds, where it is there.

    A file of the best model is mostly kept for a test at the end, or for another program. Some
    scripts look for it, and load it, before they train. Others take the file to resume from as an
    argument: it is this one if the script writes no other snapshot.
    """
    training_begins = min((event.n for event in log.select(Backward)), default=0)
    searches: list[PathSearch | Load] = [*log.select(PathSearch), *log.select(Load)]
    for event in searches:
        is_early = event.n < training_begins and event.path in paths
        if is_early and (isinstance(event, Load) or loads_if_found(evidence, event.at)):
            return True
    saved = {PurePath(event.path).name for event in log.select(Save) if event.model}
    if not all("best" in name.lower() for name in saved):
        return False
    return any(map(resumes, evidence.source.files))


def loads_if_found(evidence: RunEvidence, search: CodeLine | None) -> bool:
    """Return whether the source loads a file where it has looked for one, on this line."""
    location = evidence.location(search)
    file = evidence.source.file(location.file)
    if file is None:
        return False
    scopes: list[ast.AST] = []
    for node in ast.walk(file.tree):
        if not isinstance(node, (ast.If, ast.IfExp)):
            continue
        if is_on_line(node.test, location.line):
            scopes.append(node)
            # `if not path.exists(): return` leaves the rest of the function for the file.
            if isinstance(node, ast.If) and isinstance(node.body[-1], LEAVES_A_FUNCTION):
                scopes.append(file.enclosing_function(node))
    return any(map(has_load, scopes))
