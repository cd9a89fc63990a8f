"""No policies that somebody could have, and no baselines: what being told is worth, and what foresight is worth."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence

from benchmarks.autoscale_sim.baselines import bounded
from benchmarks.autoscale_sim.entities import Request
from benchmarks.autoscale_sim.policy import LAG_SECONDS, View
from benchmarks.autoscale_sim.stack import STAGES, THINKER, Stack

PER_RATE, PER_ROOT = (0.45, 0.9, 0.3), (0.9, 1.3, 0.55)  # of thinker, talker and code2wav


def law(rates: Sequence[float]) -> list[int]:
    """Replicas for requests per second of each stage, by coefficients that were searched on servegen."""
    return [
        bounded(math.ceil(a * rate + b * math.sqrt(rate))) for a, b, rate in zip(PER_RATE, PER_ROOT, rates, strict=True)
    ]


class Told:
    """What capacities alone are worth. Replicas = ceil(a * r + b * sqrt(r)), r the stage's requests per second over two
    minutes; up at once, down to the most of five. a and b were found by search on servegen."""

    interval = 15.0
    look_back, keep = 120.0, 300.0

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, tuple[int, ...]]] = deque()
        self._said: deque[tuple[float, list[int]]] = deque()

    def decide(self, view: View) -> Sequence[int]:
        self._arrivals.append((view.now, tuple(s.arrivals for s in view.stages)))
        while self._arrivals[0][0] < view.now - self.look_back:
            self._arrivals.popleft()
        (start, before), (end, after) = self._arrivals[0], self._arrivals[-1]
        rates = [(b - a) / (end - start) if end > start else 0.0 for a, b in zip(before, after, strict=True)]
        wanted = law(rates)
        self._said.append((view.now, wanted))
        while self._said[0][0] < view.now - self.keep:
            self._said.popleft()
        most = [max(said[i] for _, said in self._said) for i in range(len(STAGES))]
        return [max(w, min(s.target, m)) for w, s, m in zip(wanted, view.stages, most, strict=True)]


class Foreseen:
    """What a perfect forecast is worth on top of that. It knows how many requests arrive in the five minutes around every
    moment until a replica that is asked for now has started. It asks in time for the busiest of these moments, and lets
    go at once of what none of them needs."""

    interval = 15.0
    around = 150.0

    def __init__(self, stack: Stack, requests: Sequence[Request]) -> None:
        everybody, audio = [r.arrived for r in requests], [r.arrived for r in requests if r.audio]
        self._arrivals = [everybody if stage == THINKER else audio for stage in range(len(STAGES))]
        self._ahead = LAG_SECONDS + max(server.cold_seconds for server in stack.servers)
        self._laws: dict[int, list[int]] = {}

    def decide(self, view: View) -> Sequence[int]:
        first, last = int(view.now // self.interval), int((view.now + self._ahead) // self.interval)
        laws = [self._law(n) for n in range(first, last + 1)]
        return [max(counts) for counts in zip(*laws, strict=True)]

    def _law(self, number: int) -> list[int]:
        if number not in self._laws:
            begin, end = max(0.0, number * self.interval - self.around), number * self.interval + self.around
            counts = [bisect.bisect_left(a, end) - bisect.bisect_left(a, begin) for a in self._arrivals]
            self._laws[number] = law([count / (end - begin) for count in counts])
        return self._laws[number]
