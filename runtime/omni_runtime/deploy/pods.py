"""What stages share: pods, replica counts, devices, and the pipeline's budget of accelerators. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal

from omni_crds.v1alpha1.pipeline import PipelineSpec, StageSpec
from omni_runtime.deploy.overlay import PIPELINE, Origins, Violations
from omni_runtime.deploy.plan import ReplicaBounds, StagePlan
from omni_runtime.deploy.structure import StageNode

Groups = Mapping[str, tuple[StageNode, ...]]


def pod_groups(stages: Sequence[StageNode]) -> dict[str, tuple[StageNode, ...]]:
    """Leader -> the stages of its pod. The leader is the first in the order of the graph; most stages are alone."""
    leaders: dict[str, str] = {}
    groups: dict[str, list[StageNode]] = {}
    for stage in stages:
        group = stage.spec.pod_group if stage.spec else None
        leader = stage.name if group is None else leaders.setdefault(group, stage.name)
        groups.setdefault(leader, []).append(stage)
    return {leader: tuple(members) for leader, members in groups.items()}


def resolve_replicas(groups: Groups, origins: Origins, bad: Violations) -> dict[str, ReplicaBounds]:
    """Counts per stage. A pod has one count, so the members of a group get what any of them asks for."""
    found: dict[str, ReplicaBounds] = {}
    for members in groups.values():
        for member in members:
            _check_counts(member, bad)
        stating = [m for m in members if m.spec and (m.spec.replicas is not None or m.spec.scaling is not None)]
        for other in stating[1:]:
            if _counts_of(other) != _counts_of(stating[0]):
                field = "replicas" if other.spec and other.spec.replicas is not None else "scaling"
                problem = f"stage {stating[0].name} shares its pods and asks for {_counts_of(stating[0])}"
                fix = "ask for the same, leave it to one of the stages, or take the stages apart (podGroup)"
                bad.add(f"{other.path}.{field}", _counts_of(other), problem, fix)
        bounds = _bounds(stating[0].spec if stating else None)
        for member in members:
            found[member.name] = bounds
            origins.note(f"replicas.{member.name}", PIPELINE if stating else "default")
    return found


def check_groups(groups: Groups, plans: Mapping[str, StagePlan], bad: Violations) -> None:
    """Stages of one pod run on one node, from one profile, and their memory fits on the devices that they share."""
    for leader, members in groups.items():
        first = _pod_fields(plans[leader])
        different = False
        for member in members[1:]:
            for (field, value), (_, leaders) in zip(_pod_fields(plans[member.name]), first, strict=True):
                if value != leaders:
                    different = True
                    problem = f"stage {leader} shares its pods, and has {leaders or 'none'!r}"
                    fix = "use the same, or take the stages apart (podGroup)"
                    bad.add(f"{member.path}.{field}", value, problem, fix)
                    break  # another profile or device class usually brings another node selector along
        if not different and len(members) > 1:
            _check_memory(members, plans, bad)


def _pod_fields(plan: StagePlan) -> tuple[tuple[str, str], ...]:
    """(field of a stage's spec, value) of what a pod has once, the most telling first."""
    return (
        ("runtimeProfile", plan.profile),
        ("accelerator.class", plan.device.device_class),
        ("scheduling.nodeSelector", ",".join(f"{name}={value}" for name, value in plan.node_selector)),
        ("scheduling.tolerations", "; ".join(str(t) for t in plan.tolerations)),
        ("scheduling.priorityClassName", plan.priority_class_name or ""),
    )


def _check_memory(members: Sequence[StageNode], plans: Mapping[str, StagePlan], bad: Violations) -> None:
    """The engines of one pod share its devices, and each takes its fraction when it starts (T71)."""
    fractions = [(m.name, plans[m.name].device.memory_fraction) for m in members]
    total = sum((Decimal(str(fraction)) for _, fraction in fractions), Decimal(0))
    last = members[-1]
    if plans[last.name].device.resource_name is not None and total > 1:
        parts = " + ".join(f"{name} {fraction:g}" for name, fraction in fractions)
        problem = f"the stages of this pod share the device: {parts} = {total.normalize():f}, more than 1"
        fix = "lower the fractions, or take the stages apart (podGroup)"
        bad.add(f"{last.path}.accelerator.memoryFraction", fractions[-1][1], problem, fix)


def check_budget(
    spec: PipelineSpec,
    groups: Groups,
    plans: Mapping[str, StagePlan],
    replicas: Mapping[str, ReplicaBounds],
    bad: Violations,
) -> None:
    """The least that the pipeline runs with stays within spec.budget; what may come on top is for the autoscaler."""
    if spec.budget is None:
        return
    parts = []
    total = 0
    for leader, members in groups.items():
        devices = max((plans[m.name].device.count for m in members if plans[m.name].device.resource_name), default=0)
        count = replicas[leader].initial
        if devices * count:
            total += devices * count
            parts.append(f"{leader} {count} x {devices}")
    if total > spec.budget.accelerators:
        problem = f"the least that the stages run with is {' + '.join(parts)} = {total} accelerators"
        bad.add(
            "spec.budget.accelerators", spec.budget.accelerators, problem, f"use {total} or more, or lower the replicas"
        )


def _check_counts(stage: StageNode, bad: Violations) -> None:
    if stage.spec is None or stage.spec.scaling is None:
        return
    scaling = stage.spec.scaling
    if stage.spec.replicas is not None:
        fix = "keep replicas for a fixed count, or scaling for a range"
        bad.add(f"{stage.path}.replicas", stage.spec.replicas, "a fixed count together with scaling", fix)
    if scaling.min_replicas > scaling.max_replicas:
        problem = f"more than maxReplicas {scaling.max_replicas}"
        bad.add(f"{stage.path}.scaling.minReplicas", scaling.min_replicas, problem, f"use 0 to {scaling.max_replicas}")


def _bounds(spec: StageSpec | None) -> ReplicaBounds:
    if spec is None:
        return ReplicaBounds(requested=None, minimum=1, maximum=None)
    if spec.scaling is not None:
        return ReplicaBounds(None, spec.scaling.min_replicas, spec.scaling.max_replicas)
    return ReplicaBounds(requested=spec.replicas, minimum=0, maximum=None)


def _counts_of(stage: StageNode) -> str:
    assert stage.spec is not None
    if stage.spec.scaling is not None:
        return f"{stage.spec.scaling.min_replicas} to {stage.spec.scaling.max_replicas}"
    return str(stage.spec.replicas)
