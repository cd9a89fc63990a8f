"""Payload <-> bytes: numpy arrays laid out at aligned offsets behind one header. No object is built from a name."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, cast

import msgspec
import numpy as np

from omni_runtime.connectors.arena import aligned
from omni_runtime.connectors.wire import DTYPE_BYTES, ChunkHeader, MetaValue, ProtocolError, TensorSpec, check_chunk
from omni_runtime.protocol.payload import Payload

# numpy has no bfloat16 or float8: they travel as unsigned integers of the same size (Payload.dtypes names them).
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_ENCODE: Final = msgspec.msgpack.Encoder().encode
_HEADER: Final = msgspec.msgpack.Decoder(ChunkHeader)
_CARRIER: Final[Mapping[str, np.dtype[Any]]] = MappingProxyType(
    {
        name: np.dtype({"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}.get(name, name))
        for name in DTYPE_BYTES
    }
)

_NAMES: Final[Mapping[np.dtype[Any], str]] = MappingProxyType({np.dtype(n): n for n, c in _CARRIER.items() if c == n})


def describe(payload: Payload) -> ChunkHeader:
    """The header of a payload. Raises ProtocolError for a dtype or a meta value that may not travel."""
    tensors: list[TensorSpec] = []
    offset = 0
    for name, array in payload.tensors.items():
        dtype = payload.dtypes.get(name) or _NAMES.get(array.dtype, "")  # dtype.name is slow
        if _CARRIER.get(dtype) != array.dtype:
            raise ProtocolError(
                f"tensor {name!r}: {array.dtype} cannot travel as {dtype or array.dtype.name!r}; allowed: {sorted(DTYPE_BYTES)}"
                " (bfloat16 in uint16 arrays, float8 in uint8 arrays)"
            )
        tensors.append(TensorSpec(name, dtype, array.shape, offset))
        offset = aligned(offset + array.nbytes)
    nbytes = tensors[-1].offset + tensors[-1].nbytes if tensors else 0
    try:  # whoever receives it decodes it with these rules, so a round trip is the check
        meta = cast("dict[str, MetaValue]", dict(payload.meta))
        header = ChunkHeader(payload.start, payload.rows, payload.finished, nbytes, time.time(), tuple(tensors), meta)
        header = _HEADER.decode(_ENCODE(header))
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise ProtocolError(f"payload cannot travel: {error}") from error
    check_chunk(header)
    return header


def write(payload: Payload, header: ChunkHeader, target: memoryview) -> None:
    """Copy every array to its place; non-contiguous ones in the same pass."""
    flat = np.frombuffer(target, np.uint8)
    for tensor, array in zip(header.tensors, payload.tensors.values(), strict=True):
        if array.nbytes:
            place = flat[tensor.offset : tensor.offset + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(place, array)


def lay_out(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> tuple[dict[str, int], int]:
    """(offset of each tensor, bytes of all), as `describe` lays them out. Raises ProtocolError for a dtype or shape."""
    offsets: dict[str, int] = {}
    end = 0
    for name, (shape, dtype) in shapes.items():
        if dtype not in _CARRIER or any(n < 0 for n in shape):
            raise ProtocolError(f"tensor {name!r}: {dtype}{list(shape)} cannot travel; dtypes: {sorted(DTYPE_BYTES)}")
        offsets[name] = aligned(end)
        end = offsets[name] + math.prod(shape) * DTYPE_BYTES[dtype]
    return offsets, end


def arrays(shapes: Mapping[str, tuple[tuple[int, ...], str]], data: Bytes) -> dict[str, np.ndarray]:
    """Writable arrays over `data` (uint8 [nbytes of lay_out])."""
    offsets, _ = lay_out(shapes)
    return {
        name: data[at : at + math.prod(shape) * DTYPE_BYTES[dtype]].view(_CARRIER[dtype]).reshape(shape)
        for (name, (shape, dtype)), at in zip(shapes.items(), offsets.values(), strict=True)
    }


def read(header: ChunkHeader, data: np.ndarray) -> Payload:
    """The payload over `data` (uint8 [nbytes]); its arrays are read-only views. The header has been checked."""
    tensors: dict[str, np.ndarray] = {}
    dtypes: dict[str, str] = {}
    for tensor in header.tensors:
        carrier = _CARRIER[tensor.dtype]
        array = data[tensor.offset : tensor.offset + tensor.nbytes].view(carrier).reshape(tensor.shape)
        array.flags.writeable = False
        tensors[tensor.name] = array
        if carrier.name != tensor.dtype:
            dtypes[tensor.name] = tensor.dtype
    return Payload(header.start, header.rows, header.finished, tensors, header.meta, dtypes)


def detached(payload: Payload) -> Payload:
    """The same with arrays of its own, read-only as well."""
    copies = {name: array.copy() for name, array in payload.tensors.items()}
    for array in copies.values():
        array.flags.writeable = False
    return Payload(payload.start, payload.rows, payload.finished, copies, payload.meta, payload.dtypes)
