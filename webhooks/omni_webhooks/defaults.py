"""Defaults that admission writes into objects. Pure: the object and the context in, a JSON patch out.

Few, on purpose: whatever stands in an object is shown as a difference by Git tools and is taken for the user's word by the
next version. A default is written only where leaving it open would let its meaning change by itself. A replica count is
never written, anywhere (T13). Applying the defaults twice changes nothing, and they never make an object that the
validating rules or the CRD refuse because of them (T52).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omni_operator.kinds import PIPELINE, PROFILE, TENANT, JsonObject
from omni_runtime.deploy.resolve import DEFAULT_PROFILE
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Operation

Patch = list[JsonObject]


@dataclass(frozen=True, slots=True)
class _Write:
    namespace: str
    operation: Operation
    spec: JsonObject
    old: JsonObject  # the former spec; empty on a create


def default_patch(
    kind: str, namespace: str, operation: Operation, body: JsonObject, old: JsonObject | None, context: Context
) -> Patch:
    """RFC 6902. An object that is being deleted, or that does not look like one of ours, is left alone."""
    spec = body.get("spec")
    if not isinstance(spec, dict) or (body.get("metadata") or {}).get("deletionTimestamp"):
        return []
    make = _DEFAULTS.get(kind)
    return make(_Write(namespace, operation, spec, (old or {}).get("spec") or {}), context) if make else []


def _pipeline(write: _Write, context: Context) -> Patch:
    """The only profile that the tenant may use, where the pipeline names none and the common default is not allowed."""
    if write.operation is not Operation.CREATE or write.spec.get("runtimeProfile"):
        return []  # on an update the user took it out, or lived without: nothing to add to
    tenant = context.tenant_of(write.namespace)
    allowed = (tenant.spec.allowed_profiles if tenant else None) or ()
    if len(allowed) != 1 or allowed[0] == DEFAULT_PROFILE:
        return []
    return [_set("/spec/runtimeProfile", allowed[0])]


def _profile(write: _Write, context: Context) -> Patch:
    """The device class of stages that name none: written out, since the order of a list-map says nothing.

    A default that an update left alone while its class went is moved to the first class, else the CRD would refuse a
    change of the classes for the sake of a field that the user never wrote. One that the update sets is the user's.
    """
    listed = write.spec.get("deviceClasses")  # the schema is checked later: it may be anything
    classes = [c.get("name") for c in listed if isinstance(c, dict)] if isinstance(listed, list) else []
    current = write.spec.get("defaultDeviceClass")
    if not classes or not isinstance(classes[0], str) or current in classes:
        return []
    users_own = current is not None and current != write.old.get("defaultDeviceClass")
    return [] if users_own else [_set("/spec/defaultDeviceClass", classes[0])]


def _tenant(write: _Write, context: Context) -> Patch:
    """Every tenant has a weight to compare."""
    return [] if "weight" in write.spec else [_set("/spec/weight", 1)]


def _set(path: str, value: Any) -> JsonObject:
    return {"op": "add", "path": path, "value": value}


# OmniStage is not here: all that one could add is a count or a bound, and both have an owner.
_DEFAULTS: Mapping[str, Callable[[_Write, Context], Patch]] = {
    PIPELINE.kind: _pipeline,
    PROFILE.kind: _profile,
    TENANT.kind: _tenant,
}
