"""One question to the checker, and what every part of the answer is computed from. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from omni_crds.v1alpha1.pipeline import PipelineSpec
from omni_operator.placement.demand import ENTRY, Asks
from omni_operator.placement.devices import Catalogue, DeviceSpec
from omni_operator.placement.fleet import Fleet, fleet_of
from omni_operator.placement.known import known_part
from omni_operator.placement.memory import stage_memory
from omni_operator.placement.modelfacts import ModelPart
from omni_operator.placement.types import ClusterView, NodeView, StageMemory
from omni_runtime.deploy.plan import ReplicaBounds, ResolvedPlan, StagePlan
from omni_runtime.deploy.quantity import parse_quantity


class Memo:
    """What was worked out of one plan and its variants already, with one catalogue. Stages are frozen: each is asked once."""

    def __init__(self) -> None:
        self.asks = Asks()
        self._memory: dict[int, tuple[StagePlan, StageMemory | None]] = {}

    def memory(self, stage: StagePlan, work_out: Callable[[StagePlan], StageMemory | None]) -> StageMemory | None:
        found = self._memory.get(id(stage))
        if found is None:
            # The stage is kept beside the answer: its id cannot be given to another one meanwhile.
            found = self._memory[id(stage)] = (stage, work_out(stage))
        return found[1]


@dataclass(frozen=True, slots=True)
class Question:
    """parts: what stages load, where somebody has read the model's files; paths: stage -> where its spec stands."""

    plan: ResolvedPlan
    cluster: ClusterView
    catalogue: Catalogue
    fleet: Fleet | None = None  # the nodes of `cluster`, by kind
    parts: Mapping[str, ModelPart] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)
    memo: Memo = field(default_factory=Memo, compare=False)

    def path(self, stage: str) -> str:
        return self.paths.get(stage) or ("spec.entry" if stage == ENTRY else f"spec.stages[name={stage}]")

    def device(self, stage: StagePlan) -> DeviceSpec | None:
        return self.catalogue.device(stage.profile, stage.device.device_class)

    def part(self, stage: StagePlan) -> ModelPart | None:
        return self.parts.get(stage.name) or known_part(self.plan.model, self.plan.topology, stage)

    def memory(self, stage: StagePlan) -> StageMemory | None:
        """None where the device class is not known at all: another check says so."""
        return self.memo.memory(stage, self._memory)

    def _memory(self, stage: StagePlan) -> StageMemory | None:
        device = self.device(stage)
        if device is None:
            return None
        declared = self.plan.device_memory.get(stage.name)
        return stage_memory(stage, self.part(stage), device, int(parse_quantity(declared)) if declared else None)

    def with_plan(self, plan: ResolvedPlan) -> Question:
        return replace(self, plan=plan)

    def with_cluster(self, cluster: ClusterView) -> Question:
        """Another cluster with the same nodes."""
        return replace(self, cluster=cluster)

    def with_nodes(self, added: tuple[NodeView, ...]) -> Question:
        """The cluster with further nodes."""
        cluster = replace(self.cluster, nodes=(*(self.cluster.nodes or ()), *added))
        fleet = (*(self.fleet or ()), *fleet_of(added, relevant_labels(self.plan, self.catalogue, cluster)))
        return replace(self, cluster=cluster, fleet=fleet)


def ask(
    plan: ResolvedPlan,
    cluster: ClusterView,
    catalogue: Catalogue,
    parts: Mapping[str, ModelPart],
    paths: Mapping[str, str],
    fleet: Fleet | None = None,
    memo: Memo | None = None,
) -> Question:
    if fleet is None and cluster.nodes is not None:
        fleet = fleet_of(cluster.nodes, relevant_labels(plan, catalogue, cluster))
    return Question(plan, cluster, catalogue, fleet, parts, paths, memo or Memo())


def relevant_labels(plan: ResolvedPlan, catalogue: Catalogue, cluster: ClusterView) -> frozenset[str]:
    """Labels that can make a difference: what a selector names, and the domain."""
    named = {name for stage in plan.stages for name, _ in stage.node_selector}
    named |= {name for name, _ in plan.entry.node_selector}
    return common_labels(catalogue, cluster.domain_label) | named


def common_labels(catalogue: Catalogue, domain_label: str | None) -> frozenset[str]:
    """Those that can make a difference to any plan; a plan may name more."""
    named = {name for device in catalogue.classes.values() for name in device.node_selector or ()}
    return frozenset(named | ({domain_label} if domain_label else set()))


def stage_paths(spec: PipelineSpec) -> dict[str, str]:
    """Stage name -> its path in the spec, as the resolver spells it."""
    return {stage.name: f"spec.stages[{i}]" for i, stage in enumerate(spec.stages or ())}


def with_replicas(plan: ResolvedPlan, replicas: Mapping[str, int]) -> ResolvedPlan:
    """The plan with fixed counts per pod group, such as the OmniStages have now."""
    bounds = dict(plan.replicas)
    for leader, stages in plan.pod_groups().items():
        if leader in replicas:
            for stage in stages:
                known = bounds.get(stage.name) or ReplicaBounds(None, 1, None)
                bounds[stage.name] = msgspec.structs.replace(known, requested=replicas[leader])
    return msgspec.structs.replace(plan, replicas=bounds)


def replace_stage(plan: ResolvedPlan, stage: StagePlan) -> ResolvedPlan:
    return msgspec.structs.replace(plan, stages=tuple(stage if s.name == stage.name else s for s in plan.stages))
