"""The cluster as this process follows it: one mirror per resource, and what is derived from them as they change."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_crds.v1alpha1.tenant import OmniTenant
from omni_operator.errors import KubeError, NotFound
from omni_operator.kinds import (
    DEVICE_CLASS,
    NODE,
    PIPELINE,
    POD,
    PROFILE,
    QUOTA,
    SLICE,
    STAGE,
    TENANT,
    JsonObject,
)
from omni_operator.kube import Kube
from omni_operator.placement import Catalogue, ClusterView
from omni_operator.placement.dra import read_class, read_slice
from omni_operator.placement.question import common_labels
from omni_operator.placement.views import node_view, quota_view
from omni_webhooks import logs
from omni_webhooks.cache import Key, Mirror
from omni_webhooks.context import PROFILES, TENANTS, Context
from omni_webhooks.ledger import Ledger, PoolKey, StageCount
from omni_webhooks.nodes import Nodes, read_pod

CONFIRM_SECONDS = 1.5


def read_stage(body: JsonObject) -> StageCount:
    spec = body["spec"]
    return StageCount(
        pipeline=spec["pipelineRef"]["name"],
        stage=spec["stageName"],
        replicas=spec.get("replicas"),
        minimum=spec.get("minReplicas"),
        maximum=spec.get("maxReplicas"),
        colocated_with=spec.get("colocatedWith"),
    )


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """nodes: follow nodes, pods and quotas. domain_label: node label of the domain for hot edges."""

    nodes: bool = True
    domain_label: str | None = None


class Site:
    """Mirrors, and `context()`: what the rules see of them now. Nothing is copied; a review is decided in one go."""

    def __init__(
        self,
        kube: Kube,
        placement: PlacementOptions = PlacementOptions(),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._placement = placement
        self._monotonic = monotonic
        self.profiles = Mirror(
            PROFILE, OmniRuntimeProfile.model_validate, changed=self._profile_changed, monotonic=monotonic,
            keep_revisions=True,
        )  # fmt: skip
        self.tenants = Mirror(
            TENANT, OmniTenant.model_validate, changed=self._tenant_changed, monotonic=monotonic, keep_revisions=True
        )
        self.pipelines = Mirror(
            PIPELINE, OmniPipeline.model_validate, changed=self._pipeline_changed, monotonic=monotonic
        )
        self.stages = Mirror(STAGE, read_stage, changed=self._stage_changed, monotonic=monotonic)
        self.nodes = Nodes()
        self.node_list = Mirror(NODE, node_view, changed=self.nodes.node_changed, monotonic=monotonic)
        self.slices = Mirror(SLICE, read_slice, changed=self.nodes.slice_changed, monotonic=monotonic, optional=True)
        self.device_classes = Mirror(
            DEVICE_CLASS, read_class, changed=self.nodes.class_changed, monotonic=monotonic, optional=True
        )
        self.pods = Mirror(POD, read_pod, changed=self.nodes.pod_changed, monotonic=monotonic)
        self.quotas = Mirror(QUOTA, quota_view, monotonic=monotonic)
        self._catalogue: tuple[dict[str, OmniRuntimeProfile], Catalogue] = ({}, Catalogue({}))
        self.ledger = Ledger()
        self._counts: dict[PoolKey, int] = {}
        self._counted: dict[Key, PoolKey] = {}
        self._profiles_by_name: dict[str, OmniRuntimeProfile] = {}
        self._tenants_by_name: dict[str, OmniTenant] = {}
        self._reckon = asyncio.Event()  # profiles changed: the ledger has to be worked out again
        self._confirming = asyncio.Lock()
        self._confirmed: tuple[float, Context] | None = None

    @property
    def mirrors(self) -> tuple[Mirror[Any], ...]:
        own = (self.profiles, self.tenants, self.pipelines, self.stages)
        return (*own, *self._of_placement) if self._placement.nodes else own

    @property
    def _of_placement(self) -> tuple[Mirror[Any], ...]:
        return self.node_list, self.quotas, self.pods, self.slices, self.device_classes

    async def run(self) -> None:
        """Follow everything for ever. Profiles come first: what pipelines ask for is worked out with them."""
        for mirror in self.mirrors:
            mirror.listed = self._rest
        async with asyncio.TaskGroup() as tasks:
            for mirror in self.mirrors:
                tasks.create_task(mirror.run(self._kube), name=mirror.kind.plural)
            tasks.create_task(self._keep_reckoning(), name="ledger")

    def context(self) -> Context:
        return self._context(self._profiles_by_name, self._tenants_by_name, confirmed=False)

    async def confirm(self, asked_at: float, seen: Context) -> Context | None:
        """The context with profiles and tenants as the API server has them now; None where they are what was seen
        already, or when it does not say in time.

        A watch lags by milliseconds, which is enough for a profile and a pipeline that are applied together. Calls that
        ask at the same time share one answer, as long as it was fetched after they began.
        """
        async with self._confirming:
            if self._confirmed is None or self._confirmed[0] < asked_at:
                started = self._monotonic()
                try:
                    async with asyncio.timeout(CONFIRM_SECONDS):
                        profiles = await self._kube.list(PROFILE, None)
                        tenants = await self._kube.list(TENANT, None)
                except (KubeError, TimeoutError) as error:
                    logs.warning("confirm.failed", error=str(error))
                    return None
                new_profiles, new_tenants = self.profiles.news(profiles.items), self.tenants.news(tenants.items)
                context = self._context(
                    self._profiles_by_name if new_profiles is None else new_profiles,
                    self._tenants_by_name if new_tenants is None else new_tenants,
                    confirmed=True,
                )
                self._confirmed = (started, context)
            context = self._confirmed[1]
            same = context.profiles is seen.profiles and context.tenants is seen.tenants
            return None if same else context

    async def stage(self, key: Key) -> StageCount | None:
        """An OmniStage; one that the watch has not brought yet is asked for."""
        found = self.stages.items.get(key)
        if found is not None:
            return found
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                return read_stage(await self._kube.get(STAGE, *key))
        except NotFound:
            return None
        except (KubeError, TimeoutError) as error:
            logs.warning("stage.unknown", stage="/".join(key), error=str(error))
            return None

    def problem(self, stale_seconds: float) -> str | None:
        """For /readyz: which copies are missing or too old to decide anything."""
        bad = []
        for mirror in self.mirrors:
            age = mirror.age
            if age is None:
                bad.append(f"{mirror.kind.plural} not listed yet")
            elif age > stale_seconds:
                bad.append(f"{mirror.kind.plural} {age:.0f} s old")
        return f"cache: {', '.join(bad)}" if bad else None

    def _rest(self) -> None:
        """The copies are set aside from the garbage collector once they are complete: to look through them, as it does
        now and then, would stop every review for a tenth of a second and more. They have no cycles."""
        if all(mirror.age is not None for mirror in self.mirrors):
            gc.collect()
            gc.freeze()

    def _context(
        self, profiles: dict[str, OmniRuntimeProfile], tenants: dict[str, OmniTenant], *, confirmed: bool
    ) -> Context:
        ages: dict[str, float | None] = {mirror.kind.plural: mirror.age for mirror in self.mirrors}
        for mirror in self._of_placement:
            ages.setdefault(mirror.kind.plural, 0.0)  # not followed, since no rule will look
        if confirmed:
            ages |= {PROFILES: 0.0, TENANTS: 0.0}
        return Context(
            profiles=profiles,
            tenants=tenants,
            pipelines=self.pipelines.items,
            stages=self.stages.items,
            counts=self._counts,
            ledger=self.ledger,
            cluster=self._cluster,
            index=self.nodes.index,
            catalogue=self._catalogue_of(profiles),
            nodes_are_known=bool(self.node_list.items),
            ages=ages,
        )

    def _cluster(self, pipeline: Key) -> ClusterView:
        """Without the tenant: budgets have a rule of their own, which needs no nodes."""
        quotas = [quota for (namespace, _), quota in self.quotas.items.items() if namespace == pipeline[0]]
        return self.nodes.view(
            pipeline,
            quotas,
            domain_label=self._placement.domain_label,
            age_seconds=max(
                mirror.age or 0.0 for mirror in (self.node_list, self.pods, self.slices, self.device_classes)
            ),
        )

    def _catalogue_of(self, profiles: dict[str, OmniRuntimeProfile]) -> Catalogue:
        """Profiles change rarely, and every change makes another dictionary."""
        if self._catalogue[0] is not profiles:
            self._catalogue = (profiles, Catalogue.of(profiles))
        if profiles is self._profiles_by_name:
            self.nodes.tell_apart_by(common_labels(self._catalogue[1], self._placement.domain_label))
        return self._catalogue[1]

    def _profile_changed(self, key: Key, profile: OmniRuntimeProfile | None) -> None:
        # A new dictionary: contexts that are in use keep theirs.
        rest = {name: p for name, p in self._profiles_by_name.items() if name != key[1]}
        self._profiles_by_name = rest if profile is None else {**rest, key[1]: profile}
        self._reckon.set()

    def _tenant_changed(self, key: Key, tenant: OmniTenant | None) -> None:
        rest = {name: t for name, t in self._tenants_by_name.items() if name != key[1]}
        self._tenants_by_name = rest if tenant is None else {**rest, key[1]: tenant}

    def _pipeline_changed(self, key: Key, pipeline: OmniPipeline | None) -> None:
        self.ledger.put(key, pipeline, self._profiles_by_name)

    def _stage_changed(self, key: Key, stage: StageCount | None) -> None:
        former = self._counted.pop(key, None)
        if former is not None:
            self._counts.pop(former, None)
        if stage is not None and stage.replicas is not None:
            pool = self._counted[key] = (key[0], stage.pipeline, stage.stage)
            self._counts[pool] = stage.replicas

    async def _keep_reckoning(self) -> None:
        while True:
            await self._reckon.wait()
            self._reckon.clear()
            await _in_slices(self.pipelines.items.items(), self._pipeline_changed)


async def _in_slices(
    items: Iterable[tuple[Key, OmniPipeline]], put: Callable[[Key, OmniPipeline | None], None]
) -> None:
    """Half a millisecond each: reviews are answered in between."""
    for number, (key, pipeline) in enumerate(list(items)):
        put(key, pipeline)
        if number % 10 == 9:
            await asyncio.sleep(0)
