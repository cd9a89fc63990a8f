"""Tensors from the device memory of one stage's process into that of another, without a copy on a host (GPUDirect RDMA).

An address on a device means something in the process that owns it and nowhere else, so that the sidecars cannot read there:
the engine's process has a transfer engine of its own, over a pool of device memory. What travels on the edge is a chunk
without tensors whose meta says where they are; the consumer reads them into its own pool, and gives back a copy of them.

Nobody tells the producer by a message: it has a table of words in host memory that is registered too. The consumer reads
the slab's generation there after it has read the slab, so that it never takes bytes of a slab that was used again, and
writes it next to it, which frees the slab. What no consumer has fetched is freed after a lease.

Mooncake neither encrypts nor authenticates: this is for a network that the pipeline owns, as Mooncake's edges are.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import torch

from omni_runtime.connectors.arena import Allocator, aligned
from omni_runtime.connectors.mooncake import MooncakeOptions, MooncakeUnavailable, ends_well, is_segment, start_engine
from omni_runtime.connectors.tensors import ALIGNMENT, DTYPE_BYTES, ProtocolError
from omni_runtime.errors import CapacityExceeded, UpstreamLost
from omni_runtime.logs import get_logger
from omni_runtime.protocol.payload import Payload

log = get_logger(__name__)

META: Final = "device_memory"  # name in a payload's meta
SLABS: Final = 1024  # at once, of a producer
LEASE_SECONDS: Final = 300.0
_MAX_META: Final = 4096  # characters, as wire allows
_WORD: Final = 8
_GENERATION, _DONE = 0, 1  # columns of the table
_DTYPES: Final[Mapping[str, torch.dtype]] = {name: getattr(torch, name) for name in DTYPE_BYTES if hasattr(torch, name)}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}

_U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Placed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor in the slab; `offset` from its first byte."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[_U63, ...], msgspec.Meta(max_length=8)]
    offset: _U63

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the tensors of a chunk are."""

    segment: Annotated[str, msgspec.Meta(max_length=300)]
    address: Annotated[int, msgspec.Meta(ge=0)]  # of the slab, in the producer's device memory
    nbytes: _U63
    word: Annotated[int, msgspec.Meta(ge=0)]  # address of the slab's row in the table, in host memory
    generation: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    tensors: Annotated[tuple[Placed, ...], msgspec.Meta(max_length=64)]


_decode: Final = msgspec.json.Decoder(Place).decode


@dataclass(slots=True)
class _Slab:
    offset: int
    row: int
    generation: int
    since: float


def refusal(device: torch.device) -> str | None:
    """Why there can be no such path here, or None."""
    if device.type != "cuda":
        return f"device memory of {device.type!r} cannot be registered; the path is for CUDA devices"
    if not torch.cuda.is_available():
        return "no CUDA device is visible to this process"
    return None


