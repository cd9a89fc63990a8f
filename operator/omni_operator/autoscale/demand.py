"""How much load to be ready for: what comes now, what it is growing to, and the burst that came before. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from omni_operator.autoscale.types import Tuning

FAST_SECONDS = 30.0
SLOW_SECONDS = 120.0
SETTLED_SECONDS = 300.0  # of a load whose reserve is known
SURPRISE = 1.0  # two minutes above those by more standard errors than this are no noise
TREND_SECONDS = (300.0, 900.0)  # a steep rise is seen early, a slow one above its noise late
TREND_SIGMAS = 1.5  # a slope below this many standard errors is noise
MAX_HORIZON_SECONDS = 420.0
BURST_BIN_SECONDS = 60.0
BURSTY = 10.0  # variance over mean of requests per minute: Poisson has 1
GAPPED = 0.7  # standard deviation over mean of them: bursts with gaps between them, and no rough day of many users
MAX_DISPERSION = 4.0


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Arrivals of each stage in one window, in the order of the spec."""

    end: float
    seconds: float
    arrivals: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests per second that need a stage."""

    rate: float  # of now: over two minutes; where a reserve is known, over five (_settled)
    fast: float  # over the last half minute
    planned: float  # what capacity is made for
    dispersion: float  # variance over mean of arrivals; 1: independent users
    burst: bool
    source: str  # now | burst | trend | memory


def estimate(
    samples: Sequence[LoadSample],
    stage: int,
    tuning: Tuning,
    horizon: float,
    waiting: float,
    *,
    reserved: bool = False,
) -> Demand:
    """horizon: seconds until a replica that is asked for now serves. waiting: requests to be drained as well.

    reserved: the reserve of staffing.py is for what is above the rate of now. Another one on top of it would be paid for in
    quiet hours and too small in busy ones.
    """
    if not samples:
        return Demand(0.0, 0.0, waiting / SLOW_SECONDS, 1.0, False, "now")
    now = samples[-1].end
    fast, slow = _rate(samples, stage, now - FAST_SECONDS), _rate(samples, stage, now - SLOW_SECONDS)
    dispersion = _dispersion([(s.arrivals[stage]) for s in samples if s.end > now - 600.0])
    # Poisson noise alone must not look like a burst: a few requests in half a minute are nothing.
    noise = tuning.confidence * math.sqrt(max(slow, 1 / FAST_SECONDS) / FAST_SECONDS)
    # A burst is far above the last minutes, or a fifth of the way there and beyond any doubt.
    beyond_doubt = len(samples) > 4 and fast > slow * (1 + 0.2 * (tuning.burst_ratio - 1)) + 2 * noise
    burst = fast > tuning.burst_ratio * slow + noise or beyond_doubt
    choices = [(slow, "now")]
    minutes = _minutes(samples, stage, now, tuning)
    if reserved:
        level = _settled(samples, stage, now, slow, minutes)
        return Demand(level, fast, level + waiting / SLOW_SECONDS, dispersion, burst, "now")
    if burst:
        choices.append((fast, "burst"))
    growth = max(_growth(samples, stage, now - s, min(horizon, MAX_HORIZON_SECONDS)) for s in TREND_SECONDS)
    choices.append((slow + growth, "trend"))
    choices.append((_remembered(minutes, tuning), "memory"))
    planned, source = max(choices, key=lambda c: c[0])
    return Demand(slow, fast, planned + waiting / SLOW_SECONDS, dispersion, burst, source)


def _rate(samples: Sequence[LoadSample], stage: int, since: float) -> float:
    """Of the windows that end after `since`."""
    seconds = arrivals = 0.0
    for sample in reversed(samples):
        if sample.end <= since + 1e-9:
            break
        seconds += sample.seconds
        arrivals += sample.arrivals[stage]
    return arrivals / seconds if seconds > 0 else 0.0


def _dispersion(counts: Sequence[float]) -> float:
    """From neighbours' differences (von Neumann): a trend is not noise."""
    if len(counts) < 4:
        return 1.0
    mean = sum(counts) / len(counts)
    if mean <= 0:
        return 1.0
    return min(MAX_DISPERSION, max(1.0, _variance(counts) / mean))


