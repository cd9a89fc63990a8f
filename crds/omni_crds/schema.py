"""From a pydantic model to a structural schema, as the API server wants it.

Kubernetes reads OpenAPI 3.0 with rules of its own, drops some keywords silently and refuses others at install time.
So this rewriter knows a closed set of constructs and raises on the rest: a constraint that would be lost, or a field
that somebody could fill without bound, fails here and not in a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]


class UnsupportedSchemaError(TypeError):
    """A model holds a construct that has no place in a structural schema."""

    def __init__(self, path: str, problem: str, fix: str) -> None:
        super().__init__(f"{path}: {problem}; {fix}")
        self.path = path
        self.problem = problem
        self.fix = fix


def structural_schema(model: type[BaseModel], *, defaults: bool = True) -> Schema:
    """The schema of one model, with every reference inlined.

    `defaults=False` leaves pydantic's defaults out: for status, which the operator writes in full.
    Raises UnsupportedSchemaError with the path of the first construct that is not known.
    """
    document = model.model_json_schema(by_alias=True, mode="validation")
    definitions = document.pop("$defs", {})
    return _Rewriter(definitions, defaults).rewrite(document, model.__name__, ())


INT32_MAX = 2**31 - 1

# Keywords that may stand beside any type. `title` and `examples` repeat what the field name and the docs say.
_DROPPED = frozenset({"title", "examples"})
_COMMON = frozenset({"type", "description", "default", "x-kubernetes-validations"})
_BY_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset(
        {"properties", "required", "additionalProperties", "maxProperties", "minProperties", "x-kubernetes-map-type"}
        | {"x-kubernetes-preserve-unknown-fields"}
    ),
    "array": frozenset(
        {"items", "minItems", "maxItems", "uniqueItems", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"}
    ),
    "string": frozenset({"enum", "const", "minLength", "maxLength", "pattern"}),
    "integer": frozenset({"enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "boolean": frozenset(),
}
# Keywords with an own message, since people will try them.
_REFUSED: Mapping[str, tuple[str, str]] = {
    "prefixItems": ("a tuple of fixed length", "use a model with named fields"),
    "oneOf": ("a union", "use one model with optional members and a CEL rule that says which go together"),
    "allOf": ("an intersection", "use one model"),
    "not": ("a negation", "use a CEL rule"),
    "discriminator": ("a discriminated union", "use one model with optional members and a CEL rule"),
    "patternProperties": ("patternProperties", "use a list by name"),
    "propertyNames": ("a constraint on the keys of a map", "use a list by name, or a CEL rule"),
    "nullable": ("nullable", "leave the field out instead of null"),
    "format": ("a format", "the API server does not check it: use a pattern"),
}


class _Rewriter:
    def __init__(self, definitions: Mapping[str, Schema], defaults: bool) -> None:
        self._definitions = definitions
        self._defaults = defaults
        self._by_type: Mapping[str, Callable[[Schema, str, tuple[str, ...]], Schema]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "boolean": lambda node, path, stack: {},
        }

    def rewrite(self, node: Schema, path: str, stack: tuple[str, ...]) -> Schema:
        node, stack = self._inline(node, path, stack)
        if "anyOf" in node:
            return self.rewrite(_without_null(node, path), path, stack)
        for keyword in node:
            if keyword in _REFUSED:
                raise UnsupportedSchemaError(path, *_REFUSED[keyword])
        kind = node.get("type")
        if kind is None:
            raise UnsupportedSchemaError(path, "no type", "Any does not say what it takes: name the type")
        if kind not in _BY_TYPE:
            fix = "use a string or an integer with the unit in its name" if kind == "number" else "use another type"
            raise UnsupportedSchemaError(path, f"type {kind}", fix)
        node = {k: v for k, v in node.items() if k not in _DROPPED}
        if unknown := node.keys() - _COMMON - _BY_TYPE[kind]:
            raise UnsupportedSchemaError(
                path, f"unknown keywords {sorted(unknown)}", f"teach {__name__} what they mean"
            )

        out: Schema = {"type": kind}
        if "description" in node:
            out["description"] = " ".join(node["description"].split())
        out |= self._by_type[kind](node, path, stack)
        if "x-kubernetes-validations" in node:
            out["x-kubernetes-validations"] = node["x-kubernetes-validations"]
        if "default" in node and self._defaults:
            out["default"] = _scalar_default(node["default"], kind, path)
        return out

    def _inline(self, node: Schema, path: str, stack: tuple[str, ...]) -> tuple[Schema, tuple[str, ...]]:
        """Put the definition in place of a `$ref`; what stands beside the reference wins (a field's own description)."""
        if "$ref" not in node:
            return node, stack
        name = node["$ref"].removeprefix("#/$defs/")
        if name not in self._definitions:
            raise UnsupportedSchemaError(path, f"reference {node['$ref']}", "refer to models of the same document only")
        if name in stack:
            raise UnsupportedSchemaError(path, f"{name} contains itself", "a structural schema is finite: flatten it")
        beside = {k: v for k, v in node.items() if k != "$ref"}
        return {**self._definitions[name], **beside}, (*stack, name)

    def _object(self, node: Schema, path: str, stack: tuple[str, ...]) -> Schema:
        properties, values = node.get("properties"), node.get("additionalProperties")
        if properties is not None:
            if values not in (None, False):  # False is extra="forbid"; the server prunes, or refuses when strict
                raise UnsupportedSchemaError(path, "further properties beside named ones", "use one or the other")
            _allow(node, path, "properties", "required", "additionalProperties", "x-kubernetes-map-type")
            rewritten = {name: self.rewrite(child, f"{path}.{name}", stack) for name, child in properties.items()}
            out: Schema = {"properties": rewritten}
            if required := node.get("required"):
                out["required"] = sorted(required)
            return out | _take(node, "x-kubernetes-map-type")
        if values is True or node.get("x-kubernetes-preserve-unknown-fields"):
            if node.get("x-kubernetes-preserve-unknown-fields") is not True:
                raise UnsupportedSchemaError(
                    path,
                    "an object of unknown shape",
                    "mark it x-kubernetes-preserve-unknown-fields, or name its fields",
                )
            return _take(node, "x-kubernetes-preserve-unknown-fields")
        if not isinstance(values, dict):
            raise UnsupportedSchemaError(path, "an object without properties", "name its fields")
        if "maxProperties" not in node:
            raise UnsupportedSchemaError(path, "a map without bound", "set max_length")
        child = self.rewrite(values, f"{path}.*", stack)
        if child["type"] != "string":
            raise UnsupportedSchemaError(
                path, f"a map of {child['type']}", "only map[string]string: use a list by name"
            )
        return {"additionalProperties": child} | _take(node, "minProperties", "maxProperties", "x-kubernetes-map-type")

    def _array(self, node: Schema, path: str, stack: tuple[str, ...]) -> Schema:
        if "items" not in node or not isinstance(node["items"], dict):
            raise UnsupportedSchemaError(path, "a list without a type of items", "name the type")
        if "maxItems" not in node:
            raise UnsupportedSchemaError(path, "a list without bound", "set max_length")
        items = self.rewrite(node["items"], f"{path}[]", stack)
        list_type = node.get("x-kubernetes-list-type", "set" if node.get("uniqueItems") else None)
        keys = node.get("x-kubernetes-list-map-keys")
        match list_type:
            case "map":
                _check_list_map(items, keys, path)
            case "set":
                if items["type"] in ("object", "array"):
                    raise UnsupportedSchemaError(path, f"a set of {items['type']}", "use ListMap or ListAtomic")
            case "atomic":
                pass
            case _:
                raise UnsupportedSchemaError(path, "a list without list type", "say ListMap, ListSet or ListAtomic")
        if keys is not None and list_type != "map":
            raise UnsupportedSchemaError(path, f"map keys on a list of type {list_type}", "use ListMap")
        out = {"items": items, **_take(node, "minItems", "maxItems"), "x-kubernetes-list-type": list_type}
        return out if keys is None else {**out, "x-kubernetes-list-map-keys": list(keys)}

    def _string(self, node: Schema, path: str, stack: tuple[str, ...]) -> Schema:
        if "const" in node:
            return {"enum": [node["const"]]}
        if "enum" in node:
            return {"enum": list(node["enum"])}
        if "maxLength" not in node:
            raise UnsupportedSchemaError(path, "a string without bound", "set max_length")
        return _take(node, "minLength", "maxLength", "pattern")

    def _integer(self, node: Schema, path: str, stack: tuple[str, ...]) -> Schema:
        if "const" in node or "enum" in node:
            return {"enum": list(node.get("enum", [node.get("const")]))}
        bounds = _take(node, "minimum", "maximum", "multipleOf")
        # Kubernetes knows exclusive bounds as booleans only (OpenAPI 3.0); whole numbers need none.
        if "exclusiveMinimum" in node:
            bounds["minimum"] = max(node["exclusiveMinimum"] + 1, node.get("minimum", node["exclusiveMinimum"] + 1))
        if "exclusiveMaximum" in node:
            bounds["maximum"] = min(node["exclusiveMaximum"] - 1, node.get("maximum", node["exclusiveMaximum"] - 1))
        if not {"minimum", "maximum"} <= bounds.keys():
            raise UnsupportedSchemaError(path, "an integer without bounds", "set ge and le")
        return {"format": "int32" if bounds["maximum"] <= INT32_MAX else "int64", **bounds}


def _without_null(node: Schema, path: str) -> Schema:
    """`X | None = None` is an optional field: absent, never null."""
    branches = [b for b in node["anyOf"] if b != {"type": "null"}]
    if len(branches) != 1 or len(branches) == len(node["anyOf"]):
        raise UnsupportedSchemaError(path, "a union", "use one model with optional members and a CEL rule")
    beside = {k: v for k, v in node.items() if k != "anyOf"}
    if "default" not in beside:
        raise UnsupportedSchemaError(path, "a required field that may be null", "give it the default None")
    if beside["default"] is None:
        del beside["default"]
    return {**branches[0], **beside}


def _scalar_default(value: Any, kind: str, path: str) -> Any:
    if kind in ("object", "array"):
        raise UnsupportedSchemaError(path, f"a default for {kind}", "leave it out and fill it in where it is read")
    return value


def _check_list_map(items: Schema, keys: list[str] | None, path: str) -> None:
    if items["type"] != "object" or not keys:
        raise UnsupportedSchemaError(
            path, "a list map without keys or of scalars", "name the fields that identify an item"
        )
    for key in keys:
        field = items["properties"].get(key)
        if field is None or field["type"] in ("object", "array"):
            raise UnsupportedSchemaError(
                path, f"list map key {key!r} is no scalar field", "name a scalar field of the item"
            )
        if key not in items.get("required", ()) and "default" not in field:
            raise UnsupportedSchemaError(path, f"list map key {key!r} is optional", "make it required")


def _take(node: Schema, *keywords: str) -> Schema:
    return {k: node[k] for k in keywords if k in node}


def _allow(node: Schema, path: str, *keywords: str) -> None:
    if extra := node.keys() - _COMMON - frozenset(keywords):
        raise UnsupportedSchemaError(path, f"{sorted(extra)} beside named properties", "use a map or a model, not both")
