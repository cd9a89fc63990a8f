"""What of a pipeline is scaled here, and what runs of it now: from what a reconcile saw. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import msgspec

from omni_crds.v1alpha1.pipeline import ScalingMode
from omni_operator.autoscale.scrape import Target
from omni_operator.autoscale.snapshot import PodTimes
from omni_operator.autoscale.source import is_prometheus_url
from omni_operator.autoscale.types import DeviceClass, Objectives, Prior, Spec, StageFleet, StageSpec
from omni_operator.names import (
    AUTOSCALER_MANAGER,
    DELETION_COST_ANNOTATION,
    ENTRY_STAGE,
    PROMETHEUS_ANNOTATION,
    REPLICAS_MANAGER,
    stage_name,
)
from omni_operator.observed import Live, Observed
from omni_operator.plan.pods import is_active, is_finished, is_ready, is_scheduled, parse_time
from omni_operator.plan.replicas import current_replicas
from omni_runtime.deploy.plan import ResolvedPlan, StagePlan
from omni_runtime.topology.types import EngineKind, Modality, PayloadContract

# Where nothing has been measured yet. The level is learned within minutes; what counts here is the shape.
PRIORS: Mapping[EngineKind, Prior] = {
    EngineKind.AR_VLLM: Prior(0.015, 0.0010, 200.0, 10.0, 240.0),
    EngineKind.QWEN3_OMNI_TALKER: Prior(0.020, 0.0010, 400.0, 8.0, 180.0),
    EngineKind.QWEN3_OMNI_CODE2WAV: Prior(0.001, 0.0002, 400.0, 8.0, 120.0),
    EngineKind.HIBARI_ACOUSTIC: Prior(0.0001, 0.0001, 400.0, 100.0, 30.0),
    EngineKind.HIBARI_VOCODER: Prior(0.0001, 0.0001, 400.0, 8.0, 30.0),
}
# Another manager that wrote a count within this long is obeyed, and named.
SECOND_OWNER_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Owner:
    """Who else wrote a replica count."""

    stage: str
    manager: str
    count: int


def spec_of(observed: Observed, plan: ResolvedPlan) -> Spec | None:
    """None: no stage of the pipeline is scaled here."""
    pipeline = observed.pipeline
    if pipeline is None:
        return None
    wanted = {s.name: s.scaling for s in pipeline.spec.stages or () if s.scaling is not None}
    stages = []
    for leader, group in plan.pod_groups().items():
        scaling = next((wanted[s.name] for s in group if s.name in wanted), None)
        ours = scaling is not None and (scaling.mode or ScalingMode.OPERATOR) is ScalingMode.OPERATOR
        current = current_replicas(observed.stage_named(stage_name(plan.pipeline, leader))) or 0
        stages.append(
            StageSpec(
                name=leader,
                minimum=scaling.min_replicas if scaling is not None else current,
                maximum=scaling.max_replicas if scaling is not None else max(1, current),
                slots=min(s.max_concurrency for s in group),
                classes=(_device_class(group),),
                audio=all(Modality.TEXT not in s.required_for for s in group),
                realtime=any(_speaks(plan, s) for s in group),
                prior=PRIORS.get(group[0].engine, Prior()),
                fixed=not ours,
                facts=_facts(plan, group),
            )
        )
    if all(s.fixed for s in stages):
        return None
    spec = pipeline.spec
    return Spec(
        pipeline=str(observed.key),
        stages=tuple(stages),
        objectives=_objectives(observed),
        budget=spec.budget.accelerators if spec.budget is not None else None,
    )


def _facts(plan: ResolvedPlan, group: tuple[StagePlan, ...]) -> str:
    """Hash of what the speed of a replica depends on. Without images: a new one is mostly as fast as the old one, and
    where it is not, measurements overrule what was known within minutes."""
    names = {s.name for s in group}
    stages = [
        (
            s.name,
            s.engine,
            s.device,
            s.tensor_parallel,
            s.pipeline_parallel,
            s.max_concurrency,
            s.cpu,
            s.engine_args,
            s.env,
        )
        for s in group
    ]
    edges = [e for e in plan.edges if names & {e.source, e.to}]
    told = msgspec.json.encode((plan.model.uri, plan.model.revision, stages, edges), order="sorted")
    return hashlib.sha256(told).hexdigest()[:10]


def _objectives(observed: Observed) -> Objectives:
    given = observed.pipeline.spec.objectives if observed.pipeline is not None else None
    if given is None:
        return Objectives()
    return Objectives(
        ttfp_p95_seconds=given.ttfp_milliseconds.p95 / 1000 if given.ttfp_milliseconds is not None else None,
        rtf_p95=float(given.real_time_factor.p95) if given.real_time_factor is not None else None,
        queue_per_replica=given.queue_depth.per_replica if given.queue_depth is not None else None,
    )


def _device_class(group: tuple[StagePlan, ...]) -> DeviceClass:
    """Stages of one pod share its devices: the largest count is what a replica takes."""
    devices = max((s.device.count for s in group if s.device.resource_name is not None), default=0)
    return DeviceClass(group[0].device.device_class, devices=devices)


def _speaks(plan: ResolvedPlan, stage: StagePlan) -> bool:
    paced = (PayloadContract.CODEC_FRAMES, PayloadContract.ACOUSTIC_FRAMES)
    return any(e.payload in paced for e in plan.edges_from(stage.name))


def fleet_of(observed: Observed, spec: Spec) -> dict[str, StageFleet]:
    found = {}
    for stage in spec.stages:
        target = current_replicas(observed.stage_named(stage_name(observed.key.name, stage.name))) or 0
        pods = [p for p in observed.pods_of(stage.name) if not is_finished(p)]
        ready = sum(is_ready(p) and not p.deleting for p in pods)
        draining = sum(p.deleting for p in pods)
        found[stage.name] = StageFleet(stage.name, target, ready, max(0, target - ready), draining)
    return found


def devices_held(observed: Observed, spec: Spec) -> int:
    """Accelerators of the pods that have a node, those that drain included."""
    return sum(
        stage.devices * sum(is_scheduled(p) and not is_finished(p) for p in observed.pods_of(stage.name))
        for stage in spec.stages
    )


def pool_of(plan: ResolvedPlan) -> str | None:
    """The accelerators that a pipeline competes for: the resource that it has most of. None: it uses none."""
    counts: dict[str, int] = {}
    for stage in plan.stages:
        if stage.device.resource_name is not None:
            counts[stage.device.resource_name] = counts.get(stage.device.resource_name, 0) + stage.device.count
    return max(sorted(counts), key=lambda name: counts[name], default=None)


def prometheus_of(observed: Observed, plan: ResolvedPlan) -> str | None:
    """Where the profile of the first stage says that metrics are; None: the pods themselves are asked."""
    profile = observed.profiles.get(plan.stages[0].profile)
    url = profile.metadata.annotations.get(PROMETHEUS_ANNOTATION, "") if profile is not None else ""
    return url if is_prometheus_url(url) else None


def deletion_costs(
    observed: Observed, stage: str, leave: int, held: Mapping[str, int]
) -> tuple[tuple[Live, str | None], ...]:
    """(pod, its annotation; None: none) of the pods where it has to change, so that the `leave` emptiest ones go first.

    held: requests bound to each replica, by the pod's uid. Pods that are not ready leave before all others anyway; a
    mark of an earlier time that was not used is taken back.
    """
    pods = [p for p in observed.pods_of(stage) if is_active(p)]
    pods.sort(key=lambda p: (is_ready(p), held.get(p.uid, 0), p.name))
    wanted = {p.uid: "-1" if i < leave else None for i, p in enumerate(pods)}
    return tuple((p, wanted[p.uid]) for p in pods if p.annotations.get(DELETION_COST_ANNOTATION) != wanted[p.uid])


def entry_target(observed: Observed) -> Target | None:
    pod = next((p for p in observed.pods_of(ENTRY_STAGE) if _address(p) and not p.deleting and is_ready(p)), None)
    if pod is None:
        # An entry whose stages sleep is not ready, and is the only one who knows of the request that waits (T34).
        pod = next((p for p in observed.pods_of(ENTRY_STAGE) if _address(p) and not p.deleting), None)
    return Target(pod.name, pod.uid, _address(pod)) if pod is not None else None


def stage_targets(observed: Observed, plan: ResolvedPlan) -> tuple[Target, ...]:
    groups = {leader: tuple(s.name for s in group) for leader, group in plan.pod_groups().items()}
    return tuple(
        Target(p.name, p.uid, _address(p), groups[leader])
        for leader in groups
        for p in observed.pods_of(leader)
        if is_ready(p) and _address(p) and not p.deleting
    )


def pod_times(observed: Observed, spec: Spec) -> tuple[PodTimes, ...]:
    found = []
    for stage in spec.stages:
        for pod in observed.pods_of(stage.name):
            created, ready = parse_time(pod.created), _ready_since(pod)
            if is_ready(pod) and created is not None and ready is not None:
                found.append(PodTimes(stage.name, pod.name, max(0.0, (ready - created).total_seconds())))
    return tuple(found)


def other_owners(observed: Observed, spec: Spec) -> tuple[Owner, ...]:
    """Who else owns the count of a stage that is ours to scale: an HPA, KEDA, a person (T19).

    When is not known: the API server keeps no time of a write to /scale of a custom resource.
    """
    found = []
    for stage in spec.stages:
        live = observed.stage_named(stage_name(observed.key.name, stage.name))
        count = current_replicas(live)
        if stage.fixed or live is None or count is None:
            continue
        for entry in (live.live.body.get("metadata") or {}).get("managedFields") or ():
            manager = str(entry.get("manager", ""))
            owns = "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
            if owns and manager not in (AUTOSCALER_MANAGER, REPLICAS_MANAGER):
                found.append(Owner(stage.name, manager, count))
    return tuple(found)


def _address(pod: Live) -> str:
    return str(pod.status.get("podIP") or "")


def _ready_since(pod: Live) -> datetime | None:
    conditions = pod.status.get("conditions") or ()
    times = (c.get("lastTransitionTime") for c in conditions if c.get("type") == "Ready" and c.get("status") == "True")
    return parse_time(str(next(times, "")))
