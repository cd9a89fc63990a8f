"""ASGI middleware: a client that does not read is given up, and cannot keep an answer in memory for hours.

A server waits for its client's window before it takes the next piece. Large bodies go out in pieces, so that each has a
deadline of its own and a slow line is no reason to fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from omni_runtime.logs import get_logger

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = get_logger(__name__)

PIECE_BYTES = 64 << 10


class SlowClient(Exception):
    """The client took nothing of one piece of its answer within the deadline."""


class SendDeadline:
    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        watch = _Watch(self._seconds)

        async def send_in_pieces(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) <= PIECE_BYTES:
                await watch.over(send(message))
                return
            last = (len(body) - 1) // PIECE_BYTES * PIECE_BYTES
            for start in range(0, last, PIECE_BYTES):
                await watch.over(send({**message, "body": body[start : start + PIECE_BYTES], "more_body": True}))
            await watch.over(send({**message, "body": body[last:]}))

        try:
            await self._app(scope, receive, send_in_pieces)
        except SlowClient:  # the server closes the connection: there is no telling a client that does not read
            log.warning("request.slow_client", path=scope["path"], seconds=self._seconds)
        finally:
            watch.end()


class _Watch:
    """A deadline for each of many short waits of one task, with a timer for all of them: most end at once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Task[Any] | None = None
        self._since = 0.0
        self._expired = False
        self._timer: asyncio.TimerHandle | None = None

    async def over(self, wait: Awaitable[None]) -> None:
        """Raises SlowClient."""
        self._since = self._loop.time()
        self._waiting = task = asyncio.current_task()
        if self._timer is None:
            self._timer = self._loop.call_at(self._since + self._seconds, self._look)
        try:
            await wait
        except asyncio.CancelledError:
            if self._expired and task is not None and task.uncancel() == 0:
                raise SlowClient from None
            raise
        finally:
            self._waiting = None

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self._waiting is None else self._since
        if self._waiting is not None and now - since >= self._seconds:
            self._expired = True
            self._waiting.cancel()
        else:
            self._timer = self._loop.call_at(since + self._seconds, self._look)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
