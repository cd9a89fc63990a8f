"""Annotations that carry what Kubernetes needs and JSON Schema has no word for: list semantics and CEL rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class _Marker(ABC):
    """Adds `extensions()` to the JSON schema of the annotated type."""

    @abstractmethod
    def extensions(self) -> dict[str, Any]: ...

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(core_schema), **self.extensions()}


@dataclass(frozen=True, slots=True)
class ListMap(_Marker):
    """Entries have an identity, the value of `keys`; order does not matter and appliers own single entries."""

    keys: tuple[str, ...]

    def extensions(self) -> dict[str, Any]:
        return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(self.keys)}


@dataclass(frozen=True, slots=True)
class ListSet(_Marker):
    """Scalars, each at most once; order does not matter."""

    def extensions(self) -> dict[str, Any]:
        return {"x-kubernetes-list-type": "set"}


@dataclass(frozen=True, slots=True)
class ListAtomic(_Marker):
    """One value: an applier owns all of it or nothing."""

    def extensions(self) -> dict[str, Any]:
        return {"x-kubernetes-list-type": "atomic"}


@dataclass(frozen=True, slots=True)
class Rule:
    """A CEL rule that the API server checks. `message` says what is wrong and how to put it right."""

    rule: str
    message: str


def rules(*checks: Rule) -> dict[str, Any]:
    """For `json_schema_extra` of a model."""
    return {"x-kubernetes-validations": [{"rule": c.rule, "message": c.message} for c in checks]}
