"""What a tenant's other pipelines use of its budget, read while a pipeline waits for its pods.

Admission refuses what exceeds a budget, but two creates at the same moment may both fit into the last of it. Here the
older pipeline goes first: its demand counts for the younger ones whether it runs yet or not, and what a younger one
runs already counts for the older. Advisory: a failure means that the budget is not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_operator import logs
from omni_operator.errors import KubeError
from omni_operator.fleet import FleetReader
from omni_operator.kinds import PIPELINE, STAGE, JsonObject
from omni_operator.kube import KubeApi
from omni_operator.observe import parse_pipeline, parse_stage
from omni_operator.observed import Key, Observed
from omni_operator.placement import TenantView
from omni_operator.placement.pools import PoolDemand, demand_of
from omni_operator.placement.views import tenant_view
from omni_runtime.deploy.resolve import resolve
from omni_runtime.errors import InvalidPipeline

Profiles = Mapping[str, OmniRuntimeProfile]


@dataclass(frozen=True, slots=True)
class _Pool:
    """Replicas of one OmniStage: what is asked for, and pods that exist."""

    wanted: int | None
    running: int


async def read_tenant(
    kube: KubeApi, fleet: FleetReader, observed: Observed, default_profile: str | None
) -> TenantView | None:
    """None: the namespace has no tenant with a budget, or it cannot be read."""
    tenant = await fleet.tenant_of(observed.key.namespace)
    if tenant is None or not tenant.spec.accelerator_budget:
        return None
    try:
        pipelines: list[JsonObject] = []
        stages: list[JsonObject] = []
        for namespace in tenant.spec.namespaces:
            pipelines += (await kube.list(PIPELINE, namespace)).items
            stages += (await kube.list(STAGE, namespace)).items
    except KubeError as error:
        logs.warning("tenancy.unread", pipeline=str(observed.key), error=str(error))
        return None
    used = devices_of_others(observed.key, pipelines, stages, observed.profiles, default_profile)
    return tenant_view(tenant, used)


def devices_of_others(
    key: Key,
    pipelines: Iterable[JsonObject],
    stages: Iterable[JsonObject],
    profiles: Profiles,
    default_profile: str | None,
) -> Counter[str]:
    """Device class -> devices that the pipelines before this one ask for, and that those after it have already."""
    pools = dict(_pools(stages))
    bodies = {_key(p): p for p in pipelines}
    mine = _age(key, bodies.get(key))
    total: Counter[str] = Counter()
    for other, body in bodies.items():
        # What is being deleted gives its devices back: nobody waits for it to drain, as at admission.
        if other == key or (body.get("metadata") or {}).get("deletionTimestamp"):
            continue
        first = _age(other, body) < mine
        for asked in _demand(body, profiles, default_profile):
            pool = pools.get((other, asked.leader), _Pool(None, 0))
            wanted = asked.initial if pool.wanted is None else pool.wanted
            total[asked.device_class] += asked.devices * (wanted if first else pool.running)
    return total


def _demand(body: JsonObject, profiles: Profiles, default_profile: str | None) -> tuple[PoolDemand, ...]:
    """Nothing for what the operator would not run."""
    pipeline, _ = parse_pipeline(body)
    if pipeline is None:
        return ()
    try:
        return demand_of(resolve(pipeline, profiles, target="kubernetes", default_profile=default_profile))
    except InvalidPipeline:
        return ()


def _pools(stages: Iterable[JsonObject]) -> Iterable[tuple[tuple[Key, str], _Pool]]:
    for body in stages:
        stage = parse_stage(body)
        if stage is not None:
            owner = Key(str(body["metadata"].get("namespace") or ""), stage.spec.pipeline_ref.name)
            running = (body.get("status") or {}).get("replicas") or 0
            yield (owner, stage.spec.stage_name), _Pool(stage.spec.replicas, running)


def _age(key: Key, body: JsonObject | None) -> tuple[str, Key]:
    """Smaller is older; times have whole seconds, so names decide between pipelines of one second."""
    return str(((body or {}).get("metadata") or {}).get("creationTimestamp") or ""), key


def _key(body: JsonObject) -> Key:
    return Key(str(body["metadata"].get("namespace") or ""), str(body["metadata"]["name"]))
