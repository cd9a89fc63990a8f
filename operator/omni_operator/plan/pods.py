"""What a pod's status says: ready, going, or stuck and why. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from omni_crds.v1alpha1.conditions import Reason
from omni_operator.observed import Live
from omni_runtime.deploy.quantity import parse_quantity

# A container that ended badly this often is in a crash loop even in the moments when it runs.
CRASHES_THAT_LOOP = 2
# A pod that was scheduled this long ago and still creates its containers is waiting for something.
CREATING_TOO_LONG_SECONDS = 10
MAX_DETAIL = 400


@dataclass(frozen=True, slots=True)
class PodProblem:
    """Why a pod is not ready. No pod name and no counter in the message: it must not change from second to second."""

    reason: Reason
    message: str


def is_finished(pod: Live) -> bool:
    """Evicted and failed pods hold nothing and answer nobody (T67)."""
    return pod.status.get("phase") in ("Succeeded", "Failed")


def is_active(pod: Live) -> bool:
    return not pod.deleting and not is_finished(pod)


def is_ready(pod: Live) -> bool:
    return is_active(pod) and _condition(pod, "Ready").get("status") == "True"


def is_scheduled(pod: Live) -> bool:
    return bool(pod.spec.get("nodeName"))


def unschedulable(pod: Live) -> tuple[str, datetime | None] | None:
    """(the scheduler's message, since when), while the scheduler finds no place for the pod."""
    condition = _condition(pod, "PodScheduled")
    if is_active(pod) and condition.get("status") == "False" and condition.get("reason") == "Unschedulable":
        return str(condition.get("message") or "no node fits"), parse_time(
            str(condition.get("lastTransitionTime") or "")
        )
    return None


def waits_for_keys(pod: Live, now: datetime) -> bool:
    """Scheduled, but its containers are still being created: a volume, such as the Secret, may be missing."""
    if not is_active(pod) or not is_scheduled(pod):
        return False
    since = parse_time(str(_condition(pod, "PodScheduled").get("lastTransitionTime") or ""))
    if since is None or (now - since).total_seconds() < CREATING_TOO_LONG_SECONDS:
        return False
    statuses = list(_container_statuses(pod))
    return bool(statuses) and all(_waiting(s) in ("ContainerCreating", "PodInitializing") for s in statuses)


def problem_of(pod: Live) -> PodProblem | None:
    """The first thing that stops this pod, or None where it is ready, going, or simply starting."""
    if not is_active(pod) or is_ready(pod):
        return None
    blocked = unschedulable(pod)
    if blocked is not None:
        # What preemption would do is the scheduler's concern; what the pod asks for is what a person can change.
        message = blocked[0].partition(" preemption: ")[0].rstrip(" .")
        return PodProblem(Reason.UNSCHEDULABLE, _short(f"{message}{_needs(pod)}"))
    for status in _container_statuses(pod):
        waiting = _waiting(status)
        name = status.get("name")
        if waiting in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
            # ErrImagePull and ImagePullBackOff alternate, with different messages; the image is what matters.
            return PodProblem(Reason.IMAGE_PULL_FAILED, f"container {name}: cannot pull image {status.get('image')}")
        if waiting in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
            detail = (status.get("state") or {}).get("waiting", {}).get("message", "")
            return PodProblem(Reason.CHILD_REJECTED, _short(f"container {name}: {waiting}: {detail}"))
    for status in _container_statuses(pod):
        looping = _waiting(status) == "CrashLoopBackOff" or int(status.get("restartCount") or 0) >= CRASHES_THAT_LOOP
        last = (status.get("lastState") or {}).get("terminated") or (status.get("state") or {}).get("terminated")
        if looping and not status.get("ready") and last and last.get("exitCode") != 0:
            detail = str(last.get("message") or "").strip()
            ended = f"container {status.get('name')}: {last.get('reason') or 'Error'}, exit code {last.get('exitCode')}"
            return PodProblem(Reason.CRASH_LOOPING, _short(f"{ended}: {detail}" if detail else ended))
    return None


def _needs(pod: Live) -> str:
    """The devices and node labels that a pod asks for, as ` (needs ...)`; empty where it asks for neither."""
    devices: dict[str, int] = {}
    for container in pod.spec.get("containers") or []:
        for name, amount in ((container.get("resources") or {}).get("limits") or {}).items():
            if "/" in name:
                devices[name] = devices.get(name, 0) + int(parse_quantity(str(amount)))
    parts = [f"{count} x {name}" for name, count in devices.items()]
    labels = [f"{k}={v}" for k, v in (pod.spec.get("nodeSelector") or {}).items()]
    if labels:
        parts.append(f"a node labelled {', '.join(labels)}")
    return f" (needs {' on '.join(parts)})" if parts else ""


_GRAVITY = (Reason.IMAGE_PULL_FAILED, Reason.CRASH_LOOPING, Reason.CHILD_REJECTED, Reason.UNSCHEDULABLE)


def worst_problem(pods: Iterable[Live]) -> PodProblem | None:
    """The gravest problem of several pods; equal ones in the order of their text, so that the answer is stable."""
    found = sorted(
        (p for p in map(problem_of, pods) if p is not None), key=lambda p: (_GRAVITY.index(p.reason), p.message)
    )
    return found[0] if found else None


def parse_time(text: str) -> datetime | None:
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        return None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def _condition(pod: Live, kind: str) -> Mapping[str, Any]:
    return next((c for c in pod.status.get("conditions") or [] if c.get("type") == kind), {})


def _container_statuses(pod: Live) -> Iterator[Mapping[str, Any]]:
    yield from pod.status.get("initContainerStatuses") or []
    yield from pod.status.get("containerStatuses") or []


def _waiting(status: Mapping[str, Any]) -> str | None:
    waiting = (status.get("state") or {}).get("waiting")
    return str(waiting.get("reason")) if waiting else None


def _short(text: str) -> str:
    return text if len(text) <= MAX_DETAIL else text[: MAX_DETAIL - 1] + "…"
