"""Who owns a replica count. Pure.

`OmniStage.spec.replicas` belongs to whoever scales: kubectl, an HPA, KEDA, a person. The operator writes it in two cases
only: to seed a stage that has none (GET /scale is an error without it), and when the pipeline's own request changed
since it was applied last, which an annotation remembers (T12, T13).

Under server-side apply a manager that stops applying a field that it alone owns removes it. Hence a field manager of
its own, which applies nothing but the count and never applies without it.
"""

from __future__ import annotations

from omni_operator.names import REQUESTED_ANNOTATION
from omni_operator.observed import LiveStage
from omni_runtime.deploy.plan import ReplicaBounds

AUTO = "auto"  # the spec names no fixed count: seeded once, then left alone


def request_of(bounds: ReplicaBounds) -> str:
    return AUTO if bounds.requested is None else str(bounds.requested)


def plan_replica_request(observed: LiveStage | None, bounds: ReplicaBounds | None) -> tuple[int, str] | None:
    """(count, request) to apply to the OmniStage, or None: the count is not ours to touch.

    bounds: None while the spec is invalid and the last good plan runs; that plan knows no counts.
    """
    current = current_replicas(observed)
    if current is None:
        return (bounds.initial, request_of(bounds)) if bounds is not None else (1, AUTO)
    if bounds is None or observed is None:
        return None
    if observed.live.annotations.get(REQUESTED_ANNOTATION) == request_of(bounds):
        return None
    # Back to "whoever scales" keeps the count that runs; a new fixed request is applied.
    return (current if bounds.requested is None else bounds.requested), request_of(bounds)


def current_replicas(observed: LiveStage | None) -> int | None:
    if observed is None or observed.live.deleting:
        return None
    value = observed.live.spec.get("replicas")
    return int(value) if isinstance(value, int) else None


def outside_bounds(count: int, bounds: ReplicaBounds | None) -> str | None:
    """What is wrong with a count against the pipeline's scaling range. Said, never corrected: the scaler owns the count."""
    if bounds is None or bounds.requested is not None:
        return None
    if count < bounds.minimum:
        return f"{count} replicas are fewer than scaling.minReplicas {bounds.minimum}"
    if bounds.maximum is not None and count > bounds.maximum:
        return f"{count} replicas are more than scaling.maxReplicas {bounds.maximum}"
    return None
