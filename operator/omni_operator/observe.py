"""Live reads -> Observed. Any read that fails fails the whole observation: no decision is made on half a picture (T60)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from pydantic import ValidationError

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_crds.v1alpha1.stage import OmniStage
from omni_crds.v1alpha1.tenant import OmniTenant
from omni_operator.errors import NotFound
from omni_operator.kinds import CHILD_KINDS, PIPELINE, POD, PROFILE, STAGE, JsonObject
from omni_operator.kube import KubeApi
from omni_operator.names import PIPELINE_ANNOTATION, PIPELINE_LABEL, pipeline_label
from omni_operator.observed import Key, Live, LiveStage, Observed, owned


class TtfpSource(Protocol):
    async def ttfp(self, key: Key, pods: tuple[Live, ...]) -> int | None: ...


def parse_pipeline(body: JsonObject) -> tuple[OmniPipeline | None, tuple[str, ...]]:
    """The typed pipeline, or every reason why it is not one. A stored object may be older than our schema."""
    try:
        return OmniPipeline.model_validate({k: v for k, v in body.items() if k != "status"}), ()
    except ValidationError as error:
        return None, tuple(f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors())


def parse_stage(body: JsonObject) -> OmniStage | None:
    try:
        return OmniStage.model_validate({k: v for k, v in body.items() if k != "status"})
    except ValidationError:
        return None


def parse_tenant(body: JsonObject) -> OmniTenant | None:
    try:
        return OmniTenant.model_validate({k: v for k, v in body.items() if k != "status"})
    except ValidationError:
        return None


def parse_profiles(bodies: Iterable[JsonObject]) -> dict[str, OmniRuntimeProfile]:
    """By name. One that does not parse is left out: resolving then says that the profile is not there."""
    profiles = {}
    for body in bodies:
        try:
            profile = OmniRuntimeProfile.model_validate(body)
        except ValidationError:
            continue
        profiles[profile.metadata.name] = profile
    return profiles


async def observe(key: Key, kube: KubeApi, ttfp: TtfpSource | None = None) -> Observed:
    """Read everything about one pipeline. Raises KubeError."""
    label = pipeline_label(key.name)
    selector = f"{PIPELINE_LABEL}={label}"
    try:
        async with asyncio.TaskGroup() as reads:
            pipeline_task = reads.create_task(_get_or_none(kube, key))
            profiles_task = reads.create_task(kube.list(PROFILE, None))
            # A user's own OmniStage has no label of ours; it gets an answer too.
            loose_task = reads.create_task(kube.list(STAGE, key.namespace, f"!{PIPELINE_LABEL}"))
            pods_task = reads.create_task(kube.list(POD, key.namespace, selector))
            child_tasks = [(kind, reads.create_task(kube.list(kind, key.namespace, selector))) for kind in CHILD_KINDS]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed  # one failed read is enough, and callers expect a KubeError
    pipeline_read = pipeline_task.result()
    labelled = [Live(kind, body) for kind, task in child_tasks for body in task.result().items]
    pods = tuple(Live(POD, body) for body in pods_task.result().items)
    live = Live(PIPELINE, pipeline_read) if pipeline_read is not None else None
    pipeline, problems = parse_pipeline(pipeline_read) if pipeline_read is not None else (None, ())
    uid = frozenset({live.uid}) if live else frozenset()
    all_stages = [s for s in labelled if s.kind is STAGE]
    own_stages = owned(all_stages, uid)
    strangers = [s for s in all_stages if s not in own_stages]
    strangers += [s for s in (Live(STAGE, body) for body in loose_task.result().items) if _refers_to(s, key.name)]
    uids = uid | {s.uid for s in own_stages}
    mine = owned(labelled, uids)
    # Pods are controlled by ReplicaSets, which we do not read: their label and the Deployment's selector are the link.
    return Observed(
        key=key,
        pipeline_live=live,
        pipeline=pipeline,
        pipeline_error=problems,
        profiles=parse_profiles(profiles_task.result().items),
        children=mine,
        stages=tuple(LiveStage(s, parse_stage(s.body)) for s in own_stages),
        foreign_stages=tuple(LiveStage(s, parse_stage(s.body)) for s in strangers if _refers_to(s, key.name)),
        pods=pods,
        ttfp_milliseconds_p95=await ttfp.ttfp(key, pods) if ttfp is not None and live is not None else None,
    )


async def _get_or_none(kube: KubeApi, key: Key) -> JsonObject | None:
    try:
        return await kube.get(PIPELINE, key.namespace, key.name)
    except NotFound:
        return None


def _refers_to(stage: Live, pipeline: str) -> bool:
    ref = stage.spec.get("pipelineRef") or {}
    return bool(ref.get("name") == pipeline)


def key_of(body: JsonObject, kind_is_pipeline: bool) -> Key | None:
    """The pipeline that an object of any watched kind belongs to, by its name, annotation, pipelineRef or label."""
    meta = body.get("metadata") or {}
    namespace = meta.get("namespace")
    if not namespace:
        return None
    if kind_is_pipeline:
        return Key(namespace, meta["name"])
    name = (
        (meta.get("annotations") or {}).get(PIPELINE_ANNOTATION)
        or ((body.get("spec") or {}).get("pipelineRef") or {}).get("name")
        or (meta.get("labels") or {}).get(PIPELINE_LABEL)
    )
    return Key(namespace, str(name)) if name else None
