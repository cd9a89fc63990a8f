"""What one replica of a stage can do, learned from what it did. Pure.

The model: at batch b one unit of work takes a request base + slope * b seconds (continuous batching: a step serves the
whole batch, and grows with it). Throughput of a replica is then b / (base + slope * b), which saturates at 1 / slope.
Both numbers come from a decayed least-squares fit over (batch, seconds per unit); the topology's prior gives the shape
while the batch has not varied, the measurements give the level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from omni_operator.autoscale.histogram import Histogram
from omni_operator.autoscale.types import Prior, StageSpec, StageWindow

KEEP = 0.95  # weight of what was known, per window: a memory of 20 windows
SURPRISED_KEEP = 0.4  # after a measurement that the model did not expect by half
SURPRISE = 1.5
PRIOR_WEIGHT = 1.0
MIN_BATCH = 0.1
MAX_FIRST_WAIT = 2.0  # seconds per squared batch
ENOUGH = 3.0  # completions that make one full measurement


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds per unit of work at batch b: base + slope * b."""

    base: float
    slope: float

    def step(self, batch: float) -> float:
        return self.base + self.slope * max(0.0, batch)

    def batch(self, rate: float) -> float | None:
        """Mean batch of a replica that does `rate` units per second; None: more than it can do."""
        spare = 1.0 - rate * self.slope
        return rate * self.base / spare if spare > 1e-6 else None


@dataclass(frozen=True, slots=True)
class Learned:
    """Decayed sums of the fit, and what else a stage has shown. All zero: nothing was seen yet."""

    weight: float = 0.0
    b: float = 0.0
    t: float = 0.0
    bb: float = 0.0
    bt: float = 0.0
    batch: float = 0.0  # smoothed: what completed in a window was served before it, too
    done: float = 0.0  # decayed completions, and of those:
    busy: float = 0.0  # seconds of computing
    held: float = 0.0  # seconds in which they were bound to a replica
    work: float = 0.0  # units per request
    first: float = 0.0  # mean computing share of TTFP, in step times
    wait: float = 0.0  # mean waiting share of TTFP at the engine, seconds per squared batch
    transfer: float = 0.0  # mean, seconds
    computing: float = 0.0  # mean of its share of TTFP, seconds
    computing_spread: float = 0.0  # p95 of that less the mean
    waiting: float = 0.0
    waiting_spread: float = 0.0
    healthy: float = 0.0  # mean share of TTFP while the objective held, seconds
    pace: float = 0.0  # seconds per unit while the objective held
    cold: tuple[float, ...] = ()  # the last cold starts, seconds


def fit(learned: Learned, prior: Prior, slots: int) -> Fit:
    """The prior stands in as two observations on its own line, moved to the level of what was measured."""
    low, high = 1.0, float(max(2, slots))
    at = learned.b / learned.weight if learned.weight > 0 else low
    expected = prior.base_seconds + prior.slope_seconds * at
    level = (learned.t / learned.weight) / expected if learned.weight > 0 and expected > 0 else 1.0
    weight, b, t, bb, bt = learned.weight, learned.b, learned.t, learned.bb, learned.bt
    for batch in (low, high):
        seconds = level * (prior.base_seconds + prior.slope_seconds * batch)
        weight += PRIOR_WEIGHT
        b += PRIOR_WEIGHT * batch
        t += PRIOR_WEIGHT * seconds
        bb += PRIOR_WEIGHT * batch * batch
        bt += PRIOR_WEIGHT * batch * seconds
    spread = bb - b * b / weight
    slope = (bt - b * t / weight) / spread if spread > 1e-9 else 0.0
    mean_b, mean_t = b / weight, t / weight
    # A step never gets cheaper with the batch, and never costs nothing without one.
    slope = min(max(slope, 0.0), 0.95 * mean_t / max(mean_b, 1e-9))
    return Fit(mean_t - slope * mean_b, slope)


