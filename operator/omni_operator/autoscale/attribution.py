"""Which objective is broken, and which stage is to blame. Pure.

A talker always has the largest share of TTFP; that alone says nothing. Blamed is the stage whose share has grown most
over what it was while the objective held (before that: over what its prior promises), not the largest one (T30).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from omni_operator.autoscale.capacity import Learned, first_work, share_mean
from omni_operator.autoscale.histogram import Histogram
from omni_operator.autoscale.types import Objectives, Spec, StageFleet, StageSpec, Window

MISSES = 0.05  # share of requests that may be slower than a p95
ENOUGH = 5.0  # observations below which a percentile is anecdote
BEYOND_CHANCE = 1.28  # standard deviations: of windows that are as good as promised, one in ten looks worse


@dataclass(frozen=True, slots=True)
class Breach:
    """objective: ttfp, rtf, queue, or "" for none. over: how far beyond it, 1 is exactly at it."""

    objective: str = ""
    over: float = 0.0
    stage: str | None = None
    excess_seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.objective)


def find_breach(spec: Spec, window: Window, fleet: Mapping[str, StageFleet], learned: Mapping[str, Learned]) -> Breach:
    """The first broken objective in the order in which a listener notices: no answer, late, stuttering."""
    objectives = spec.objectives
    ratio = _queue_ratio(objectives, spec, window, fleet)
    if ratio > 1.0:
        return Breach("queue", ratio, _fullest(spec, window, fleet))
    target = objectives.ttfp_p95_seconds
    if target is not None and _missed(window.ttfp, target):
        stage, excess = blame_latency(spec, window, fleet, learned)
        return Breach("ttfp", (window.ttfp.quantile(0.95) or target) / target, stage, excess)
    pace = objectives.rtf_p95
    if pace is not None and _missed(window.rtf, pace):
        return Breach("rtf", (window.rtf.quantile(0.95) or pace) / pace, blame_pace(spec, window, learned))
    return Breach()


def _missed(seen: Histogram, limit: float) -> bool:
    """More are slower than a p95 allows, and more than so many requests would be by chance."""
    if seen.count < ENOUGH:
        return False
    allowed = MISSES * seen.count
    chance = BEYOND_CHANCE * math.sqrt(allowed * (1.0 - MISSES))
    return seen.share_above(limit) * seen.count > allowed + chance


def blame_latency(
    spec: Spec, window: Window, fleet: Mapping[str, StageFleet], learned: Mapping[str, Learned]
) -> tuple[str | None, float]:
    """(stage, seconds of mean TTFP that it has grown by)."""
    grown: dict[str, float] = {}
    for stage in spec.stages:
        seen = window.stage(stage.name)
        mean = share_mean(seen)
        if mean is not None:
            grown[stage.name] = mean - _usual(stage, learned[stage.name])
    full = _fullest(spec, window, fleet)
    if full is not None and sum(window.stage(s.name).waiting for s in spec.stages) > 0:
        # Waiting in the entry is the doing of the stage that has no room: it outweighs what the engines show.
        return full, grown.get(full, 0.0)
    if not grown:
        return full, 0.0
    worst = max(grown, key=lambda name: grown[name])
    unexplained = _unexplained(spec, window)
    crowded = _fullest(spec, window, fleet, waiting=False)
    if crowded is not None and unexplained > max(0.0, grown[worst]):
        # The queue is gone, and those who were in it arrive late: no stage's share has their waiting in the entry.
        return crowded, unexplained
    return worst, grown[worst]


def _unexplained(spec: Spec, window: Window) -> float:
    """Mean seconds of TTFP that are in no stage's share."""
    seen = [window.stage(s.name) for s in spec.stages]
    shares = sum((share_mean(s) or 0.0) + (s.transfer.mean or 0.0) for s in seen)
    return max(0.0, (window.ttfp.mean or 0.0) - shares)


def blame_pace(spec: Spec, window: Window, learned: Mapping[str, Learned]) -> str | None:
    """Of the stages at the pace of the audio, the one whose time per unit has grown most."""
    worst, factor = None, 0.0
    for stage in spec.stages:
        seen, known = window.stage(stage.name), learned[stage.name]
        work = seen.work if seen.work > 0 else seen.completions
        if not stage.audio or work <= 0:
            continue
        usual = known.pace if known.pace > 0 else stage.prior.base_seconds + stage.prior.slope_seconds
        ratio = seen.busy_seconds / work / max(usual, 1e-9)
        if ratio > factor:
            worst, factor = stage.name, ratio
    return worst


def _usual(stage: StageSpec, learned: Learned) -> float:
    if learned.healthy > 0:
        return learned.healthy
    return first_work(learned, stage.prior) * (stage.prior.base_seconds + stage.prior.slope_seconds)


def _queue_ratio(objectives: Objectives, spec: Spec, window: Window, fleet: Mapping[str, StageFleet]) -> float:
    """Waiting requests per replica over the objective, of the worst stage. Without replicas, any request is too many."""
    if objectives.queue_per_replica is None:
        return 0.0
    return max(
        (
            window.stage(s.name).waiting / (objectives.queue_per_replica * max(1, fleet[s.name].ready))
            if fleet[s.name].ready > 0
            else 2.0 * (window.stage(s.name).waiting > 0)
            for s in spec.stages
        ),
        default=0.0,
    )


def _fullest(spec: Spec, window: Window, fleet: Mapping[str, StageFleet], *, waiting: bool = True) -> str | None:
    """The stage that has least room for the requests that wait for it. waiting=False: whether or not any does now."""
    worst, fullness = None, 0.0
    for stage in spec.stages:
        seen, ready = window.stage(stage.name), fleet[stage.name].ready
        if seen.waiting <= 0 and (waiting or seen.in_flight <= 0):
            continue
        filled = seen.in_flight / (stage.slots * ready) if ready > 0 else float("inf")
        if worst is None or filled > fullness:
            worst, fullness = stage.name, filled
    return worst
