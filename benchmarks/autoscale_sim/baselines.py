"""Published scaling policies, each with its defaults. What a source leaves open is marked "ours".

Concurrency per replica is the metric of all that need one: requests bound to a replica or waiting for its stage. The
concurrency that a replica stands is given to them (CAPACITY, from the stack: where it just keeps the objective) and the
target is 70 % of it, Knative's default utilisation; they do not have to learn it, ours does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from benchmarks.autoscale_sim.policy import StageView, View
from benchmarks.autoscale_sim.stack import STAGES, Stack

CAPACITY = (9.0, 14.0, 40.0)  # requests per replica that keep the objectives of the documented stack
UTILISATION = 0.7
MIN, MAX = 1, 100


def bounded(count: float) -> int:
    return int(min(MAX, max(MIN, count)))


def target(stage: int) -> float:
    return UTILISATION * CAPACITY[stage]


class Static:
    interval = 60.0

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = tuple(counts)

    def decide(self, view: View) -> Sequence[int]:
        return self._counts


class PerStage:
    """Stages know nothing of each other: the shape of all the generic autoscalers."""

    interval = 15.0

    def __init__(self, make: Callable[[int], StageScaler]) -> None:
        self._scalers = tuple(make(i) for i in range(len(STAGES)))
        self.interval = self._scalers[0].interval

    def decide(self, view: View) -> Sequence[int]:
        return [s.desired(view.now, x) for s, x in zip(self._scalers, view.stages, strict=True)]


class StageScaler(ABC):
    interval = 15.0

    def __init__(self, stage: int) -> None:
        self.stage = stage

    @abstractmethod
    def desired(self, now: float, seen: StageView) -> int:
        """Replicas wanted now."""


class Hpa(StageScaler):
    """Kubernetes HPA v2: ratio of the average to the target, tolerance 0.1, up at most +100 % or +4 per 15 s, down by
    the highest recommendation of 300 s; pods that are not ready count as idle when scaling up."""

    tolerance, window = 0.1, 300.0

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self._said: deque[tuple[float, int]] = deque()

    def desired(self, now: float, seen: StageView) -> int:
        wanted = self._recommend(seen)
        if not self._said:
            self._said.append((now, seen.target))  # as the controller does when it first sees an HPA
        self._said.append((now, wanted))
        while self._said[0][0] <= now - self.window:
            self._said.popleft()
        if wanted < seen.target:
            wanted = min(seen.target, max(w for _, w in self._said))
        return bounded(min(wanted, max(2 * seen.target, seen.target + 4)))

    def _recommend(self, seen: StageView) -> int:
        ratio = seen.load / max(1, seen.ready) / target(self.stage)
        if abs(ratio - 1) <= self.tolerance:
            return seen.target
        if ratio > 1 and seen.pending > 0:
            ratio = seen.load / max(1, seen.target) / target(self.stage)
            return seen.target if ratio <= 1 + self.tolerance else math.ceil(seen.target * ratio)
        return math.ceil(max(1, seen.ready) * ratio)


class Keda(Hpa):
    """KEDA: an HPA on AverageValue whose metric is polled every 30 s. Its 0 <-> 1 part never acts on these traces."""

    polling = 30.0

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self._polled, self._load = -math.inf, 0

    def _recommend(self, seen: StageView) -> int:
        wanted = self._load / target(self.stage)
        if seen.target and abs(wanted / seen.target - 1) <= self.tolerance:
            return seen.target
        return math.ceil(wanted)

    def desired(self, now: float, seen: StageView) -> int:
        if now >= self._polled + self.polling:
            self._polled, self._load = now, seen.load
        return super().desired(now, seen)


class KnativeKpa(StageScaler):
    """Knative KPA: mean over 60 s; panic when the mean over 6 s wants twice the ready pods, and then never down until a
    stable window has passed; up at most 1000 times, down at most by half; every 2 s."""

    interval = 2.0
    stable, panic, threshold = 60.0, 6.0, 2.0

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self._points: deque[tuple[float, int]] = deque()
        self._panic_until, self._panic_count = -math.inf, 0

    def _mean(self, now: float, seconds: float) -> float:
        recent = [load for at, load in self._points if at > now - seconds]
        return sum(recent) / len(recent) if recent else 0.0

    def desired(self, now: float, seen: StageView) -> int:
        self._points.append((now, seen.load))
        while self._points[0][0] <= now - self.stable:
            self._points.popleft()
        ready = max(1, seen.ready)
        lowest, highest = math.floor(ready / 2), math.ceil(1000 * ready)
        steady = min(highest, max(lowest, math.ceil(self._mean(now, self.stable) / target(self.stage))))
        urgent = min(highest, max(lowest, math.ceil(self._mean(now, self.panic) / target(self.stage))))
        if urgent / ready >= self.threshold:
            self._panic_until = now + self.stable
        if now < self._panic_until:
            self._panic_count = max(self._panic_count, urgent, seen.target)
            return bounded(self._panic_count)
        self._panic_count = 0
        return bounded(steady)


class AibrixApa(StageScaler):
    """AIBrix APA: mean per pod over 180 s against the target; beyond +-10 % up to twice, down to half; 300 s between
    downs (pkg/controller/podautoscaler)."""

    interval = 10.0
    window, tolerance, cooldown = 180.0, 0.1, 300.0

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self._points: deque[tuple[float, float]] = deque()
        self._down_at = -math.inf

    def desired(self, now: float, seen: StageView) -> int:
        self._points.append((now, seen.load / max(1, seen.ready)))
        while self._points[0][0] <= now - self.window:
            self._points.popleft()
        ratio = sum(v for _, v in self._points) / len(self._points) / target(self.stage)
        current = max(1, seen.target)
        wanted = current
        if ratio > 1 + self.tolerance:
            wanted = min(math.ceil(current * ratio), 2 * current)
        elif ratio < 1 - self.tolerance:
            wanted = max(math.ceil(current * ratio), current // 2)
        if wanted < seen.target:
            if now - self._down_at < self.cooldown:
                return seen.target
            self._down_at = now
        return bounded(wanted)


class AibrixKpa(StageScaler):
    """AIBrix KPA with the total load, as Knative has it; with the mean over pods, as its code has it, the count could
    not follow the load. Stable 180 s, panic 60 s, rates 2 and 2, 300 s between downs."""

    interval = 10.0
    stable, panic, threshold, cooldown = 180.0, 60.0, 2.0, 300.0

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self._points: deque[tuple[float, int]] = deque()
        self._down_at = -math.inf

    def desired(self, now: float, seen: StageView) -> int:
        self._points.append((now, seen.load))
        while self._points[0][0] <= now - self.stable:
            self._points.popleft()
        steady = sum(v for _, v in self._points) / len(self._points)
        recent = [v for at, v in self._points if at > now - self.panic]
        urgent = sum(recent) / len(recent)
        current = max(1, seen.target)
        panicking = steady <= 0 or urgent / steady > self.threshold
        value = max(steady, urgent) if panicking else steady
        wanted = min(max(math.ceil(value / target(self.stage)), current // 2), max(1, 2 * current))
        if panicking:
            wanted = max(wanted, seen.target)
        if wanted < seen.target:
            if now - self._down_at < self.cooldown:
                return seen.target
            self._down_at = now
        return bounded(wanted)


class WvaSaturation(StageScaler):
    """llm-d WVA saturation V1: a replica is saturated at 80 % of its cache or 5 queued; +1 if the spare of the others is
    below 0.1 or 3; -1 if the rest could take the load and still not trigger. Cache use is what its slots are used
    (ours), the queue of a stage is shared evenly (ours); a one-minute maximum, and nothing while replicas start."""

    interval = 30.0
    cache_limit, queue_limit, cache_spare, queue_spare = 0.80, 5.0, 0.1, 3.0

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self._last: tuple[tuple[int, ...], int] = ((), 0)

    def desired(self, now: float, seen: StageView) -> int:
        previous, self._last = self._last, (seen.held, seen.waiting)
        if seen.pending > 0 or not seen.held:
            return seen.target
        held = sorted(seen.held)
        before = sorted(previous[0]) if len(previous[0]) == len(held) else held
        use = [max(a, b) / (CAPACITY[self.stage] / self.cache_limit) for a, b in zip(held, before, strict=True)]
        queue = max(seen.waiting, previous[1]) / len(held)
        free = [u for u in use if u < self.cache_limit and queue < self.queue_limit]
        spare = sum(self.cache_limit - u for u in free) / len(free) if free else 0.0
        if not free or spare < self.cache_spare or self.queue_limit - queue < self.queue_spare:
            return bounded(seen.target + 1)
        n = len(free)
        if n >= 2 and seen.target > 1:
            left = self.cache_limit - sum(free) / (n - 1)
            if left >= self.cache_spare and self.queue_limit - queue * n / (n - 1) >= self.queue_spare:
                return bounded(seen.target - 1)
        return seen.target


class DynamoLoad(StageScaler):
    """Dynamo planner, load loop: every 5 s; +1 only if all workers are predicted above the objective, -1 only if each
    would stay below 80 % of it with one fewer; nothing while a scaling is under way. Its regression is given the true
    law of the stack, and a stage's objective is the step time at CAPACITY (ours)."""

    interval = 5.0
    sensitivity = 0.8

    def __init__(self, stage: int, stack: Stack) -> None:
        super().__init__(stage)
        self._server = stack.servers[stage]
        self.floor = MIN

    def _latency(self, load: float) -> float:
        return self._server.base + self._server.slope * load

    def desired(self, now: float, seen: StageView) -> int:
        if seen.pending > 0 or seen.draining > 0 or not seen.held:
            return max(self.floor, seen.target)
        objective = self._latency(CAPACITY[self.stage])
        share = seen.waiting / len(seen.held)
        loads = [h + share for h in seen.held]
        if all(self._latency(x) > objective for x in loads):
            return bounded(max(self.floor, seen.target + 1))
        n = len(loads)
        if n > 1 and all(self._latency(x * n / (n - 1)) < objective * self.sensitivity for x in loads):
            return bounded(max(self.floor, seen.target - 1))
        return bounded(max(self.floor, seen.target))


