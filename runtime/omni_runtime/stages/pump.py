"""One outgoing edge stream of one request: chunks go to the connector in order, at the consumer's pace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omni_runtime.connectors.api import EdgeClient
from omni_runtime.connectors.wire import INLINE_BYTES
from omni_runtime.errors import OmniError, StreamClosed
from omni_runtime.logs import get_logger
from omni_runtime.protocol.payload import Payload

log = get_logger(__name__)


class Pump:
    """Puts the chunks of one edge stream in order, at the consumer's pace."""

    def __init__(
        self,
        edges: EdgeClient,
        request: str,
        edge: str,
        done: Callable[[str, str], None],
        closed: Callable[[str, str], None],
        failed: Callable[[str, str, str, str], None],
    ) -> None:
        self._edges, self._request, self._edge = edges, request, edge
        self._done, self._closed, self._failed = done, closed, failed
        self._queue: asyncio.Queue[Payload] = asyncio.Queue()
        self.task = asyncio.create_task(self._run(), name=f"pump {edge}")

    def add(self, payload: Payload) -> None:
        self._queue.put_nowait(payload)

    @property
    def waiting(self) -> int:
        """Chunks that the consumer has not taken yet."""
        return self._queue.qsize()

    async def _put(self, payload: Payload) -> None:
        """Parts are joined in the arena, so that their bytes are copied once."""
        if sum(piece.nbytes for pieces in payload.parts.values() for piece in pieces) <= INLINE_BYTES:
            await self._edges.put(self._request, self._edge, payload.joined())
            return
        room = await self._edges.reserve(payload.shapes())
        payload = payload.joined(room.tensors if room is not None else None)
        await self._edges.put(self._request, self._edge, payload, room)

    async def _run(self) -> None:
        finished = False
        while not finished:
            payload = await self._queue.get()
            finished = payload.finished
            try:
                await self._put(payload)
            except StreamClosed as error:
                log.info("edge.closed_by_consumer", request=self._request, edge=self._edge, reason=str(error))
                self._closed(self._request, self._edge)
                return
            except OmniError as error:
                self._failed(self._request, self._edge, error.code, str(error))
                return
            self._done(self._request, self._edge)
