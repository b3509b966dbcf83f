"""Rules for the process group, for ranks that wait for each other, and for what needs CUDA."""

from __future__ import annotations

import ast

from stepladder.launcher.diagnose.explanation import describe_other_threads
from stepladder.launcher.diagnose.rank_status import is_in_queue
from stepladder.tools.check.events import Backward, GpuQuery, GroupInit, ProcessExit, WrapperBuilt
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, align, rank_rule, run_rule
from stepladder.tools.check.rules.static import value_of_variable
from stepladder.tools.probe.events import CodeLine

CHOOSES_RANK_OR_GPU = ("CUDA_VISIBLE_DEVICES", "WORLD_SIZE")


@run_rule("hang", "hang.queue")
def hang(evidence: RunEvidence) -> Findings:
    """Find ranks that wait for each other, so that none can go on."""
    deadlock = evidence.run.deadlock
    if deadlock is None:
        return
    statuses = {status.rank: status for status in deadlock.ranks}
    rank = deadlock.rank if deadlock.rank is not None else min(statuses)
    status = statuses[rank]
    # A rank that has ended has no line: that of a rank that waits for it.
    frames = [peer.frame for peer in [status, *deadlock.ranks]]
    frame = next(filter(None, frames), None)
    is_starved = is_in_queue(status.stack) and not status.is_loading_data
    yield evidence.finding(
        "hang.queue" if is_starved else "hang",
        CodeLine(frame.file, frame.line, frame.function) if frame else None,
        "; ".join([deadlock.with_cause, *describe_other_threads(status)]),
        rank,
    )


@rank_rule("no-gradient.gathered")
def gathered_constants(evidence: RunEvidence) -> Findings:
    """Find features that are gathered, and of which a loss has even its own rank's as constants."""
    backwards = evidence.rank_0.select(Backward)
    lines = [event.gathered for event in backwards if event.gathered]
    if lines:
        yield evidence.finding(
            "no-gradient.gathered",
            lines[0],
            f"in {len(lines)} of {len(backwards)} backward passes the loss has this rank's own "
            "features among the gathered ones, as constants",
        )


@run_rule("no-destroy")
def no_destroy(evidence: RunEvidence) -> Findings:
    """Find a process group that the script makes, and that is still there when its ranks end."""
    run = evidence.run
    made = [event for _, event in run.select(GroupInit) if event.direct]
    ranks_with_group = [rank for rank, event in run.select(ProcessExit) if event.group]
    is_over = run.has_finished and not run.has_stalled and not run.was_cut_short
    if made and is_over and ranks_with_group:
        text = f"is still there when {len(ranks_with_group)} ranks end"
        yield evidence.finding(
            "no-destroy", made[0].at, f"the group is made on {len(made)} ranks, and {text}"
        )


@run_rule("cuda-only")
def cuda_only(evidence: RunEvidence) -> Findings:
    """Find a process group on NCCL in a script that never asks whether there is a GPU."""
    if evidence.run.select(GpuQuery):
        return
    for rank, event in evidence.run.select(GroupInit):
        if "nccl" in event.backend and event.direct:
            yield evidence.finding(
                "cuda-only",
                event.at,
                f"the backend is {event.backend}, and the script never asks whether there is a GPU",
                rank,
            )
            return


def shared_gpus(evidence: RunEvidence) -> Findings:
    """Find ranks of one node whose models are on one GPU.

    A script that sets such a variable itself starts its ranks in a way of its own, such as one in
    each container.
    """
    for _, node in evidence.source.nodes(ast.AST):
        if any(value_of_variable(node, name) for name in CHOOSES_RANK_OR_GPU):
            return
    wrapped = [log.select(WrapperBuilt)[:1] for log in evidence.first_ranks]
    for first, second in align(wrapped):
        if first.gpu and first.gpu == second.gpu:
            yield evidence.finding(
                "device-per-rank",
                first.at,
                f"the models of rank 0 and of rank 1 are both on {first.gpu}",
            )
