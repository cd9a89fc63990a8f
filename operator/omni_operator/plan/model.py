"""What a reconcile is going to do, as values that can be printed and compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from omni_crds.v1alpha1.conditions import Reason
from omni_operator.observed import Live
from omni_operator.resources.child import Child
from omni_runtime.deploy.plan import ResolvedPlan


@dataclass(frozen=True, slots=True)
class Write:
    """One server-side apply. `manager` is the concern that owns the fields of the body."""

    child: Child
    manager: str
    cause: str
    live: Live | None  # None: not seen among our children, so it is probably to be created


@dataclass(frozen=True, slots=True)
class Delete:
    live: Live
    cause: str


@dataclass(frozen=True, slots=True)
class Note:
    """A Kubernetes Event to emit, with a fixed reason."""

    reason: Reason
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Rollout:
    """Which revisions run, derived anew from what is seen each time."""

    newest: str
    serving: str | None  # the revision that answers now, if any
    kept: tuple[str, ...] = ()  # newest first; at most two (T39)
    groups_to_run: frozenset[str] = frozenset()  # leaders whose Deployment of the newest revision should exist now
    obsolete: tuple[Live, ...] = ()  # stage Deployments to delete
    shrink: tuple[tuple[Live, int, str], ...] = ()  # (old Deployment, replicas, yield note): gives way (T38)
    blocked: Mapping[str, str] = field(default_factory=dict)  # leader -> why its new pods cannot run beside the old
    requeue_after: float | None = None


class OutlookKind(StrEnum):
    NEEDS_NODES = "NeedsNodes"  # an autoscaler has to bring some
    INFEASIBLE = "Infeasible"  # no node, quota or device is there for all of it


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the placement check says of pods that have no node. hold: make none of them."""

    kind: OutlookKind
    reason: Reason
    message: str
    hold: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    resolved: ResolvedPlan | None  # what should run: of the spec, or the last good one while the spec is invalid
    violations: tuple[str, ...] = ()  # of the spec; children of the last good revision stay (recovery by itself)
    wanted: Mapping[str, int] = field(default_factory=dict)  # leader -> replicas
    rollout: Rollout | None = None
    writes: tuple[Write, ...] = ()
    deletes: tuple[Delete, ...] = ()
    notes: tuple[Note, ...] = ()
    keys_missing: bool = False  # pods wait for a Secret that is not there
    outlook: Outlook | None = None  # only while some pods have no node
    requeue_after: float | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """One write that the API server refused, or that we refused ourselves because the object is not ours."""

    kind: str
    name: str
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a plan's writes. Failures that pass by themselves are not here: they fail the reconcile."""

    failures: tuple[Failure, ...] = ()
    waiting: tuple[str, ...] = ()  # children that are being deleted by somebody and will be made again
    wrote: int = 0
    notes: tuple[Note, ...] = ()
    changed_stages: frozenset[str] = frozenset()  # OmniStages written now: what was read of them is out of date
    interrupted: str | None = None  # a failure that passes by itself cut the writes short
