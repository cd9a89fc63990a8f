"""The only writer of children: executes a plan against the API server and decides nothing but ownership.

Order is the plan's. Every write is preceded by the fence, so a process that lost the Lease stops at the next one. The
sequence may be cut after any write: the next reconcile reads what is there and plans the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from omni_crds.v1alpha1.conditions import Reason
from omni_operator import logs
from omni_operator.curve import key_files
from omni_operator.errors import (
    AlreadyExists,
    Forbidden,
    KubeError,
    NotFound,
    QuotaExceeded,
    Rejected,
)
from omni_operator.kinds import SECRET, STAGE
from omni_operator.kube import KubeApi
from omni_operator.names import MANAGER, PIPELINE_LABEL
from omni_operator.observed import Key, Live, Observed
from omni_operator.plan.diff import render
from omni_operator.plan.model import Failure, Note, Outcome, Plan, Write
from omni_operator.resources.child import Child, Scope
from omni_operator.resources.config import build_curve_secret

Fence = Callable[[], None]  # raises LeadershipLost

PARALLEL_CHECKS = 8


@dataclass(slots=True)
class KeyRing:
    """Which pipelines (by uid) have their CURVE Secret, as far as this process knows.

    The Secret cannot be read, only created: once per pipeline after a start, and again while pods hang in
    ContainerCreating. An idle resync never tries (T7).
    """

    known: set[str] = field(default_factory=set)

    def should_create(self, uid: str, keys_missing: bool) -> bool:
        return keys_missing or uid not in self.known


@dataclass(slots=True)
class _Run:
    """State of one execution."""

    observed: Observed
    kube: KubeApi
    fence: Fence
    owners: dict[str, Live]
    failures: list[Failure] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    changed_stages: set[str] = field(default_factory=set)
    wrote: int = 0


async def apply_plan(observed: Observed, plan: Plan, kube: KubeApi, fence: Fence, keys: KeyRing) -> Outcome:
    """Raises retryable KubeErrors and LeadershipLost; refusals come back as failures, and the other writes go on."""
    pipeline = observed.pipeline_live
    if pipeline is None or plan.resolved is None:
        return Outcome()
    run = _Run(observed, kube, fence, {s.live.name: s.live for s in observed.stages})
    taken = await _existing(run, plan)
    if keys.should_create(pipeline.uid, plan.keys_missing):
        await _create_keys(run, pipeline, keys)
    for write in plan.writes:
        await _apply(run, write, pipeline, taken)
    for delete in plan.deletes:
        await _delete(run, delete.live, delete.cause)
    return Outcome(
        failures=tuple(run.failures),
        waiting=tuple(run.waiting),
        wrote=run.wrote,
        notes=tuple(run.notes),
        changed_stages=frozenset(run.changed_stages),
    )


async def _existing(run: _Run, plan: Plan) -> dict[tuple[str, str], Live]:
    """Objects that already have the name of a child that we did not see among ours: somebody else's, or leftovers."""
    missing = [w.child for w in plan.writes if w.live is None and w.manager == MANAGER]
    limit = asyncio.Semaphore(PARALLEL_CHECKS)

    async def look(child: Child) -> Live | None:
        async with limit:
            try:
                return Live(child.kind, await run.kube.get(child.kind, run.observed.key.namespace, child.name))
            except NotFound:
                return None

    found = await asyncio.gather(*(look(c) for c in missing))
    return {(live.kind.plural, live.name): live for live in found if live is not None}


async def _create_keys(run: _Run, pipeline: Live, keys: KeyRing) -> None:
    scope = Scope(run.observed.key.name, run.observed.key.namespace)
    child = build_curve_secret(scope, key_files())
    run.fence()
    try:
        await run.kube.create(SECRET, run.observed.key.namespace, render(child, pipeline))
        run.wrote += 1
        if any(pod.status.get("phase") == "Running" for pod in run.observed.pods):
            run.notes.append(Note(Reason.KEYS_REPLACED, _restart_for_keys(child, run.observed.key), warning=True))
    except AlreadyExists:
        pass
    except Rejected as error:
        _refused(run, child, error)
        return
    keys.known.add(pipeline.uid)


def _restart_for_keys(secret: Child, pipeline: Key) -> str:
    """Processes read their keys once; that two of one pipeline have different ones shows only in failing handshakes."""
    return (
        f"Secret {secret.name} was gone and has new keys now; pods that run keep the old ones and cannot talk to new "
        f"pods: kubectl delete pods -n {pipeline.namespace} -l {PIPELINE_LABEL}={pipeline.name}"
    )


