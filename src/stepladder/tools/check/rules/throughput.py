"""The rule for a throughput that counts the samples of all ranks once for each rank."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from stepladder.tools.check.recording import RankLog
from stepladder.tools.check.rules.evidence import Findings, RunEvidence, run_rule
from stepladder.tools.check.rules.source_patterns import assignments
from stepladder.tools.check.script_source import ScriptSource, SourceFile, find_nodes
from stepladder.tools.probe.events import CodeLine

RANKS = re.compile(
    r"world_?size|num_replicas|num_processes|\bn_?procs?\b|num_ranks|num_gpus|\bworld\b|\branks\b",
    re.I,
)
SECONDS = re.compile(r"time|elapsed|sec|duration|\bdt\b|perf_counter|\bend\b|\bstop\b", re.I)
NOT_TRAINED = re.compile(r"test|val|eval", re.I)
MAX_NAMES = 3  # that lead from a quotient to a number


@dataclass
class Fraction:
    """A product and a quotient of expressions, as the texts of its factors."""

    factors: list[str] = field(default_factory=list)
    divisors: list[str] = field(default_factory=list)

    def is_rate_of(self, lengths: set[str]) -> bool:
        """Return whether one of these lengths is divided by a time."""
        has_time = any(map(SECONDS.search, self.divisors))
        return has_time and not lengths.isdisjoint(self.factors) and not self.divides_by_ranks

    @property
    def multiplies_by_ranks(self) -> bool:
        return any(map(RANKS.search, self.factors))

    @property
    def divides_by_ranks(self) -> bool:
        return any(map(RANKS.search, self.divisors))


@run_rule("inflated-throughput")
def inflated_throughput(evidence: RunEvidence) -> Findings:
    """Find rates of the whole data set times the number of ranks, which divide the samples."""
    ranks = evidence.run.ranks
    if not evidence.has_several_ranks or not all(map(divides_samples, ranks)):
        return
    lengths = set(lengths_of_all(evidence.source))
    for file in evidence.source.files:
        for node in quotients(file):
            fraction = Fraction()
            expand(node, file.enclosing_function(node), fraction)
            if fraction.is_rate_of(lengths) and fraction.multiplies_by_ranks:
                (length, *_) = lengths & set(fraction.factors)
                start = ranks[0].training_passes[0].start
                yield evidence.finding(
                    "inflated-throughput",
                    CodeLine(file.name, node.lineno),
                    f"{length} is {start.length}, the samples of all "
                    f"{len(ranks)} ranks, and is multiplied by their number",
                )
                return


def divides_samples(log: RankLog) -> bool:
    """Return whether the sampler of each training pass divides the samples among the ranks."""
    passes = log.training_passes
    return bool(passes) and all((one_pass.start.replicas or 1) > 1 for one_pass in passes)


def lengths_of_all(source: ScriptSource) -> Iterator[str]:
    """Yield the expressions for the length of a data set that a sampler divides."""
    for _, call in source.calls("DistributedSampler"):
        for data in call.args[:1]:
            yield f"len({ast.unparse(data)})"
    for _, call in source.calls("len"):
        length = ast.unparse(call)
        if length.endswith(".dataset)") and not NOT_TRAINED.search(length):
            yield length


def quotients(file: SourceFile) -> Iterator[ast.BinOp]:
    """Yield the products and quotients that are no part of a larger one."""
    for node in find_nodes(file.tree, ast.BinOp):
        if is_product(node) and not is_product(file.parents.get(node)):
            yield node


def is_product(node: ast.AST | None) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div))


def expand(node: ast.expr, scope: ast.AST, fraction: Fraction, depth: int = 0) -> None:
    """Add the factors of an expression to a fraction, with names as what a scope sets them to."""
    if isinstance(node, ast.BinOp) and is_product(node):
        expand(node.left, scope, fraction, depth)
        divided = Fraction(fraction.divisors, fraction.factors)
        expand(node.right, scope, divided if isinstance(node.op, ast.Div) else fraction, depth)
        return
    text = ast.unparse(node)
    values = list(assignments(scope, text)) if isinstance(node, ast.Name) else []
    is_known = RANKS.search(text) or SECONDS.search(text)
    if len(values) == 1 and not is_known and depth < MAX_NAMES:
        expand(values[0].value, scope, fraction, depth + 1)
    else:
        fraction.factors.append(text)
