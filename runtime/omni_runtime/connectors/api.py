"""OmniConnector as a stage worker sees it (report section 2.5): put, get, cleanup, health over edge streams. Torch-free.

A worker holds one `EdgeClient` to the pod's connector sidecar. All methods are for one asyncio loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from omni_runtime.protocol.control import Producer
from omni_runtime.protocol.payload import Payload


@dataclass(frozen=True, slots=True, eq=False)
class ChunkReceived:
    request: str
    edge: str
    seq: int
    payload: Payload
    transfer_seconds: float


@dataclass(frozen=True, slots=True)
class EdgeFailed:
    request: str
    edge: str
    code: str  # UpstreamLost | DeadlineExceeded | ContractMismatch | ProtocolError
    message: str


EdgeEvent = ChunkReceived | EdgeFailed


@dataclass(frozen=True, slots=True)
class ConnectorHealth:
    healthy: bool
    detail: str
    arena_bytes: int
    arena_used_bytes: int
    open_streams: int


class EdgeClient(Protocol):
    async def connect(self, deadline_s: float) -> None: ...

    async def put(self, request: str, edge: str, payload: Payload) -> None:
        """Queue one chunk for whoever opens the stream (now or later). Waits for credits or arena space.

        Raises DeadlineExceeded (with edge and request) if the consumer grants nothing for the put deadline,
        and StreamClosed if the consumer cancelled.
        """

    async def open(self, request: str, producer: Producer) -> None:
        """Open the consumer side: chunks then arrive through `events`, in order, deduplicated, gaps reported."""

    def events(self) -> AsyncIterator[EdgeEvent]: ...

    async def cleanup(self, request: str) -> None:
        """Drop every stream, queued chunk and arena slab of a request, as producer and as consumer. Idempotent."""

    async def health(self) -> ConnectorHealth: ...
    async def close(self) -> None: ...
