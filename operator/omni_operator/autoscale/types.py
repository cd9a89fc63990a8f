"""Values that go into a scaling decision and come out of it. Frozen, printable, no I/O.

Times are seconds on one clock that the caller chooses; durations are seconds, rates per second. Work is what a stage
does for a request in units of its own: tokens for an AR stage, codec frames for a talker, chunks or frames after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from omni_operator.autoscale.histogram import Histogram


class Freshness(StrEnum):
    """How far a window can be trusted. From best to worst; a window is as good as its worst needed series."""

    FRESH = "Fresh"
    PARTIAL = "Partial"  # some ready replicas have no series: what is there is a lower bound of the load
    RESET = "Reset"  # a counter went back (a process restarted): its delta is a lower bound
    STALE = "Stale"  # the last sample is too old
    ABSENT = "Absent"  # the entry has no series at all


BLIND = frozenset({Freshness.STALE, Freshness.ABSENT})
# These say "at least so much": enough to grow, never enough to shrink (T27).
LOWER_BOUND = frozenset({Freshness.PARTIAL, Freshness.RESET})


@dataclass(frozen=True, slots=True)
class StageWindow:
    """One stage over one window, summed over its replicas. Series of pods that are gone are not in it (T26)."""

    name: str
    arrivals: float = 0.0  # requests that need this stage and came
    completions: float = 0.0
    busy_seconds: float = 0.0  # summed service times of what completed
    work: float = 0.0  # units done by what completed; 0: not reported, then a request is the unit
    in_flight: float = 0.0  # mean over the window
    waiting: float = 0.0  # at its end: requests in the entry's queue that need this stage
    queue: Histogram = field(default_factory=Histogram)  # its share of TTFP: waiting for the engine
    compute: Histogram = field(default_factory=Histogram)  # from there to the next stage's first work
    transfer: Histogram = field(default_factory=Histogram)
    cold_starts: tuple[float, ...] = ()  # seconds from creation to ready of replicas that became ready
    zombie: bool = False  # series of pods that no longer exist were seen and left out


@dataclass(frozen=True, slots=True)
class Window:
    """What was measured between start and end."""

    start: float
    end: float
    stages: tuple[StageWindow, ...]
    freshness: Freshness = Freshness.FRESH
    problem: str = ""  # what is not fresh, for a person
    ttfp: Histogram = field(default_factory=Histogram)
    rtf: Histogram = field(default_factory=Histogram)
    streams: float = 0.0  # audio answers that ended
    underruns: float = 0.0  # of those, with an audible gap
    arrivals: float = 0.0  # requests of any modality
    audio_arrivals: float = 0.0  # of those, that ask for audio

    @property
    def seconds(self) -> float:
        return max(1e-9, self.end - self.start)

    def stage(self, name: str) -> StageWindow:
        return next((s for s in self.stages if s.name == name), StageWindow(name))


@dataclass(frozen=True, slots=True)
class Prior:
    """What is believed of a stage before anything is measured; a handful of observations outweighs it.

    Time per unit of work and request at batch b: base_seconds + slope_seconds * b.
    """

    base_seconds: float = 0.02
    slope_seconds: float = 0.001
    work_per_request: float = 100.0
    first_work: float = 10.0  # units until the next stage has its first work
    cold_start_seconds: float = 180.0


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """One kind of replica that a stage may have. speed: relative to the stage's first class."""

    name: str
    devices: int = 1  # accelerators per replica; 0 for a stage on CPUs
    cost: float = 1.0  # per device and hour, in any unit
    speed: float = 1.0
    available: int | None = None  # replicas that can be placed at most; None: not known to be limited


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A stage as its owner wants it scaled. Stages that share pods are one StageSpec, named after the leader."""

    name: str
    minimum: int
    maximum: int
    slots: int  # requests that one replica works on at once
    classes: tuple[DeviceClass, ...] = (DeviceClass("default"),)
    audio: bool = False  # text-only requests do not need it
    realtime: bool = False  # its pace is the pace of the audio: real-time factor is decided here
    prior: Prior = Prior()
    fixed: bool = False  # not ours to scale: a fixed count, or another owner; counted, never changed
    unit_audio_seconds: float = 0.0  # audio per unit of work, for the real-time factor; 0: no audio
    facts: str = ""  # hash of what its speed depends on: where it changes, what was learned is of another stage

    @property
    def devices(self) -> int:
        return self.classes[0].devices


@dataclass(frozen=True, slots=True)
class Objectives:
    """None: nothing was promised, so nothing is scaled for it."""

    ttfp_p95_seconds: float | None = None
    rtf_p95: float | None = None
    queue_per_replica: int | None = None


@dataclass(frozen=True, slots=True)
class Tuning:
    """Everything that is a choice. Defaults are explained in docs/autoscaling.md."""

    scale_down_seconds: float = 300.0  # the highest wish of this long counts
    reversal_seconds: float = 600.0  # after a change of direction, no shrinking for so long (T24)
    idle_seconds: float = 300.0  # without any request, before a stage may go to zero
    margin: float = 0.75  # shrink only if the objectives hold at this share of themselves
    shrink_share: float = 0.3  # of what could go, so much goes at once: the model is least sure of what it has not seen
    confidence: float = 1.64  # standard deviations above the mean load that are planned for
    burst_ratio: float = 2.0  # recent load over longer load that makes a burst
    memory_seconds: float = 1800.0  # how long a burst is remembered
    burst_coverage: float = 0.95  # share of the remembered requests whose burst is kept capacity for
    min_write_seconds: float = 15.0  # between two changes of one stage, except upwards out of a breach


@dataclass(frozen=True, slots=True)
class Spec:
    """One pipeline."""

    pipeline: str
    stages: tuple[StageSpec, ...]  # in the order of the graph
    objectives: Objectives = Objectives()
    budget: int | None = None  # accelerators of all stages together
    tuning: Tuning = Tuning()

    def stage(self, name: str) -> StageSpec:
        return next(s for s in self.stages if s.name == name)


@dataclass(frozen=True, slots=True)
class StageFleet:
    """Replicas of a stage now. target: what `spec.replicas` says."""

    name: str
    target: int
    ready: int = 0
    pending: int = 0  # created, not ready
    draining: int = 0

    @property
    def coming(self) -> int:
        """Ready or on the way: both count, or a cold start is answered with another one (T23)."""
        return self.ready + self.pending


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds a pipeline back besides its own budget. None: not limited."""

    quota: int | None = None  # accelerators that its namespace's quota and tenant allow
    fair_share: int | None = None  # its share of a cluster that is full; None while there is room
    placeable: int | None = None  # accelerators that fit on the nodes now, what it holds included

    def ceiling(self, budget: int | None) -> tuple[int | None, str]:
        """(accelerators, which limit it is)."""
        known = [
            (value, name)
            for value, name in (
                (budget, "budget"),
                (self.quota, "quota"),
                (self.fair_share, "fair share"),
                (self.placeable, "nodes"),
            )
            if value is not None
        ]
        return min(known) if known else (None, "")


