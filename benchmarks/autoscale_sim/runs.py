"""One run of one policy on one trace with one seed, and its figures."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from benchmarks.autoscale_sim import baselines, oracle, references
from benchmarks.autoscale_sim.engine import Simulation
from benchmarks.autoscale_sim.entities import AUDIBLE_SECONDS, Request
from benchmarks.autoscale_sim.ours import DAY, START, Ours, spec_of
from benchmarks.autoscale_sim.policy import LAG_SECONDS, Policy, View, drive
from benchmarks.autoscale_sim.stack import DOCUMENTED
from benchmarks.autoscale_sim.workload import TRACES_BY_NAME, Trace, requests_of

NODES = 200  # accelerators of the cluster
TAIL_SECONDS = 60.0  # after the last arrival; who has no first packet by then has missed


@dataclass(frozen=True, slots=True)
class Result:
    """attainment, underrun_free: shares of audio requests. points: (second, ready replicas of thinker, talker and code2wav, requests until then)."""

    trace: str
    policy: str
    seed: int
    attainment: float
    underrun_free: float
    accelerator_hours: float
    scale_events: int
    max_waiting: int
    seconds: float
    points: tuple[tuple[float, ...], ...] = ()


class Recorded:
    """A policy, and what was there each time that it was asked: at most twice a minute."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.interval = policy.interval
        self.points: list[tuple[float, ...]] = []

    def decide(self, view: View) -> Sequence[int] | None:
        if not self.points or view.now >= self.points[-1][0] + 30:
            self.points.append((view.now, *(float(s.ready) for s in view.stages), float(view.stages[0].arrivals)))
        return self._policy.decide(view)


def static_counts(requests: Sequence[Request], until: float) -> tuple[list[int], list[int]]:
    """(peak, mean) of what the trace needs."""
    need = oracle.needed(DOCUMENTED, requests, until)
    return [max(n) for n in need], [round(sum(n) / len(n) + 0.499) for n in need]


@lru_cache(maxsize=4)
def facts(trace: str, seed: int) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    """(end of the run, peak, mean) of a trace."""
    requests = requests_of(TRACES_BY_NAME[trace], seed)
    until = requests[-1].arrived + TAIL_SECONDS
    peak, mean = static_counts(requests, until)
    return until, tuple(peak), tuple(mean)


def make_policy(name: str, trace: Trace, seed: int, requests: Sequence[Request]) -> Policy:
    until, peak, mean = facts(trace.name, seed)
    stack = DOCUMENTED
    makers: Mapping[str, Callable[[], Policy]] = {
        "static_peak": lambda: baselines.Static(peak),
        "static_mean": lambda: baselines.Static(mean),
        "hpa": lambda: baselines.PerStage(baselines.Hpa),
        "keda": lambda: baselines.PerStage(baselines.Keda),
        "knative_kpa": lambda: baselines.PerStage(baselines.KnativeKpa),
        "aibrix_apa": lambda: baselines.PerStage(baselines.AibrixApa),
        "aibrix_kpa": lambda: baselines.PerStage(baselines.AibrixKpa),
        "wva_v1": lambda: baselines.PerStage(baselines.WvaSaturation),
        "dynamo_load": lambda: baselines.Dynamo(stack, throughput=False),
        "dynamo_throughput_load": lambda: baselines.Dynamo(stack, throughput=True),
        "ratio_coupled": lambda: baselines.RatioCoupled(mean),
        "told": references.Told,
        "foreseen": lambda: references.Foreseen(stack, requests),
        "oracle": lambda: baselines.Planned(oracle.schedule(stack, requests, until), LAG_SECONDS),
        "ours": lambda: Ours(spec_of(stack, trace.ttfp_seconds, NODES)),
        "ours_known": lambda: Ours(
            spec_of(stack, trace.ttfp_seconds, NODES), kept=learned_before(trace.name), began=START + DAY
        ),
    }
    return makers[name]()


EARLIER_SEED = 9  # of the day on which `ours_known` has learned what a replica can do; in no table


@cache
def learned_before(trace_name: str) -> bytes | None:
    """What `ours` has learned on a day of its own, from its wrong priors on, as the status has it in the end."""
    trace = TRACES_BY_NAME[trace_name]
    requests = requests_of(trace, EARLIER_SEED)
    until, _, mean = facts(trace_name, EARLIER_SEED)
    ours = Ours(spec_of(DOCUMENTED, trace.ttfp_seconds, NODES))
    drive(Simulation(DOCUMENTED, requests, mean, devices=NODES, seed=EARLIER_SEED), ours, until)
    return ours.kept


def _median_cold_start(stage: int, _: random.Random) -> float:
    return DOCUMENTED.servers[stage].cold_seconds


POLICIES = (
    "static_peak",
    "static_mean",
    "hpa",
    "keda",
    "knative_kpa",
    "aibrix_apa",
    "aibrix_kpa",
    "wva_v1",
    "dynamo_load",
    "dynamo_throughput_load",
    "ratio_coupled",
    "oracle",
    "ours",
    "ours_known",
)
FOR_COMPARISON = ("told", "foreseen")  # not in the tables: found on the trace that they are run on


def run(trace_name: str, policy_name: str, seed: int) -> Result:
    if policy_name == "ours_known" and seed == EARLIER_SEED:
        raise ValueError(f"seed {seed} is the day that it has learned on")
    started = time.perf_counter()
    trace = TRACES_BY_NAME[trace_name]
    requests = requests_of(trace, seed)
    until, peak, mean = facts(trace_name, seed)
    policy = Recorded(make_policy(policy_name, trace, seed, requests))
    start, cold = list(peak if policy_name == "static_peak" else mean), None
    if policy_name == "oracle":
        start = list(oracle.schedule(DOCUMENTED, requests, until)[0][1])
        cold = _median_cold_start  # it knows those, too
    simulation = Simulation(DOCUMENTED, requests, start, devices=NODES, seed=seed, cold=cold)
    drive(simulation, policy, until)
    audio = sum(r.audio for r in requests)
    ended = simulation.outcomes
    in_time = sum(1 for r in requests if r.audio and 0 <= r.first - r.arrived <= trace.ttfp_seconds and r.first >= 0)
    return Result(
        trace=trace_name,
        policy=policy_name,
        seed=seed,
        attainment=in_time / audio,
        underrun_free=sum(o.dry <= AUDIBLE_SECONDS for o in ended) / max(1, len(ended)),
        accelerator_hours=simulation.device_seconds / 3600,
        scale_events=simulation.scale_events,
        max_waiting=simulation.max_waiting,
        seconds=time.perf_counter() - started,
        points=tuple(policy.points),
    )


def run_job(job: tuple[str, str, int]) -> Result:
    """(trace, policy, seed). Here and not in __main__, which a worker process cannot import its functions from."""
    return run(*job)
