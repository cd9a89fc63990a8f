"""The answer of a request on its way to the client; who leaves or does not read ends the request on every stage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from omni_runtime.errors import OmniError
from omni_runtime.orchestrator.actions import Emit
from omni_runtime.orchestrator.calls import CLIENT_DISCONNECT, SLOW_CLIENT, Output, RequestHandle
from omni_runtime.orchestrator.values import CodesPiece
from omni_runtime.serving.collect import Collected
from omni_runtime.serving.send_deadline import SlowClient

T = TypeVar("T")


class RequestStream(StreamingResponse):
    """A body that ends with its request: whatever ends the one ends the other (R16).

    The server stops pulling at a client that does not read: outputs then wait in the handle's queue, which is bounded,
    until `SendDeadline` gives the client up.
    """

    def __init__(
        self, handle: RequestHandle, body: AsyncIterator[bytes], media_type: str = "text/event-stream", **options: Any
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **options.pop("headers", {})}
        super().__init__(body, media_type=media_type, headers=headers, **options)
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not StreamingResponse's own way, a task group per answer: whoever leaves ends the request, and that the body.
        gone = asyncio.ensure_future(_end_with_client(receive, self._handle))
        reason = CLIENT_DISCONNECT
        try:
            await self.stream_response(send)
        except OmniError:  # a body without a place for errors: the connection breaks off, and the log has the reason
            pass
        except SlowClient:
            reason = SLOW_CLIENT
            raise
        finally:
            gone.cancel()
            self._handle.cancel(reason)


async def unless_gone(request: Request, handle: RequestHandle, work: Awaitable[T]) -> T:
    """The result of `work`, which reads the handle's outputs. When the client goes, the request is aborted, and `work`
    gets its StreamClosed (R16)."""
    gone = asyncio.ensure_future(_end_with_client(request.receive, handle))
    try:
        return await work
    finally:
        gone.cancel()


async def _end_with_client(receive: Receive, handle: RequestHandle) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    handle.cancel(CLIENT_DISCONNECT)


async def collect(request: Request, handle: RequestHandle) -> Collected:
    """Everything that the request gives. Raises its error."""
    return await unless_gone(request, handle, _collect(handle))


async def _collect(handle: RequestHandle) -> Collected:
    collected = Collected()
    async for output in handle.outputs():
        collected.add(output)
    return collected


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A request of which something has come for the client; or nothing ever will, and it has ended well."""

    head: tuple[Output, ...]
    _rest: AsyncIterator[Output]

    async def outputs(self) -> AsyncIterator[Output]:
        for output in self.head:
            yield output
        async for output in self._rest:
            yield output


async def begin(request: Request, handle: RequestHandle) -> Opened:
    """Wait for the first piece: what fails before it is an HTTP status, not a broken stream."""
    outputs = handle.outputs()
    return Opened(await unless_gone(request, handle, _head(outputs)), outputs)


async def _head(outputs: AsyncIterator[Output]) -> tuple[Output, ...]:
    """Up to the first text or sound; codes come earlier, and stages may end before another one emits anything."""
    head = []
    async for output in outputs:
        head.append(output)
        if isinstance(output, Emit) and not isinstance(output.piece, CodesPiece):
            break
    return tuple(head)
