"""A decision in words: why each stage gets what it gets, who limits, what was weighed. Pure; decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omni_operator.autoscale import solve as solver
from omni_operator.autoscale.capacity import (
    fit,
)
from omni_operator.autoscale.solve import Solution
from omni_operator.autoscale.stabilise import Wish
from omni_operator.autoscale.types import (
    Candidate,
    Spec,
    StageDecision,
    StageFleet,
    StageSpec,
)
from omni_operator.autoscale.view import (
    View,
    goal_of,
    loads_of,
    mix_of,
)


def explain_stages(
    view: View, decided: Sequence[int], wish: Wish, kept: Mapping[int, str], chosen: Solution | None
) -> tuple[StageDecision, ...]:
    stages = []
    for i, stage in enumerate(view.spec.stages):
        option = chosen.options[i] if chosen is not None else None
        now, target, demand = view.current[i], decided[i], view.demand[i]
        if stage.fixed:
            said = "not scaled here"
        elif target > now:
            said = _why_up(view, i)
        elif target < now:
            said = f"{target} are enough with margin for {view.spec.tuning.scale_down_seconds:.0f} s"
        elif i in kept:
            said = f"{wish.counts[i]} would be enough, kept: {kept[i]}"
        else:
            said = f"{now} for {demand.planned:.2f} requests/s"
        mix = option.mix if option is not None and option.count == target else ()
        known = view.state.learned[i]
        stages.append(
            StageDecision(
                name=stage.name,
                current=now,
                target=target,
                reason=said,
                wanted=wish.counts[i],
                by_class=tuple((c.name, n) for c, n in zip(stage.classes, mix, strict=False)) if len(mix) > 1 else (),
                load=option.load if option is not None else 0.0,
                step_seconds=fit(known, stage.prior, stage.slots).step(option.batch if option else 0.0),
                ttfp_share=option.ttfp if option is not None and view.spec.objectives.ttfp_p95_seconds else None,
            )
        )
    return tuple(stages)


def _why_up(view: View, index: int) -> str:
    stage, demand = view.spec.stages[index], view.demand[index]
    if view.current[index] == 0:
        return "a request needs this stage"
    if view.current[index] < stage.minimum:
        return f"minReplicas is {stage.minimum}"
    told = {
        "now": f"{demand.rate:.2f} requests/s",
        "burst": f"burst: {demand.fast:.2f} requests/s, {demand.rate:.2f} before",
        "trend": f"growing: {demand.planned:.2f} requests/s when a new replica serves",
        "memory": f"a burst of {demand.planned:.2f} requests/s is remembered",
    }[demand.source]
    return f"{told}; objective {view.breach.objective} is missed" if view.breach else told


def headline(
    view: View,
    stages: Sequence[StageDecision],
    limiting: str | None,
    reason: str,
    message: str,
    stuck: bool,
) -> tuple[str, str]:
    if stuck:
        return "QueueStuck", "requests wait, none comes and none ends: scaling would not help, look at the entry"
    ups = [s for s in stages if s.target > s.current]
    downs = [s for s in stages if s.target < s.current]
    counts = ", ".join(f"{s.name} {s.current} -> {s.target}" for s in (*ups, *downs))
    if ups and any(s.current == 0 for s in ups):
        return "FromZero", counts
    if reason == "Limited":
        return reason, f"{message}; {limiting} limits" + (f"; {counts}" if counts else "")
    if ups:
        broken = f"{view.breach.objective} is {view.breach.over:.2f} of its objective, " if view.breach else ""
        return "ScaleUp", f"{broken}{limiting} limits: {counts}"
    if downs:
        return "ToZero" if any(s.target == 0 for s in downs) else "ScaleDown", counts
    if view.breach:
        return "ObjectiveMissed", (
            f"{view.breach.objective} is {view.breach.over:.2f} of its objective; {limiting} limits,"
            " and the model expects the present replicas to be enough"
        )
    return reason, message


def limiting_stage(view: View, chosen: Solution | None) -> str | None:
    """The blamed stage; without a breach, the one that is closest to its limit."""
    if view.breach and view.breach.stage is not None:
        return view.breach.stage
    loads = loads_of(view, view.current, view.current)
    goal = goal_of(view, 1.0)
    strains = [solver.evaluate(x, mix_of(x.spec, n), goal).strain for x, n in zip(loads, view.current, strict=True)]
    busy = [i for i, demand in enumerate(view.demand) if demand.planned > 0]
    return view.spec.stages[max(busy, key=lambda i: strains[i])].name if busy else None


def candidates_of(
    view: View, grown: Solution | None, free: Solution | None, enough: Solution | None
) -> tuple[Candidate, ...]:
    names = [s.name for s in view.spec.stages]
    shown = (("keep or grow", grown), ("from scratch", free), ("enough with margin", enough))
    return tuple(
        Candidate(label, tuple(zip(names, s.counts, strict=True)), s.devices, round(s.ttfp, 4), s.share >= 1)
        for label, s in shown
        if s is not None
    )


def inputs_of(view: View) -> tuple[tuple[str, float], ...]:
    window, found = view.window, []
    found.append(("ttfp_p95_seconds", window.ttfp.quantile(0.95) or 0.0))
    found.append(("rtf_p95", window.rtf.quantile(0.95) or 0.0))
    for i, stage in enumerate(view.spec.stages):
        seen = window.stage(stage.name)
        found.append((f"{stage.name}.requests_per_second", view.demand[i].rate))
        found.append((f"{stage.name}.planned_per_second", view.demand[i].planned))
        found.append((f"{stage.name}.in_flight", seen.in_flight))
        found.append((f"{stage.name}.waiting", seen.waiting))
    return tuple((name, round(value, 4)) for name, value in found)


def held(stage: StageSpec, fleet: StageFleet, why: str) -> StageDecision:
    return StageDecision(stage.name, fleet.target, fleet.target, why, wanted=fleet.target)


def devices_of(spec: Spec, stages: Sequence[StageDecision]) -> int:
    return sum(
        sum(n * c.devices for (_, n), c in zip(d.by_class, s.classes, strict=False))
        if d.by_class
        else d.target * s.devices
        for d, s in zip(stages, spec.stages, strict=True)
    )
