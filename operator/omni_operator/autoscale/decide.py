"""decide(): from one window to replica counts with reasons. Pure: the operator, the simulator and replay share it.

Reads top to bottom: is the data good enough; what comes; what is broken and by whom; what is the cheapest set of
replicas that keeps the objectives; may it be made smaller now. docs/autoscaling.md has the formulas and their sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from omni_operator.autoscale.attribution import Breach, find_breach
from omni_operator.autoscale.capacity import (
    cold_start,
)
from omni_operator.autoscale.demand import comes_in_bursts
from omni_operator.autoscale.explain import (
    candidates_of,
    devices_of,
    explain_stages,
    headline,
    held,
    inputs_of,
    limiting_stage,
)
from omni_operator.autoscale.solve import Solution, solve
from omni_operator.autoscale.stabilise import Shrinking, Wish, moved, reason_to_keep, remember, settled
from omni_operator.autoscale.staffing import staffed
from omni_operator.autoscale.types import (
    BLIND,
    LOWER_BOUND,
    Decision,
    Freshness,
    Limits,
    Spec,
    StageFleet,
    StageSpec,
    Window,
)
from omni_operator.autoscale.view import (
    State,
    View,
    cautious,
    demand_of,
    goal_of,
    initial,
    is_staffed,
    loads_of,
    observe,
)

SPARE = 0.2  # of the margin of TTFP, as a margin of load: what shrinking needs where the law of staffing.py decides
GRAVELY_LATE = 0.5  # of a window's requests; below it that law's own reserve answers
REBALANCE_GAIN = 1.15  # serving so much more of the load is worth moving an accelerator between stages


def decide(
    spec: Spec, window: Window, fleet: Mapping[str, StageFleet], limits: Limits, state: State, now: float
) -> tuple[Decision, State]:
    """The targets of every stage, and what to remember for the next call."""
    state = initial(spec, state, now)
    if window.freshness in BLIND:
        kept = tuple(held(s, fleet[s.name], f"no data: {window.problem}") for s in spec.stages)
        # The wishes from before prove nothing about the time that nobody saw.
        return Decision(
            now, kept, "MetricsStale", f"holding: {window.problem}", ready=False, devices=devices_of(spec, kept)
        ), replace(state, wishes=())
    ceiling, ceiling_name = limits.ceiling(spec.budget)
    state, stuck = observe(spec, window, fleet, state, now)
    breach = find_breach(spec, window, fleet, dict(zip((s.name for s in spec.stages), state.learned, strict=True)))
    by_law = is_staffed(spec, state)
    view = View(
        spec=spec,
        window=window,
        fleet=tuple(fleet[s.name] for s in spec.stages),
        current=tuple(fleet[s.name].target for s in spec.stages),
        demand=tuple(demand_of(spec, window, state, i, stuck=stuck, by_law=by_law) for i in range(len(spec.stages))),
        breach=Breach() if stuck else breach,
        ceiling=ceiling,
        ceiling_name=ceiling_name,
        state=state,
        now=now,
        by_law=by_law,
    )
    decision, state = _choose(view, stuck)
    if window.freshness is Freshness.FRESH and not stuck:
        bursts = [comes_in_bursts(state.samples, i, spec.tuning) for i in range(len(spec.stages))]
        law = staffed(spec, window, fleet, state.learned, state.staffing, bursts, by_law=by_law)
        state = replace(state, staffing=law)
    return decision, state


def _choose(view: View, stuck: bool) -> tuple[Decision, State]:
    goal = goal_of(view, 1.0)
    lows = [_low(view, i) for i in range(len(view.spec.stages))]
    keep = [max(low, now) for low, now in zip(lows, view.current, strict=True)]
    highs = [max(low, s.maximum) for low, s in zip(lows, view.spec.stages, strict=True)]
    grown = solve(loads_of(view, keep, highs), goal, view.ceiling)
    short = grown is None or grown.share < 1
    # From scratch may mean that a stage gives an accelerator away; a lower bound of the load does not prove that it can.
    certain = view.window.freshness not in LOWER_BOUND
    free = solve(loads_of(view, lows, highs), goal, view.ceiling) if short and certain else None
    spare = 1.0 + SPARE * (1.0 - view.spec.tuning.margin)
    enough = solve(loads_of(view, lows, highs, spare), goal_of(view, view.spec.tuning.margin), view.ceiling)

    counts = list(grown.counts) if grown is not None else list(view.current)
    reason, message = ("Steady", "the objectives hold")
    chosen = grown
    if free is not None and (grown is None or free.share > grown.share * REBALANCE_GAIN):
        counts, chosen = list(free.counts), free
    share = chosen.share if chosen is not None else 0.0
    if share < 1:
        where = _limit(view, counts)
        reason, message = "Limited", f"{share:.0%} of the load can be served within the objectives: {where} is reached"
    caution = cautious(view)
    counts = _insist(view, counts)
    wish = _wish(view, enough, counts)
    wishes = remember(view.state.wishes, wish, view.spec.tuning.scale_down_seconds)
    kept: dict[int, str] = {}
    if counts == list(view.current) and share >= 1:
        counts, kept = _shrink(view, wishes)
    # Where not even the lower bounds fit under the limits, and the data do not allow a move: nothing changes.
    decided = _bounded(view, counts, lows) if chosen is not None else list(view.current)
    stages = explain_stages(view, decided, wish, kept, chosen)
    limiting = limiting_stage(view, chosen)
    reason, message = headline(view, stages, limiting, reason, message, stuck)
    moves = tuple(
        moved(m, now, target, view.now, demand.planned)
        for m, now, target, demand in zip(view.state.moves, view.current, decided, view.demand, strict=True)
    )
    decision = Decision(
        at=view.now,
        stages=stages,
        reason=reason,
        message=message,
        limiting_stage=limiting,
        candidates=candidates_of(view, grown, free, enough),
        inputs=inputs_of(view),
        devices=devices_of(view.spec, stages),
        ready=not stuck,
        stuck=stuck,
    )
    return decision, replace(view.state, wishes=wishes, moves=moves, caution=caution)


def _insist(view: View, counts: list[int]) -> list[int]:
    """The objective is missed and the model sees no reason: what is measured wins, one replica at a time.

    Not again before the last one has been seen at work, nor above a limit.
    """
    if not view.breach or counts != list(view.current) or (view.by_law and view.late < GRAVELY_LATE):
        return counts
    for i, stage in enumerate(view.spec.stages):
        fleet, moves = view.fleet[i], view.state.moves[i]
        if stage.name != view.breach.stage or stage.fixed or fleet.pending > 0:
            continue
        seen_at_work = view.now - moves.at > cold_start(view.state.learned[i], stage.prior)
        used = sum(n * s.devices for n, s in zip(counts, view.spec.stages, strict=True))
        fits = view.ceiling is None or used + stage.devices <= view.ceiling
        if seen_at_work and fits and counts[i] < _most(stage):
            counts[i] += 1
    return counts


def _most(stage: StageSpec) -> int:
    """maxReplicas, or what can be placed of all classes together."""
    limits = [c.available for c in stage.classes]
    placed = [x for x in limits if x is not None]
    return min(stage.maximum, sum(placed)) if len(placed) == len(limits) else stage.maximum


def _low(view: View, index: int) -> int:
    stage = view.spec.stages[index]
    if stage.fixed:
        return view.current[index]
    if stage.minimum > 0:
        return stage.minimum
    idle = view.now - view.state.active[index]
    return 0 if idle >= view.spec.tuning.idle_seconds or (view.current[index] == 0 and idle > 0) else 1


def _wish(view: View, enough: Solution | None, counts: Sequence[int]) -> Wish:
    """What would be enough with margin. Where the limits do not give the margin: what there is."""
    if enough is None or enough.share < 1:
        return Wish(view.now, tuple(max(a, b) for a, b in zip(counts, view.current, strict=True)))
    return Wish(view.now, enough.counts)


def _shrink(view: View, wishes: Sequence[Wish]) -> tuple[list[int], dict[int, str]]:
    counts, kept = list(view.current), {}
    for i, stage in enumerate(view.spec.stages):
        target = settled(wishes, i, view.current[i], view.now, view.spec.tuning.scale_down_seconds)
        if target >= view.current[i] or stage.fixed:
            continue
        fewer = view.current[i] - max(1, math.floor((view.current[i] - target) * view.spec.tuning.shrink_share))
        why_not = reason_to_keep(
            Shrinking(
                spec=stage,
                fleet=view.fleet[i],
                moves=view.state.moves[i],
                window=view.window,
                tuning=view.spec.tuning,
                breach=view.breach.objective,
                burst=view.demand[i].burst,
                now=view.now,
                count=fewer,
                load=view.demand[i].planned,
            )
        )
        if why_not is None:
            counts[i] = fewer
        else:
            kept[i] = why_not
    return counts, kept


def _bounded(view: View, counts: Sequence[int], lows: Sequence[int]) -> list[int]:
    """Into minReplicas..maxReplicas, whatever was computed; a count above a maximum that was lowered comes down."""
    return [
        now if s.fixed else min(max(low, count), max(low, s.maximum))
        for s, count, low, now in zip(view.spec.stages, counts, lows, view.current, strict=True)
    ]


def _limit(view: View, counts: Sequence[int]) -> str:
    if _bound_by_ceiling(view, counts):
        return view.ceiling_name
    placed = any(n >= _most(s) < s.maximum for n, s in zip(counts, view.spec.stages, strict=True) if not s.fixed)
    return "the room on nodes or in quotas" if placed else "maxReplicas"


def _bound_by_ceiling(view: View, counts: Sequence[int]) -> bool:
    if view.ceiling is None:
        return False
    used = sum(n * s.devices for n, s in zip(counts, view.spec.stages, strict=True))
    open_stages = [
        s for n, s in zip(counts, view.spec.stages, strict=True) if n < s.maximum and not s.fixed and s.devices
    ]
    return any(used + s.devices > view.ceiling for s in open_stages)
