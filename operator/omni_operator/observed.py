"""What one reconcile saw: frozen values that the planner decides on. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from omni_crds.v1alpha1.conditions import Reason
from omni_crds.v1alpha1.learned import LearnedCapacity
from omni_crds.v1alpha1.pipeline import OmniPipeline, ScalingDecision
from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_crds.v1alpha1.stage import OmniStage
from omni_operator.edges import EdgeHealth
from omni_operator.kinds import DEPLOYMENT, JsonObject, Kind
from omni_operator.names import ENTRY_STAGE, REVISION_LABEL, STAGE_LABEL


class Key(NamedTuple):
    """A pipeline, by name: delete and re-create under one name stay in one queue slot."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Live:
    """An object as the API server returned it. `body` is read-only by convention."""

    kind: Kind
    body: JsonObject

    @property
    def _meta(self) -> Mapping[str, Any]:
        return self.body.get("metadata") or {}

    @property
    def name(self) -> str:
        return str(self._meta.get("name", ""))

    @property
    def uid(self) -> str:
        return str(self._meta.get("uid", ""))

    @property
    def resource_version(self) -> str:
        return str(self._meta.get("resourceVersion", ""))

    @property
    def generation(self) -> int:
        return int(self._meta.get("generation") or 0)

    @property
    def labels(self) -> Mapping[str, str]:
        return self._meta.get("labels") or {}

    @property
    def annotations(self) -> Mapping[str, str]:
        return self._meta.get("annotations") or {}

    @property
    def deleting(self) -> bool:
        return bool(self._meta.get("deletionTimestamp"))

    @property
    def created(self) -> str:
        return str(self._meta.get("creationTimestamp") or "")

    @property
    def controller(self) -> tuple[str, str, str] | None:
        """(kind, name, uid) of the controlling owner."""
        for ref in self._meta.get("ownerReferences") or []:
            if ref.get("controller"):
                return str(ref.get("kind")), str(ref.get("name")), str(ref.get("uid"))
        return None

    @property
    def stage(self) -> str:
        return self.labels.get(STAGE_LABEL, "")

    @property
    def revision(self) -> str:
        return self.labels.get(REVISION_LABEL, "")

    @property
    def spec(self) -> Mapping[str, Any]:
        return self.body.get("spec") or {}

    @property
    def status(self) -> Mapping[str, Any]:
        return self.body.get("status") or {}


@dataclass(frozen=True, slots=True)
class LiveStage:
    """An OmniStage and, where it parses, its model."""

    live: Live
    stage: OmniStage | None


@dataclass(frozen=True, slots=True)
class Scaling:
    """What the operator's own autoscaler has to say of a pipeline."""

    decisions: tuple[ScalingDecision, ...]  # newest first
    ready: bool
    reason: Reason
    message: str
    learned: LearnedCapacity | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything about one pipeline at one moment; lists are complete or the read failed as a whole (T60)."""

    key: Key
    pipeline_live: Live | None
    pipeline: OmniPipeline | None  # None with `pipeline_live` set: the object does not parse
    pipeline_error: tuple[str, ...] = ()
    profiles: Mapping[str, OmniRuntimeProfile] = field(default_factory=dict)
    children: tuple[Live, ...] = ()
    stages: tuple[LiveStage, ...] = ()  # controlled by this pipeline
    foreign_stages: tuple[LiveStage, ...] = ()  # name this pipeline, but are not its own
    pods: tuple[Live, ...] = ()
    ttfp_milliseconds_p95: int | None = None
    edges: Mapping[str, EdgeHealth] = field(default_factory=dict)  # by name, as far as sidecars have said anything
    scaling: Scaling | None = None  # None: no stage is scaled by the operator, or nothing has been decided yet

    def child(self, kind: Kind, name: str) -> Live | None:
        return next((c for c in self.children if c.kind is kind and c.name == name), None)

    def of_kind(self, kind: Kind) -> tuple[Live, ...]:
        return tuple(c for c in self.children if c.kind is kind)

    @property
    def stage_deployments(self) -> tuple[Live, ...]:
        return tuple(d for d in self.of_kind(DEPLOYMENT) if d.stage != ENTRY_STAGE)

    @property
    def entry_deployment(self) -> Live | None:
        return next((d for d in self.of_kind(DEPLOYMENT) if d.stage == ENTRY_STAGE), None)

    def pods_of(self, stage: str, revision: str | None = None) -> tuple[Live, ...]:
        """Pods of a pod group's leader (or of the entry), optionally of one revision."""
        return tuple(p for p in self.pods if p.stage == stage and revision in (None, p.revision))

    def stage_named(self, name: str) -> LiveStage | None:
        """By the object's name, not the stage's."""
        return next((s for s in self.stages if s.live.name == name), None)

    @property
    def owner_uids(self) -> frozenset[str]:
        """Uids that may control a child of this pipeline: the pipeline's, and its stages'."""
        own = {self.pipeline_live.uid} if self.pipeline_live else set()
        return frozenset(own | {s.live.uid for s in self.stages})


def owned(objects: Iterable[Live], uids: frozenset[str]) -> tuple[Live, ...]:
    """Only what one of `uids` controls; labels alone prove nothing."""
    return tuple(o for o in objects if o.controller is not None and o.controller[2] in uids)
