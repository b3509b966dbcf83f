"""Rules for models that are wrapped twice, changed after that, or cut into unlike shards."""

from __future__ import annotations

import re

from stepladder.tools.check.events import (
    Backward,
    Forward,
    ModelMoved,
    OptimizerStep,
    Print,
    Sharding,
    StateDictLoad,
    WrapperBuilt,
)
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, align, rank_rule, run_rule
from stepladder.tools.check.rules.model import first_difference
from stepladder.tools.check.rules.shown_values import names_rank

REPLICATES = re.compile("NO_SHARD|HYBRID")
SHARDING_WRAPPER = "FullyShardedDataParallel"
INTEGER = re.compile(r"(?<![\w.,])\d[\d,_]*(?!\w|\.\d)")
MIN_PARAMETERS = 1000  # a smaller number may be another one


@run_rule("moved-after-wrapping", "moved-after-wrapping.twice")
def moved_after_wrapping(evidence: RunEvidence) -> Findings:
    """Find a trained model that changed its device or type after it was wrapped."""
    log = evidence.rank_0
    last_backward = max((event.n for event in log.select(Backward)), default=0)
    for event in log.select(ModelMoved):
        if event.n < last_backward:
            yield evidence.finding(
                "moved-after-wrapping",
                event.at,
                f"the wrapped model goes from {event.before} to {event.after}, and is then trained",
            )
            break
    for wrapper in log.select(WrapperBuilt):
        if wrapper.nested:
            yield evidence.finding(
                "moved-after-wrapping.twice",
                wrapper.at,
                f"the model that is wrapped is or holds a {wrapper.nested} already",
            )
            break


@rank_rule("replicas-differ.shards", "replicas-differ")
def shards_differ(evidence: RunEvidence) -> Findings:
    """Find shards that are cut from another model on each rank, and are trained.

    This is a note, for a mixture of independent draws is a draw as well. Strategies that keep
    several copies of a weight mix none: these copies differ to the end.
    """
    loads = evidence.rank_0.select(StateDictLoad)
    if not evidence.rank_0.select(OptimizerStep):
        return
    for first, second in align(log.select(Sharding) for log in evidence.first_ranks):
        name = first_difference(first.weights, second.weights)
        if name and not any(load.n > first.n for load in loads):
            rule = "replicas-differ.shards"
            text = f"{name} differs between rank 0 and rank 1 when the model is cut into shards"
            if REPLICATES.search(first.strategy):
                rule = "replicas-differ"
                text += f", and {first.strategy} keeps a copy of each on several ranks"
            yield evidence.finding(rule, first.at, text)
            return


@rank_rule("one-rank-metric.parameters")
def parameters_of_shard(evidence: RunEvidence) -> Findings:
    """Find a number of parameters that is shown as the model's, and is of one rank's shard."""
    log = evidence.rank_0
    wrappers = {event.wrapped for event in log.select(Forward)}
    strategies = {event.strategy for event in log.select(Sharding)}
    if SHARDING_WRAPPER not in wrappers or "NO_SHARD" in strategies:
        return
    counts = {event.numel for event in log.select(OptimizerStep)}
    for event in log.select(Print):
        numbers = [int(re.sub("[,_]", "", text)) for text in INTEGER.findall(event.text)]
        shown = max(counts.intersection(numbers), default=0)
        if shown >= MIN_PARAMETERS and not names_rank(event, log.rank):
            yield evidence.finding(
                "one-rank-metric.parameters",
                event.at,
                f"{shown:,} is the number of parameters in the shard of rank 0",
                0,
            )
            return
