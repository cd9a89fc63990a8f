"""What can go wrong between the operator and the API server. An unknown error is never "gone" (T60)."""

from __future__ import annotations

from omni_operator.kinds import JsonObject


class OperatorError(Exception):
    """Root of the tree."""


class LeadershipLost(OperatorError):
    """The Lease is not ours any more (or may not be): nothing may be written."""


class KubeError(OperatorError):
    """An answer of the API server that is not a success, or no answer at all."""

    retryable = True

    def __init__(
        self, message: str, status: int | None = None, reason: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.reason = reason
        self.retry_after = retry_after


class Transient(KubeError):
    """Timeout, refused connection, 5xx, 429, or anything that we do not understand: try again, conclude nothing."""


class NotFound(KubeError):
    """The API server itself says that this very object does not exist."""


class Conflict(KubeError):
    """Somebody else wrote first: read again."""


class AlreadyExists(Conflict):
    """A create met an object of that name."""


class Rejected(KubeError):
    """The server understood and refuses (422, 400, or 403 by admission or quota): the same write will fail again."""

    retryable = False


class QuotaExceeded(Rejected):
    """403 of the ResourceQuota admission plugin (T65)."""


class Forbidden(Rejected):
    """403 of the authorizer: our RBAC lacks a rule, or was taken away."""


class Unauthorized(KubeError):
    """401: the credentials must be read again."""


class Expired(KubeError):
    """410: the list's continue token or watch version is too old."""


def classify(status: int, body: JsonObject | None, retry_after: float | None = None) -> KubeError:
    """The error of an answer.

    Only a Status object that names the object (`details.name`) makes a 404 a NotFound: a proxy's 404, or that of a
    kind whose CRD is missing, says nothing about the object (T60).
    """
    reason = str(body.get("reason") or "") if body else ""
    message = str((body or {}).get("message") or f"HTTP {status} without a Status object")
    details = (body or {}).get("details") or {}
    is_status = bool(body) and (body or {}).get("kind") == "Status"

    def made(cls: type[KubeError]) -> KubeError:
        return cls(message, status, reason, retry_after)

    if status == 401:
        return made(Unauthorized)
    if not is_status:
        return made(Transient)
    if status == 404 and reason == "NotFound" and isinstance(details, dict) and details.get("name"):
        return made(NotFound)
    if status == 409:
        return made(AlreadyExists if reason == "AlreadyExists" else Conflict)
    if status == 410:
        return made(Expired)
    if status == 403:
        if "exceeded quota" in message:
            return made(QuotaExceeded)
        # The authorizer's message names the user; admission plugins and webhooks refuse the object itself.
        return made(Forbidden if " cannot " in message and "in API group" in message else Rejected)
    if status in (400, 405, 413, 415, 422):
        return made(Rejected)
    return made(Transient)
