"""What a chunk says of its bytes, checked before any allocation; a violation is a ProtocolError. Free of numpy and torch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from omni_runtime.errors import OmniError

DTYPE_BYTES: Final[dict[str, int]] = {
    "bool": 1, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip
ALIGNMENT: Final = 64  # of every tensor and slab: a cache line, and enough for any vector load
MAX_CHUNK_BYTES: Final = 4 << 30

_U63 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Text = Annotated[str, Meta(max_length=4096)]
MetaValue = int | float | bool | None | _Text | Annotated[tuple[int | float, ...], Meta(max_length=4096)]


class ProtocolError(OmniError):
    """A peer sent something that the protocol does not allow."""

    code = "ProtocolError"
    http_status = 502


ChunkMeta = Annotated[dict[Annotated[str, Meta(max_length=64)], MetaValue], Meta(max_length=64)]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One tensor in a chunk's bytes; `offset` from the chunk's first byte."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[_U63, ...], Meta(max_length=8)]
    offset: _U63

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


Tensors = Annotated[tuple[TensorSpec, ...], Meta(max_length=64)]


class ChunkHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Travels once per chunk, with its first piece."""

    start: _U63  # absolute position of the first row
    rows: _U63
    finished: bool
    nbytes: Annotated[int, Meta(ge=0, le=MAX_CHUNK_BYTES)]  # of all pieces together
    sent_at: float  # wall clock, seconds
    tensors: Tensors = ()
    meta: ChunkMeta = {}


def check_chunk(chunk: ChunkHeader) -> None:
    """Raises as check_tensors."""
    check_tensors(chunk.tensors, chunk.nbytes)


@lru_cache(maxsize=256)  # the chunks of a stream look alike
def check_tensors(tensors: tuple[TensorSpec, ...], nbytes: int) -> None:
    """Raises ProtocolError for an unknown dtype, or tensors that overlap or reach past the chunk's end."""
    end = 0
    names: set[str] = set()
    for tensor in tensors:
        if tensor.dtype not in DTYPE_BYTES:
            raise ProtocolError(f"tensor {tensor.name!r}: dtype {tensor.dtype!r} is not allowed: {sorted(DTYPE_BYTES)}")
        if tensor.name in names:
            raise ProtocolError(f"tensor {tensor.name!r} occurs twice")
        names.add(tensor.name)
        if tensor.offset % ALIGNMENT or tensor.offset < end:
            raise ProtocolError(f"tensor {tensor.name!r}: offset {tensor.offset} overlaps or is not aligned")
        end = tensor.offset + tensor.nbytes
        if end > nbytes:
            raise ProtocolError(
                f"tensor {tensor.name!r}: {tensor.dtype}{list(tensor.shape)} at {tensor.offset} ends at {end},"
                f" past the chunk's {nbytes} bytes"
            )
