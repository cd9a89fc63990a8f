"""From two scrapes to one Window. Pure: what is absent, stale, reset, partial or a zombie is told apart here (T26, T27).

A scrape is one moment of one pipeline: the entry's families, /omni/status, and the counters of the stage pods. Rates
and histograms are differences of counters; a difference below zero is a process that restarted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from omni_operator.autoscale.histogram import INFINITE, Histogram, merge
from omni_operator.autoscale.types import Freshness, Spec, StageWindow, Window

Labels = tuple[tuple[str, str], ...]
STALE_SECONDS = 60.0

# Names without the prefix; both spellings of it are met (T33).
PREFIXES = ("vllm_omni:", "vllm:omni_", "omni:")
TTFP, RTF, UNDERRUN = "audio_ttfp_s", "audio_rtf", "audio_underrun_s"
SHARES, STAGE_SECONDS = "ttfp_component_seconds", "stage_gen_time_s"
WAITING, E2E = "stage_waiting_requests", "e2e_request_latency_s"
WORK = ("replica_frames_total", "replica_tokens_total")
AUDIBLE_SECONDS = 0.1


def short_name(name: str) -> str:
    return next((name[len(p) :] for p in PREFIXES if name.startswith(p)), name)


@dataclass(frozen=True, slots=True)
class Scrape:
    """at: seconds. entry: sample name without prefix -> labels -> value. held: requests bound to each live replica."""

    at: float
    entry: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    held: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # stage -> replica -> bound
    work: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # stage -> pod -> units since its start
    entry_pod: str = ""  # uid: another one is another process
    missing: tuple[str, ...] = ()  # ready pods that did not answer

    @property
    def blank(self) -> bool:
        return not self.entry


@dataclass(frozen=True, slots=True)
class PodTimes:
    """A ready pod of a stage. started: seconds from its creation until it was ready."""

    stage: str
    name: str
    started: float


def window_of(
    spec: Spec,
    before: Scrape | None,
    after: Scrape | None,
    pods: Iterable[PodTimes],
    now: float,
    new_pods: frozenset[str] = frozenset(),
) -> Window:
    """The window between two scrapes. pods: those that are ready now; new_pods: names of those that were not before."""
    problem = _blind(before, after, now)
    if problem is not None:
        freshness, said = problem
        end = after.at if after is not None else now
        return Window(end, end, tuple(StageWindow(s.name) for s in spec.stages), freshness, said)
    assert before is not None and after is not None
    known = tuple(pods)
    difference = _Difference(before, after)
    stages = tuple(_stage(spec, s.name, difference, known, new_pods) for s in spec.stages)
    freshness, said = Freshness.FRESH, ""
    if after.missing:
        freshness, said = Freshness.PARTIAL, f"no metrics from {', '.join(sorted(after.missing)[:4])}"
    if difference.reset or before.entry_pod != after.entry_pod:
        freshness, said = Freshness.RESET, "a process has restarted since the last scrape"
    underruns = difference.histogram(UNDERRUN)
    audio = difference.histogram(TTFP)
    total = sum(v for v in difference.counter(f"{E2E}_count").values())
    return Window(
        start=before.at,
        end=after.at,
        stages=stages,
        freshness=freshness,
        problem=said,
        ttfp=audio,
        rtf=difference.histogram(RTF),
        streams=underruns.count,
        underruns=underruns.share_above(AUDIBLE_SECONDS) * underruns.count,
        arrivals=max((s.arrivals for s in stages), default=total),
        audio_arrivals=max((w.arrivals for w, s in zip(stages, spec.stages, strict=True) if s.audio), default=0.0),
    )


def _blind(before: Scrape | None, after: Scrape | None, now: float) -> tuple[Freshness, str] | None:
    if after is None or after.blank:
        return Freshness.ABSENT, "the entry gives no metrics"
    if now - after.at > STALE_SECONDS:
        return Freshness.STALE, f"the last metrics are {now - after.at:.0f} s old"
    if before is None or before.blank:
        return Freshness.ABSENT, "only one scrape so far: rates need two"
    if after.at <= before.at:
        return Freshness.STALE, "the metrics have not moved"
    return None


class _Difference:
    """Counters of two scrapes, subtracted series by series."""

    def __init__(self, before: Scrape, after: Scrape) -> None:
        self.before, self.after = before, after
        self.seconds = after.at - before.at
        self.reset = False

    def counter(self, name: str, keep: Callable[[Mapping[str, str]], bool] | None = None) -> dict[Labels, float]:
        old, found = self.before.entry.get(name, {}), {}
        for labels, value in self.after.entry.get(name, {}).items():
            if keep is not None and not keep(dict(labels)):
                continue
            found[labels] = self.delta(old.get(labels, 0.0), value)
        return found

    def delta(self, old: float, new: float) -> float:
        if new < old:
            self.reset = True
            return new  # counted from zero again: what it has now is a lower bound
        return new - old

    def histogram(self, name: str, keep: Callable[[Mapping[str, str]], bool] | None = None) -> Histogram:
        """Of all series of a family, merged bucket by bucket; replicas that are gone have no growth (T26)."""
        grouped: dict[Labels, dict[float, float]] = {}
        for labels, value in self.counter(f"{name}_bucket", keep).items():
            bound = min(INFINITE, float(dict(labels)["le"]))
            grouped.setdefault(tuple(x for x in labels if x[0] != "le"), {})[bound] = value
        sums = self.counter(f"{name}_sum", keep)
        return merge(_from_cumulative(buckets, sums.get(labels, 0.0)) for labels, buckets in grouped.items())


def _from_cumulative(buckets: Mapping[float, float], total: float) -> Histogram:
    bounds = tuple(sorted(buckets))
    counts, below = [], 0.0
    for bound in bounds:
        counts.append(max(0.0, buckets[bound] - below))
        below = max(below, buckets[bound])
    return Histogram(bounds, tuple(counts), total)


def _stage(
    spec: Spec, name: str, difference: _Difference, pods: tuple[PodTimes, ...], new_pods: frozenset[str]
) -> StageWindow:
    before, after = difference.before, difference.after

    def mine(labels: Mapping[str, str]) -> bool:
        return labels.get("stage") == name

    def share(component: str) -> Histogram:
        return difference.histogram(SHARES, lambda x: mine(x) and x.get("component") == component)

    completions = sum(difference.counter(f"{STAGE_SECONDS}_count", mine).values())
    busy = sum(difference.counter(f"{STAGE_SECONDS}_sum", mine).values())
    ready = {p.name for p in pods if p.stage == name}
    waiting = _gauge(after, WAITING, mine)
    held_now, held_before = after.held.get(name, {}), before.held.get(name, {})
    # What came is what ended plus what is there more than before; nothing counts arrivals per stage.
    grown = sum(held_now.values()) + waiting - sum(held_before.values()) - _gauge(before, WAITING, mine)
    work = 0.0
    for pod, units in after.work.get(name, {}).items():
        if pod in ready:
            work += difference.delta(before.work.get(name, {}).get(pod, 0.0), units)
    return StageWindow(
        name=name,
        arrivals=max(0.0, completions + grown),
        completions=completions,
        busy_seconds=busy,
        work=work,
        in_flight=(sum(held_now.values()) + sum(held_before.values())) / 2,
        waiting=waiting,
        queue=share("queue"),
        compute=share("compute"),
        transfer=share("transfer"),
        cold_starts=tuple(p.started for p in pods if p.stage == name and p.name in new_pods),
        zombie=bool(set(after.work.get(name, {})) - ready),
    )


def _gauge(scrape: Scrape, name: str, keep: Callable[[Mapping[str, str]], bool]) -> float:
    values = [v for labels, v in scrape.entry.get(name, {}).items() if keep(dict(labels)) and not math.isnan(v)]
    return sum(values)
