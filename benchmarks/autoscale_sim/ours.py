"""The operator's own decide() in the simulator: the same function, the same buckets, its priors deliberately wrong.

Its process may end and start again, and it may start from what it has learned on another day: through the same memory, in
the same format, that the operator keeps in the pipeline's status.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from benchmarks.autoscale_sim.policy import FAST, RATIOS, SECONDS, View, histogram
from benchmarks.autoscale_sim.stack import CODE2WAV, FRAME_SECONDS, STAGES, TALKER, THINKER, Stack
from omni_crds.v1alpha1.learned import LearnedCapacity
from omni_operator.autoscale.decide import decide
from omni_operator.autoscale.memory import is_due, restored, saved
from omni_operator.autoscale.types import (
    Decision,
    DeviceClass,
    Limits,
    Objectives,
    Prior,
    Spec,
    StageFleet,
    StageSpec,
    StageWindow,
    Tuning,
    Window,
)
from omni_operator.autoscale.view import State

# Half as fast as the stack is: a topology's prior is a guess for other hardware.
PRIORS = (
    Prior(0.015, 0.0020, 150.0, 8.0, 180.0),
    Prior(0.030, 0.0034, 400.0, 30.0, 180.0),
    Prior(0.030, 0.0160, 16.0, 1.0, 180.0),
)


def spec_of(stack: Stack, ttfp_seconds: float, budget: int, maximum: int = 100, tuning: Tuning | None = None) -> Spec:
    stages = tuple(
        StageSpec(
            name=name,
            minimum=1,
            maximum=maximum,
            slots=stack.servers[i].slots,
            classes=(DeviceClass("default", devices=stack.servers[i].devices),),
            audio=i != THINKER,
            realtime=i == TALKER,
            prior=PRIORS[i],
            unit_audio_seconds=(0.0, FRAME_SECONDS, FRAME_SECONDS * stack.chunk_frames)[i],
        )
        for i, name in enumerate(STAGES)
    )
    return Spec("simulated", stages, Objectives(ttfp_seconds, 0.8, 4), budget, tuning or Tuning())


START = datetime(2026, 6, 1, tzinfo=UTC)
DAY = timedelta(days=1)
DOWN_SECONDS = 30.0  # from the end of one process to the first scrape of the next: the lease, the start, the first list


class Ours:
    """kept: what `status.learned` has at the start, as JSON. restarts: when the process ends. remembers=False: and what
    it has learned ends with it, as it did before anything was kept."""

    interval = 15.0

    def __init__(
        self,
        spec: Spec,
        *,
        kept: bytes | None = None,
        began: datetime = START,
        restarts: Sequence[float] = (),
        remembers: bool = True,
    ) -> None:
        self.spec = spec
        self.kept = kept
        self._began, self._remembers = began, remembers
        self._restarts = list(restarts)
        self._down_until = 0.0
        self._state = self._fresh(0.0)
        self._written: LearnedCapacity | None = None
        self._written_at = 0.0
        self._before: View | None = None
        self.decisions: list[Decision] = []
        self.windows: list[tuple[Window, dict[str, StageFleet]]] = []

    def decide(self, view: View) -> Sequence[int] | None:
        if self._restarts and view.now >= self._restarts[0]:
            self._down_until = self._restarts.pop(0) + DOWN_SECONDS
        if view.now < self._down_until:
            self._before = None
            return None
        if self._down_until and self._before is None:
            # The first scrape of a process: rates need two.
            self._before = view
            self._state = self._fresh(view.now)
            return None
        window = window_of(view, self._before)
        self._before = view
        fleet = {
            name: StageFleet(name, s.target, s.ready, s.pending, s.draining)
            for name, s in zip(STAGES, view.stages, strict=True)
        }
        decision, self._state = decide(self.spec, window, fleet, Limits(), self._state, view.now)
        self._keep(view.now, changed=bool(decision.changes))
        self.windows.append((window, fleet))
        self.decisions.append(decision)
        return [s.target for s in decision.stages]

    def _fresh(self, now: float) -> State:
        raw = msgspec.json.decode(self.kept) if self.kept is not None and self._remembers else None
        return restored(self.spec, raw, now, self._clock(now)).state or State()

    def _keep(self, now: float, *, changed: bool) -> None:
        """As the loop does it: with the writes that a change makes, and seldom without one."""
        fresh = saved(self.spec, self._state, now, self._clock(now))
        if is_due(self._written, fresh, now - self._written_at, written_anyway=changed) and fresh is not None:
            self._written, self._written_at = fresh, now
            self.kept = fresh.model_dump_json(by_alias=True).encode()

    def _clock(self, now: float) -> datetime:
        return self._began + timedelta(seconds=now)


def window_of(view: View, before: View | None) -> Window:
    stages = []
    seconds = view.now - (before.now if before else 0.0)
    for i, (name, seen) in enumerate(zip(STAGES, view.stages, strict=True)):
        old = before.stages[i] if before else None
        stages.append(
            StageWindow(
                name=name,
                arrivals=seen.arrivals - (old.arrivals if old else 0),
                completions=seen.completions - (old.completions if old else 0),
                busy_seconds=seen.busy - (old.busy if old else 0.0),
                work=seen.work - (old.work if old else 0.0),
                in_flight=(seen.held_seconds - (old.held_seconds if old else 0.0)) / seconds,
                waiting=seen.waiting,
                queue=histogram(view.queue[i], FAST),
                compute=histogram(view.compute[i], FAST),
                cold_starts=view.cold[i],
            )
        )
    return Window(
        start=view.now - seconds,
        end=view.now,
        stages=tuple(stages),
        ttfp=histogram(view.ttfps, SECONDS),
        rtf=histogram(view.rtfs, RATIOS),
        streams=len(view.dry),
        underruns=sum(d > 0.1 for d in view.dry),
        arrivals=stages[THINKER].arrivals,
        audio_arrivals=stages[CODE2WAV].arrivals,
    )
