"""Does a live object still hold what we want? Pure. The answer "yes" is what makes an idle operator write nothing (T7).

Two questions, since neither alone is enough:
- is the hash of the body that was applied last the hash of the body now? A field that left the body is a change that
  the live object cannot show (T6);
- does the live object contain the body? Somebody may have edited a field of ours (T8); fields that others added are theirs.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from omni_operator.kinds import JsonObject
from omni_operator.names import APPLIED_ANNOTATION
from omni_operator.observed import Live
from omni_operator.resources.child import Child
from omni_runtime.deploy.quantity import parse_quantity

# Keys that identify the items of a list, as the API server's merge rules do; the first that all items have counts.
_ITEM_KEYS = ("name", "mountPath", "containerPort", "port", "uid", "key", "topologyKey")
# Values below these keys are quantities, which the API server rewrites ("1024Mi" -> "1Gi").
_QUANTITY_KEYS = frozenset({"requests", "limits", "sizeLimit"})


def body_hash(body: JsonObject) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def owner_reference(owner: Live) -> JsonObject:
    """A controlling reference. Without blockOwnerDeletion: that would need a permission on the owner's finalizers."""
    return {
        "apiVersion": owner.kind.api_version,
        "kind": owner.kind.kind,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
    }


def render(child: Child, owner: Live | None) -> JsonObject:
    """The body that is sent: with the owner and the hash of everything else."""
    body = copy.deepcopy(child.body)
    metadata = body["metadata"]
    if owner is not None:
        metadata["annotations"] = {**metadata.get("annotations", {}), APPLIED_ANNOTATION: body_hash(child.body)}
        metadata["ownerReferences"] = [owner_reference(owner)]
    return body


def difference(child: Child, live: Live) -> str | None:
    """Why the child must be applied again, or None."""
    if live.annotations.get(APPLIED_ANNOTATION) != body_hash(child.body):
        return "changed"
    # Items of a list carry neither apiVersion nor kind.
    wanted = {key: value for key, value in child.body.items() if key not in ("apiVersion", "kind")}
    path = first_difference(wanted, live.body)
    return None if path is None else f"edited: {path}"


def first_difference(want: Any, have: Any, path: str = "") -> str | None:
    """Path of the first place where `have` does not contain `want`; None where it does."""
    if isinstance(want, Mapping):
        if not isinstance(have, Mapping):
            return None if not want and have is None else path
        for key, value in want.items():
            inner = f"{path}.{key}" if path else str(key)
            if key not in have:
                # The server stores no empty lists, maps and strings.
                if value in ({}, [], None, ""):
                    continue
                return inner
            found = first_difference(value, have[key], inner)
            if found is not None:
                return found
        return None
    if isinstance(want, Sequence) and not isinstance(want, str):
        return _list_difference(want, have, path)
    return None if _same_scalar(want, have, path) else path


def _list_difference(want: Sequence[Any], have: Any, path: str) -> str | None:
    if not isinstance(have, Sequence) or isinstance(have, str):
        return path if want else None
    key = _item_key(want)
    if key is None:
        if len(want) != len(have):
            return path
        pairs = list(zip(want, have, strict=True))
    else:
        by_key = {item[key]: item for item in have if isinstance(item, Mapping) and key in item}
        pairs = [(item, by_key.get(item[key])) for item in want]
    for index, (left, right) in enumerate(pairs):
        found = first_difference(left, right, f"{path}[{index}]")
        if found is not None:
            return found
    return None


def _item_key(items: Sequence[Any]) -> str | None:
    """The merge key of a list of objects: present in every item, a scalar, and different in each."""
    for key in _ITEM_KEYS:
        values = [item[key] for item in items if isinstance(item, Mapping) and isinstance(item.get(key), str | int)]
        if items and len(values) == len(items) and len(set(values)) == len(values):
            return key
    return None


def _same_scalar(want: Any, have: Any, path: str) -> bool:
    if want == have and isinstance(want, bool) == isinstance(have, bool):
        return True
    if isinstance(want, str) and isinstance(have, str) and _QUANTITY_KEYS.intersection(path.split(".")):
        try:
            return parse_quantity(want) == parse_quantity(have)
        except ValueError:
            return False
    return False
