"""What a KV cache looks like as it travels, what a chunk covers, and how a range is cut into chunks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from omni_runtime.errors import CapacityExceeded, ContractMismatch

CARRIERS: Final[Mapping[str, np.dtype[Any]]] = MappingProxyType(
    {
        "float32": np.dtype("float32"),
        "float16": np.dtype("float16"),
        "bfloat16": np.dtype("uint16"),
        "float8_e4m3fn": np.dtype("uint8"),
        "float8_e5m2": np.dtype("uint8"),
    }
)
"""numpy types that hold each number type: bits are moved and never interpreted, so that NaN is a value like others."""

_SAME_MODEL: Final = "give both stages the same model"
_FIXES: Final[Mapping[str, str]] = MappingProxyType(
    {"dtype": "give both stages the same engineArgs dtype and kv_cache_dtype"}
)
_META: Final = "kv_"  # the names of a chunk's meta are a namespace of all contracts


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What both sides must agree on. Block sizes are not part of it: positions are tokens.

    model: whose keys and values; a cache of another model may fit, and is nonsense.
    heads: KV heads of the whole model, over all tensor-parallel shards.
    planes: 2 for keys and values, 1 where both are one latent vector (MLA).
    """

    model: str
    layers: int
    heads: int
    head_dim: int
    dtype: str
    planes: int = 2

    def __post_init__(self) -> None:
        if self.dtype not in CARRIERS:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(CARRIERS)}")
        if min(self.layers, self.heads, self.head_dim, self.planes) < 1:
            raise ValueError(f"every size of a KV layout is at least 1: {self}")

    @property
    def carrier(self) -> np.dtype[Any]:
        return CARRIERS[self.dtype]

    @property
    def dtypes(self) -> Mapping[str, str]:
        """As in Payload."""
        return {} if self.carrier.name == self.dtype else {"kv": self.dtype}

    def meta(self) -> dict[str, object]:
        """For the first chunk of whoever sends."""
        return {_META + f.name: getattr(self, f.name) for f in fields(self)}

    def check(self, meta: Mapping[str, object], where: str) -> None:
        """Raises ContractMismatch for the first field of the producer's layout that is not ours."""
        for name, ours in self.meta().items():
            theirs, field = meta.get(name), name.removeprefix(_META)
            if type(theirs) is not type(ours) or theirs != ours:
                raise ContractMismatch(
                    f"{where}: {field} of the KV cache is {theirs!r} at the producer and {ours!r} at the consumer;"
                    f" {_FIXES.get(field, _SAME_MODEL)}"
                )


@dataclass(frozen=True, slots=True)
class Span:
    """A box of a KV cache: absolute layers, heads and token positions, each without gaps."""

    layers: range
    heads: range
    tokens: range

    def shape(self, layout: KvLayout) -> tuple[int, int, int, int, int]:
        """Of its array as it travels: [layers, planes, tokens, heads, head_dim]."""
        return len(self.layers), layout.planes, len(self.tokens), len(self.heads), layout.head_dim


def cut(layout: KvLayout, span: Span, limit: int) -> Iterator[Span]:
    """In chunks of at most `limit` bytes: groups of layers where all tokens of a layer fit, else tokens of one layer.

    Layers come in order, and the tokens of each layer. Raises CapacityExceeded if not even one token of a layer fits.
    """
    if not span.tokens:
        return
    row = layout.planes * len(span.heads) * layout.head_dim * layout.carrier.itemsize
    if row > limit:
        raise CapacityExceeded(f"one token of one layer has {row} bytes, a chunk at most {limit}; use larger chunks")
    at_once = min(len(span.tokens), limit // row)
    together = max(1, limit // (row * len(span.tokens)))
    for first in range(0, len(span.layers), together):
        for start in range(0, len(span.tokens), at_once):
            yield Span(span.layers[first : first + together], span.heads, span.tokens[start : start + at_once])
