"""What a rule is: a name, the kind that it looks at, the parts of the cluster that it needs, and a pure check."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from omni_crds.v1alpha1.base import OmniModel
from omni_operator.kinds import Kind
from omni_runtime.errors import FieldError
from omni_webhooks.cache import Key
from omni_webhooks.context import Context

T = TypeVar("T", bound=OmniModel)


class Operation(StrEnum):
    CREATE = "CREATE"
    UPDATE = "UPDATE"
    DELETE = "DELETE"


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """A write of one object. new: what would be stored, or what would be deleted; old: what an update replaces."""

    operation: Operation
    key: Key
    new: T
    old: T | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """Legal, but unwise: a warning that kubectl prints."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


Finding = FieldError | Advice
Check = Callable[[Change[T], Context], Iterable[Finding]]
WRITES = frozenset({Operation.CREATE, Operation.UPDATE})


@dataclass(frozen=True, slots=True)
class Rule(Generic[T]):
    """name: PascalCase, stable; metrics, docs and switches use it. needs: plurals of the resources that it looks at."""

    name: str
    kind: Kind
    check: Check[T]
    needs: tuple[str, ...] = ()
    operations: frozenset[Operation] = WRITES


AnyRule = Rule[Any]
