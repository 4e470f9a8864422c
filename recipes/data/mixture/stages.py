"""Map stream positions to sources and per-source indices: arithmetic, no state.

Shapes: K sources, P positions of a period.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from recipes.data.order import Positions

PERIOD = 10_000  # P: number of positions in which each source has exactly its share


def count_shares(weights: Sequence[float]) -> Positions:
    """Return the number of positions per period of each source, [K], rounded by the largest remainder method.

    Args:
        weights: [K], nonnegative, summing to 1.
    """
    exact = PERIOD * np.asarray(weights, dtype=np.float64) / sum(weights)  # [K]
    counts = np.floor(exact).astype(np.int64)
    by_remainder = np.lexsort((np.arange(len(weights)), counts - exact))
    counts[by_remainder[: PERIOD - counts.sum()]] += 1
    return counts


class Stage:
    """Positions from `start` on, with one set of weights.

    Each source's positions are spread evenly over a period, so any long section of the stream has about its share.

    Args:
        start: First position.
        counts: [K], positions of each source per period.
        before: [K], positions of each source before `start`.
    """

    def __init__(self, start: int, counts: Positions, before: Positions) -> None:
        self.start = start
        self.counts = counts
        self._before = before
        sources = np.repeat(np.arange(len(counts)), counts)  # [P]
        firsts = np.cumsum(counts) - counts  # [K]
        # for each source, the midpoints of n equal parts of a period; sorting them interleaves the sources
        middles = (2 * (np.arange(PERIOD) - firsts[sources]) + 1) / (2 * counts[sources])  # [P]
        self._sources = sources[np.lexsort((sources, middles))]  # [P]
        is_of = self._sources[:, None] == np.arange(len(counts))  # [P, K]
        self._had = is_of.cumsum(axis=0) - is_of  # [P, K], before each position of a period

    def count_before(self, position: int) -> Positions:
        """Return the number of positions of each source before a position of this stage, [K]."""
        periods, offset = divmod(position - self.start, PERIOD)
        counts: Positions = self._before + periods * self.counts + self._had[offset]
        return counts

    def locate(self, positions: Positions) -> tuple[Positions, Positions]:
        """Return the source of each position of this stage, and the number of earlier positions of that source."""
        periods, offsets = np.divmod(positions - self.start, PERIOD)
        sources = self._sources[offsets]
        return sources, self._before[sources] + periods * self.counts[sources] + self._had[offsets, sources]


class Stages:
    """All stages of the stream.

    Args:
        starts: First position of each stage, ascending from 0.
        weights: Weights [K] of each stage.
    """

    def __init__(self, starts: Sequence[int], weights: Sequence[Sequence[float]]) -> None:
        assert starts[0] == 0, starts
        self._starts = np.asarray(starts, dtype=np.int64)
        self._stages: list[Stage] = []
        for start, of_stage in zip(starts, weights, strict=True):
            before = self.count_before(start) if self._stages else np.zeros(len(of_stage), dtype=np.int64)
            self._stages.append(Stage(start, count_shares(of_stage), before))

    def __iter__(self) -> Iterator[tuple[int, Positions]]:
        """Yield the first position of each stage, and its positions per period by source, [K]."""
        return ((stage.start, stage.counts) for stage in self._stages)

    def count_before(self, position: int) -> Positions:
        """Return the number of positions of each source before a position, [K]."""
        started = [stage for stage in self._stages if stage.start <= position]
        return started[-1].count_before(position)

    def locate(self, positions: Positions) -> tuple[Positions, Positions]:
        """Return the source of each position [N], and the number of earlier positions of that source, [N]."""
        sources, had = np.empty_like(positions), np.empty_like(positions)
        numbers = np.searchsorted(self._starts, positions, side="right") - 1
        for number in np.unique(numbers):
            here = numbers == number
            sources[here], had[here] = self._stages[number].locate(positions[here])
        return sources, had

    def find_end(self, limits: Positions) -> int | None:
        """Return the first position at which a source exceeds its limit [K]; None: it never happens.

        Limits of sources without weight in the last stage may never be reached.
        """
        last = self._stages[-1]
        # after this many periods of the last stage, every source with a weight in it is beyond its limit
        shares = last.counts[last.counts > 0]
        enough = last.start + PERIOD * (int(limits.max()) // int(shares.min()) + 2)

        def is_beyond(position: int) -> bool:
            return bool((self.count_before(position) > limits).any())

        if not is_beyond(enough):
            return None
        return bisect_left(range(enough), True, key=is_beyond) - 1
