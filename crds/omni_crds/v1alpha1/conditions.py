"""Condition types, reasons and the pure functions that change a condition list.

Reasons are constants beside the type (kueue's convention); nothing else in the code spells one out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from omni_crds.v1alpha1.base import Generation, Message, OmniModel

CAMEL_CASE = r"^[A-Z][A-Za-z0-9]*$"
TIMESTAMP = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z$"


class ConditionType(StrEnum):
    READY = "Ready"  # every stage that the outputs need has its desired replicas on the newest revision
    SERVING = "Serving"  # requests are answered now, perhaps by an older revision or fewer replicas (T42)
    UPDATED = "Updated"  # all replicas run the newest revision (T41)
    RECONCILING = "Reconciling"  # abnormal-true: present only while true (kstatus)
    STALLED = "Stalled"  # abnormal-true: needs a human
    SCALING_READY = "ScalingReady"
    PLACEMENT_FEASIBLE = "PlacementFeasible"
    CONNECTORS_READY = "ConnectorsReady"


class Reason(StrEnum):
    """Reasons of conditions and Events. PascalCase, stable: dashboards and alerts match on them."""

    ALL_STAGES_READY = "AllStagesReady"
    STAGES_NOT_READY = "StagesNotReady"
    REPLICAS_READY = "ReplicasReady"
    REPLICAS_NOT_READY = "ReplicasNotReady"
    STAGE_DOWN = "StageDown"
    ENTRY_NOT_READY = "EntryNotReady"
    SERVING = "Serving"
    ROLLING_OUT = "RollingOut"
    UP_TO_DATE = "UpToDate"
    PROGRESSING = "Progressing"
    SCALED_TO_ZERO = "ScaledToZero"
    INVALID_SPEC = "InvalidSpec"
    PROFILE_NOT_FOUND = "ProfileNotFound"
    NAME_CONFLICT = "NameConflict"
    NOT_OWNED = "NotOwned"
    CHILD_REJECTED = "ChildRejected"
    QUOTA_EXCEEDED = "QuotaExceeded"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CRASH_LOOPING = "CrashLooping"
    CRD_OUTDATED = "CRDOutdated"
    MANUAL = "Manual"
    AUTOSCALING = "Autoscaling"
    METRICS_STALE = "MetricsStale"
    QUEUE_STUCK = "QueueStuck"
    SECOND_OWNER = "SecondOwner"
    SCALING_LIMITED = "ScalingLimited"
    OUT_OF_RANGE = "OutOfRange"
    FOLLOWS_LEADER = "FollowsLeader"
    REACHABLE = "Reachable"
    DEGRADED = "Degraded"
    BACKPRESSURED = "Backpressured"
    FEASIBLE = "Feasible"
    UNKNOWN = "Unknown"
    CREATED = "Created"
    DELETED = "Deleted"
    SCALED = "Scaled"
    SURGE_BLOCKED = "SurgeBlocked"
    RECOVERED = "Recovered"
    KEYS_REPLACED = "KeysReplaced"


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(OmniModel):
    """One aspect of an object's state."""

    type: Annotated[str, Field(min_length=1, max_length=63, pattern=CAMEL_CASE)]
    """Name of the aspect, such as Ready."""
    status: ConditionStatus
    """Whether it holds: True, False or Unknown."""
    reason: Annotated[str, Field(min_length=1, max_length=128, pattern=CAMEL_CASE)]
    """Why, in one CamelCase word that alerts can match."""
    message: Message = ""
    """Why, for a person."""
    last_transition_time: Annotated[
        str,
        Field(
            min_length=20,
            max_length=27,
            pattern=TIMESTAMP,
        ),
    ]
    """When status last changed, in UTC."""
    observed_generation: Generation = 0
    """The metadata.generation that this condition describes."""


MAX_MESSAGE = 1024


_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


def truncate(message: str, limit: int = MAX_MESSAGE) -> str:
    """One line, cut to what the schema allows with a visible mark.

    Messages quote container logs: escape sequences from there must not reach the terminal of whoever runs kubectl.
    """
    message = _CONTROLS.sub(" ", message)
    return message if len(message) <= limit else message[: limit - 1] + "…"


def merge_conditions(old: Iterable[Condition], new: Iterable[Condition]) -> tuple[Condition, ...]:
    """The complete new list, keeping lastTransitionTime where the status did not change.

    Conditions that are absent from `new` are dropped: Reconciling and Stalled exist only while true (kstatus).
    """
    before = {c.type: c for c in old}
    merged = []
    for condition in new:
        previous = before.get(condition.type)
        if previous is not None and previous.status == condition.status:
            condition = condition.model_copy(update={"last_transition_time": previous.last_transition_time})
        merged.append(condition)
    return tuple(merged)