class DeviceMemory:
    """A pool of device memory that is registered with a transfer engine of this process. For one loop."""

    def __init__(self, engine: Any, segment: str, pool: torch.Tensor) -> None:
        """See `start`. The pool may be in host memory, which is how it is tested where there is no device."""
        self.segment = segment
        self._engine = engine
        self._pool = pool
        self._places = Allocator(0, pool.numel())
        self._table = np.zeros((SLABS, 2), np.uint64)
        self._scratch = np.zeros(SLABS, np.uint64)  # what a fetch reads generations into, and writes them from
        self._rows = list(range(SLABS))
        self._scratch_rows = list(range(SLABS))
        self._held: dict[int, _Slab] = {}  # by generation
        self._generation = 0
        self._threads = ThreadPoolExecutor(2, "device-memory")
        self._freed = asyncio.Event()

    @classmethod
    def start(cls, host: str, options: MooncakeOptions, device: torch.device, nbytes: int) -> DeviceMemory:
        """Blocks for a moment. Raises MooncakeUnavailable with a reason; tensors then take the way through the arena."""
        reason = refusal(device)
        if reason is not None:
            raise MooncakeUnavailable(reason)
        try:
            pool = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise MooncakeUnavailable(f"no {nbytes} bytes are free on {device}: {error}") from error
        return cls.over(host, options, pool)

    @classmethod
    def over(cls, host: str, options: MooncakeOptions, pool: torch.Tensor) -> DeviceMemory:
        """With memory of the caller's. Raises MooncakeUnavailable."""
        engine = start_engine(host, options)
        self = cls(engine, f"{host}:{engine.get_rpc_port()}", pool)
        regions = ((pool.data_ptr(), pool.numel()), *((a.ctypes.data, a.nbytes) for a in (self._table, self._scratch)))
        for address, length in regions:
            if engine.register_memory(address, length):
                raise MooncakeUnavailable(
                    f"the transfer engine cannot register {length} bytes of {pool.device}: is nvidia_peermem loaded, and"
                    " the image built with mooncake-transfer-engine for CUDA?"
                )
        return self

    @property
    def used_bytes(self) -> int:
        return self._places.used

    # --- the producer's side

    async def export(self, payload: Payload, tensors: Mapping[str, torch.Tensor]) -> Payload | None:
        """The payload with a place instead of tensors; it may be put as any other. The tensors are the caller's again.

        None if the pool has no room now: then they take the way through the arena. Raises ProtocolError for a dtype
        that may not travel.
        """
        self.collect(time.monotonic())
        placed, length = _lay_out(tensors)
        at = self._places.allocate(aligned(max(1, length), ALIGNMENT)) if self._rows else None
        if at is None:
            return None
        row = self._rows.pop()
        self._generation += 1
        slab = self._held[self._generation] = _Slab(at, row, self._generation, time.monotonic())
        self._table[row] = (slab.generation, 0)
        place = Place(
            self.segment,
            self._pool.data_ptr() + at,
            length,
            self._table.ctypes.data + row * 2 * _WORD,
            slab.generation,
            placed,
        )
        text = msgspec.json.encode(place).decode()
        if len(text) > _MAX_META:
            self._free(slab)
            raise ProtocolError(f"{len(tensors)} tensors are too many to name in {_MAX_META} characters")
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._fill, at, placed, tensors)
        except BaseException:
            self._free(slab)
            raise
        return msgspec.structs.replace(payload, meta={**payload.meta, META: text})

    def _fill(self, at: int, placed: tuple[Placed, ...], tensors: Mapping[str, torch.Tensor]) -> None:
        """Until the device has done it: the other pod reads without asking this one's streams."""
        for one in placed:
            source = tensors[one.name].contiguous().view(-1).view(torch.uint8)
            self._pool[at + one.offset : at + one.offset + one.nbytes].copy_(source)
        if self._pool.device.type == "cuda":
            torch.cuda.synchronize(self._pool.device)

    def collect(self, now: float) -> None:
        """Free what was fetched, and what nobody has fetched within a lease. For every few seconds; exports do it too."""
        for slab in list(self._held.values()):
            if self._table[slab.row, _DONE] == slab.generation or now - slab.since > LEASE_SECONDS:
                self._free(slab)

    def _free(self, slab: _Slab) -> None:
        """The generation goes first: whoever reads the slab now finds out."""
        self._table[slab.row] = 0
        del self._held[slab.generation]
        self._places.free(slab.offset)
        self._rows.append(slab.row)
        self._freed.set()

    # --- the consumer's side

    async def fetch(self, payload: Payload, deadline_s: float) -> dict[str, torch.Tensor]:
        """The tensors of a payload that was exported, on this device, the caller's own. A producer that stands still is given
        up by the engine after half a minute.

        Raises ProtocolError for a place that is none, CapacityExceeded where the pool has no room within the deadline,
        UpstreamLost where the producer is gone or had freed them.
        """
        place = read_place(payload, self._pool.numel())
        at = await self._room(aligned(max(1, place.nbytes), ALIGNMENT), deadline_s)
        row = self._scratch_rows.pop()
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._threads, self._read, place, at, row)
        try:
            return await asyncio.shield(reading)
        finally:
            if reading.done():
                self._done_with(at, row)
            else:  # cancelled: it still writes there
                reading.add_done_callback(lambda _: self._done_with(at, row))

    async def _room(self, nbytes: int, deadline_s: float) -> int:
        deadline = asyncio.get_running_loop().time() + deadline_s
        while True:
            at = self._places.allocate(nbytes) if self._scratch_rows else None
            if at is not None:
                return at
            self._freed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._freed.wait()
            except TimeoutError:
                raise CapacityExceeded(
                    f"no {nbytes} bytes of the device memory pool ({self._pool.numel()} bytes) came free within {deadline_s:g} s"
                ) from None

    def _done_with(self, at: int, row: int) -> None:
        self._places.free(at)
        self._scratch_rows.append(row)
        self._freed.set()

    def _read(self, place: Place, at: int, row: int) -> dict[str, torch.Tensor]:
        """In a thread. The generation is read after the bytes, in a transfer of its own: those of one have no order."""
        engine, here = self._engine, self._pool.data_ptr() + at
        word = self._scratch.ctypes.data + row * _WORD
        self._scratch[row] = 0
        came = (
            not place.nbytes
            or ends_well(
                engine, engine.batch_transfer_async_read(place.segment, [here], [place.address], [place.nbytes])
            )
        ) and ends_well(engine, engine.batch_transfer_async_read(place.segment, [word], [place.word], [_WORD]))
        if not came or self._scratch[row] != place.generation:
            why = "had freed them" if came else "does not answer"
            raise UpstreamLost(f"tensors in device memory of {place.segment}: the producer {why}")
        tensors = {
            one.name: self._pool[at + one.offset : at + one.offset + one.nbytes]
            .view(_DTYPES[one.dtype])
            .view(one.shape)
            .clone()
            for one in place.tensors
        }
        if self._pool.device.type == "cuda":
            torch.cuda.synchronize(self._pool.device)  # the slab is used again as soon as this returns
        if not ends_well(
            engine, engine.batch_transfer_async_write(place.segment, [word], [place.word + _WORD], [_WORD])
        ):
            log.warning("device_memory.not_told", segment=place.segment, reason="it frees them after its lease")
        return tensors

    def close(self) -> None:
        """Waits for transfers that run: they write to the pool."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for address in (self._pool.data_ptr(), self._table.ctypes.data, self._scratch.ctypes.data):
            self._engine.unregister_memory(address)
        self._engine = None  # its ports and threads go with it, whoever still has this object


def is_exported(payload: Payload) -> bool:
    return META in payload.meta


def read_place(payload: Payload, longest: int) -> Place:
    """Checked before anything is allocated. Raises ProtocolError."""
    try:
        place = _decode(str(payload.meta[META]))
    except (KeyError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ProtocolError(f"the payload names no place in device memory: {error}") from error
    if not is_segment(place.segment):
        raise ProtocolError(f"segment {place.segment!r} is not host:port")
    if place.nbytes > longest:
        raise ProtocolError(f"{place.nbytes} bytes in device memory; the pool here has {longest}")
    end, names = 0, set[str]()
    for one in place.tensors:
        if one.dtype not in _DTYPES:
            raise ProtocolError(f"tensor {one.name!r}: dtype {one.dtype!r} is not allowed: {sorted(_DTYPES)}")
        if one.name in names or one.offset % ALIGNMENT or one.offset < end:
            raise ProtocolError(f"tensor {one.name!r}: twice, not aligned, or over another")
        names.add(one.name)
        end = one.offset + one.nbytes
        if end > place.nbytes:
            raise ProtocolError(f"tensor {one.name!r} ends at {end}, past the slab's {place.nbytes} bytes")
    return place


def _lay_out(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[Placed, ...], int]:
    placed: list[Placed] = []
    end = 0
    for name, tensor in tensors.items():
        dtype = _NAMES.get(tensor.dtype)
        if dtype is None:
            raise ProtocolError(f"tensor {name!r}: dtype {tensor.dtype} may not travel: {sorted(_DTYPES)}")
        one = Placed(name, dtype, tuple(tensor.shape), aligned(end, ALIGNMENT))
        placed.append(one)
        end = one.offset + one.nbytes
    return tuple(placed), end