def _growth(samples: Sequence[LoadSample], stage: int, since: float, horizon: float) -> float:
    """Requests per second by which the load will have grown after `horizon`; 0 where no growth is certain."""
    points = [(s.end - since, s.arrivals[stage] / s.seconds) for s in samples if s.end > since]
    if len(points) < 8:
        return 0.0
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    xx = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / xx
    left = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    error = math.sqrt(left / (n - 2) / xx)
    # Only what is certain is added, and never more than the load itself: a ramp may end at any time.
    return min(max(0.0, slope - TREND_SIGMAS * error) * horizon, mean_y)


def _minutes(samples: Sequence[LoadSample], stage: int, now: float, tuning: Tuning) -> list[float]:
    """Requests of each minute that is remembered, the newest first."""
    bins: dict[int, float] = {}
    for sample in samples:
        if sample.end > now - tuning.memory_seconds:
            index = int((now - sample.end) // BURST_BIN_SECONDS)
            bins[index] = bins.get(index, 0.0) + sample.arrivals[stage]
    return [bins.get(i, 0.0) for i in range(max(bins, default=-1) + 1)]


def comes_in_bursts(samples: Sequence[LoadSample], stage: int, tuning: Tuning) -> bool:
    """With gaps between them: nothing that a queue's law for independent users could say anything about."""
    return bool(samples) and _in_bursts(_minutes(samples, stage, samples[-1].end, tuning), GAPPED)


def _settled(samples: Sequence[LoadSample], stage: int, now: float, slow: float, minutes: Sequence[float]) -> float:
    """Requests per second over five minutes, or as many as the last two have beyond their own noise.

    What comes and goes within minutes is over before a replica has started for it; the reserve stands it. Two minutes
    alone would ask for a replica more at each of their peaks: up to 4 % of a day's hours (docs/autoscaling.md). A rise
    that is more than noise is followed at once.
    """
    noise = math.sqrt(max(_variance(minutes), sum(minutes) / max(1, len(minutes))) / (SLOW_SECONDS * BURST_BIN_SECONDS))
    return max(_rate(samples, stage, now - SETTLED_SECONDS), slow - SURPRISE * noise)


def _variance(counts: Sequence[float]) -> float:
    """From neighbours' differences (von Neumann): a trend is not noise."""
    return sum((b - a) ** 2 for a, b in pairwise(counts)) / (2 * (len(counts) - 1)) if len(counts) > 1 else 0.0


def _in_bursts(minutes: Sequence[float], spread: float = 0.0) -> bool:
    """Far rougher than independent users, and by at least `spread` of the mean."""
    mean = sum(minutes) / max(1, len(minutes))
    if len(minutes) < 5 or mean <= 0:
        return False
    variance = _variance(minutes)
    return variance >= BURSTY * mean and math.sqrt(variance) >= spread * mean


def _remembered(counts: Sequence[float], tuning: Tuning) -> float:
    """Load that comes in bursts: the rate within which most of the remembered requests came.

    A burst is over before a cold start is; who answers it with new replicas pays for them and is late. So capacity is
    kept for the bursts of the last half hour, weighted by requests: a rare burst of few requests is not worth it.
    """
    if not _in_bursts(counts):
        return 0.0
    total = sum(counts)
    mean = total / len(counts)
    newest_first = [count > mean for count in counts]
    if sum(b and not a for b, a in pairwise(newest_first)) < 2:
        return 0.0  # it has not come back yet: a step, or one burst
    seen = 0.0
    for count in sorted(counts):
        seen += count
        if seen >= tuning.burst_coverage * total:
            return count / BURST_BIN_SECONDS
    return 0.0
