"""The field paths of each schema version, one a line. `python -m tests.unit.crds.fields` writes the present list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omni_crds import SCHEMA_VERSION
from omni_crds.crd import KINDS, build_schema

FOLDER = Path(__file__).parent / "field_lists"


def field_paths() -> list[str]:
    """Such as `OmniPipeline.spec.stages[].name`, in the order of the types."""
    return [path for kind in KINDS for path in _paths(build_schema(kind), kind.name)]


def recorded(version: int) -> list[str]:
    return (FOLDER / f"{version}.txt").read_text().splitlines()


def _paths(schema: dict[str, Any], path: str) -> Iterator[str]:
    for name, child in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from _paths(child, f"{path}.{name}")
    if "items" in schema:
        yield from _paths(schema["items"], f"{path}[]")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{SCHEMA_VERSION}.txt").write_text("\n".join(field_paths()) + "\n")