class Dynamo:
    """Load loop, and with `throughput` the 180 s loop that sets its floor: ceil(predicted rate / rate of a replica at
    the objective). The rate of a replica comes from the true law; the prediction continues the last change (its default,
    ARIMA, does little else with one point per 180 s)."""

    interval = 5.0
    throughput_seconds = 180.0

    def __init__(self, stack: Stack, *, throughput: bool) -> None:
        self._scalers = tuple(DynamoLoad(i, stack) for i in range(len(STAGES)))
        self._stack, self._throughput = stack, throughput
        self._next = self.throughput_seconds
        self._seen: list[tuple[int, int, float]] = [(0, 0, 0.0)] * len(STAGES)
        self._rates: list[float | None] = [None] * len(STAGES)

    def decide(self, view: View) -> Sequence[int]:
        if self._throughput and view.now >= self._next:
            self._next = view.now + self.throughput_seconds
            for i, stage in enumerate(view.stages):
                arrivals, completions, held = self._seen[i]
                self._seen[i] = (stage.arrivals, stage.completions, stage.held_seconds)
                rate = (stage.arrivals - arrivals) / self.throughput_seconds
                last, self._rates[i] = self._rates[i], rate
                predicted = max(0.0, rate if last is None else 2 * rate - last)
                done = stage.completions - completions
                if done > 0:
                    seconds = (stage.held_seconds - held) / done
                    self._scalers[i].floor = bounded(math.ceil(predicted * seconds / CAPACITY[i]))
        return [s.desired(view.now, x) for s, x in zip(self._scalers, view.stages, strict=True)]


class RatioCoupled:
    """Kthena and HeteroScale: one stage, the talker, follows its load by the HPA's rule; the others are kept at a fixed
    ratio to it. The ratio is the one that the whole trace needs on average (ours: given, not found)."""

    interval = 15.0

    def __init__(self, ratio: Sequence[float]) -> None:
        self._lead = Hpa(1)
        self._ratio = tuple(r / ratio[1] for r in ratio)

    def decide(self, view: View) -> Sequence[int]:
        lead = self._lead.desired(view.now, view.stages[1])
        return [bounded(math.ceil(lead * r - 1e-9)) for r in self._ratio]


class Planned:
    """Counts that were computed beforehand: (from when, counts), ascending. The oracle."""

    interval = 5.0

    def __init__(self, schedule: Sequence[tuple[float, tuple[int, ...]]], lag: float) -> None:
        self._schedule, self._lag, self._at = tuple(schedule), lag, 0

    def decide(self, view: View) -> Sequence[int]:
        when = view.now + self._lag
        while self._at + 1 < len(self._schedule) and self._schedule[self._at + 1][0] <= when:
            self._at += 1
        return self._schedule[self._at][1]
