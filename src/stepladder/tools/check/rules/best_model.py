"""The best model: who chooses it, whether the script goes on from it, and an old best value."""

from __future__ import annotations

import ast
from pathlib import PurePath

from stepladder.tools.check.events import Backward, Load, PathSearch, Save
from stepladder.tools.check.recording import RankLog
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, rank_rule, run_rule
from stepladder.tools.check.rules.metrics import (
    describe_share,
    evaluations_of_shares,
    has_collective_after,
    one_rank_metric,
)
from stepladder.tools.check.rules.source_patterns import assignments, has_load, resumes
from stepladder.tools.check.script_source import SourceFile, constant_value, lines_of
from stepladder.tools.probe.events import CodeLine

LEAVES_A_FUNCTION = (ast.Return, ast.Raise)


@rank_rule("one-rank-metric.best")
def best_of_one_rank(evidence: RunEvidence) -> Findings:
    """Find a file of the best model that is written after an evaluation of one rank's share."""
    if any(one_rank_metric(evidence)):
        return
    for passes in evaluations_of_shares(evidence):
        if any(map(has_collective_after, evidence.ranks, passes)):
            continue
        following = evidence.rank_0.events_until_training(passes[0])
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


@run_rule("incomplete-snapshot.best")
def best_of_earlier_epochs(evidence: RunEvidence) -> Findings:
    """Find a best value that is stored, and is compared with the new one only then."""
    saved = {key for _, save in evidence.run.select(Save) for key in save.keys}
    for file, state in evidence.source.nodes(ast.Dict):
        for key, value in zip(state.keys, state.values, strict=True):
            update = later_comparison(file, state, ast.unparse(value))
            if update and constant_value(key) in saved:
                yield evidence.finding(
                    "incomplete-snapshot.best",
                    CodeLine(file.name, value.lineno),
                    f"{ast.unparse(value)} is stored, and is set to a better value in line "
                    f"{update.lineno}, after that",
                )
                return


def later_comparison(file: SourceFile, state: ast.Dict, name: str) -> ast.Assign | None:
    """Return the statement that sets a stored value to a better one later in the same iteration.

    None if another statement of the loop sets the value.
    """
    loops = (node for node in file.parents_of(state) if isinstance(node, ast.For | ast.While))
    loop = next(loops, None)
    updates = list(assignments(loop, name)) if loop else []
    for update in updates:
        if update.lineno < state.lineno or not sets_to_better(update, file.parents[update]):
            return None
    return updates[0] if updates else None


def sets_to_better(update: ast.Assign, parent: ast.AST) -> bool:
    """Return whether a statement is `best = max(best, new)`, or `best = new` if `new > best`."""
    name = ast.unparse(update.targets[0])
    value = ast.unparse(update.value)
    if value.startswith(("max(", "min(")):
        return name in value
    if not isinstance(parent, ast.If) or update not in parent.body:
        return False
    test = ast.unparse(parent.test)
    return name in test and value in test


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
