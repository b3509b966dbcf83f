"""A linear fit of the targets of a rank's batches to their inputs, and rows that test it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepladder.tools.check.events import LinearFit
from stepladder.tools.check.probe.patching import default_on_error

MAX_FEATURES = 64
MAX_OUTPUTS = 16
MAX_FITTED_ROWS = 2048
MAX_TESTED_ROWS = 256


class FittedRows:
    """The rows of one pass: half of them make a fit, and the others test it.

    A row's hash decides to which half it belongs, so that a row that comes again tests no fit that
    it has made.
    """

    def __init__(self) -> None:
        self.number = 0  # of the pass
        self.inputs: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.targets: tuple[list[Tensor], list[Tensor]] = ([], [])

    def begin(self, number: int) -> None:
        """Forget the rows of an earlier pass."""
        self.number = number
        self.inputs = ([], [])
        self.targets = ([], [])

    @default_on_error(lambda: None)
    def add(self, number: int, batch: Any, hashes: list[str]) -> None:
        """Add a batch of inputs and targets to those of its pass; any other batch is left out."""
        if number != self.number:
            self.begin(number)
        is_pair = isinstance(batch, (list, tuple)) and len(batch) == 2
        if not is_pair or len(self.inputs[0]) > MAX_FITTED_ROWS:
            return
        inputs = as_inputs(batch[0])
        targets = as_targets(batch[1])
        if inputs is None or targets is None:
            return
        rows = zip(hashes, inputs, targets, strict=False)
        for digest, row, target in rows:
            half = int(digest, 16) % 2
            self.inputs[half].append(row)
            self.targets[half].append(target)

    @default_on_error(lambda: None)
    def fit(self, number: int) -> LinearFit | None:
        """Return the fit of the least squared error in a pass; None where it has no such rows."""
        if number != self.number or not all(self.inputs):
            return None
        fitted = torch.stack(self.inputs[0])
        tested = torch.stack(self.inputs[1][:MAX_TESTED_ROWS])
        wanted = torch.stack(self.targets[0])
        tested_targets = torch.stack(self.targets[1][:MAX_TESTED_ROWS])
        weights = torch.linalg.lstsq(fitted, wanted).solution
        return LinearFit(
            number=number,
            count=len(fitted),
            weights=weights.T.tolist(),
            inputs=tested.T.tolist(),
            targets=tested_targets.T.tolist(),
        )


def as_inputs(value: Any) -> Tensor | None:
    """Return the inputs of a batch with a 1 at the end of each; None if they are too many."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    flat = value.detach().flatten(1).double().cpu()
    if flat.shape[1] > MAX_FEATURES:
        return None
    ones = torch.ones_like(flat[:, :1])
    return torch.cat([flat, ones], 1)


def as_targets(value: Any) -> Tensor | None:
    """Return the targets of a batch, of which classes become one number for each class."""
    if not isinstance(value, Tensor):
        return None
    flat = value.detach().reshape(len(value), -1).cpu()
    if value.is_floating_point():
        return flat.double() if flat.shape[1] <= MAX_OUTPUTS else None
    if flat.shape[1] != 1:
        return None
    # It raises for a class below 0, or beyond the last.
    one_hot = torch.nn.functional.one_hot(flat[:, 0].long(), MAX_OUTPUTS)
    return one_hot.double()


fitted_rows = FittedRows()
