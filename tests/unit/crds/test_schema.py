"""The rewriter knows a closed set of constructs: what it keeps, what it turns into something else, what it refuses."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from omni_crds.schema import UnsupportedSchemaError, structural_schema
from omni_crds.v1alpha1.markers import ListAtomic, ListMap, ListSet, Rule, rules

Name = Annotated[str, Field(max_length=9)]
Small = Annotated[int, Field(ge=0, le=9)]


class Colour(StrEnum):
    """Text about the enum, which is not the text of the field."""

    RED = "red"
    BLUE = "blue"


class Item(BaseModel):
    """An item."""

    model_config = ConfigDict(json_schema_extra=rules(Rule("self.name != 'x'", "not x")))

    name: Name
    note: Name | None = None


class Forbidding(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Name


ITEM = {
    "type": "object",
    "description": "An item.",
    "properties": {"name": {"type": "string", "maxLength": 9}, "note": {"type": "string", "maxLength": 9}},
    "required": ["name"],
    "x-kubernetes-validations": [{"rule": "self.name != 'x'", "message": "not x"}],
}


def model_with(annotation: Any, *default: Any) -> type[BaseModel]:
    """A model with the single field `value`."""
    namespace: dict[str, Any] = {"__annotations__": {"value": annotation}, "__module__": __name__}
    if default:
        namespace["value"] = default[0]
    return type("Probe", (BaseModel,), namespace)


def field_schema(annotation: Any, *default: Any, **options: bool) -> dict[str, Any]:
    result: dict[str, Any] = structural_schema(model_with(annotation, *default), **options)["properties"]["value"]
    return result


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        pytest.param(Name, {"type": "string", "maxLength": 9}, id="string"),
        pytest.param(
            Annotated[str, Field(min_length=1, max_length=9, pattern="^a$")],
            {"type": "string", "minLength": 1, "maxLength": 9, "pattern": "^a$"},
            id="string with everything",
        ),
        pytest.param(bool, {"type": "boolean"}, id="boolean"),
        pytest.param(Small, {"type": "integer", "format": "int32", "minimum": 0, "maximum": 9}, id="integer"),
        pytest.param(
            Annotated[int, Field(ge=0, le=2**53)],
            {"type": "integer", "format": "int64", "minimum": 0, "maximum": 2**53},
            id="long integer",
        ),
        pytest.param(
            Annotated[int, Field(gt=0, lt=10)],
            {"type": "integer", "format": "int32", "minimum": 1, "maximum": 9},
            id="exclusive bounds become inclusive: numbers there are unknown to OpenAPI 3.0",
        ),
        pytest.param(
            Annotated[int, Field(gt=0, ge=5, lt=10, le=7)],
            {"type": "integer", "format": "int32", "minimum": 5, "maximum": 7},
            id="the narrower of two bounds holds",
        ),
        pytest.param(Literal["a"], {"type": "string", "enum": ["a"]}, id="const becomes enum"),
        pytest.param(Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}, id="literal"),
        pytest.param(Literal[3], {"type": "integer", "enum": [3]}, id="integer const"),
        pytest.param(Literal[3, 4], {"type": "integer", "enum": [3, 4]}, id="integer literal"),
        pytest.param(
            Colour,
            {
                "type": "string",
                "description": "Text about the enum, which is not the text of the field.",
                "enum": ["red", "blue"],
            },
            id="enum is inlined",
        ),
        pytest.param(Item, ITEM, id="model is inlined with its rules"),
        pytest.param(
            Annotated[Item, Field(description="Mine.")],
            {**ITEM, "description": "Mine."},
            id="a field's own description wins over the model's",
        ),
        pytest.param(
            Forbidding,
            {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]},
            id="extra=forbid is the server's job",
        ),
        pytest.param(
            Annotated[tuple[Item, ...], Field(max_length=3), ListMap(("name",))],
            {
                "type": "array",
                "items": ITEM,
                "maxItems": 3,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            },
            id="list map",
        ),
        pytest.param(
            Annotated[list[Name], Field(min_length=1, max_length=3), ListSet()],
            {
                "type": "array",
                "items": {"type": "string", "maxLength": 9},
                "minItems": 1,
                "maxItems": 3,
                "x-kubernetes-list-type": "set",
            },
            id="list set",
        ),
        pytest.param(
            Annotated[set[Name], Field(max_length=3)],
            {
                "type": "array",
                "items": {"type": "string", "maxLength": 9},
                "maxItems": 3,
                "x-kubernetes-list-type": "set",
            },
            id="uniqueItems becomes a set",
        ),
        pytest.param(
            Annotated[tuple[Item, ...], Field(max_length=3), ListAtomic()],
            {"type": "array", "items": ITEM, "maxItems": 3, "x-kubernetes-list-type": "atomic"},
            id="atomic list",
        ),
        pytest.param(
            Annotated[dict[str, Name], Field(max_length=3)],
            {"type": "object", "additionalProperties": {"type": "string", "maxLength": 9}, "maxProperties": 3},
            id="map of strings",
        ),
        pytest.param(
            Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})],
            {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            id="an object of unknown shape, said aloud",
        ),
    ],
)
def test_rewrites(annotation: Any, expected: dict[str, Any]) -> None:
    assert field_schema(annotation) == expected


class Recursive(BaseModel):
    child: Recursive | None = None


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


def extra(**keywords: Any) -> Any:
    return Field(max_length=9, json_schema_extra=keywords)


@pytest.mark.parametrize(
    ("annotation", "problem"),
    [
        pytest.param(float, "type number", id="float"),
        pytest.param(None, "type null", id="only null"),
        pytest.param(Any, "no type", id="Any"),
        pytest.param(str, "a string without bound", id="unbounded string: no CEL budget"),
        pytest.param(int, "an integer without bounds", id="unbounded integer"),
        pytest.param(Annotated[int, Field(ge=0)], "an integer without bounds", id="half-bounded integer"),
        pytest.param(Annotated[tuple[Name, ...], ListSet()], "a list without bound", id="unbounded list"),
        pytest.param(dict[str, Name], "a map without bound", id="unbounded map"),
        pytest.param(Annotated[dict[str, Small], Field(max_length=3)], "a map of integer", id="map of integers"),
        pytest.param(
            Annotated[dict[Name, Name], Field(max_length=3)], "a constraint on the keys of a map", id="propertyNames"
        ),
        pytest.param(
            Annotated[dict[Annotated[str, Field(pattern="^a$")], Name], Field(max_length=3)],
            "patternProperties",
            id="patternProperties",
        ),
        pytest.param(dict[str, Any], "an object of unknown shape", id="dict"),
        pytest.param(
            Annotated[tuple[Name, ...], Field(max_length=3)], "a list without list type", id="list type not said"
        ),
        pytest.param(
            Annotated[tuple[Item, ...], Field(max_length=3), ListSet()], "a set of object", id="set of objects"
        ),
        pytest.param(
            Annotated[tuple[Item, ...], Field(max_length=3), ListMap(("note",))],
            "list map key 'note' is optional",
            id="optional key",
        ),
        pytest.param(
            Annotated[tuple[Item, ...], Field(max_length=3), ListMap(("nope",))],
            "list map key 'nope' is no scalar",
            id="unknown key",
        ),
        pytest.param(
            Annotated[tuple[Name, ...], Field(max_length=3), ListMap(("name",))],
            "a list map without keys or of scalars",
            id="map of scalars",
        ),
        pytest.param(
            Annotated[tuple[Item, ...], Field(max_length=3), ListMap(())],
            "a list map without keys",
            id="map without keys",
        ),
        pytest.param(
            Annotated[
                tuple[Item, ...],
                Field(
                    max_length=3,
                    json_schema_extra={"x-kubernetes-list-type": "set", "x-kubernetes-list-map-keys": ["name"]},
                ),
            ],
            "a set of object",
            id="set with keys",
        ),
        pytest.param(
            Annotated[
                tuple[Name, ...],
                Field(
                    max_length=3,
                    json_schema_extra={"x-kubernetes-list-type": "set", "x-kubernetes-list-map-keys": ["name"]},
                ),
            ],
            "map keys on a list of type set",
            id="set of scalars with keys",
        ),
        pytest.param(tuple[Name, Name], "a tuple of fixed length", id="prefixItems"),
        pytest.param(Annotated[list[Any], Field(max_length=3), ListAtomic()], "no type", id="list of anything"),
        pytest.param(Name | Small, "a union", id="union of scalars"),
        pytest.param(Cat | Dog, "a union", id="union of models"),
        pytest.param(
            Annotated[Cat | Dog, Field(discriminator="kind")], "a discriminated union", id="discriminated union"
        ),
        pytest.param(Name | None, "a required field that may be null", id="nullable and required"),
        pytest.param(Recursive, "Recursive contains itself", id="recursion"),
        pytest.param(Annotated[str, extra(nullable=True)], "nullable", id="nullable"),
        pytest.param(Annotated[str, extra(format="date-time")], "a format", id="format, which nobody checks"),
        pytest.param(Annotated[str, extra(readOnly=True)], "unknown keywords ['readOnly']", id="unknown keyword"),
        pytest.param(
            Annotated[str, extra(**{"x-kubernetes-int-or-string": True})], "unknown keywords", id="unknown extension"
        ),
        pytest.param(Annotated[str, extra(allOf=[])], "an intersection", id="allOf"),
        pytest.param(Annotated[str, extra(**{"not": {}})], "a negation", id="not"),
        pytest.param(Annotated[str, extra(oneOf=[])], "a union", id="oneOf"),
        pytest.param(Annotated[str, extra(minimum=3)], "unknown keywords ['minimum']", id="keyword of another type"),
        pytest.param(
            Annotated[Item, Field(json_schema_extra={"additionalProperties": {"type": "string"}})],
            "further properties beside named ones",
            id="properties and additionalProperties",
        ),
        pytest.param(
            Annotated[Item, Field(json_schema_extra={"maxProperties": 3})],
            "beside named properties",
            id="properties and maxProperties",
        ),
        pytest.param(
            Annotated[Name, Field(json_schema_extra={"type": "object"})], "unknown keywords", id="type changed by hand"
        ),
    ],
)
def test_refuses(annotation: Any, problem: str) -> None:
    with pytest.raises(UnsupportedSchemaError) as caught:
        field_schema(annotation)
    assert problem in str(caught.value)
    assert caught.value.path.startswith("Probe"), "the path leads to the field"
    assert caught.value.fix


def test_optional_is_absent_never_null() -> None:
    schema = structural_schema(model_with(Name | None, None))
    assert schema["properties"]["value"] == {"type": "string", "maxLength": 9}
    assert "required" not in schema


@pytest.mark.parametrize(
    ("annotation", "default"), [(Colour, Colour.RED), (Small, 3), (bool, True), (Name | None, "a")]
)
def test_scalar_default_is_served_or_left_out(annotation: Any, default: Any) -> None:
    assert field_schema(annotation, default)["default"] == default
    assert "default" not in field_schema(annotation, default, defaults=False)


def test_default_of_a_list_is_refused() -> None:
    """It would be merged into what an applier owns, item by item."""
    with pytest.raises(UnsupportedSchemaError, match="a default for array"):
        field_schema(Annotated[tuple[Name, ...], Field(max_length=3), ListSet()], ("a",))


def test_path_names_the_field_deep_inside() -> None:
    class Inner(BaseModel):
        size: float

    class Outer(BaseModel):
        items: Annotated[tuple[Inner, ...], Field(max_length=3), ListAtomic()]

    with pytest.raises(UnsupportedSchemaError, match=r"^Outer\.items\[\]\.size: type number; use a string"):
        structural_schema(Outer)
