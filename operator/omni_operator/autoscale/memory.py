"""What decide() has learned, as it is kept in the pipeline's status, and back. Pure; whoever reads trusts nothing.

Kept is what took long to find out: step times, shares of TTFP, tails, caution, the bursts of the last half hour. Not
kept is what proves that shrinking is safe (wishes, moves): after a restart nothing shrinks for a whole window, as ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from pydantic import ValidationError

from omni_crds.v1alpha1.learned import LEARNED_VERSION, REMEMBERED_MINUTES, LearnedCapacity, LearnedStage
from omni_operator.autoscale.capacity import Learned, idle_seconds
from omni_operator.autoscale.demand import LoadSample
from omni_operator.autoscale.stabilise import Moves
from omni_operator.autoscale.staffing import DAY_WINDOWS, MEMORY_WINDOWS, RESERVE_RANGE, Staffing
from omni_operator.autoscale.types import Spec, StageSpec
from omni_operator.autoscale.view import CAUTION_RANGE, RATIO_RANGE, State

SECONDS_KEPT = 14 * 86_400.0
HALF_LIFE_SECONDS = 86_400.0  # of the weight of what was measured
ENOUGH_WINDOWS = 4.0  # below it a stage is not kept
# However much was measured before: six new windows weigh as much, and a surprise overrules it at once.
RESTORED_WINDOWS = 6.0
RESTORED_REQUESTS = 10.0
RESTORED_JUDGED = 200.0
FIRST_WRITE_SECONDS, WRITE_SECONDS = 60.0, 300.0  # between two writes that nothing else is a reason for
CLOCKS_DIFFER_SECONDS = 300.0
MINUTE = 60.0
PIECES = 4  # of a remembered minute, as long as usual windows: dispersion compares neighbours
MOVED = 0.1  # a figure that moved less is the same

MAX_STEP_SECONDS = 600.0
MAX_SHARE_SECONDS = 3600.0
MAX_BATCH = 100_000.0


@dataclass(frozen=True, slots=True)
class Restored:
    """state: None where nothing of it can be used. ignored: what is not used, and why."""

    state: State | None
    ignored: tuple[str, ...] = ()


def saved(spec: Spec, state: State, now: float, time: datetime) -> LearnedCapacity | None:
    """time: what a wall clock shows at `now`. None: nothing that is worth keeping has been seen."""
    stages = tuple(
        _stage(spec, state, i, now)
        for i, known in enumerate(state.learned)
        if known.weight >= ENOUGH_WINDOWS and _measured(known) is not None
    )
    if not stages:
        return None
    return LearnedCapacity(
        version=LEARNED_VERSION,
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ"),
        ratio_thousandths=_whole(1000 * state.ratio),
        stages=stages,
    )


def restored(spec: Spec, raw: object, now: float, time: datetime) -> Restored:
    """raw: `status.learned` as JSON. Never raises for what somebody wrote there."""
    if raw is None:
        return Restored(None)
    if isinstance(raw, Mapping) and raw.get("version") != LEARNED_VERSION:
        return Restored(None, (f"version {str(raw.get('version'))[:20]} is not {LEARNED_VERSION}",))
    try:
        kept = LearnedCapacity.model_validate(raw)
        written = datetime.fromisoformat(kept.time)
        age = (time - written).total_seconds()
    except (ValidationError, ValueError, OverflowError, TypeError) as error:
        return Restored(None, (f"it does not parse: {_first_line(error)}",))
    if age < -CLOCKS_DIFFER_SECONDS:
        return Restored(None, (f"it is from the future: {kept.time}",))
    if age > SECONDS_KEPT:
        return Restored(None, (f"it is older than {SECONDS_KEPT / 86_400:.0f} days: {kept.time}",))
    found = {s.name: s for s in kept.stages}
    ignored, used = [], {}
    for stage in spec.stages:
        mine = found.get(stage.name)
        why = _unusable(stage, mine) if mine is not None else None
        if why is not None:
            ignored.append(f"{stage.name}: {why}")
        elif mine is not None:
            used[stage.name] = mine
    if not used:
        return Restored(None, tuple(ignored))
    ratio = kept.ratio_thousandths / 1000
    return Restored(
        State(
            learned=tuple(_learned(used.get(s.name), max(0.0, age)) for s in spec.stages),
            samples=_samples([used.get(s.name) for s in spec.stages], now, max(0.0, age), spec.tuning.memory_seconds),
            moves=(Moves(),) * len(spec.stages),
            active=(now,) * len(spec.stages),
            # A factor on the sum of all stages says nothing where one of them is another one now.
            ratio=_within(ratio, RATIO_RANGE) if len(used) == len(spec.stages) else 1.0,
            caution=tuple(
                _within(used[s.name].caution_thousandths / 1000, CAUTION_RANGE) if s.name in used else 1.0
                for s in spec.stages
            ),
            facts=tuple(s.facts for s in spec.stages),
            staffing=tuple(_staffing(used.get(s.name)) for s in spec.stages),
        ),
        tuple(ignored),
    )


def is_due(
    kept: LearnedCapacity | None, fresh: LearnedCapacity | None, since_write: float, *, written_anyway: bool
) -> bool:
    """Whether `fresh` should take the place of what the status has. An idle pipeline learns nothing and writes nothing."""
    if fresh is None:
        return False
    wait = FIRST_WRITE_SECONDS if kept is None else WRITE_SECONDS
    return written_anyway or (since_write >= wait and _has_moved(kept, fresh))


def _has_moved(old: LearnedCapacity | None, new: LearnedCapacity) -> bool:
    if old is None:
        return True
    before, after = _figures(old), _figures(new)
    return before.keys() != after.keys() or any(
        abs(value - before[name]) > max(1.0, MOVED * before[name]) for name, value in after.items()
    )


# --- to the status


def _stage(spec: Spec, state: State, index: int, now: float) -> LearnedStage:
    stage, known = spec.stages[index], state.learned[index]
    law = state.staffing[index]
    weight = known.weight
    batch, step = known.b / weight, known.t / weight
    spread = max(0.0, known.bb / weight - batch * batch)
    slope = (known.bt / weight - batch * step) / spread if spread > 1e-6 else 0.0
    return LearnedStage(
        name=stage.name,
        learned_for=stage.facts,
        requests_per_hour=_whole(3600 * law.capacity, 1_000_000),
        reserve_thousandths=_whole(1000 * law.reserve),
        law_windows=_whole(law.windows, 1_000_000),
        judged_windows=_whole(law.judged, 1_000_000),
        usual_requests_per_hour=_whole(3600 * law.usual),
        usual_windows=_whole(law.watched, 1_000_000),
        bursty_thousandths=_whole(1000 * law.bursty),
        windows=_whole(weight),
        batch_thousandths=_whole(1000 * batch),
        batch_spread_thousandths=_whole(1000 * math.sqrt(spread)),
        step_nanoseconds=_whole(1e9 * step),
        slope_nanoseconds=_whole(1e9 * slope),
        work_thousandths=_whole(1000 * known.work),
        first_thousandths=_whole(1000 * known.first),
        wait_microseconds=_micros(known.wait),
        transfer_microseconds=_micros(known.transfer),
        computing_microseconds=_micros(known.computing),
        computing_spread_microseconds=_micros(known.computing_spread),
        waiting_microseconds=_micros(known.waiting),
        waiting_spread_microseconds=_micros(known.waiting_spread),
        healthy_microseconds=_micros(known.healthy),
        pace_nanoseconds=_whole(1e9 * known.pace),
        idle_microseconds=_micros(idle_seconds(known)),
        cold_start_seconds=tuple(_whole(s, 1_000_000) for s in known.cold[-20:]),
        caution_thousandths=_whole(1000 * state.caution[index]),
        arrivals_per_minute=_arrivals(state.samples, index, now),
    )


def _arrivals(samples: Sequence[LoadSample], index: int, now: float) -> tuple[int, ...]:
    """By the minute, oldest first, without the leading ones of which nothing is known."""
    minutes: dict[int, float] = {}
    for sample in samples:
        minute = int((now - sample.end) // MINUTE)
        if 0 <= minute < REMEMBERED_MINUTES:
            minutes[minute] = minutes.get(minute, 0.0) + sample.arrivals[index]
    return tuple(_whole(minutes.get(m, 0.0), 1_000_000) for m in range(max(minutes, default=-1), -1, -1))


def _micros(seconds: float) -> int:
    return _whole(1e6 * min(seconds, MAX_SHARE_SECONDS))


def _whole(value: float, most: int = 1_000_000_000_000) -> int:
    return min(most, max(0, round(value))) if math.isfinite(value) else 0


# --- from the status


def _unusable(stage: StageSpec, kept: LearnedStage) -> str | None:
    """Why it says nothing of this stage."""
    if kept.learned_for != stage.facts:
        return "model, engine, devices or settings have changed since"
    if kept.windows < 1 or not 0 < kept.step_nanoseconds / 1e9 <= MAX_STEP_SECONDS:
        return "there is no step time in it"
    if kept.batch_thousandths / 1000 > MAX_BATCH or kept.batch_spread_thousandths / 1000 > MAX_BATCH:
        return "no replica has such a batch"
    shares = (
        kept.wait_microseconds,
        kept.transfer_microseconds,
        kept.computing_microseconds,
        kept.computing_spread_microseconds,
        kept.waiting_microseconds,
        kept.waiting_spread_microseconds,
        kept.healthy_microseconds,
        kept.idle_microseconds,
    )
    if max(shares) / 1e6 > MAX_SHARE_SECONDS or kept.pace_nanoseconds / 1e9 > MAX_STEP_SECONDS:
        return "no request takes so long"
    return None


def _measured(known: Learned) -> float | None:
    """Mean seconds per unit, where they can be kept."""
    step = known.t / known.weight if known.weight > 0 else 0.0
    return step if 1e-9 <= step <= MAX_STEP_SECONDS else None


def _learned(kept: LearnedStage | None, age: float) -> Learned:
    if kept is None:
        return Learned()
    weight = min(float(kept.windows), RESTORED_WINDOWS) * 0.5 ** (age / HALF_LIFE_SECONDS)
    batch, spread = kept.batch_thousandths / 1000, kept.batch_spread_thousandths / 1000
    step, slope = kept.step_nanoseconds / 1e9, kept.slope_nanoseconds / 1e9
    known = Learned(
        work=kept.work_thousandths / 1000,
        first=kept.first_thousandths / 1000,
        wait=kept.wait_microseconds / 1e6,
        transfer=kept.transfer_microseconds / 1e6,
        computing=kept.computing_microseconds / 1e6,
        computing_spread=kept.computing_spread_microseconds / 1e6,
        waiting=kept.waiting_microseconds / 1e6,
        waiting_spread=kept.waiting_spread_microseconds / 1e6,
        healthy=kept.healthy_microseconds / 1e6,
        pace=kept.pace_nanoseconds / 1e9,
        cold=tuple(float(s) for s in kept.cold_start_seconds),
        done=RESTORED_REQUESTS,
        held=RESTORED_REQUESTS * kept.idle_microseconds / 1e6,
    )
    return replace(
        known,
        weight=weight,
        b=weight * batch,
        t=weight * step,
        bb=weight * (spread * spread + batch * batch),
        bt=weight * (slope * spread * spread + batch * step),
    )


def _staffing(kept: LearnedStage | None) -> Staffing:
    if kept is None or kept.requests_per_hour < 1:
        return Staffing()
    return Staffing(
        capacity=kept.requests_per_hour / 3600,
        windows=min(MEMORY_WINDOWS, float(kept.law_windows)),
        reserve=_within(kept.reserve_thousandths / 1000, RESERVE_RANGE),
        judged=min(RESTORED_JUDGED, float(kept.judged_windows)),
        usual=kept.usual_requests_per_hour / 3600,
        watched=min(DAY_WINDOWS, float(kept.usual_windows)),
        bursty=min(1.0, kept.bursty_thousandths / 1000),
    )


def _samples(
    stages: Sequence[LearnedStage | None], now: float, age: float, memory_seconds: float
) -> tuple[LoadSample, ...]:
    """The remembered minutes, in pieces as long as windows are."""
    minutes = [s.arrivals_per_minute if s is not None else () for s in stages]
    length = MINUTE / PIECES
    found = []
    for back in range(max(map(len, minutes), default=0), 0, -1):
        arrivals = tuple(m[-back] / PIECES if back <= len(m) else 0.0 for m in minutes)
        for piece in range(PIECES):
            end = now - age - back * MINUTE + (piece + 1) * length
            if end > now - memory_seconds:
                found.append(LoadSample(end, length, arrivals))
    return tuple(found)


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(bounds[1], max(bounds[0], value))


def _figures(kept: LearnedCapacity) -> dict[str, float]:
    found = {"ratio": float(kept.ratio_thousandths)}
    for stage in kept.stages:
        for name, value in stage.model_dump(exclude={"name", "learned_for"}).items():
            # A list of numbers by its largest one.
            figure = max(value, default=0) if isinstance(value, tuple) else value
            found[f"{stage.name}.{stage.learned_for}.{name}"] = float(figure)
    return found


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))[:80]}: {first['msg'][:80]}"
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
