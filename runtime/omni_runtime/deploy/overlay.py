"""The two notebooks that the resolver writes while it works: violations, and where each value came from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from omni_runtime.errors import FieldError, InvalidPipeline

T = TypeVar("T")


@dataclass(slots=True)
class Violations:
    """Every problem of a spec, in the order in which they were found; one problem is noted once."""

    found: list[FieldError] = field(default_factory=list)

    def add(self, path: str, value: object, problem: str, fix: str) -> None:
        error = FieldError(path=path, value=str(value), problem=problem, fix=fix)
        if error not in self.found:
            self.found.append(error)

    def error(self) -> InvalidPipeline:
        return InvalidPipeline(tuple(self.found))


@dataclass(slots=True)
class Origins:
    """Value path in the plan -> the layer that set it."""

    noted: dict[str, str] = field(default_factory=dict)

    def pick(self, key: str, candidates: Iterable[tuple[str, T | None]], default: T) -> T:
        """The first candidate that is set; the layers come in order of precedence."""
        for origin, value in candidates:
            if value is not None:
                self.noted[key] = origin
                return value
        self.noted[key] = "default"
        return default

    def note(self, key: str, origin: str) -> None:
        self.noted[key] = origin


PIPELINE = "pipeline"


def profile_origin(name: str) -> str:
    return f"profile {name}"


def topology_origin(name: str) -> str:
    """A custom topology says nothing about a stage, so what it does not spell out is a default."""
    return "default" if name == "custom" else f"topology {name}"
