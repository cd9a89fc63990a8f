"""The topologies that this runtime knows by name. A new family is one file with one value, listed here. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from types import MappingProxyType

from omni_runtime.errors import FieldError
from omni_runtime.topology.qwen3_omni import QWEN3_OMNI_MOE
from omni_runtime.topology.smol_omni import SMOL_OMNI
from omni_runtime.topology.types import Topology

CUSTOM = Topology(
    name="custom",
    description="stages and edges are spelled out in the pipeline",
    stages=(),
    edges=(),
    inputs=("text", "audio", "image"),
)

TOPOLOGIES = MappingProxyType({t.name: t for t in (SMOL_OMNI, QWEN3_OMNI_MOE, CUSTOM)})


def find_topology(name: str, path: str = "spec.topology") -> Topology | FieldError:
    """The topology of that name, or an error that lists the known names and the closest match."""
    if name in TOPOLOGIES:
        return TOPOLOGIES[name]
    return FieldError(path=path, value=name, problem="unknown topology", fix=f"use {one_of(name, TOPOLOGIES)}")


def one_of(wrong: str, known: Iterable[str]) -> str:
    """Advice for a misspelt name: the known names, closest first if one is close."""
    names = sorted(known)
    if not names:
        return "none: nothing is defined yet"
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.6)
    listed = f"one of {', '.join(names)}" if len(names) > 1 else names[0]
    return f"{listed} (did you mean {close[0]}?)" if close and len(names) > 1 else listed
