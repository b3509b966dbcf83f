"""Features that all_gather takes without their graph, and that a loss has as constants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from stepladder.tools.check.probe.patching import default_on_error
from stepladder.tools.probe.events import CodeLine

MAX_NODES = 64  # of a loss's graph that are examined


class GatheredFeatures:
    """What all_gather has taken since the last backward pass."""

    def __init__(self) -> None:
        # Of each: its first row, and the line that gathers it.
        self.rows: list[tuple[torch.Tensor, CodeLine | None]] = []

    @default_on_error(lambda: None)
    def add(self, features: torch.Tensor, at: CodeLine | None) -> None:
        """Remember features of this rank, [samples, features], if they have a graph."""
        has_graph = features.requires_grad and torch.is_grad_enabled()
        if has_graph and features.dim() == 2 and features.shape[1] > 1 and len(features):
            self.rows.append((features[0].detach().clone(), at))

    @default_on_error(lambda: None)
    def find_constant(self, loss: Any) -> CodeLine | None:
        """Return the line that gathers features which a loss has as constants, and forget all.

        With the features' own graph among the gathered ones, the operand of the product has one.
        """
        rows = self.rows
        self.rows = []
        for node in nearest_nodes(loss) if rows else ():
            for name in ("_saved_self", "_saved_mat2"):
                operand = getattr(node, name, None)
                if not isinstance(operand, torch.Tensor) or operand.requires_grad:
                    continue
                for row, at in rows:
                    if holds_row(operand, row):
                        return at
        return None


def nearest_nodes(loss: Any) -> Iterator[Any]:
    """Yield nodes of a loss's graph, the nearest first."""
    nodes = [loss.grad_fn]
    for index in range(MAX_NODES):
        if index == len(nodes):
            return
        yield nodes[index]
        inputs = [node for node, _ in nodes[index].next_functions]
        nodes += [node for node in inputs if node not in (None, *nodes)]


def holds_row(operand: torch.Tensor, row: torch.Tensor) -> bool:
    """Return whether a matrix has this row, or this column."""
    if operand.dim() != 2:
        return False
    for rows in (operand, operand.t()):
        has_length = rows.shape[1] == len(row)
        if has_length and bool((rows == row).all(1).any()):
            return True
    return False


gathered_features = GatheredFeatures()
