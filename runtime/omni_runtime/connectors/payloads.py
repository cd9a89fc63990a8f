"""Payload <-> bytes: numpy arrays laid out at aligned offsets behind one header. No object is built from a name."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, cast

import msgspec
import numpy as np

from omni_runtime.connectors.arena import aligned
from omni_runtime.connectors.tensors import DTYPE_BYTES, ChunkHeader, MetaValue, ProtocolError, TensorSpec, check_chunk
from omni_runtime.protocol.payload import Payload

# numpy has no bfloat16 or float8: they travel as unsigned integers of the same size (Payload.dtypes names them).
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Specs = tuple[tuple[str, str, tuple[int, ...]], ...]  # name, dtype, shape

_ENCODE: Final = msgspec.msgpack.Encoder().encode
_HEADER: Final = msgspec.msgpack.Decoder(ChunkHeader)
_CARRIER: Final[Mapping[str, np.dtype[Any]]] = MappingProxyType(
    {
        name: np.dtype({"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}.get(name, name))
        for name in DTYPE_BYTES
    }
)

_NAMES: Final[Mapping[np.dtype[Any], str]] = MappingProxyType({np.dtype(n): n for n, c in _CARRIER.items() if c == n})
_FEW: Final = 8
_END: Final = 1 << 63  # of counts
_SHORT: Final = 64  # as in ChunkHeader.meta
_BORROWED: Final = frozenset(name for name, carrier in _CARRIER.items() if carrier.name != name)


def describe(payload: Payload) -> ChunkHeader:
    """The header of a payload. Raises ProtocolError for a dtype or a meta value that may not travel."""
    specs: list[tuple[str, str, tuple[int, ...]]] = []
    named = payload.dtypes
    for name, array in payload.tensors.items():
        dtype = (named.get(name) if named else None) or _NAMES.get(array.dtype, "")  # dtype.name is slow
        if not dtype or (named and _CARRIER.get(dtype) != array.dtype):
            raise ProtocolError(
                f"tensor {name!r}: {array.dtype} cannot travel as {dtype or array.dtype.name!r}; allowed: {sorted(DTYPE_BYTES)}"
                " (bfloat16 in uint16 arrays, float8 in uint8 arrays)"
            )
        specs.append((name, dtype, array.shape))
    try:
        tensors, nbytes = _tensor_specs(tuple(specs))
        meta = cast("dict[str, MetaValue]", dict(payload.meta))
        start, rows, finished = payload.start, payload.rows, payload.finished
        header = ChunkHeader(start, rows, finished, nbytes, time.time(), tensors, meta)
        counted = type(start) is type(rows) is int and 0 <= start < _END and 0 <= rows < _END and type(finished) is bool
        if not counted or (meta and not _are_plain(meta)):
            header = _HEADER.decode(_ENCODE(header))  # whoever receives it has these rules: a round trip is the check
    except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeError) as error:
        raise ProtocolError(f"payload cannot travel: {error}") from error
    return header


def _are_plain(meta: dict[str, MetaValue]) -> bool:
    """Values of which there is nothing to check."""
    if len(meta) > _FEW:
        return False
    for name, value in meta.items():
        if type(name) is not str or len(name) > _SHORT or not name.isascii():
            return False
        kind = type(value)
        if kind is not float and kind is not bool and (kind is not int or not 0 <= value < _END):  # type: ignore[operator]
            return False
    return True


@lru_cache(maxsize=256)  # the chunks of a stream look alike
def _tensor_specs(specs: Specs) -> tuple[tuple[TensorSpec, ...], int]:
    """(tensors at their offsets, bytes of all), checked. Raises as msgspec does, or ProtocolError."""
    offsets, nbytes = _lay_out(specs)
    tensors = tuple(TensorSpec(name, dtype, shape, offsets[name]) for name, dtype, shape in specs)
    header = _HEADER.decode(_ENCODE(ChunkHeader(0, 0, False, nbytes, 0.0, tensors)))
    check_chunk(header)
    return header.tensors, nbytes


def flat(payload: Payload, header: ChunkHeader) -> bytes | bytearray:
    """All of a chunk's bytes, copied."""
    if len(header.tensors) == 1:
        (array,) = payload.tensors.values()
        return array.tobytes()
    data = bytearray(header.nbytes)
    write(payload, header, memoryview(data))
    return data


def write(payload: Payload, header: ChunkHeader, target: memoryview) -> None:
    """Copy every array to its place; non-contiguous ones in the same pass."""
    flat = np.frombuffer(target, np.uint8)
    for tensor, array in zip(header.tensors, payload.tensors.values(), strict=True):
        if array.nbytes:
            place = flat[tensor.offset : tensor.offset + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(place, array)


def lay_out(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> tuple[Mapping[str, int], int]:
    """(offset of each tensor, bytes of all), as `describe` lays them out. Raises ProtocolError for a dtype or shape."""
    return _lay_out(tuple((name, dtype, shape) for name, (shape, dtype) in shapes.items()))


@lru_cache(maxsize=256)  # the chunks of a stream look alike
def _lay_out(specs: Specs) -> tuple[Mapping[str, int], int]:
    offsets: dict[str, int] = {}
    end = 0
    for name, dtype, shape in specs:
        if dtype not in _CARRIER or any(n < 0 for n in shape):
            raise ProtocolError(f"tensor {name!r}: {dtype}{list(shape)} cannot travel; dtypes: {sorted(DTYPE_BYTES)}")
        offsets[name] = aligned(end)
        end = offsets[name] + math.prod(shape) * DTYPE_BYTES[dtype]
    return MappingProxyType(offsets), end


def arrays(shapes: Mapping[str, tuple[tuple[int, ...], str]], data: Bytes) -> dict[str, np.ndarray]:
    """Writable arrays over `data` (uint8 [nbytes of lay_out])."""
    offsets, _ = lay_out(shapes)
    return {name: np.ndarray(shape, _CARRIER[dtype], data, offsets[name]) for name, (shape, dtype) in shapes.items()}


def read(header: ChunkHeader, data: Bytes | bytes) -> Payload:
    """The payload over `data` (uint8 [nbytes]); its arrays are read-only views. The header has been checked."""
    tensors: dict[str, np.ndarray] = {}
    dtypes: dict[str, str] = {}
    for tensor in header.tensors:
        carrier = _CARRIER[tensor.dtype]
        array: np.ndarray = np.ndarray(tensor.shape, carrier, data, tensor.offset)
        if not isinstance(data, bytes):  # over those they are so anyway
            array.flags.writeable = False
        tensors[tensor.name] = array
        if tensor.dtype in _BORROWED:
            dtypes[tensor.name] = tensor.dtype
    return Payload(header.start, header.rows, header.finished, tensors, header.meta, dtypes)


def detached(payload: Payload) -> Payload:
    """The same with arrays of its own, read-only as well."""
    copies = {name: array.copy() for name, array in payload.tensors.items()}
    for array in copies.values():
        array.flags.writeable = False
    return Payload(payload.start, payload.rows, payload.finished, copies, payload.meta, payload.dtypes)
