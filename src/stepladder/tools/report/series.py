"""Series of any length in little memory: curves of means, and the ranks' times in columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from stepladder.rank.timing import SPREAD

Label = int | str  # a rank, or one of SPREAD
MAX_CURVE_POINTS = 800  # of a curve
MAX_TIME_COLUMNS = 240
MAX_SHOWN_RANKS = 32  # ranks that are shown one by one
SLOWEST = 8  # that are, where there are more
AT_ONCE = 10_000
LEAST_SECONDS = 1e-9  # of a window that was measured


class Curve:
    """Points, each the mean of as many neighbours as keep them few. last: the newest one, as it was
    given.
    """

    def __init__(self) -> None:
        self.done: list[tuple[float, float]] = []
        self.width, self.count, self.x, self.y = 1, 0, 0.0, 0.0
        self.last: tuple[float, float] | None = None

    def add(self, x: float, y: float) -> None:
        self.last = (x, y)
        self.x, self.y, self.count = self.x + x, self.y + y, self.count + 1
        if self.count == self.width:
            self.done.append((self.x / self.count, self.y / self.count))
            self.count, self.x, self.y = 0, 0.0, 0.0
            if len(self.done) == MAX_CURVE_POINTS:
                pairs = zip(self.done[::2], self.done[1::2], strict=True)
                self.done = [((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in pairs]
                self.width *= 2

    @property
    def points(self) -> list[tuple[float, float]]:
        return [*self.done, (self.x / self.count, self.y / self.count)] if self.count else self.done


class RankTimes:
    """Seconds by phase of ranks, window by window, summed into at most COLUMNS columns.

    keys: of the phases; the first two are a rank's own work.  speeds: steps per second, by step.
    lasts: the last step of each column.  size: ranks of the last start, whose columns begin with
    `since`."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys, self.speeds, self.size, self.since = keys, Curve(), 0, 0
        self.lasts: list[int] = []
        self.places: dict[Label, int] = {}
        self._cells = np.zeros((4, MAX_TIME_COLUMNS, 1 + len(keys)))  # steps, and seconds by phase
        self._waiting: list[tuple[float, ...]] = []
        self._width, self._room = (
            1,
            0,
        )  # windows of a column; those that the last column still takes

    def add(self, last: int, count: int, rows: Mapping[Label, Sequence[float]], size: int) -> None:
        """A window: `count` steps up to the `last` one, by some or all of `size` ranks."""
        whole = max(sum(row) for label, row in rows.items() if label not in SPREAD)
        if whole > LEAST_SECONDS:
            self.speeds.add(last, count / whole)
        if not self._room or size != self.size:
            if len(self.lasts) == MAX_TIME_COLUMNS:
                self._fold()
            self.lasts.append(last)
            self._room = self._width
        if size != self.size:
            self.size, self.since = size, len(self.lasts) - 1
        self.lasts[-1] = last
        self._room -= 1
        for label, row in rows.items():
            place = self.places.setdefault(label, len(self.places))
            self._waiting.append((place, len(self.lasts) - 1, count, *row))
        if len(self._waiting) > AT_ONCE:
            self._sum()

    def _sum(self) -> None:
        if missing := max(0, len(self.places) - len(self._cells)):
            more = np.zeros((max(missing, len(self._cells)), *self._cells.shape[1:]))
            self._cells = np.concatenate([self._cells, more])
        if self._waiting:
            rows = np.array(self._waiting)
            np.add.at(self._cells, tuple(rows[:, :2].T.astype(int)), rows[:, 2:])
            self._waiting.clear()

    def _fold(self) -> None:
        """Two columns into one each."""
        self._sum()
        self._cells[:, : MAX_TIME_COLUMNS // 2] = self._cells[:, ::2] + self._cells[:, 1::2]
        self._cells[:, MAX_TIME_COLUMNS // 2 :] = 0
        self.lasts, self.since, self._width = (
            self.lasts[1::2],
            (self.since + 1) // 2,
            2 * self._width,
        )

    def cells(self, labels: Sequence[Label]) -> np.ndarray:
        """Steps and seconds by phase of these, shape (labels, columns, 1 + phases)."""
        self._sum()
        found: np.ndarray = self._cells[[self.places[label] for label in labels], : len(self.lasts)]
        return found

    @property
    def ranks(self) -> list[int]:
        return sorted(label for label in self.places if isinstance(label, int))

    def rows(self) -> tuple[list[str], np.ndarray]:
        """What can be shown: names, and their cells. All ranks, or of many the spread and the
        slowest ones.
        """
        ranks = self.ranks
        if SPREAD[0] not in self.places and len(ranks) <= MAX_SHOWN_RANKS:
            return [f"rank {rank}" for rank in ranks], self.cells(ranks)
        medians = dict(self._medians(ranks))
        slowest = sorted(sorted(ranks, key=lambda rank: -medians[rank])[:SLOWEST])
        spread = (
            self.cells(SPREAD) if SPREAD[0] in self.places else compute_spread(self.cells(ranks))
        )
        return [*SPREAD, *(f"rank {rank}" for rank in slowest)], np.concatenate(
            [spread, self.cells(slowest)]
        )

    def _medians(self, labels: Sequence[Label], since: int = 0) -> Iterator[tuple[Label, float]]:
        """Seconds per step of own work; of a label that is in less than half of the columns, 0."""
        for label, own in zip(
            labels, compute_busy_time(self.cells(labels)[:, since:]), strict=True
        ):
            known = own[np.isfinite(own)]
            yield label, float(np.median(known)) if 2 * len(known) >= own.size > 0 else 0.0

    def stragglers(self, factor: float = 1.2) -> list[tuple[int, float]]:
        """(rank, how many times the others' time) of ranks that take `factor` times as long for
        their own share.

        Of the last start. Medians over columns and over ranks: one slow moment names nobody.
        """
        ranks = [rank for rank in self.ranks if rank < self.size] if self.size > 1 else []
        own = np.array([seconds for _, seconds in self._medians(ranks, self.since)])
        of_all = [
            label for label in ("median",) if label in self.places
        ]  # where not every rank is known
        found = []
        for place, rank in enumerate(ranks):
            others = sum(seconds for _, seconds in self._medians(of_all, self.since))
            others = others or float(np.median(np.delete(own, place))) if len(own) > 1 else others
            if others > 0 and own[place] > factor * others:
                found.append((rank, float(own[place] / others)))
        return found


def compute_busy_time(cells: np.ndarray) -> np.ndarray:
    """Seconds per step before a rank waits for others, NaN where there is nothing; shape (labels,
    columns).
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        own: np.ndarray = cells[..., 1:3].sum(-1) / cells[..., 0]
    return own


def compute_spread(cells: np.ndarray) -> np.ndarray:
    """The least, median and most of all ranks in each column."""
    there = np.where(cells[..., :1] > 0, cells, np.nan)
    spread: np.ndarray = np.nan_to_num(np.nanquantile(there, [0, 0.5, 1], axis=0))
    return spread
