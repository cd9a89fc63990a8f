"""What a rule may look at besides the object: the cluster as the cache knows it. Values only; no I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_crds.v1alpha1.tenant import OmniTenant
from omni_operator.kinds import NODE, PIPELINE, POD, PROFILE, QUOTA, STAGE, TENANT
from omni_operator.placement import (
    Catalogue,
    ClusterView,
    Feasible,
    Fix,
    Infeasible,
    Verdict,
    check_placement,
    plan_demand,
    stage_paths,
)
from omni_operator.placement.fleet import Fleet
from omni_operator.placement.question import Memo, relevant_labels
from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.deploy.resolve import DEFAULT_PROFILE, resolve
from omni_runtime.errors import FieldError, InvalidPipeline
from omni_webhooks.cache import Key
from omni_webhooks.index import NodeIndex
from omni_webhooks.ledger import Ledger, PoolKey, StageCount, devices_in_use
from omni_webhooks.nodes import promising

PROFILES, TENANTS, PIPELINES, STAGES = PROFILE.plural, TENANT.plural, PIPELINE.plural, STAGE.plural
NODES, QUOTAS, PODS = NODE.plural, QUOTA.plural, POD.plural
# A check of more nodes than this takes longer than an admission should.
FEW_NODES = 128
ADVISORS = 8  # nodes per pod group on which a way out is looked for, which is most of the time of a refusal
GROWTH = "MaxReplicasDoNotFit"  # a warning that only all nodes together can give
RESOURCES = (PROFILES, TENANTS, PIPELINES, STAGES, NODES, QUOTAS, PODS)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A pipeline with the profiles of the cluster. plan: None where `errors` or `missing` say why."""

    plan: ResolvedPlan | None
    errors: tuple[FieldError, ...]  # of the pipeline itself
    missing: tuple[FieldError, ...]  # profiles that do not exist (yet): the pipeline goes on by itself when they do
    memo: Memo = field(default_factory=Memo)


