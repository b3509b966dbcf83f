"""The file of a best model: who chooses it, and whether the script goes on from it."""

from __future__ import annotations

import ast
from pathlib import PurePath

from stepladder.tools.check.events import Backward, Load, PathSearch, Save
from stepladder.tools.check.recording import RankLog
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, rank_rule
from stepladder.tools.check.rules.metrics import (
    describe_share,
    evaluations_of_shares,
    events_until_training,
    has_collective_after,
    one_rank_metric,
)
from stepladder.tools.check.rules.source_patterns import has_load, resumes
from stepladder.tools.check.script_source import lines_of
from stepladder.tools.probe.events import CodeLine

LEAVES_A_FUNCTION = (
    ast.Return,
    ast.Raise,
)


@rank_rule("one-rank-metric.best")
def best_of_one_rank(evidence: RunEvidence) -> Findings:
    """Find a file of the best model that is written after an evaluation of one rank's share."""
    if any(one_rank_metric(evidence)):
        return
    for passes in evaluations_of_shares(evidence):
        if any(map(has_collective_after, evidence.ranks, passes)):
            continue
        following = events_until_training(evidence.rank_0, passes[0])
        saves = [event for event in following if isinstance(event, Save)]
        best = [save for save in saves if "best" in PurePath(save.path).name.lower()]
        if best:
            yield evidence.finding(
                "one-rank-metric.best",
                best[0].at,
                f"{describe_share(passes)}, no collective follows, and it writes "
                f"{PurePath(best[0].path).name}",
                0,
            )
            return


def is_loaded_to_go_on(
    evidence: RunEvidence,
    log: RankLog,
    paths: set[str],
) -> bool:
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


def loads_if_found(
    evidence: RunEvidence,
    search: CodeLine | None,
) -> bool:
    """Return whether the source loads a file where it has looked for one, on this line."""
    file = evidence.source_file(search)
    if search is None or file is None:
        return False
    scopes: list[ast.AST] = []
    for node in ast.walk(file.tree):
        if not isinstance(node, (ast.If, ast.IfExp)):
            continue
        if search.line in lines_of(node.test):
            scopes.append(node)
            # `if not path.exists(): return` leaves the rest of the function for the file.
            if isinstance(node, ast.If) and isinstance(node.body[-1], LEAVES_A_FUNCTION):
                scopes.append(file.enclosing_function(node))
    return any(map(has_load, scopes))
