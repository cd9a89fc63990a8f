"""What the end of the operator's process costs the pipeline that it scales, with and without what it had learned.

The process ends in the middle of a peak, and another one begins DOWN_SECONDS later; for that long, and until its second
scrape, nothing is decided. The half hour from then on is compared with the same half hour of a run without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.autoscale_sim.engine import Simulation
from benchmarks.autoscale_sim.entities import Request
from benchmarks.autoscale_sim.ours import Ours, spec_of
from benchmarks.autoscale_sim.policy import drive
from benchmarks.autoscale_sim.runs import NODES, facts
from benchmarks.autoscale_sim.stack import DOCUMENTED
from benchmarks.autoscale_sim.workload import TRACES_BY_NAME, requests_of

LOOK_SECONDS = 1800.0
KINDS = ("undisturbed", "forgets", "remembers")
MOMENTS = ("in_the_peak", "quarter_after")


@dataclass(frozen=True, slots=True)
class HalfHour:
    """Of the requests that came in it: share in time; hours paid; changes of counts."""

    attainment: float
    hours: float
    changes: int


def busiest(requests: Sequence[Request], until: float, window: float = 600.0) -> float:
    """The middle of the busiest ten minutes that leave half an hour after them."""
    starts = [i * 60.0 for i in range(int((until - LOOK_SECONDS - window) // 60) + 1)]
    counts = [sum(s <= r.arrived < s + window for r in requests) for s in starts]
    return starts[max(range(len(counts)), key=lambda i: counts[i])] + window / 2


def moment_of(trace_name: str, seed: int, moment: str) -> float:
    """moment: of MOMENTS."""
    peak = busiest(requests_of(TRACES_BY_NAME[trace_name], seed), facts(trace_name, seed)[0])
    return peak if moment == "in_the_peak" else peak + 900.0


def half_hour(trace_name: str, seed: int, at: float, kind: str) -> HalfHour:
    """kind: of KINDS."""
    trace = TRACES_BY_NAME[trace_name]
    requests = requests_of(trace, seed)
    until, _, mean = facts(trace_name, seed)
    ours = Ours(
        spec_of(DOCUMENTED, trace.ttfp_seconds, NODES),
        restarts=() if kind == "undisturbed" else (at,),
        remembers=kind == "remembers",
    )
    simulation = Simulation(DOCUMENTED, requests, mean, devices=NODES, seed=seed)
    seen: list[tuple[float, int]] = []

    def look() -> None:
        simulation.bill()
        seen.append((simulation.device_seconds, simulation.scale_events))

    end = min(until, at + LOOK_SECONDS)
    simulation.call_at(at, look)
    simulation.call_at(end, look)
    drive(simulation, ours, min(until, end + 60.0))
    mine = [r for r in requests if r.audio and at <= r.arrived < end]
    in_time = sum(0 <= r.first - r.arrived <= trace.ttfp_seconds and r.first >= 0 for r in mine)
    (before, events), (after, more) = seen
    return HalfHour(in_time / max(1, len(mine)), (after - before) / 3600, more - events)