@dataclass(slots=True)
class Context:
    """One look at the cluster. `ages` says of each resource how old the copy is; None: it was never complete."""

    profiles: Mapping[str, OmniRuntimeProfile] = field(default_factory=dict)
    tenants: Mapping[str, OmniTenant] = field(default_factory=dict)
    pipelines: Mapping[Key, OmniPipeline] = field(default_factory=dict)
    stages: Mapping[Key, StageCount] = field(default_factory=dict)
    counts: Mapping[PoolKey, int] = field(default_factory=dict)  # replicas that the OmniStages ask for
    ledger: Ledger = field(default_factory=Ledger)
    cluster: Callable[[Key], ClusterView] = lambda _pipeline: ClusterView()  # for one pipeline, without its own pods
    index: Callable[[Key], NodeIndex | None] = lambda _pipeline: None  # of the same nodes, where somebody keeps one
    nodes_are_known: bool = True  # False: nobody follows them, or there is none, as on a control plane alone
    catalogue: Catalogue = field(default_factory=lambda: Catalogue({}))
    ages: Mapping[str, float | None] = field(default_factory=lambda: dict.fromkeys(RESOURCES, 0.0))
    _resolved: dict[int, tuple[OmniPipeline, Resolved]] = field(default_factory=dict)
    _fits: dict[int, Verdict | None] = field(default_factory=dict)  # fits_devices, of the pipelines of _resolved

    def resolve(self, pipeline: OmniPipeline) -> Resolved:
        """The plan of a pipeline; worked out once per review."""
        found = self._resolved.get(id(pipeline))
        if found is None:
            # The object is kept beside the answer: its id cannot be given to another one meanwhile.
            found = self._resolved[id(pipeline)] = (pipeline, resolve_with(pipeline, self.profiles))
        return found[1]

    def fits_devices(self, pipeline: OmniPipeline) -> Verdict | None:
        """Whether each stage fits the devices that it asks for, whatever nodes there are; None without a plan."""
        self.resolve(pipeline)
        if id(pipeline) not in self._fits:
            self._fits[id(pipeline)] = self._check(pipeline, ClusterView())
        return self._fits[id(pipeline)]

    def fits_cluster(self, pipeline: OmniPipeline, key: Key, *, nodes_may_be_added: bool) -> Verdict | None:
        """Whether the nodes have room for all of it now. Counts that somebody scaled are those that will run.

        Of a large cluster the most promising nodes are asked first, and the advice is found on them: what fits some
        nodes fits all of them. A refusal is always the word of the whole cluster.
        """
        plan = self.resolve(pipeline).plan
        if plan is None:
            return None
        cluster = replace(self.cluster(key), nodes_may_be_added=nodes_may_be_added)
        replicas = self._scaled(plan, key)
        if len(cluster.nodes or ()) <= FEW_NODES:
            return self._check(pipeline, cluster, replicas)
        index, certain = self._index(key, plan, cluster), replace(cluster, nodes_may_be_added=False)
        demands = plan_demand(plan, replicas, {}, self.resolve(pipeline).memo.asks)
        most = max((*(d.replicas for d in demands), *(bounds.maximum or 0 for bounds in plan.replicas.values())))
        some = promising(certain, index, demands, min(max(most, ADVISORS), FEW_NODES))
        quick = self._check(pipeline, some, replicas, advise=False)
        if isinstance(quick, Feasible) and not any(w.code == GROWTH for w in quick.warnings):
            return quick
        whole = self._check(pipeline, cluster, replicas, advise=False, fleet=index.fleet())
        if not isinstance(whole, Infeasible):
            return whole
        advised = self._check(pipeline, promising(certain, index, demands, ADVISORS), replicas)
        return with_fixes(whole, advised.fixes if isinstance(advised, Infeasible) else ())

    def _index(self, key: Key, plan: ResolvedPlan, cluster: ClusterView) -> NodeIndex:
        """The one that is kept up; or one for this question, where the pipeline names other labels or has pods itself."""
        labels = relevant_labels(plan, self.catalogue, cluster)
        kept = self.index(key)
        return kept if kept is not None and labels <= kept.labels else NodeIndex(labels, cluster.nodes or ())

    def _check(
        self,
        pipeline: OmniPipeline,
        cluster: ClusterView,
        replicas: Mapping[str, int] | None = None,
        *,
        advise: bool = True,
        fleet: Fleet | None = None,
    ) -> Verdict | None:
        resolved = self.resolve(pipeline)
        if resolved.plan is None:
            return None
        return check_placement(
            resolved.plan,
            cluster,
            catalogue=self.catalogue,
            replicas=replicas,
            paths=stage_paths(pipeline.spec),
            fixes=1 if advise else 0,  # one is said
            fleet=fleet,
            memo=resolved.memo,
        )

    def _scaled(self, plan: ResolvedPlan, key: Key) -> dict[str, int]:
        """Pod group -> replicas of its OmniStage, where the pipeline does not fix them."""
        return {
            leader: self.counts[(*key, leader)]
            for leader in plan.pod_groups()
            if plan.replicas[leader].requested is None and (*key, leader) in self.counts
        }

    def tenant_of(self, namespace: str) -> OmniTenant | None:
        """The tenant of a namespace; the first by name where two claim it, which only old objects can."""
        claiming = (name for name, tenant in sorted(self.tenants.items()) if namespace in tenant.spec.namespaces)
        first = next(claiming, None)
        return None if first is None else self.tenants[first]

    def in_use(self, tenant: OmniTenant, without: Key | None = None) -> Counter[str]:
        """Device class -> devices of the tenant's pipelines, but those of one of them."""
        return devices_in_use(self.ledger, self.counts, frozenset(tenant.spec.namespaces), without)


def with_fixes(verdict: Infeasible, fixes: tuple[Fix, ...]) -> Infeasible:
    """The errors that have no advice yet, with the first of the fixes."""
    if not fixes:
        return verdict
    errors = tuple(e if e.fix else FieldError(e.path, e.value, e.problem, fixes[0].text) for e in verdict.errors)
    return replace(verdict, errors=errors, fixes=fixes)


def profile_names(pipeline: OmniPipeline, profiles: Mapping[str, OmniRuntimeProfile]) -> dict[str, str]:
    """Field path -> runtime profile that the pipeline uses there; the default one under `spec.runtimeProfile`."""
    spec = pipeline.spec
    named = {f"spec.stages[{i}].runtimeProfile": s.runtime_profile for i, s in enumerate(spec.stages or ())}
    default = DEFAULT_PROFILE if DEFAULT_PROFILE in profiles else None
    own = spec.runtime_profile or default
    return {path: name for path, name in {"spec.runtimeProfile": own, **named}.items() if name is not None}


def resolve_with(pipeline: OmniPipeline, profiles: Mapping[str, OmniRuntimeProfile]) -> Resolved:
    try:
        return Resolved(resolve(pipeline, profiles, target="kubernetes"), (), ())
    except InvalidPipeline as error:
        absent = [e for e in error.errors if e.path.endswith("runtimeProfile") and e.value not in profiles]
        return Resolved(None, tuple(e for e in error.errors if e not in absent), tuple(absent))
