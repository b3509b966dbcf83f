"""Series of any length in little memory: curves of means, and the times of ranks in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stepladder.rank.timing import SPREAD

Label = int | str  # a rank, or one of SPREAD
MAX_CURVE_POINTS = 800
MAX_TIME_COLUMNS = 240
MAX_SHOWN_RANKS = 32  # of more ranks, only the spread and the slowest are shown
NUM_SLOWEST_SHOWN = 8
MAX_BUFFERED_ROWS = 10_000
STRAGGLER_FACTOR = 1.2  # a rank that is busy so many times as long as the others
MIN_WINDOW_S = 1e-9  # a shorter window was not measured


class Curve:
    """A curve of at most MAX_CURVE_POINTS points, each the mean of `width` neighbours.

    The width is doubled whenever the points become too many.
    """

    def __init__(self) -> None:
        # The last point that was added, unchanged.
        self.newest: tuple[float, float] | None = None
        self._means: list[tuple[float, float]] = []
        self._width = 1
        # The points that have no mean yet.
        self._count = 0
        self._x_sum = 0.0
        self._y_sum = 0.0

    def add(self, x: float, y: float) -> None:
        self.newest = (x, y)
        self._x_sum += x
        self._y_sum += y
        self._count += 1
        if self._count == self._width:
            self._means.append(self._get_mean())
            self._count = 0
            self._x_sum = 0.0
            self._y_sum = 0.0
            if len(self._means) == MAX_CURVE_POINTS:
                self._merge_neighbours()

    def _get_mean(self) -> tuple[float, float]:
        return self._x_sum / self._count, self._y_sum / self._count

    def _merge_neighbours(self) -> None:
        pairs = zip(self._means[::2], self._means[1::2], strict=True)
        self._means = [((x0 + x1) / 2, (y0 + y1) / 2) for (x0, y0), (x1, y1) in pairs]
        self._width *= 2

    @property
    def points(self) -> list[tuple[float, float]]:
        if self._count == 0:
            return self._means
        return [*self._means, self._get_mean()]


class RankTimes:
    """The seconds of each rank by phase, summed into at most MAX_TIME_COLUMNS columns of windows.

    A column is closed when the number of ranks changes.

    Args:
        keys: The names of the phases. The first two are the rank's busy time.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = keys
        # Steps per second, by step.
        self.speeds = Curve()
        # The number of ranks of the last start.
        self.world_size = 0
        # The first column of the last start.
        self.start_column = 0
        # The last step of each column.
        self.last_steps: list[int] = []
        # The row of each label in the table of sums.
        self.row_of: dict[Label, int] = {}
        # The values of a cell: steps, and seconds by phase.
        self._sums = np.zeros((4, MAX_TIME_COLUMNS, 1 + len(keys)))
        self._pending: list[tuple[float, ...]] = []  # (row, column, *values of a cell)
        self._column_width = 1  # windows that a column holds
        self._free_windows = 0  # windows that still go into the last column

    def add(
        self, last_step: int, steps: int, rows: Mapping[Label, Sequence[float]], world_size: int
    ) -> None:
        """Add a window of so many steps up to `last_step`: the seconds by phase of some ranks."""
        rank_rows = [row for label, row in rows.items() if label not in SPREAD]
        window_s = max(sum(row) for row in rank_rows)
        if window_s > MIN_WINDOW_S:
            self.speeds.add(last_step, steps / window_s)
        if self._free_windows == 0 or world_size != self.world_size:
            self._open_column(last_step)
        if world_size != self.world_size:
            self.world_size = world_size
            self.start_column = len(self.last_steps) - 1
        self.last_steps[-1] = last_step
        self._free_windows -= 1
        column = len(self.last_steps) - 1
        for label, row in rows.items():
            index = self.row_of.setdefault(label, len(self.row_of))
            pending = (index, column, steps, *row)
            self._pending.append(pending)
        if len(self._pending) > MAX_BUFFERED_ROWS:
            self._sum_pending()

    def _open_column(self, last_step: int) -> None:
        if len(self.last_steps) == MAX_TIME_COLUMNS:
            self._merge_columns()
        self.last_steps.append(last_step)
        self._free_windows = self._column_width

    def _sum_pending(self) -> None:
        missing = len(self.row_of) - len(self._sums)
        if missing > 0:
            _, columns, values = self._sums.shape
            num_new_rows = max(missing, len(self._sums))  # at least doubled: few copies
            new_rows = np.zeros((num_new_rows, columns, values))
            self._sums = np.concatenate([self._sums, new_rows])
        if self._pending:
            pending = np.array(self._pending)
            rows, columns = pending[:, :2].T.astype(int)
            np.add.at(self._sums, (rows, columns), pending[:, 2:])
            self._pending.clear()

    def _merge_columns(self) -> None:
        """Merge each two neighbouring columns into one."""
        self._sum_pending()
        half = MAX_TIME_COLUMNS // 2
        first = self._sums[:, ::2]
        second = self._sums[:, 1::2]
        self._sums[:, :half] = first + second
        self._sums[:, half:] = 0
        self.last_steps = self.last_steps[1::2]
        self.start_column = (self.start_column + 1) // 2
        self._column_width *= 2

    def get_cells(self, labels: Sequence[Label]) -> np.ndarray:
        """Return the steps and the seconds by phase, shape (labels, columns, 1 + phases)."""
        self._sum_pending()
        indices = [self.row_of[label] for label in labels]
        cells: np.ndarray = self._sums[indices, : len(self.last_steps)]
        return cells

    @property
    def ranks(self) -> list[int]:
        return sorted(label for label in self.row_of if isinstance(label, int))

    def get_shown_rows(self) -> tuple[list[str], np.ndarray]:
        """Return the names and cells to show: all ranks, or the spread and the slowest ranks."""
        ranks = self.ranks
        has_spread = SPREAD[0] in self.row_of
        if not has_spread and len(ranks) <= MAX_SHOWN_RANKS:
            return [f"rank {rank}" for rank in ranks], self.get_cells(ranks)
        busy_times = self._get_median_busy_times(ranks)
        busy_of = dict(zip(ranks, busy_times, strict=True))
        by_busy_time = sorted(ranks, key=lambda rank: -busy_of[rank])
        slowest = sorted(by_busy_time[:NUM_SLOWEST_SHOWN])
        if has_spread:
            spread = self.get_cells(SPREAD)
        else:
            spread = _compute_spread(self.get_cells(ranks))
        names = [*SPREAD, *(f"rank {rank}" for rank in slowest)]
        cells = np.concatenate([spread, self.get_cells(slowest)])
        return names, cells

    def _get_median_busy_times(self, labels: Sequence[Label], start_column: int = 0) -> list[float]:
        """Return the busy seconds per step of each label, the median of its columns.

        A label that is in fewer than half of the columns has 0.
        """
        cells = self.get_cells(labels)[:, start_column:]
        medians = []
        for busy_s in compute_busy_time(cells):
            known = busy_s[np.isfinite(busy_s)]
            median = 0.0
            if 2 * len(known) >= busy_s.size > 0:
                median = float(np.median(known))
            medians.append(median)
        return medians

    def find_stragglers(self) -> list[tuple[int, float]]:
        """Return the ranks that are busy much longer than the others, and how many times as long.

        Only the last start counts. Medians over columns and over ranks are compared, so one slow
        moment makes no straggler.
        """
        if self.world_size <= 1:
            return []
        ranks = [rank for rank in self.ranks if rank < self.world_size]
        busy_times = self._get_median_busy_times(ranks, self.start_column)
        # The recording has the median of all ranks where it does not have every rank.
        median_of_all = 0.0
        if "median" in self.row_of:
            (median_of_all,) = self._get_median_busy_times(["median"], self.start_column)
        stragglers = []
        for index, (rank, busy_s) in enumerate(zip(ranks, busy_times, strict=True)):
            reference_s = median_of_all
            if not reference_s and len(ranks) > 1:
                peer_times = np.delete(busy_times, index)
                reference_s = float(np.median(peer_times))
            if reference_s > 0 and busy_s > STRAGGLER_FACTOR * reference_s:
                stragglers.append((rank, float(busy_s / reference_s)))
        return stragglers

    def describe_stragglers(self) -> list[str]:
        """Return a sentence about each rank of `find_stragglers`."""
        peers = "the other" if self.world_size == 2 else "the others"
        return [
            f"rank {rank} takes {factor:.1f} times as long as {peers} for its share"
            for rank, factor in self.find_stragglers()
        ]


def compute_busy_time(cells: np.ndarray) -> np.ndarray:
    """Return the seconds per step before a rank waits for others, shape (labels, columns).

    A column without steps has NaN.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        steps = cells[..., 0]
        busy_s: np.ndarray = cells[..., 1:3].sum(-1) / steps
    return busy_s


def _compute_spread(cells: np.ndarray) -> np.ndarray:
    """Return the minimum, median and maximum over the ranks in each column."""
    has_steps = cells[..., :1] > 0
    known = np.where(has_steps, cells, np.nan)
    quantiles = np.nanquantile(known, [0, 0.5, 1], axis=0)
    spread: np.ndarray = np.nan_to_num(quantiles)
    return spread