async def _apply(run: _Run, write: Write, pipeline: Live, taken: dict[tuple[str, str], Live]) -> None:
    child = write.child
    if write.manager != MANAGER:
        # A part of an object that another write makes: without that object there is nothing to add to.
        if child.kind is STAGE and child.name not in run.owners:
            return
        await _send(run, write, None, force=True)
        return
    owner = pipeline if child.owner_stage is None else run.owners.get(child.owner_stage)
    if owner is None:
        return  # its OmniStage was refused; that failure is noted
    other = taken.get((child.kind.plural, child.name))
    if other is not None and not _is_ours(run, other, owner, pipeline):
        _note_conflict(run, child, other, owner)
        return
    # Not seen before: without force, so that an object which appears in this moment is not taken from its owner.
    body = await _send(run, write, owner, force=write.live is not None or other is not None)
    if body is not None and child.kind is STAGE:
        run.owners[child.name] = body


def _is_ours(run: _Run, other: Live, owner: Live, pipeline: Live) -> bool:
    controller = other.controller
    return controller is not None and controller[2] in {owner.uid, pipeline.uid, *(o.uid for o in run.owners.values())}


def _note_conflict(run: _Run, child: Child, other: Live, owner: Live) -> None:
    controller = other.controller
    if other.deleting or (controller is not None and controller[:2] == (owner.kind.kind, owner.name)):
        # Controlled by an earlier object of our owner's name: the garbage collector is on its way.
        run.waiting.append(f"{child.kind.kind} {child.name}")
        return
    held = f"{controller[0]} {controller[1]}" if controller else "nobody"
    run.failures.append(
        Failure(
            child.kind.kind,
            child.name,
            Reason.NAME_CONFLICT,
            f"exists and is controlled by {held}, not by this pipeline; delete or rename it, or rename the pipeline",
        )
    )


async def _send(run: _Run, write: Write, owner: Live | None, *, force: bool) -> Live | None:
    """The object as the server has it now, or None after a refusal."""
    child = write.child
    run.fence()
    try:
        body = await run.kube.apply(
            child.kind,
            run.observed.key.namespace,
            child.name,
            render(child, owner),
            manager=write.manager,
            force=force,
        )
    except Rejected as error:
        if write.live is not None and "immutable" in error.message:
            await _recreate(run, write.live, error)
        else:
            _refused(run, child, error)
        return None
    run.wrote += 1
    if child.kind is STAGE:
        run.changed_stages.add(child.name)
    logs.info("child.applied", pipeline=str(run.observed.key), kind=child.kind.kind, name=child.name, cause=write.cause)
    return Live(child.kind, body)


async def _recreate(run: _Run, live: Live, error: KubeError) -> None:
    """A field that cannot be changed in place, such as a selector of an earlier version (T2): once, with an Event."""
    message = f"{live.kind.kind} {live.name} is made anew: {error.message}"
    run.notes.append(Note(Reason.DELETED, message, warning=True))
    await _delete(run, live, "a field is immutable")
    run.waiting.append(f"{live.kind.kind} {live.name}")


async def _delete(run: _Run, live: Live, cause: str) -> None:
    run.fence()
    try:
        await run.kube.delete(
            live.kind, run.observed.key.namespace, live.name, uid=live.uid, resource_version=live.resource_version
        )
    except NotFound:
        return
    except Rejected as error:
        run.failures.append(Failure(live.kind.kind, live.name, Reason.CHILD_REJECTED, error.message))
        return
    run.wrote += 1
    logs.info("child.deleted", pipeline=str(run.observed.key), kind=live.kind.kind, name=live.name, cause=cause)


def _refused(run: _Run, child: Child, error: KubeError) -> None:
    if "because it is being terminated" in error.message:
        run.waiting.append(f"namespace {run.observed.key.namespace}")
        return
    reason = Reason.QUOTA_EXCEEDED if isinstance(error, QuotaExceeded) else Reason.CHILD_REJECTED
    logs.warning(
        "child.refused",
        pipeline=str(run.observed.key),
        kind=child.kind.kind,
        name=child.name,
        status=error.status,
        message=error.message,
        rbac=isinstance(error, Forbidden),
    )
    run.failures.append(Failure(child.kind.kind, child.name, reason, error.message))
