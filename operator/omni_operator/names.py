"""Names, labels and annotations of children. Pure; the same pipeline always gives the same names."""

from __future__ import annotations

import hashlib
import re

from omni_crds.v1alpha1.base import GROUP

PIPELINE_LABEL = f"{GROUP}/pipeline"
STAGE_LABEL = f"{GROUP}/stage"
REVISION_LABEL = f"{GROUP}/revision"
TOPOLOGY_LABEL = f"{GROUP}/topology"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "omni-operator"

# Full name of the pipeline; the label of the same key is hashed when the name is longer than a label value (T4).
PIPELINE_ANNOTATION = PIPELINE_LABEL
# Hash of the body that was applied last: a field that leaves the body is a change although the live object
# still contains everything that we want (T6).
APPLIED_ANNOTATION = f"{GROUP}/applied-hash"
# The replica request of the pipeline that was applied last (T12).
REQUESTED_ANNOTATION = f"{GROUP}/requested-replicas"
# When and how far an old revision gave way to a new one that could not be scheduled beside it (T38).
YIELD_ANNOTATION = f"{GROUP}/surge-yield"
# Kubernetes' own: of a ReplicaSet's ready pods those with the lowest cost leave first. Without it: 0.
DELETION_COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
# On a runtime profile: the autoscaler asks this Prometheus instead of the pods.
PROMETHEUS_ANNOTATION = f"{GROUP}/prometheus-url"

ENTRY_STAGE = "entry"  # the stage label of entry pods

# One field manager per concern, so that a concern that stops applying a field never removes another's.
MANAGER = "omni-operator"
REPLICAS_MANAGER = "omni-operator-replicas"
ROLLOUT_MANAGER = "omni-operator-rollout"
AUTOSCALER_MANAGER = "omni-operator-autoscaler"

MAX_NAME = 63  # DNS label: Services, and every label value made of a name


def child_name(pipeline: str, *parts: str) -> str:
    """A DNS label for a child of `pipeline`.

    `pipeline-part-part` where that is a valid DNS-1035 label; otherwise cleaned (dots become dashes, a leading digit
    gets a letter before it), cut, and ended with a hash of the exact parts, so that `a.b` and `a-b` never meet (T4, T5).
    """
    raw = "-".join((pipeline, *parts))
    if len(raw) <= MAX_NAME and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", raw):
        return raw
    digest = hashlib.sha256("\0".join((pipeline, *parts)).encode()).hexdigest()[:8]
    clean = re.sub(r"[^a-z0-9]+", "-", raw.lower()).strip("-")
    if not clean[:1].isalpha():
        clean = f"p-{clean}"
    return f"{clean[: MAX_NAME - 9].rstrip('-')}-{digest}"


def pipeline_label(pipeline: str) -> str:
    """The value of the pipeline label: the name itself where it fits (dots are fine in a value), else hashed."""
    return pipeline if len(pipeline) <= MAX_NAME else child_name(pipeline)


def api_service_name(pipeline: str) -> str:
    return child_name(pipeline)


def entry_name(pipeline: str) -> str:
    return child_name(pipeline, "entry")


def entry_control_name(pipeline: str) -> str:
    return child_name(pipeline, "entry", "control")


def stage_name(pipeline: str, stage: str) -> str:
    """OmniStage, headless Service, PodDisruptionBudget and NetworkPolicy of a stage."""
    return child_name(pipeline, stage)


def stage_deployment_name(pipeline: str, leader: str, revision: str) -> str:
    return child_name(pipeline, leader, revision)


def plan_name(pipeline: str, revision: str) -> str:
    return child_name(pipeline, "plan", revision)


def curve_name(pipeline: str) -> str:
    return child_name(pipeline, "curve")


def service_account_name(pipeline: str) -> str:
    return child_name(pipeline)


def pipeline_labels(pipeline: str) -> dict[str, str]:
    """Labels of every child."""
    return {PIPELINE_LABEL: pipeline_label(pipeline), MANAGED_BY_LABEL: MANAGED_BY}


def stage_labels(pipeline: str, stage: str) -> dict[str, str]:
    return {**pipeline_labels(pipeline), STAGE_LABEL: stage}


def stage_selector(pipeline: str, stage: str) -> dict[str, str]:
    """Selector of a stage's pods, of every revision. Immutable labels only: they never depend on the spec (T1)."""
    return {PIPELINE_LABEL: pipeline_label(pipeline), STAGE_LABEL: stage}


def selector_string(selector: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(selector.items()))