@dataclass(frozen=True, slots=True)
class StageDecision:
    """target: replicas; by_class where the stage has several classes, in the order of the spec."""

    name: str
    current: int
    target: int
    reason: str
    wanted: int = 0  # before stabilisation
    by_class: tuple[tuple[str, int], ...] = ()
    load: float = 0.0  # requests in flight that are planned for
    step_seconds: float = 0.0  # learned time per unit of work at the planned batch
    ttfp_share: float | None = None  # predicted p95 of this stage's share, seconds


@dataclass(frozen=True, slots=True)
class Candidate:
    """A set of replica counts that was weighed."""

    label: str
    replicas: tuple[tuple[str, int], ...]
    devices: int
    ttfp_seconds: float | None
    holds: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """What decide() answers. `inputs` is what a person needs to see why; replay needs the window itself."""

    at: float
    stages: tuple[StageDecision, ...]
    reason: str  # one CamelCase word
    message: str
    limiting_stage: str | None = None
    candidates: tuple[Candidate, ...] = ()
    inputs: tuple[tuple[str, float], ...] = ()
    devices: int = 0
    ready: bool = True  # ScalingReady
    stuck: bool = False  # a queue that nothing drains and nobody feeds (T25)

    def target(self, name: str) -> int:
        return next(s.target for s in self.stages if s.name == name)

    @property
    def changes(self) -> tuple[StageDecision, ...]:
        return tuple(s for s in self.stages if s.target != s.current)
