"""Which violations of an update are new. Pure.

An object that broke a rule before the rule existed, or before the cluster changed, can still be edited: a violation that
was there already does not block an update that leaves its field alone, nor one that leaves fewer of them (T52).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from omni_runtime.errors import FieldError

Blame = tuple[str, FieldError]  # rule, violation
_INDEX = re.compile(r"^(\w+)\[(\d+)\]$")


def new_violations(
    now: Iterable[Blame], before: Iterable[Blame], new: Mapping[str, Any], old: Mapping[str, Any]
) -> list[Blame]:
    """Those of `now` that the update brings.

    new, old: the objects as JSON; with them, list entries are known by name, so that a violation that only moved in its
    list is the same one.
    """
    now, before = list(now), list(before)
    known = {(rule, stable_path(e.path, old), _what(e)) for rule, e in before}
    fields = {(rule, stable_path(e.path, old)) for rule, e in before}
    brought = [(rule, e) for rule, e in now if (rule, stable_path(e.path, new), _what(e)) not in known]
    better = len(now) < len(before) and all((rule, stable_path(e.path, new)) in fields for rule, e in now)
    return [] if better else brought


def _what(error: FieldError) -> str:
    """What is wrong with the field. Where no single value is, the problem tells one violation from a larger one."""
    return error.value or error.problem


def stable_path(path: str, body: Mapping[str, Any]) -> str:
    """`spec.stages[2].replicas` -> `spec.stages[talker].replicas`; a path that does not lead into the object stays."""
    value: Any = body
    parts = []
    for part in path.split("."):
        match = _INDEX.match(part)
        name = match[1] if match else part
        value = value.get(name) if isinstance(value, Mapping) else None
        if match and isinstance(value, list) and int(match[2]) < len(value):
            value = value[int(match[2])]
            parts.append(f"{name}[{_identity(value, match[2])}]")
        else:
            parts.append(part)
    return ".".join(parts)


def _identity(entry: object, index: str) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Mapping):
        for keys in (("name",), ("from", "to"), ("class",)):
            if all(isinstance(entry.get(key), str) for key in keys):
                return "->".join(entry[key] for key in keys)
    return index
