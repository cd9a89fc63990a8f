"""What a scaling policy sees and answers, and the loop that calls it.

All policies see the same numbers, a metrics lag late, and set a replica count per stage.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.autoscale_sim.engine import Simulation
from benchmarks.autoscale_sim.stack import STAGES, THINKER
from omni_operator.autoscale.histogram import INFINITE, Histogram

WARM_UP_SECONDS = 120.0  # policies see the load from the start, and act from here on: their windows are full
LAG_SECONDS = 10.0  # scrape, evaluation and the write; every policy has it

# The buckets of the entry's families, so that percentiles are as coarse here as there.
SECONDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class StageView:
    """A stage at one moment. Cumulative: arrivals, completions, busy (seconds), work (units), held_seconds."""

    target: int
    ready: int
    pending: int
    draining: int
    held: tuple[int, ...]  # requests bound to each ready replica
    waiting: int
    arrivals: int
    completions: int
    busy: float
    work: float
    held_seconds: float

    @property
    def load(self) -> int:
        """Requests that are served or wait."""
        return sum(self.held) + self.waiting


@dataclass(frozen=True, slots=True)
class View:
    """The pipeline at one moment; lists are what was observed since the policy's last call."""

    now: float
    stages: tuple[StageView, ...]
    ttfps: tuple[float, ...]
    rtfs: tuple[float, ...]
    dry: tuple[float, ...]
    queue: tuple[tuple[float, ...], ...]  # per stage: seconds of TTFP
    compute: tuple[tuple[float, ...], ...]
    cold: tuple[tuple[float, ...], ...]


class Policy(Protocol):
    @property
    def interval(self) -> float: ...

    def decide(self, view: View) -> Sequence[int] | None: ...


def view_of(simulation: Simulation) -> View:
    stages = []
    queue, compute, cold = [], [], []
    for stage in range(len(STAGES)):
        pool, counters = simulation.pools[stage], simulation.counters[stage]
        counters.hold(simulation.now, 0)
        ready = [r for r in pool if not r.draining and r.ready_at <= simulation.now]
        waiting = len(simulation.waiting[1]) + (len(simulation.waiting[0]) if stage == THINKER else 0)
        draining = sum(r.draining for r in pool)
        stages.append(
            StageView(
                target=simulation.targets[stage],
                ready=len(ready),
                pending=simulation.targets[stage] - len(ready),
                draining=draining,
                held=tuple(r.held for r in ready),
                waiting=waiting,
                arrivals=counters.arrivals,
                completions=counters.completions,
                busy=counters.busy,
                work=counters.work,
                held_seconds=counters.held_seconds,
            )
        )
        queue.append(tuple(counters.queue))
        compute.append(tuple(counters.compute))
        cold.append(tuple(counters.cold))
        counters.queue.clear()
        counters.compute.clear()
        counters.cold.clear()
    seen = View(
        simulation.now,
        tuple(stages),
        tuple(simulation.ttfps),
        tuple(simulation.rtfs),
        tuple(simulation.dry),
        tuple(queue),
        tuple(compute),
        tuple(cold),
    )
    simulation.ttfps.clear()
    simulation.rtfs.clear()
    simulation.dry.clear()
    return seen


def histogram(values: Sequence[float], bounds: Sequence[float]) -> Histogram:
    counts = [0.0] * (len(bounds) + 1)
    for value in values:
        counts[bisect.bisect_left(bounds, value)] += 1
    return Histogram((*bounds, INFINITE), tuple(counts), sum(values))


def drive(simulation: Simulation, policy: Policy, until: float, lag: float = LAG_SECONDS) -> None:
    """Run, calling the policy at its interval; what it wants comes into effect a lag later."""

    def apply(targets: Sequence[int]) -> None:
        for stage, target in enumerate(targets):
            simulation.scale(stage, target)

    def tick() -> None:
        targets = policy.decide(view_of(simulation))
        if targets is not None and simulation.now >= WARM_UP_SECONDS:
            wanted = tuple(targets)
            simulation.call_at(simulation.now + lag, lambda: apply(wanted))
        simulation.call_at(simulation.now + policy.interval, tick)

    simulation.call_at(policy.interval, tick)
    simulation.run(until)
