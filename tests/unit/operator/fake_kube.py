"""An API server in memory: what the operator relies on, and nothing else.

Server-side apply with field managers (a field that its only manager leaves out is removed), resourceVersion and
generation that move only on change, status as a subresource, preconditions on delete, garbage collection by owner.
Every call is recorded; `fail_next` makes a call fail.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from omni_operator.errors import AlreadyExists, Conflict, NotFound, Rejected
from omni_operator.kinds import DEPLOYMENT, JsonObject, Kind
from omni_operator.kube import Listing

ObjectKey = tuple[str, str, str]  # plural, namespace, name
WRITES = ("create", "apply", "delete", "replace", "patch_status", "scale", "annotate")


class FakeKube:
    def __init__(self) -> None:
        self.objects: dict[ObjectKey, JsonObject] = {}
        self.kinds: dict[str, Kind] = {}
        self.calls: list[tuple[str, str, str]] = []  # verb, plural, name
        self.before: Callable[[str, str, str], None] = lambda verb, plural, name: None
        self._managed: dict[ObjectKey, dict[str, JsonObject]] = {}
        self._versions = itertools.count(1)

    # ------------------------------------------------------------------ what the operator calls
    async def get(self, kind: Kind, namespace: str | None, name: str) -> JsonObject:
        self._record("get", kind, name)
        return copy.deepcopy(self._existing(kind, namespace, name))

    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> Listing:
        self._record("list", kind, selector)
        found = [
            {k: v for k, v in copy.deepcopy(body).items() if k not in ("apiVersion", "kind")}
            for (plural, where, _), body in self.objects.items()
            if plural == kind.plural and (namespace is None or where == namespace) and _matches(body, selector)
        ]
        return Listing(tuple(found), str(next(self._versions)))

    async def create(self, kind: Kind, namespace: str | None, body: JsonObject) -> JsonObject:
        name = body["metadata"]["name"]
        self._record("create", kind, name)
        key = (kind.plural, namespace or "", name)
        if key in self.objects:
            raise AlreadyExists(f"{kind.plural} {name} already exists", 409, "AlreadyExists")
        return self._store(key, kind, copy.deepcopy(body), new=True)

    async def apply(
        self, kind: Kind, namespace: str | None, name: str, body: JsonObject, *, manager: str, force: bool
    ) -> JsonObject:
        self._record("apply", kind, name)
        key = (kind.plural, namespace or "", name)
        current = self.objects.get(key)
        managed = self._managed.setdefault(key, {})
        result: JsonObject = copy.deepcopy(current) if current else {}
        others = {path for m, b in managed.items() if m != manager for path in _leaves(b)}
        for path in set(_leaves(managed.get(manager, {}))) - set(_leaves(body)) - others:
            _remove(result, path)
        _merge(result, copy.deepcopy(body))
        if current and kind is DEPLOYMENT and current["spec"].get("selector") != result["spec"].get("selector"):
            raise Rejected("spec.selector: Invalid value: field is immutable", 422, "Invalid")
        managed[manager] = copy.deepcopy(body)
        if current is not None and _same(current, result):
            return copy.deepcopy(current)
        return self._store(key, kind, result, new=current is None)

    async def delete(self, kind: Kind, namespace: str | None, name: str, *, uid: str, resource_version: str) -> None:
        self._record("delete", kind, name)
        meta = self._existing(kind, namespace, name)["metadata"]
        if (meta["uid"], meta["resourceVersion"]) != (uid, resource_version):
            raise Conflict("precondition failed", 409, "Conflict")
        self.remove(kind, namespace or "", name)

    async def replace(
        self, kind: Kind, namespace: str | None, name: str, body: JsonObject, timeout: float = 1.0
    ) -> JsonObject:
        self._record("replace", kind, name)
        current = self._existing(kind, namespace, name)
        if body["metadata"].get("resourceVersion") != current["metadata"]["resourceVersion"]:
            raise Conflict("the object has been modified", 409, "Conflict")
        return self._store((kind.plural, namespace or "", name), kind, copy.deepcopy(body), new=False)

    async def patch_status(
        self, kind: Kind, namespace: str | None, name: str, *, resource_version: str, status: Mapping[str, Any]
    ) -> JsonObject:
        self._record("patch_status", kind, name)
        current = self._existing(kind, namespace, name)
        if current["metadata"]["resourceVersion"] != resource_version:
            raise Conflict("the object has been modified", 409, "Conflict")
        merged = {**current.get("status", {}), **copy.deepcopy(dict(status))}
        body = {**copy.deepcopy(current), "status": {k: v for k, v in merged.items() if v is not None}}
        return self._store((kind.plural, namespace or "", name), kind, body, new=False)

    async def scale(
        self, kind: Kind, namespace: str, name: str, *, replicas: int, resource_version: str, manager: str
    ) -> JsonObject:
        self._record("scale", kind, name)
        current = self._existing(kind, namespace, name)
        if current["metadata"]["resourceVersion"] != resource_version:
            raise Conflict("the object has been modified", 409, "Conflict")
        body = copy.deepcopy(current)
        body["spec"]["replicas"] = replicas
        return self._store((kind.plural, namespace, name), kind, body, new=False)

    async def annotate(
        self, kind: Kind, namespace: str, name: str, annotations: Mapping[str, str | None], *, uid: str, manager: str
    ) -> JsonObject:
        self._record("annotate", kind, name)
        body = copy.deepcopy(self._existing(kind, namespace, name))
        if body["metadata"]["uid"] != uid:
            raise Conflict("the UID in the precondition does not match", 409, "Conflict")
        known = {**body["metadata"].get("annotations", {}), **annotations}
        body["metadata"]["annotations"] = {k: v for k, v in known.items() if v is not None}
        return self._store((kind.plural, namespace, name), kind, body, new=False)

    # ------------------------------------------------------------------ what tests call
    def put(self, kind: Kind, namespace: str, body: JsonObject) -> JsonObject:
        """Create or edit as a user would: spec and metadata replaced, uid and status kept."""
        key = (kind.plural, namespace, body["metadata"]["name"])
        current = self.objects.get(key)
        body = copy.deepcopy(body)
        if current is not None:
            body["metadata"] = {**current["metadata"], **body["metadata"]}
            body.setdefault("status", current.get("status", {}))
        return self._store(key, kind, body, new=current is None)

    def edit(self, kind: Kind, namespace: str, name: str, change: Callable[[JsonObject], None]) -> None:
        body = copy.deepcopy(self._existing(kind, namespace, name))
        change(body)
        self._store((kind.plural, namespace, name), kind, body, new=False)

    def remove(self, kind: Kind, namespace: str, name: str) -> None:
        """Delete now, and everything that it controls, as the garbage collector would."""
        key = (kind.plural, namespace, name)
        gone = self.objects.pop(key)
        self._managed.pop(key, None)
        uid = gone["metadata"]["uid"]
        for plural, where, child in list(self.objects):
            refs = self.objects.get((plural, where, child), {}).get("metadata", {}).get("ownerReferences", [])
            if any(ref["uid"] == uid for ref in refs):
                self.remove(self.kinds[plural], where, child)

    def all(self, kind: Kind, namespace: str = "ns") -> dict[str, JsonObject]:
        return {n: b for (plural, where, n), b in self.objects.items() if plural == kind.plural and where == namespace}

    @property
    def writes(self) -> list[tuple[str, str, str]]:
        return [call for call in self.calls if call[0] in WRITES]

    # ------------------------------------------------------------------ inside
    def _record(self, verb: str, kind: Kind, name: str) -> None:
        self.before(verb, kind.plural, name)
        self.calls.append((verb, kind.plural, name))

    def _existing(self, kind: Kind, namespace: str | None, name: str) -> JsonObject:
        try:
            return self.objects[(kind.plural, namespace or "", name)]
        except KeyError:
            raise NotFound(f"{kind.plural} {name} not found", 404, "NotFound") from None

    def _store(self, key: ObjectKey, kind: Kind, body: JsonObject, *, new: bool) -> JsonObject:
        self.kinds[kind.plural] = kind
        number = next(self._versions)
        meta = body["metadata"]
        old = self.objects.get(key)
        if new:
            meta.update(uid=f"uid-{number}", generation=1, creationTimestamp="2026-01-01T00:00:00Z", namespace=key[1])
        elif old is not None:
            changed = old.get("spec") != body.get("spec")
            meta["generation"] = int(old["metadata"].get("generation", 1)) + (1 if changed else 0)
            meta["uid"] = old["metadata"]["uid"]
        meta["resourceVersion"] = str(number)
        self.objects[key] = body
        return copy.deepcopy(body)


def _matches(body: JsonObject, selector: str) -> bool:
    labels = body["metadata"].get("labels") or {}
    for term in filter(None, selector.split(",")):
        if term.startswith("!"):
            if term[1:] in labels:
                return False
        else:
            name, _, value = term.partition("=")
            if labels.get(name) != value:
                return False
    return True


def _leaves(body: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of scalars and (atomic) lists."""
    if isinstance(body, dict) and body:
        return [leaf for key, value in body.items() for leaf in _leaves(value, (*path, key))]
    return [path] if path else []


def _remove(body: JsonObject, path: tuple[str, ...]) -> None:
    for part in path[:-1]:
        inner = body.get(part)
        if not isinstance(inner, dict):
            return
        body = inner
    body.pop(path[-1], None)


def _merge(into: JsonObject, new: JsonObject) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _same(left: JsonObject, right: JsonObject) -> bool:
    return left == right
