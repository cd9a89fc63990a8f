"""Histograms as counters: merged, subtracted and read as a whole, never averaged (a mean of p95s is no p95). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

INFINITE = 1e308  # the bound of the last bucket: a number, because JSON has no infinity


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations per bucket. bounds: upper bounds, ascending, the last one infinite; counts: as many, not cumulative."""

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    total: float = 0.0  # sum of all observed values

    @property
    def count(self) -> float:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        count = self.count
        return self.total / count if count > 0 else None

    def quantile(self, q: float) -> float | None:
        """Linear inside a bucket, as PromQL has it; the last finite bound for what lies beyond it. None: no observation."""
        count = self.count
        if count <= 0:
            return None
        rank, seen, low = q * count, 0.0, 0.0
        for bound, inside in zip(self.bounds, self.counts, strict=True):
            if inside > 0 and seen + inside >= rank:
                if bound >= INFINITE:
                    return low
                return low + (bound - low) * max(0.0, rank - seen) / inside
            seen += inside
            low = bound if not bound >= INFINITE else low
        return low

    def share_above(self, value: float) -> float:
        """Share of the observations above `value`, 0 to 1; inside a bucket they count as spread evenly."""
        count = self.count
        if count <= 0:
            return 0.0
        above, low = 0.0, 0.0
        for bound, inside in zip(self.bounds, self.counts, strict=True):
            if low >= value:
                above += inside
            elif bound > value:
                above += inside if bound >= INFINITE else inside * (bound - value) / (bound - low)
            low = bound
        return above / count

    def plus(self, other: Histogram) -> Histogram:
        """Raises ValueError where the buckets differ: two versions of a process are two families, not one."""
        if not other.bounds:
            return self
        if not self.bounds:
            return other
        if self.bounds != other.bounds:
            raise ValueError(f"buckets differ: {self.bounds} and {other.bounds}")
        return Histogram(
            self.bounds,
            tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)),
            self.total + other.total,
        )


def merge(histograms: Iterable[Histogram]) -> Histogram:
    merged = Histogram()
    for histogram in histograms:
        merged = merged.plus(histogram)
    return merged


def of_values(values: Iterable[float], bounds: Sequence[float]) -> Histogram:
    """bounds without the infinite one."""
    edges = (*bounds, INFINITE)
    counts, total = [0.0] * len(edges), 0.0
    for value in values:
        total += value
        index = next(i for i, bound in enumerate(edges) if value <= bound)
        counts[index] += 1
    return Histogram(edges, tuple(counts), total)
