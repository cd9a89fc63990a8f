"""Every constraint of a CRD with objects that just keep it and objects that just break it, derived from the schema.

Patterns and CEL rules need examples by hand (examples.py). A keyword, pattern or rule that has none raises KeyError
when the table is built, so a new constraint cannot go untested.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from omni_crds.crd import KINDS, Kind, build_schema
from omni_crds.v1alpha1.base import API_VERSION
from tests.apiserver.crds.examples import BESIDE, BESIDE_IN_SPEC, RULES, SMALLEST
from tests.apiserver.crds.patterns import PATTERNS

Schema = dict[str, Any]
Path = tuple[str, ...]

# The keyword -> what the API server says about a value that breaks it.
COMPLAINTS = {
    "required": "Required value",
    "type": "must be of type",
    "enum": "Unsupported value",
    "minimum": "should be greater than or equal to",
    "maximum": "should be less than or equal to",
    "minLength": "should be at least",
    "maxLength": "Too long",
    "pattern": "should match",
    "minItems": "should have at least",
    "maxItems": "Too many",
    "maxProperties": "Too many",
    "x-kubernetes-list-type": "Duplicate value",
}
# No constraints of their own: structure, texts, and `format`, which the narrower maximum makes void.
_STRUCTURE = {
    "description",
    "properties",
    "items",
    "additionalProperties",
    "default",
    "format",
    "x-kubernetes-list-map-keys",
}
# pydantic reads leniently, and leaves uniqueness and CEL to the server.
SERVER_ONLY = {"type", "x-kubernetes-list-type", "x-kubernetes-validations"}
WRONG_TYPE = {"object": "text", "array": "text", "string": 7, "integer": "text"}


@dataclass(frozen=True)
class Constraint:
    """`accepted` and `refused` are whole objects; `before` is what is stored when an update is meant."""

    kind: Kind
    path: Path
    keyword: str
    accepted: tuple[Schema, ...]
    refused: tuple[Schema, ...]
    field: str
    complaint: str
    before: Schema | None = None

    @property
    def name(self) -> str:
        return f"{self.kind.name}{dotted(self.path)} {self.keyword}"

    @property
    def in_status(self) -> bool:
        return self.path[0] == "status"


@cache
def _schema(kind: Kind) -> Schema:
    return build_schema(kind)


def all_constraints() -> list[Constraint]:
    return [c for kind in KINDS for c in _of_kind(kind)]


def smallest_object(kind: Kind) -> Schema:
    return _whole(kind, ("spec",), smallest(_schema(kind)["properties"]["spec"], ".spec"))


def dotted(path: Path) -> str:
    """`.spec.stages[].name`; a map's values are `*`."""
    return "".join(p if p == "[]" else f".{p}" for p in path)


def smallest(schema: Schema, at: str) -> Any:
    """The smallest valid value: required fields only, each as short as it may be."""
    for end, value in SMALLEST.items():
        if at.endswith(end):
            return copy.deepcopy(value)
    match schema["type"]:
        case "object":
            fields = schema.get("properties", {})
            return {name: smallest(fields[name], f"{at}.{name}") for name in schema.get("required", ())}
        case "array":
            return _distinct(
                schema["items"], f"{at}[]", schema.get("x-kubernetes-list-map-keys"), schema.get("minItems", 0)
            )
        case "integer":
            return schema["minimum"]
        case "string":
            if "enum" in schema:
                return schema["enum"][0]
            return PATTERNS[schema["pattern"]].accepted[0] if "pattern" in schema else "x" * schema.get("minLength", 0)
    raise KeyError(f"{at}: no smallest value of type {schema['type']}")


def _of_kind(kind: Kind) -> Iterator[Constraint]:
    schema = _schema(kind)
    assert schema["required"] == ["spec"]
    empty = smallest_object(kind)
    missing = {k: v for k, v in empty.items() if k != "spec"}
    yield Constraint(kind, ("spec",), "required", (empty,), (missing,), "spec", COMPLAINTS["required"])
    for part in ("spec", "status"):
        for path, node in _walk(schema["properties"][part], (part,)):
            yield from _of_node(kind, path, node)


