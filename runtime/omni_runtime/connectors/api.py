"""OmniConnector as a stage worker sees it (report section 2.5): put, get, cleanup, health over edge streams. Torch-free.

A worker holds one `EdgeClient` to the pod's connector sidecar. All methods are for one asyncio loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from omni_runtime.protocol.control import Producer
from omni_runtime.protocol.payload import Payload


class ChunkReceived(msgspec.Struct, frozen=True, eq=False):
    """One chunk of an open stream.

    The payload's arrays are read-only views; they stay valid for as long as something refers to them, and their
    place in the arena is released when the last reference goes. Keeping them is safe: past a share of the arena the
    client copies chunks out instead.
    """

    request: str
    edge: str
    seq: int
    payload: Payload
    transfer_seconds: float  # from the producer's put to here


@dataclass(frozen=True, slots=True)
class EdgeFailed:
    """The stream ended without its finished chunk; nothing of it follows."""

    request: str
    edge: str
    code: str  # UpstreamLost | DeadlineExceeded | ContractMismatch | CapacityExceeded | ProtocolError
    message: str


EdgeEvent = ChunkReceived | EdgeFailed


@dataclass(frozen=True, slots=True)
class ConnectorHealth:
    healthy: bool
    detail: str
    arena_bytes: int
    arena_used_bytes: int  # by slabs that this client has put, or holds views of
    open_streams: int


class Reservation(Protocol):
    """Room in the arena for one chunk. Dropped without a put, it goes back."""

    @property
    def tensors(self) -> Mapping[str, np.ndarray]:
        """Writable arrays, uninitialised. After the put they are the consumer's: nobody writes to them any more."""


class EdgeClient(Protocol):
    async def connect(self, deadline_s: float) -> None:
        """Attach to the sidecar. Raises DeadlineExceeded with the last reason, ContractMismatch if it refuses us.

        Afterwards the client keeps itself attached; streams that were open when the sidecar went away fail.
        """

    @property
    def missing(self) -> str | None:
        """Why no stream can go now: the sidecar is gone, or refuses us. None while attached."""

    @property
    def data_endpoint(self) -> str:
        """`tcp://host:port` for this replica's Hello; known after `connect`."""

    @property
    def shared_memory_domain(self) -> str:
        """For this replica's Hello; known after `connect`."""

    async def reserve(self, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> Reservation | None:
        """Arrays in the arena, by name (shape, dtype), that a stage computes its output straight into.

        A put of exactly these arrays copies nothing. None if they do not fit now: then compute anywhere and put that.
        Names of dtypes are those of Payload.dtypes: bfloat16 comes as uint16, float8 as uint8. Raises ProtocolError
        for a dtype that may not travel.
        """

    async def put(self, request: str, edge: str, payload: Payload, reservation: Reservation | None = None) -> None:
        """Queue one chunk for whoever opens the stream (now or later). Waits for credits or arena space.

        Puts of one stream are sent in the order of the calls; a stream that waits holds up no other. The arrays are
        copied before this returns, unless they are those of the reservation. Raises DeadlineExceeded (with edge and request) if the consumer grants nothing
        for the put deadline, StreamClosed if the consumer cancelled or is gone, UpstreamLost if the sidecar is gone
        or does not come back within seconds, CapacityExceeded if the chunk is larger than any chunk may be.
        """

    async def open(self, request: str, producer: Producer) -> None:
        """Open the consumer side: chunks then arrive through `events`, in order, deduplicated, gaps reported.

        On an edge of mode fullPayload all chunks arrive together, once the last one is here. Raises UpstreamLost if
        there is no sidecar.
        """

    def events(self) -> AsyncIterator[EdgeEvent]:
        """Chunks and failures of all open streams, fair between requests. One iterator; ends after `close`."""

    async def cleanup(self, request: str) -> None:
        """The request is over in this replica. Idempotent.

        Incoming streams are cancelled and unfinished outgoing ones fail at their consumer. Outgoing streams whose
        `finished` chunk has been put go on until they are delivered: a stage that is done must not cut the tail of
        its own output off (R6, R23). No event of the request follows.
        """

    async def abort(self, request: str) -> None:
        """As cleanup, and finished outgoing streams that are not yet delivered are dropped as well."""

    async def health(self) -> ConnectorHealth: ...
    async def close(self) -> None: ...
