"""What stored pipelines ask for: devices per pod group, and the names of their children. Kept up as pipelines change.

Pure but for the dictionary. A pipeline that does not resolve asks for nothing: the operator does not run it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_operator.names import api_service_name, entry_control_name, entry_name, stage_name
from omni_operator.placement.pools import PoolDemand, demand_of
from omni_runtime.deploy.resolve import resolve
from omni_runtime.errors import InvalidPipeline

Key = tuple[str, str]
PoolKey = tuple[str, str, str]  # namespace, pipeline, stage


@dataclass(frozen=True, slots=True)
class StageCount:
    """What is kept of an OmniStage."""

    pipeline: str
    stage: str
    replicas: int | None
    minimum: int | None
    maximum: int | None
    colocated_with: str | None


@dataclass(frozen=True, slots=True)
class Entry:
    pools: tuple[PoolDemand, ...]
    names: frozenset[str]


def child_names(pipeline: str, stages: Iterable[str]) -> frozenset[str]:
    """Names that the operator gives to Services and Deployments of a pipeline; shared by all pipelines of a namespace."""
    fixed = {api_service_name(pipeline), entry_name(pipeline), entry_control_name(pipeline)}
    return frozenset(fixed | {stage_name(pipeline, stage) for stage in stages})


class Ledger:
    """Pipeline -> what it asks for, with the profiles as they are now."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._by_name: dict[Key, set[Key]] = {}  # (namespace, child name) -> pipelines that have such a child

    def put(self, key: Key, pipeline: OmniPipeline | None, profiles: Mapping[str, OmniRuntimeProfile]) -> None:
        old = self._entries.pop(key, None)
        for name in old.names if old else ():
            owners = self._by_name[(key[0], name)]
            owners.discard(key)
            if not owners:
                del self._by_name[(key[0], name)]
        if pipeline is None:
            return
        try:
            plan = resolve(pipeline, profiles, target="kubernetes")
        except InvalidPipeline:
            entry = Entry((), frozenset())
        else:
            entry = Entry(demand_of(plan), child_names(key[1], tuple(s.name for s in plan.stages)))
        self._entries[key] = entry
        for name in entry.names:
            self._by_name.setdefault((key[0], name), set()).add(key)

    def pools(self, namespaces: frozenset[str]) -> Iterator[tuple[Key, PoolDemand]]:
        for key, entry in self._entries.items():
            if key[0] in namespaces:
                for pool in entry.pools:
                    yield key, pool

    def pools_of(self, key: Key) -> tuple[PoolDemand, ...]:
        entry = self._entries.get(key)
        return entry.pools if entry else ()

    def owners(self, namespace: str, name: str) -> frozenset[Key]:
        """Pipelines with a child of this name."""
        return frozenset(self._by_name.get((namespace, name), ()))


def devices_in_use(
    ledger: Ledger, counts: Mapping[PoolKey, int], namespaces: frozenset[str], without: Key | None = None
) -> Counter[str]:
    """Device class -> devices of all pipelines in the namespaces: what they start with, or more where they were scaled.

    counts: replicas of the OmniStages.
    """
    total: Counter[str] = Counter()
    for key, pool in ledger.pools(namespaces):
        if key != without:
            total[pool.device_class] += pool.devices * counts.get((*key, pool.leader), pool.initial)
    return total
