"""Which of several things went on at each instant: spans of time, cut at every edge of all of them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Spans = NDArray[np.float64]  # shape (n, 2): begin and end, in any order, overlapping or not
Mask = NDArray[np.bool_]  # per piece of a timeline


def spans(pairs: Iterable[tuple[float, float]]) -> Spans:
    return np.array(list(pairs), dtype=np.float64).reshape(-1, 2)


class Timeline:
    """Pieces between neighbouring edges: within one, nothing begins or ends."""

    def __init__(self, *everything: Spans) -> None:
        edges = np.unique(np.concatenate([one.reshape(-1) for one in everything]))
        self.lengths, self.middles = np.diff(edges), (edges[:-1] + edges[1:]) / 2

    def inside(self, some: Spans) -> Mask:
        """The pieces that at least one of these spans covers."""
        begun = np.searchsorted(np.sort(some[:, 0]), self.middles)
        ended = np.searchsorted(np.sort(some[:, 1]), self.middles)
        covered: Mask = begun > ended
        return covered

    def length(self, mask: Mask) -> float:
        return float(self.lengths[mask].sum())