def _walk(schema: Schema, path: Path) -> Iterator[tuple[Path, Schema]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from _walk(child, (*path, name))
    if "items" in schema:
        yield from _walk(schema["items"], (*path, "[]"))
    if "additionalProperties" in schema:
        yield from _walk(schema["additionalProperties"], (*path, "*"))


def _of_node(kind: Kind, path: Path, node: Schema) -> Iterator[Constraint]:
    at = dotted(path)

    def case(keyword: str, accepted: list[Any], refused: list[Any], below: str = "", name: str = "") -> Constraint:
        return Constraint(
            kind,
            path,
            f"{keyword} {name}".strip(),
            tuple(_whole(kind, path, v) for v in accepted),
            tuple(_whole(kind, path, v) for v in refused),
            f"{_reported(path)}{below}",
            COMPLAINTS.get(keyword, name),
        )

    for keyword, limit in node.items():
        match keyword:
            case "type":
                yield case(keyword, [smallest(node, at)], [WRONG_TYPE[limit]])
            case "required":
                whole = smallest(node, at)
                for field in limit:
                    yield case(keyword, [whole], [{k: v for k, v in whole.items() if k != field}], f".{field}", field)
            case "enum":
                yield case(keyword, _legal_choices(at, limit), ["no-such-choice", ""])
            case "minimum":
                yield case(keyword, [limit], [limit - 1])
            case "maximum":
                yield case(keyword, [limit], [limit + 1])
            case "minLength":
                yield case(keyword, [_text(node, limit)], [_text(node, limit - 1)])
            case "maxLength":
                yield case(keyword, [_text(node, limit)], [_text(node, limit + 1)])
            case "pattern":
                fits = [v for v in PATTERNS[limit].accepted if len(v) >= node.get("minLength", 0)]
                yield case(keyword, fits, [v for v in PATTERNS[limit].refused if v])
            case "minItems":
                yield case(keyword, [_items(node, at, limit)], [_items(node, at, limit - 1)])
            case "maxItems":
                most, more = _items(node, at, limit), _items(node, at, limit + 1)
                yield case(keyword, [most], [more if len(more) > limit else (most * (limit + 1))[: limit + 1]])
            case "maxProperties":
                value = smallest(node["additionalProperties"], f"{at}.*")
                full = [{f"k{i}": value for i in range(n)} for n in (limit, limit + 1)]
                yield case(keyword, full[:1], full[1:])
            case "x-kubernetes-list-type":
                if limit != "atomic":
                    one, two = _items(node, at, 1), _items(node, at, 2)
                    yield case(keyword, [two], [one * 2], "[1]")
            case "x-kubernetes-validations":
                for rule in limit:
                    yield _of_rule(kind, path, node, rule["message"])
            case _ if keyword not in _STRUCTURE:
                raise KeyError(f"{kind.name}{at}: no case for the keyword {keyword}")


def _of_rule(kind: Kind, path: Path, node: Schema, message: str) -> Constraint:
    examples = RULES[message]
    base = smallest(node, dotted(path))

    def objects(nodes: tuple[Schema, ...]) -> tuple[Schema, ...]:
        return tuple(_whole(kind, path, {**base, **n}) for n in nodes)

    before = None if examples.before is None else objects((examples.before,))[0]
    keyword = f"x-kubernetes-validations {message}"
    return Constraint(
        kind, path, keyword, objects(examples.accepted), objects(examples.refused), _reported(path), message, before
    )


def _whole(kind: Kind, path: Path, value: Any) -> Schema:
    """The smallest object with `value` at `path`, and beside it what makes it legal."""
    schema = _schema(kind)
    obj: Schema = {"apiVersion": API_VERSION, "kind": kind.name, "metadata": {"name": "x"}}
    for part in {"spec", path[0]}:
        steps = path[1:] if part == path[0] else None
        obj[part] = _placed(schema["properties"][part], f".{part}", steps, value)
    for end, fields in BESIDE_IN_SPEC.items():
        if dotted(path).endswith(end):
            obj["spec"].update(copy.deepcopy(fields))
    return obj


def _placed(schema: Schema, at: str, steps: Path | None, value: Any) -> Any:
    if steps == ():
        return copy.deepcopy(value)
    if steps is None:
        return smallest(schema, at)
    head, rest = steps[0], steps[1:]
    if head == "[]":
        return [_placed(schema["items"], f"{at}[]", rest, value)]
    if head == "*":
        return {"k0": _placed(schema["additionalProperties"], f"{at}.*", rest, value)}
    node = smallest(schema, at)
    node[head] = _placed(schema["properties"][head], f"{at}.{head}", rest, value)
    for end, change in BESIDE.items():
        if not rest and f"{at}.{head}".endswith(end):
            change(node, value)
    return node


def _reported(path: Path) -> str:
    """The path as the API server reports it."""
    return "".join("[0]" if p == "[]" else ".k0" if p == "*" else f".{p}" for p in path).removeprefix(".")


def _text(schema: Schema, length: int) -> str:
    return PATTERNS[schema["pattern"]].fill(length) if "pattern" in schema else "x" * length


def _legal_choices(at: str, choices: list[str]) -> list[str]:
    """`Auto` is no connector that a profile could list."""
    return [c for c in choices if not (at.endswith(".connectors[]") and c == "Auto")]


def _items(schema: Schema, at: str, count: int) -> list[Any]:
    return _distinct(schema["items"], f"{at}[]", schema.get("x-kubernetes-list-map-keys"), count)


def _distinct(items: Schema, at: str, keys: list[str] | None, count: int) -> list[Any]:
    """`count` items without repetition; fewer where the choices run out."""
    if items["type"] == "object":
        # The first key tells them apart; the others keep what the smallest item has.
        key = (keys or [None])[0]
        base = smallest(items, at)
        return [
            copy.deepcopy(base) if key is None else {**copy.deepcopy(base), key: f"{_nth(items['properties'][key], i)}"}
            for i in range(count)
        ]
    if "enum" in items:
        return _legal_choices(at, items["enum"])[:count]
    if items["type"] == "integer":
        return [items["minimum"] + i for i in range(count)]
    return [_nth(items, i) for i in range(count)]


def _nth(schema: Schema, number: int) -> str:
    """A different text for each number, within pattern and length."""
    return f"{PATTERNS[schema['pattern']].fill(1)}{number}"
