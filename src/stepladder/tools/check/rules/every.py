"""All rules of the dynamic pass, and which of them are certain while the script still runs."""

from __future__ import annotations

from stepladder.tools.check.finding import Fault
from stepladder.tools.check.rules import (
    accumulation,
    augmentation,
    data,
    evaluation,
    metrics,
    model,
    numbering,
    process,
    snapshots,
    training,
)
from stepladder.tools.check.rules.base import Rule, Seen

EARLY: tuple[Rule, ...] = (
    data.set_epoch,
    data.same_samples,
    data.file_over_fork,
    numbering.own_index,
    model.not_wrapped,
    training.missing_zero_grad,
    training.clip_before_average,
    snapshots.many_writers,
    snapshots.module_prefix,
    snapshots.unsafe_load,
)
LATE: tuple[Rule, ...] = (
    data.workers_repeat,
    data.samples_lost,
    data.files_unread,
    evaluation.padded_evaluation,
    evaluation.padded_by_hand,
    evaluation.no_eval_mode,
    evaluation.eval_keeps_graph,
    augmentation.same_augmentation,
    data.uneven_steps,
    model.replicas_differ,
    training.no_gradient,
    training.small_batch_norm,
    training.optimizer_params,
    training.learns_nothing,
    training.eval_stays,
    training.graph_kept,
    training.activation_twice,
    accumulation.gradients_discarded,
    accumulation.accumulation_sync,
    accumulation.accumulation_mean,
    metrics.mean_of_means,
    metrics.local_count,
    metrics.one_rank_metric,
    metrics.schedule_per_rank,
    snapshots.in_place,
    snapshots.resumed_in_run,
    snapshots.incomplete,
    process.collective_order,
    process.uneven_backward,
    process.uneven_end,
    process.no_destroy,
    process.cuda_only,
)


def judge(seen: Seen, early: bool = False) -> list[Fault]:
    """What the rules say, each place once, without what a comment in the source takes back."""
    rules = EARLY if early else EARLY + LATE
    if not seen.run.ranks:
        return []
    found = [fault for rule in rules for fault in rule(seen)]
    return without_consequences(kept(found, seen))


def kept(found: list[Fault], seen: Seen) -> list[Fault]:
    """Each rule and line once, and none that a comment with a reason takes back."""
    by_key = {fault.key: fault for fault in reversed(found)}
    return [
        f
        for f in reversed(by_key.values())
        if not seen.source.ignored(f.rule, f.place.file, f.place.line)
    ]


CAUSES = {  # a rule whose finding is the consequence of another's
    "replicas-differ": ("not-wrapped", "changed-outside", "optimizer-params"),
    "collective-order": ("uneven-steps",),
    "padded-evaluation": ("one-rank-metric",),
    "overlapping-shards": ("same-samples",),
    "samples-lost": ("same-samples", "overlapping-shards"),
    "accumulation-mean": ("missing-zero-grad", "gradients-discarded"),
    "accumulation-sync": ("gradients-discarded",),
    "no-gradient": ("optimizer-params", "changed-outside", "learns-nothing"),
    "mean-of-means": ("padded-evaluation", "one-rank-metric", "local-count"),
    "resume-samples": ("resume-epoch",),
    "resume-differs": (
        "module-prefix",
        "resume-epoch",
        "resume-samples",
        "resume-lr",
        "incomplete-snapshot",
    ),
    "resume-lr": ("incomplete-snapshot",),
}


def without_consequences(found: list[Fault]) -> list[Fault]:
    rules = {fault.rule for fault in found}
    return [fault for fault in found if not rules & set(CAUSES.get(fault.rule, ()))]
