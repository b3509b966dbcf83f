"""All rules that examine a recording, and which of them are certain while the script still runs."""

from __future__ import annotations

from stepladder.tools.check.finding import Finding
from stepladder.tools.check.rules import (
    accumulation,
    augmentation,
    collectives,
    evaluation,
    metrics,
    model,
    numbering,
    samples,
    snapshots,
    training,
)
from stepladder.tools.check.rules.evidence import Rule, RunEvidence
from stepladder.tools.check.script_source import ScriptSource

EARLY_RULES: tuple[Rule, ...] = (
    samples.set_epoch,
    samples.same_samples,
    samples.file_over_fork,
    numbering.own_index,
    model.not_wrapped,
    training.missing_zero_grad,
    training.clip_before_average,
    snapshots.many_writers,
    snapshots.module_prefix,
    snapshots.unsafe_load,
)
LATE_RULES: tuple[Rule, ...] = (
    samples.workers_repeat,
    samples.samples_lost,
    samples.files_unread,
    evaluation.padded_evaluation,
    evaluation.padded_by_hand,
    evaluation.no_eval_mode,
    evaluation.eval_keeps_graph,
    augmentation.same_augmentation,
    samples.uneven_steps,
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
    collectives.collective_order,
    collectives.uneven_backward,
    collectives.uneven_end,
    collectives.no_destroy,
    collectives.cuda_only,
)
# The findings of each rule are dropped if one of the rules listed with it has a finding, which is
# the cause.
CAUSING_RULES = {
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


def apply_rules(evidence: RunEvidence, early: bool = False) -> list[Finding]:
    """Return the findings of all rules, or only of those that are certain early."""
    if not evidence.run.ranks:
        return []
    rules = EARLY_RULES if early else EARLY_RULES + LATE_RULES
    findings = [finding for rule in rules for finding in rule(evidence)]
    return drop_consequences(drop_suppressed(unique_findings(findings), evidence.source))


def unique_findings(findings: list[Finding]) -> list[Finding]:
    """Return the first finding of each rule and line."""
    by_key: dict[tuple[str, str, int], Finding] = {}
    for finding in findings:
        by_key.setdefault(finding.key, finding)
    return list(by_key.values())


def drop_suppressed(findings: list[Finding], source: ScriptSource) -> list[Finding]:
    """Return the findings that no comment in the source suppresses."""
    return [
        finding
        for finding in findings
        if not source.is_suppressed(
            finding.rule,
            finding.code_line.file,
            finding.code_line.line,
        )
    ]


def drop_consequences(findings: list[Finding]) -> list[Finding]:
    """Return the findings without those that another finding explains."""
    rules = {finding.rule for finding in findings}
    return [
        finding for finding in findings if rules.isdisjoint(CAUSING_RULES.get(finding.rule, ()))
    ]
