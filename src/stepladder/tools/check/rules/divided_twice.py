"""The rule for means that are divided once more: by samples, or by the number of ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stepladder.tools.check.events import Backward, ScriptCollective
from stepladder.tools.check.mean_losses import MEAN_LOSSES
from stepladder.tools.check.recording import LoaderPass
from stepladder.tools.check.rules.batch_means import (
    BatchMeans,
    Quotient,
    all_batch_means,
    divides_by_samples,
    own_value,
    quotients,
)
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, run_rule
from stepladder.tools.check.rules.model import is_wrapped
from stepladder.tools.check.rules.shown_metrics import first_certain, shown_means_by_samples
from stepladder.tools.check.rules.source_patterns import assignments, is_addition
from stepladder.tools.check.rules.unscaled_batch import depends_on
from stepladder.tools.check.script_source import (
    ScriptSource,
    SourceFile,
    constant_value,
    keyword_value,
    last_name,
    lines_of,
)
from stepladder.tools.findings.finding import Finding, Location
from stepladder.tools.probe.events import CodeLine

LOSS_OBJECTS = ("criterion", "loss")
LOSS_WORDS = ("loss", "criterion", "cost", "entropy", "objective", "error", "mse")
UNWRAPS = ("item", "detach", "cpu", "float")


@run_rule("mean-divided-twice")
def mean_divided_twice(evidence: RunEvidence) -> Findings:
    shown = first_certain(evidence, "mean-divided-twice", shown_means_by_samples(evidence))
    yield from list(divided_by_samples(evidence)) or shown
    if evidence.has_several_ranks:
        yield from loss_divided_by_ranks(evidence)
        yield from reduced_twice(evidence)


def divided_by_samples(evidence: RunEvidence) -> Findings:
    """Find sums of batch means that are divided by the number of samples."""
    passes = [p for p in evidence.rank_0.passes if p.is_complete and p.line]
    for file in evidence.source.files:
        for means in all_batch_means(file):
            for one_pass in passes:
                location = evidence.location(one_pass.line)
                is_of_loop = location.file == file.name and location.line in means.lines
                if is_of_loop and max((batch.size for batch in one_pass.batches), default=0) > 1:
                    yield from sums_over_samples(evidence, file, means, one_pass)
                    break


def sums_over_samples(
    evidence: RunEvidence, file: SourceFile, means: BatchMeans, one_pass: LoaderPass
) -> Findings:
    sums = certain_sums(means, evidence.source)
    for quotient in quotients(means.following_nodes()):
        if divides_by_samples(quotient, means) and any(name in quotient.dividend for name in sums):
            count = sum(batch.size for batch in one_pass.batches)
            yield evidence.finding(
                "mean-divided-twice",
                CodeLine(file.name, quotient.line),
                f"the sum of {len(one_pass.batches)} batch means is divided by a number of "
                f"samples, {quotient.divisor}; this rank has read {count}",
            )
            return


def certain_sums(means: BatchMeans, source: ScriptSource) -> set[str]:
    """Return the values to which a loss is added that is certainly a mean."""
    node = means.node
    if isinstance(node, ast.ListComp | ast.GeneratorExp):
        return set(means.values) if is_mean_loss(node.elt, node, source) else set()
    additions = (part for part in ast.walk(node) if is_addition(part))
    targets = {ast.unparse(a.target) for a in additions if is_mean_loss(a.value, node, source)}
    return targets & set(means.values)


def is_mean_loss(value: ast.expr, loop: ast.AST, source: ScriptSource) -> bool:
    """Return whether a value is a loss of torch over a batch that is certainly a mean."""
    value = own_value(value)
    while isinstance(value, ast.Call) and last_name(value.func) in UNWRAPS:
        if isinstance(value.func, ast.Attribute):
            value = value.func.value
        elif value.args:
            value = value.args[0]
        else:
            return False
    values: list[ast.expr] = [value]
    if isinstance(value, ast.Name | ast.Attribute):
        values = [part.value for part in assignments(loop, ast.unparse(value))]
    return bool(values) and all(is_mean_call(part, source) for part in values)


def is_mean_call(call: ast.expr, source: ScriptSource) -> bool:
    if not isinstance(call, ast.Call):
        return False
    name = last_name(call.func)
    if name in MEAN_LOSSES:
        return is_reduced_to_mean(call)
    if any(function.name == name for _, function in source.nodes(ast.FunctionDef)):
        return False
    calls = [call for _, call in source.nodes(ast.Call)]
    losses = [made for made in calls if last_name(made.func).endswith("Loss")]
    is_object = any(word in name.lower() for word in LOSS_OBJECTS)
    return is_object and bool(losses) and all(map(is_reduced_to_mean, losses))


def is_reduced_to_mean(call: ast.Call) -> bool:
    reduction = keyword_value(call, "reduction")
    is_mean = reduction is None or constant_value(reduction) == "mean"
    return is_mean and keyword_value(call, "size_average") is None


def rank_quotients(scope: ast.AST) -> Iterator[Quotient]:
    """Yield the divisions by the number of ranks in a function."""
    for quotient in quotients(ast.walk(scope)):
        if depends_on(ast.parse(quotient.divisor, mode="eval").body, set()):
            yield quotient


def loss_divided_by_ranks(evidence: RunEvidence) -> Findings:
    """Find losses that are divided by the number of ranks before a wrapper averages gradients."""
    size = evidence.run.world_size
    backwards = evidence.rank_0.select(Backward)
    divided = [e for e in backwards if e.scale and abs(e.scale * size - 1) < 1e-6]
    if len(divided) < 2 or len(divided) < len(backwards) or not is_wrapped(evidence.rank_0):
        return
    for file in evidence.source.files:
        for quotient in rank_quotients(file.tree):
            if any(word in quotient.dividend.lower() for word in LOSS_WORDS):
                yield evidence.finding(
                    "mean-divided-twice",
                    CodeLine(file.name, quotient.line),
                    f"the mean loss is divided by {size} ranks in {len(divided)} of "
                    f"{len(backwards)} backward passes, and then the wrapper averages gradients",
                )
                return


def reduced_twice(evidence: RunEvidence) -> Findings:
    """Find values that a collective has averaged, or that were divided before, and are again."""
    recorded = evidence.locations(ScriptCollective)
    for file in evidence.source.files:
        for call in file.calls("all_reduce"):
            lines = {Location(file.name, line) for line in lines_of(call)}
            finding = None
            if call.args and not recorded.isdisjoint(lines):
                finding = divided_around(evidence, file, call)
            if finding is not None:
                yield finding
                return


def divided_around(evidence: RunEvidence, file: SourceFile, call: ast.Call) -> Finding | None:
    """Return the finding of a value that is divided by ranks twice around one collective."""
    value = ast.unparse(call.args[0])
    before: list[Quotient] = []
    after: list[Quotient] = []
    for quotient in rank_quotients(file.enclosing_function(call)):
        is_later = quotient.line >= call.lineno
        if is_later and quotient.dividend == value:
            after.append(quotient)
        elif not is_later and is_stored_in(quotient, value, file):
            before.append(quotient)
    is_average = "AVG" in ast.unparse(call)
    if is_average and (before or after):
        text = f"{value} is averaged over the ranks by the collective, and divided by their number"
    elif before and after:
        text = f"{value} is divided by the number of ranks before and after it is summed over them"
    else:
        return None
    line = CodeLine(file.name, (after or before)[0].line)
    return evidence.finding("mean-divided-twice", line, text)


def is_stored_in(quotient: Quotient, value: str, file: SourceFile) -> bool:
    """Return whether a quotient is `value /= n`, `value.div_(n)` or `value = ... / n`."""
    node = quotient.node
    is_method = isinstance(node, ast.Call) and last_name(node.func) == "div_"
    if is_method or isinstance(node, ast.AugAssign):
        return quotient.dividend == value
    parent = file.parents.get(node)
    return isinstance(parent, ast.Assign) and ast.unparse(parent.targets[0]) == value
