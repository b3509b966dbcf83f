"""Collectives that only local rank 0 of each node calls.

With two ranks each simulates a node, so both are local rank 0, and both call them. On one node with
two ranks only one does, and waits for the other.
"""

from __future__ import annotations

import ast
from dataclasses import replace

from stepladder.tools.check.events import Forward, ScriptCollective
from stepladder.tools.check.rank_processes import RankLaunch
from stepladder.tools.check.rules.all_rules import apply_rules
from stepladder.tools.check.rules.evidence import RunEvidence
from stepladder.tools.check.rules.rank_values import LOCAL_RANK, chooses_ranks
from stepladder.tools.check.script_source import ScriptSource, lines_reached_from
from stepladder.tools.findings.finding import Finding, Location

RAN_ON_ONE_NODE = "run a second time, on one node: a collective is called by local rank 0"
EXPLAINS_A_HANG = ("uneven-steps", "collective-order", "hang")


def needs_one_node(evidence: RunEvidence, launch: RankLaunch) -> bool:
    """Return whether each rank was local rank 0, and has called what others might not call."""
    if launch.is_alone or launch.nproc < 2 or launch.ranks_per_node > 1:
        return False
    if not evidence.run.has_finished:
        return False
    lines = lines_of_some_local_ranks(evidence.source)
    for _, event in evidence.run.select(ScriptCollective, Forward):
        if isinstance(event, Forward) and not event.wrapped:
            continue
        if evidence.location(event.at) in lines:
            return True
    return False


def hangs_on_one_node(evidence: RunEvidence) -> list[Finding]:
    """Return why ranks of one node cannot go on together."""
    findings = []
    for finding in apply_rules(evidence):
        if finding.rule in EXPLAINS_A_HANG:
            text = f"{finding.evidence}; so it is on one node, where each rank has a local rank"
            findings.append(replace(finding, evidence=text))
    return findings


def lines_of_some_local_ranks(source: ScriptSource) -> set[Location]:
    """Return the lines under an `if` on the local rank, and those of the functions called there."""
    conditions = source.nodes(ast.If)
    chosen = [pair for pair in conditions if chooses_ranks(pair[1].test, LOCAL_RANK, source)]
    return set[Location]().union(*(lines_reached_from(source, *pair) for pair in chosen))