def learn(
    learned: Learned, spec: StageSpec, seen: StageWindow, replicas: int, seconds: float, *, calm: bool
) -> Learned:
    """After one more window of `seconds`. calm: the objective held, so this is what the stage looks like when well.

    The batch is what computes, by Little's law from the busy seconds; what is bound may be more (a code2wav replica
    holds a stream for as long as its talker speaks, and computes a hundredth of that).
    """
    batch = seen.busy_seconds / seconds / replicas if replicas > 0 else 0.0
    smooth = batch if learned.batch == 0 else 0.5 * learned.batch + 0.5 * batch
    updated = replace(
        learned,
        batch=smooth,
        cold=(*learned.cold, *seen.cold_starts)[-20:],
        done=KEEP * learned.done + seen.completions,
        busy=KEEP * learned.busy + seen.busy_seconds,
        held=KEEP * learned.held + seen.in_flight * seconds,
    )
    if seen.completions <= 0 or replicas <= 0 or seen.busy_seconds <= 0:
        return updated
    work = seen.work if seen.work > 0 else seen.completions
    measured = seen.busy_seconds / work
    trust = min(1.0, seen.completions / ENOUGH)
    known = fit(learned, spec.prior, spec.slots).step(smooth)
    surprised = learned.weight > 0 and not known / SURPRISE <= measured <= known * SURPRISE
    keep = 1.0 - (1.0 - (SURPRISED_KEEP if surprised else KEEP)) * trust
    updated = replace(
        updated,
        weight=keep * learned.weight + trust,
        b=keep * learned.b + trust * smooth,
        t=keep * learned.t + trust * measured,
        bb=keep * learned.bb + trust * smooth * smooth,
        bt=keep * learned.bt + trust * smooth * measured,
        work=_blend(learned.work, work / seen.completions, 0.1 * trust),
    )
    step = fit(updated, spec.prior, spec.slots).step(smooth)
    share, moved = share_mean(seen), seen.transfer.mean
    trust = min(1.0, seen.compute.count / 10)
    if share is not None and step > 0:
        queued, computed = seen.queue.mean or 0.0, seen.compute.mean or 0.0
        updated = replace(
            updated,
            first=_blend(learned.first, _near(learned.first, computed / step), 0.1 * trust),
            # Waiting falls much faster with more replicas than computing does; the square is what a burst in front of
            # a replica shows: half as many come to it, and each waits for half as many.
            wait=_ease(learned.wait, queued / max(smooth, MIN_BATCH) ** 2, 0.03 * trust),
        )
        slowly = 0.02 * trust
        updated = replace(
            updated,
            computing=_blend(learned.computing, computed, slowly),
            computing_spread=_blend(learned.computing_spread, _spread(seen.compute), slowly),
            waiting=_blend(learned.waiting, queued, slowly),
            waiting_spread=_blend(learned.waiting_spread, _spread(seen.queue), slowly),
        )
    if moved is not None:
        updated = replace(updated, transfer=_blend(learned.transfer, moved, 0.1))
    if calm:
        updated = replace(updated, pace=_blend(learned.pace, measured, 0.2))
        if share is not None:
            updated = replace(updated, healthy=_blend(learned.healthy, share, 0.2))
    return updated


def share_mean(seen: StageWindow) -> float | None:
    """Mean seconds of TTFP that went to this stage. Means of parts add up to the mean of the whole; p95s do not."""
    if seen.compute.count <= 0:
        return None
    queued = seen.queue.total / seen.queue.count if seen.queue.count > 0 else 0.0
    return queued + seen.compute.total / seen.compute.count


def work_per_request(learned: Learned, prior: Prior) -> float:
    return learned.work if learned.work > 0 else prior.work_per_request


def first_work(learned: Learned, prior: Prior) -> float:
    return learned.first if learned.first > 0 else prior.first_work


def idle_seconds(learned: Learned) -> float:
    """Per request: bound to a replica of the stage, but not computing there."""
    return max(0.0, learned.held - learned.busy) / learned.done if learned.done >= 1 else 0.0


@dataclass(frozen=True, slots=True)
class Tail:
    """Factors on the two parts of a stage's mean share, so that the sum of all stages is the p95 of the whole."""

    computing: float = 1.0
    waiting: float = 1.0


def tails(stages: Sequence[Learned]) -> tuple[Tail, ...]:
    """Delays of different stages, and waiting and computing, are nearly independent: their spreads add up as squares,
    and each answers for its part of that sum (Euler's allocation). A thinker with a few long prompts has a small mean
    and a large part; what of it is the prompts' own computing no replica takes away, what is waiting behind them does.
    """
    whole = math.sqrt(sum(s.computing_spread**2 + s.waiting_spread**2 for s in stages))

    def factor(mean: float, spread: float) -> float:
        return 1.0 + (spread**2 / whole / mean if whole > 0 and mean > 0 else 0.0)

    return tuple(Tail(factor(s.computing, s.computing_spread), factor(s.waiting, s.waiting_spread)) for s in stages)


def cold_start(learned: Learned, prior: Prior) -> float:
    """Seconds until nine of ten new replicas serve."""
    known = sorted((*learned.cold, prior.cold_start_seconds))
    return known[min(len(known) - 1, int(0.9 * len(known)))]


def _spread(seen: Histogram) -> float:
    return max(0.0, (seen.quantile(0.95) or 0.0) - (seen.mean or 0.0))


def _near(known: float, seen: float) -> float:
    """One window moves what is known by so much at most: an overload is not how a stage is."""
    return seen if known == 0 else min(seen, 2.0 * known)


def _ease(known: float, seen: float, weight: float) -> float:
    """From nothing, slowly: the first burst that anybody sees is not what is usual."""
    return known + weight * (min(seen, 2.0 * known + MAX_FIRST_WAIT) - known)


def _blend(old: float, new: float, weight: float) -> float:
    return new if old == 0 else (1 - weight) * old + weight * new
