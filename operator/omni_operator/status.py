"""The only writer of status: one merge patch per object, only if it changes something, bound to the version that was read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from omni_crds.v1alpha1.pipeline import PipelineStatus
from omni_crds.v1alpha1.stage import OmniStageStatus
from omni_operator.errors import NotFound
from omni_operator.kinds import PIPELINE, STAGE
from omni_operator.kube import KubeApi
from omni_operator.observed import Live, Observed
from omni_operator.plan.model import Note, Outcome, Plan
from omni_operator.plan.stage_status import plan_stage_statuses
from omni_operator.plan.status import live_status_differs, plan_status

PIPELINE_FIELDS = tuple(f.alias or name for name, f in PipelineStatus.model_fields.items())
STAGE_FIELDS = tuple(f.alias or name for name, f in OmniStageStatus.model_fields.items())


async def announce(observed: Observed, plan: Plan, kube: KubeApi, fence: Callable[[], None], now: datetime) -> Observed:
    """Before the first child of a new pipeline is made: an object without a status looks finished to kstatus.

    Returns the observation with the version that this write made.
    """
    live = observed.pipeline_live
    if live is None or live.status or plan.violations:
        return observed  # with violations nothing is made, and the one status write follows at once
    planned = plan_status(observed, plan, Outcome(), now)
    if planned is None:
        return observed
    fence()
    try:
        body = await kube.patch_status(
            PIPELINE,
            observed.key.namespace,
            live.name,
            resource_version=live.resource_version,
            status=planned.status,
        )
    except NotFound:
        return observed
    return replace(observed, pipeline_live=Live(PIPELINE, body))


async def write_status(
    observed: Observed, plan: Plan, outcome: Outcome, kube: KubeApi, fence: Callable[[], None], now: datetime
) -> tuple[Note, ...]:
    """Write what changed; returns the Events that the change is worth. Raises KubeError; a Conflict means: read again."""
    namespace = observed.key.namespace
    planned = plan_status(observed, plan, outcome, now)
    notes: tuple[Note, ...] = ()
    if planned is not None and observed.pipeline_live is not None:
        live = observed.pipeline_live
        patch = live_status_differs(live, planned.status, PIPELINE_FIELDS)
        if patch is not None:
            fence()
            try:
                await kube.patch_status(
                    PIPELINE, namespace, live.name, resource_version=live.resource_version, status=patch
                )
            except NotFound:
                return ()
            notes = planned.notes
    groups = planned.groups if planned is not None else ()
    for stage, status in plan_stage_statuses(observed, plan, groups, now):
        if stage.live.name in outcome.changed_stages:
            continue  # its new version comes with the next event; writing to the old one is a certain Conflict
        patch = live_status_differs(stage.live, status, STAGE_FIELDS)
        if patch is None:
            continue
        fence()
        try:
            await kube.patch_status(
                STAGE, namespace, stage.live.name, resource_version=stage.live.resource_version, status=patch
            )
        except NotFound:
            continue
    return notes
