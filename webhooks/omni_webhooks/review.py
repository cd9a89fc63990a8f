"""AdmissionReview v1 on the wire: what a call asks, and how an answer is said. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass

from omni_crds.v1alpha1.conditions import truncate
from omni_operator.kinds import STAGE, JsonObject
from omni_runtime.errors import FieldError
from omni_webhooks.cache import Key
from omni_webhooks.decision import Decision, Review
from omni_webhooks.defaults import Patch
from omni_webhooks.ledger import StageCount
from omni_webhooks.rules.rule import Operation

API_VERSION = "admission.k8s.io/v1"
# The API server cuts the sum of all warnings at 4096 bytes, and clients may cut each one.
MAX_WARNING, MAX_WARNINGS, MAX_MESSAGE = 400, 9, 8192


class BadReview(ValueError):
    """Not an AdmissionReview that the API server would send."""


@dataclass(frozen=True, slots=True)
class Call:
    """One AdmissionReview request. `object` is empty for a DELETE, `old` for a CREATE."""

    uid: str
    kind: str
    subresource: str
    operation: Operation
    key: Key
    object: JsonObject
    old: JsonObject
    dry_run: bool

    def review(self) -> Review:
        """Of a DELETE, what is deleted is what there is to look at."""
        deleting = self.operation is Operation.DELETE
        new, old = (self.old, None) if deleting else (self.object, self.old or None)
        return Review(self.kind, self.operation, self._named(new), old, self.dry_run)

    def _named(self, body: JsonObject) -> JsonObject:
        """generateName leaves the name open until after admission."""
        metadata = {"namespace": self.key[0], "name": self.key[1], **(body.get("metadata") or {})}
        return {**body, "metadata": metadata}


def parse_call(raw: bytes) -> Call:
    """Raises BadReview."""
    try:
        request = json.loads(raw)["request"]
        metadata = (request.get("object") or request.get("oldObject") or {}).get("metadata") or {}
        return Call(
            uid=str(request["uid"]),
            kind=str(request["kind"]["kind"]),
            subresource=str(request.get("subResource") or ""),
            operation=Operation(request["operation"]),
            key=(
                str(request.get("namespace") or ""),
                str(request.get("name") or metadata.get("name") or metadata.get("generateName") or ""),
            ),
            object=request.get("object") or {},
            old=request.get("oldObject") or {},
            dry_run=bool(request.get("dryRun")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadReview(f"not an AdmissionReview request: {error!r}") from error


def scale_review(call: Call, stage: StageCount) -> Review:
    """`/scale` of an OmniStage carries a Scale; as a change of the stage itself, every rule about counts applies."""

    def as_stage(scale: JsonObject) -> JsonObject:
        spec = {
            "pipelineRef": {"name": stage.pipeline},
            "stageName": stage.stage,
            "replicas": (scale.get("spec") or {}).get("replicas", 0),
            "minReplicas": stage.minimum,
            "maxReplicas": stage.maximum,
            "colocatedWith": stage.colocated_with,
        }
        metadata = {"namespace": call.key[0], "name": call.key[1]}
        return {"metadata": metadata, "spec": {name: value for name, value in spec.items() if value is not None}}

    return Review(STAGE.kind, call.operation, as_stage(call.object), as_stage(call.old), call.dry_run)


def verdict_answer(call: Call, decision: Decision) -> JsonObject:
    """Refusals carry every violation as a cause with its field, as the API server's own validation does."""
    response: JsonObject = {"uid": call.uid, "allowed": decision.allowed}
    if decision.errors:
        response["status"] = {
            "status": "Failure",
            "code": 422,
            "reason": "Invalid",
            "message": truncate("; ".join(f"{e.path}: {_said(e)}" for _, e in decision.errors), MAX_MESSAGE),
            "details": {
                "kind": call.kind,
                "name": call.key[1],
                "causes": [
                    {
                        "reason": "FieldValueInvalid",
                        "field": error.path,
                        "message": truncate(f"{_said(error)} [{rule}]", MAX_MESSAGE),
                    }
                    for rule, error in decision.errors
                ],
            },
        }
    warnings = _bounded([text for _, text in decision.warnings])
    if warnings:
        response["warnings"] = warnings
    return _envelope(response)


def patch_answer(call: Call, patch: Patch) -> JsonObject:
    response: JsonObject = {"uid": call.uid, "allowed": True}
    if patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(patch).encode()).decode()
    return _envelope(response)


def unchecked_answer(call: Call, why: str) -> JsonObject:
    return _envelope({"uid": call.uid, "allowed": True, "warnings": [truncate(f"not checked: {why}", MAX_WARNING)]})


def _said(error: FieldError) -> str:
    value = f"{error.value!r}: " if error.value else ""
    return f"{value}{error.problem}; {error.fix}"


def _bounded(texts: Sequence[str]) -> list[str]:
    shown = [truncate(text, MAX_WARNING) for text in texts[:MAX_WARNINGS]]
    if len(texts) > MAX_WARNINGS:
        shown.append(f"and {len(texts) - MAX_WARNINGS} more warnings")
    return shown


def _envelope(response: JsonObject) -> JsonObject:
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}
