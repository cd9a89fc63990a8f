"""A verdict without advice: rules, memory, shared devices, quota, budget, nodes, in this order. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from omni_operator.placement import nodes
from omni_operator.placement.budgets import over_budget, over_quota
from omni_operator.placement.demand import ENTRY, PodDemand, plan_demand
from omni_operator.placement.nodes import arrange, place
from omni_operator.placement.question import Question
from omni_operator.placement.rules import check_rules
from omni_operator.placement.types import (
    ClusterView,
    Constraint,
    ConstraintKind,
    Feasible,
    Infeasible,
    PlacementWarning,
    StageMemory,
    Verdict,
    Witness,
)
from omni_operator.placement.warn import memory_warnings, placement_warnings
from omni_runtime.deploy.plan import StagePlan
from omni_runtime.errors import FieldError
from omni_runtime.topology.types import PayloadContract

GIB = 1 << 30
# Edges whose chunks are large and on the way to the first packet: their stages should be near each other.
HOT = (PayloadContract.THINKER_HIDDEN, PayloadContract.KV_CACHE)


@dataclass(frozen=True, slots=True)
class Facts:
    """What was computed on the way to the verdict; the advice starts from it."""

    verdict: Verdict
    demands: tuple[PodDemand, ...] = ()


def evaluate(question: Question, *, explain: bool = True) -> Facts:
    """Feasible with a witness, or Infeasible with its first constraint; every violation of that kind is in errors.
    explain=False: why the nodes have no room is not worked out."""
    errors, warnings = check_rules(question)
    memory = tuple(m for m in (question.memory(s) for s in question.plan.stages) if m is not None)
    warnings += tuple(memory_warnings(question, memory))
    if errors:
        stages = tuple(
            s.name for s in question.plan.stages if any(e.path.startswith(question.path(s.name)) for e in errors)
        )
        constraint = Constraint(
            ConstraintKind.INCOMPATIBLE, "; ".join(f"{e.path}: {e.problem}" for e in errors), stages
        )
        return Facts(Infeasible(memory, warnings, constraint, errors))
    broken = _memory_verdict(question, memory) or _shared_verdict(question)
    if broken is not None:
        return Facts(Infeasible(memory, warnings, *broken))
    demands = plan_demand(question.plan, {}, {m.stage: m.need if m.known else 0 for m in memory}, question.memo.asks)
    limits = _limit_constraints(demands, question.cluster)
    if limits:
        where = [FieldError(_replicas_path(question, c), "", c.message, "") for c in limits]
        return Facts(Infeasible(memory, warnings, limits[0], tuple(where)), demands)
    if question.fleet is None:
        return Facts(Feasible(memory, warnings), demands)
    return Facts(_on_nodes(question, demands, memory, warnings, explain), demands)


def _on_nodes(
    question: Question,
    demands: tuple[PodDemand, ...],
    memory: tuple[StageMemory, ...],
    warnings: tuple[PlacementWarning, ...],
    explain: bool,
) -> Verdict:
    cluster = question.cluster
    assert question.fleet is not None
    ties = hot_components(question) if cluster.domain_label else {}
    witness: Witness | None = None
    if ties:
        shelf = arrange(demands, question.fleet, cluster.domain_label, ties)
        witness, packing = place(shelf)
    if witness is None:
        shelf = arrange(demands, question.fleet)
        witness, packing = place(shelf)
        if witness is None:
            if not explain:
                return Infeasible(memory, warnings, proven=packing.proven)
            constraint = nodes.explain(shelf, question.fleet, packing)
            error = FieldError(_replicas_path(question, constraint), "", constraint.message, "")
            return Infeasible(memory, warnings, constraint, (error,), (), packing.proven)
        if ties and cluster.domain_required:
            groups = tuple(sorted(ties))
            message = f"{' and '.join(groups)} exchange hidden rows, and no {cluster.domain_label} has room for both"
            constraint = Constraint(ConstraintKind.DOMAIN, message, groups, cluster.domain_label)
            return Infeasible(memory, warnings, constraint, (FieldError("spec.edges", "", message, ""),))
    warnings += tuple(placement_warnings(question, shelf, witness, ties))
    return Feasible(memory, warnings, witness)


def hot_components(question: Question) -> dict[str, int]:
    """Pod group -> number of its component, for groups that hot edges join."""
    group_of = {s.name: s.pod_group for s in question.plan.stages}
    component: dict[str, int] = {}
    for number, edge in enumerate(e for e in question.plan.edges if e.payload in HOT):
        ends = {group_of[edge.source], group_of[edge.to]}
        if len(ends) < 2:
            continue
        known = {component[g] for g in ends if g in component}
        target = min(known, default=number)
        for group, old in list(component.items()):
            if old in known:
                component[group] = target
        component.update(dict.fromkeys(ends, target))
    return component


def _memory_verdict(
    question: Question, memory: tuple[StageMemory, ...]
) -> tuple[Constraint, tuple[FieldError, ...]] | None:
    """Stages that do not fit their share of a device, each with what is missing (R43, R44)."""
    short = [m for m in memory if m.missing]
    if not short:
        return None
    stages = {s.name: s for s in question.plan.stages}
    errors = tuple(
        FieldError(
            f"{question.path(m.stage)}.{'resources.memory' if _on_cpu(stages[m.stage]) else 'accelerator'}",
            stages[m.stage].memory if _on_cpu(stages[m.stage]) else f"{m.devices} x {m.device_class}",
            _shortage(m, stages[m.stage]),
            "",
        )
        for m in short
    )
    ranked = sorted(short, key=lambda m: -m.missing)
    message = "; ".join(f"{m.stage} {_shortage(m, stages[m.stage])}" for m in short)
    return Constraint(ConstraintKind.DEVICE_MEMORY, message, tuple(m.stage for m in ranked)), errors


def _shortage(memory: StageMemory, stage: StagePlan) -> str:
    per = "" if _on_cpu(stage) else " on each device" if memory.devices > 1 else " of the device"
    share = "" if _on_cpu(stage) else f" ({stage.device.memory_fraction:g} of {memory.capacity / GIB:.1f} GiB)"
    biggest = sorted(memory.terms, key=lambda t: -t.bytes)[:2]
    parts = ", ".join(f"{t.name} {t.bytes / GIB:.1f}" for t in biggest)
    if any(t.source.startswith("topology ") for t in memory.terms):
        # Nothing is known of this very model: a fine-tune has the sizes of its family, another model has not.
        parts += "; sizes of the topology's own model, accelerator.memory may say otherwise"
    return (
        f"needs {memory.need / GIB:.1f} GiB{per} ({parts}), its share is {memory.budget / GIB:.1f} GiB{share}: "
        f"{memory.missing / GIB:.1f} GiB are missing"
    )


def _shared_verdict(question: Question) -> tuple[Constraint, tuple[FieldError, ...]] | None:
    """Engines of one pod share its devices from the first on: the shares of one device add up to at most 1 (T71)."""
    for leader, stages in question.plan.pod_groups().items():
        sharing = [s for s in stages if s.device.resource_name is not None]
        for index in range(max((s.device.count for s in sharing), default=0)):
            users = [s for s in sharing if s.device.count > index]
            whole = sum((Decimal(str(s.device.memory_fraction)) for s in users), Decimal(0))
            if whole > 1:
                parts = " + ".join(f"{s.name} {s.device.memory_fraction:g}" for s in users)
                message = f"the stages of {leader}'s pods share device {index}: {parts} = {whole.normalize():f}"
                path = f"{question.path(users[-1].name)}.accelerator.memoryFraction"
                error = FieldError(path, f"{users[-1].device.memory_fraction:g}", message, "")
                names = tuple(s.name for s in users)
                return Constraint(ConstraintKind.SHARED_DEVICE, message, names), (error,)
    return None


def _limit_constraints(demands: tuple[PodDemand, ...], cluster: ClusterView) -> list[Constraint]:
    return [c for *_, c in over_quota(demands, cluster)] + [c for *_, c in over_budget(demands, cluster)]


def _replicas_path(question: Question, constraint: Constraint) -> str:
    group = next((s for s in constraint.stages if s != ENTRY), None)
    return "spec.entry" if group is None else f"{question.path(group)}"


def _on_cpu(stage: StagePlan) -> bool:
    return stage.device.resource_name is None
