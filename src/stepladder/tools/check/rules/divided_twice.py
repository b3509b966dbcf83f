"""The rule for means that are divided once more: by samples, or by the number of ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from stepladder.tools.check.events import Backward, ScriptCollective
from stepladder.tools.check.recording import LoaderPass
from stepladder.tools.check.rules.batch_means import (
    BatchMeans,
    Quotient,
    all_batch_means,
    divides_by_samples,
    quotient_of,
)
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, run_rule
from stepladder.tools.check.rules.model import is_wrapped
from stepladder.tools.check.rules.shown_metrics import first_certain, shown_means_by_samples
from stepladder.tools.check.rules.source_patterns import assignments, is_addition, is_on_line
from stepladder.tools.check.rules.unscaled_batch import depends_on
from stepladder.tools.check.script_source import (
    ScriptSource,
    SourceFile,
    constant_value,
    find_nodes,
    keyword_value,
    last_name,
)
from stepladder.tools.findings.finding import Finding
from stepladder.tools.probe.events import CodeLine

MEAN_LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
LOSS_OBJECTS = ("criterion", "loss")
LOSS_WORDS = ("loss", "criterion", "cost", "entropy", "objective", "error", "mse")
UNWRAPS = ("item", "detach", "cpu", "float")


@dataclass(frozen=True)
class RankQuotient:
    """A division by the number of ranks, and the node that it is."""

    quotient: Quotient
    node: ast.AST


@run_rule("mean-divided-twice")
def mean_divided_twice(evidence: RunEvidence) -> Findings:
    shown = first_certain(evidence, "mean-divided-twice", shown_means_by_samples(evidence))
    yield from list(divided_by_samples(evidence)) or shown
    if evidence.has_several_ranks:
        yield from loss_divided_by_ranks(evidence)
        yield from reduced_twice(evidence)


def divided_by_samples(evidence: RunEvidence) -> Findings:
    """Find sums of batch means that are divided by the number of samples."""
    passes = [p for p in evidence.run.ranks[0].passes if p.is_complete and p.line]
    for file in evidence.source.files:
        for means in all_batch_means(file):
            for one_pass in passes:
                location = evidence.location(one_pass.line)
                is_of_loop = location.file == file.name and means.begins_at(location.line)
                if is_of_loop and max((batch.size for batch in one_pass.batches), default=0) > 1:
                    yield from sums_over_samples(
                        evidence,
                        file,
                        means,
                        one_pass,
                    )
                    break


def sums_over_samples(
    evidence: RunEvidence,
    file: SourceFile,
    means: BatchMeans,
    one_pass: LoaderPass,
) -> Findings:
    sums = certain_sums(means, evidence.source)
    for node in ast.walk(means.scope):
        quotient = quotient_of(node)
        if quotient is None or quotient.line < means.lines.start or not sums:
            continue
        if divides_by_samples(quotient, means) and any(name in quotient.dividend for name in sums):
            count = sum(batch.size for batch in one_pass.batches)
            yield evidence.finding(
                "mean-divided-twice",
                CodeLine(file.name, quotient.line),
                f"the sum of {len(one_pass.batches)} batch means is divided by a number of "
                f"samples, {quotient.divisor}; this rank has read {count}",
            )
            return


def certain_sums(
    means: BatchMeans,
    source: ScriptSource,
) -> set[str]:
    """Return the values to which a loss is added that is certainly a mean."""
    node = means.node
    if isinstance(node, ast.ListComp | ast.GeneratorExp):
        return (
            set(means.values)
            if is_mean_loss(
                node.elt,
                node,
                source,
            )
            else set()
        )
    additions = (part for part in ast.walk(node) if is_addition(part))
    targets = {
        ast.unparse(part.target)
        for part in additions
        if is_mean_loss(
            part.value,
            node,
            source,
        )
    }
    return targets & set(means.values)


def is_mean_loss(
    value: ast.expr,
    loop: ast.AST,
    source: ScriptSource,
) -> bool:
    """Return whether a value is a loss of torch over a batch that is certainly a mean."""
    while isinstance(value, ast.Call) and last_name(value.func) in UNWRAPS:
        if isinstance(value.func, ast.Attribute):
            value = value.func.value
        elif value.args:
            value = value.args[0]
        else:
            return False
    if isinstance(value, ast.Name | ast.Attribute):
        values = [part.value for part in assignments(loop, ast.unparse(value))]
        calls = [part for part in values if isinstance(part, ast.Call)]
        return (
            bool(values)
            and len(calls) == len(values)
            and all(is_mean_call(call, source) for call in calls)
        )
    return isinstance(value, ast.Call) and is_mean_call(value, source)


def is_mean_call(
    call: ast.Call,
    source: ScriptSource,
) -> bool:
    name = last_name(call.func)
    if name in MEAN_LOSSES:
        return is_reduced_to_mean(call)
    is_object = any(word in name.lower() for word in LOSS_OBJECTS)
    losses = [
        made
        for file in source.files
        for made in find_nodes(file.tree, ast.Call)
        if last_name(made.func).endswith("Loss")
    ]
    is_function = any(
        function.name == name
        for file in source.files
        for function in find_nodes(file.tree, ast.FunctionDef)
    )
    return is_object and not is_function and bool(losses) and all(map(is_reduced_to_mean, losses))


def is_reduced_to_mean(call: ast.Call) -> bool:
    reduction = keyword_value(call, "reduction")
    is_mean = reduction is None or constant_value(reduction) == "mean"
    return is_mean and keyword_value(call, "size_average") is None


def rank_quotients(scope: ast.AST) -> Iterator[RankQuotient]:
    """Yield the divisions by the number of ranks in a function."""
    for node in ast.walk(scope):
        quotient = quotient_of(node)
        if quotient is not None:
            divisor = ast.parse(quotient.divisor, mode="eval").body
            if depends_on(divisor, set()):
                yield RankQuotient(quotient, node)


def loss_divided_by_ranks(evidence: RunEvidence) -> Findings:
    """Find losses that are divided by the number of ranks before a wrapper averages gradients."""
    log = evidence.run.ranks[0]
    size = evidence.run.world_size
    backwards = log.select(Backward)
    divided = [e for e in backwards if e.scale and abs(e.scale * size - 1) < 1e-6]
    if len(divided) < 2 or len(divided) < len(backwards) or not is_wrapped(log):
        return
    for file in evidence.source.files:
        for rank_quotient in rank_quotients(file.tree):
            if any(word in rank_quotient.quotient.dividend.lower() for word in LOSS_WORDS):
                yield evidence.finding(
                    "mean-divided-twice",
                    CodeLine(file.name, rank_quotient.quotient.line),
                    f"the mean loss is divided by {size} ranks in {len(divided)} of "
                    f"{len(backwards)} backward passes, and then the wrapper averages gradients",
                )
                return


def reduced_twice(evidence: RunEvidence) -> Findings:
    """Find values that a collective has averaged, or that were divided before, and are again."""
    recorded = [evidence.location(e.at) for _, e in evidence.run.select(ScriptCollective) if e.at]
    for file in evidence.source.files:
        for call in file.calls("all_reduce"):
            lines = {location.line for location in recorded if location.file == file.name}
            if call.args and any(is_on_line(call, line) for line in lines):
                finding = divided_around(
                    evidence,
                    file,
                    call,
                )
                if finding is not None:
                    yield finding
                    return


def divided_around(
    evidence: RunEvidence,
    file: SourceFile,
    call: ast.Call,
) -> Finding | None:
    """Return the finding of a value that is divided by ranks twice around one collective."""
    value = ast.unparse(call.args[0])
    before: list[RankQuotient] = []
    after: list[RankQuotient] = []
    scope = file.enclosing_function(call)
    for rank_quotient in rank_quotients(scope):
        is_earlier = rank_quotient.quotient.line < call.lineno
        if is_earlier and is_stored_in(
            rank_quotient,
            value,
            file,
        ):
            before.append(rank_quotient)
        elif not is_earlier and rank_quotient.quotient.dividend == value:
            after.append(rank_quotient)
    is_average = "AVG" in ast.unparse(call)
    if is_average and (before or after):
        text = f"{value} is averaged over the ranks by the collective, and divided by their number"
    elif before and after:
        text = f"{value} is divided by the number of ranks before and after it is summed over them"
    else:
        return None
    line = (after or before)[0].quotient.line
    return evidence.finding(
        "mean-divided-twice",
        CodeLine(file.name, line),
        text,
    )


def is_stored_in(
    rank_quotient: RankQuotient,
    value: str,
    file: SourceFile,
) -> bool:
    """Return whether a quotient is `value /= n`, `value.div_(n)` or `value = ... / n`."""
    is_in_place = isinstance(rank_quotient.node, ast.AugAssign) or (
        isinstance(rank_quotient.node, ast.Call) and last_name(rank_quotient.node.func) == "div_"
    )
    if is_in_place:
        return rank_quotient.quotient.dividend == value
    parent = file.parents.get(rank_quotient.node)
    return isinstance(parent, ast.Assign) and ast.unparse(parent.targets[0]) == value
