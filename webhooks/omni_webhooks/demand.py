"""What a plan asks for, and where in the spec to point at it. Pure."""

from __future__ import annotations

from collections import Counter

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.placement.pools import demand_of
from omni_runtime.deploy.plan import ResolvedPlan


def devices_at_start(plan: ResolvedPlan) -> Counter[str]:
    """Device class -> devices of all replicas that the pipeline starts with."""
    total: Counter[str] = Counter()
    for pool in demand_of(plan):
        total[pool.device_class] += pool.devices * pool.initial
    return total


def devices_at_most(plan: ResolvedPlan) -> Counter[str]:
    """Device class -> devices at maxReplicas; a pool without a bound counts as it starts."""
    total: Counter[str] = Counter()
    for pool in demand_of(plan):
        total[pool.device_class] += pool.devices * (pool.initial if pool.maximum is None else pool.maximum)
    return total


def path_of(pipeline: OmniPipeline, stage: str) -> str:
    """The path of a stage: by index where the user wrote it, by name where the topology brings it."""
    for i, spec in enumerate(pipeline.spec.stages or ()):
        if spec.name == stage:
            return f"spec.stages[{i}]"
    return f"spec.stages[name={stage}]"


def stage_path(pipeline: OmniPipeline, plan: ResolvedPlan, device_class: str) -> str:
    """The stage that asks for most devices of a class: where a person would start to save."""
    pools = [p for p in demand_of(plan) if p.device_class == device_class]
    largest = max(pools, key=lambda p: p.devices * p.initial)
    return f"{path_of(pipeline, largest.leader)}.accelerator.count"
