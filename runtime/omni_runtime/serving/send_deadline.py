"""ASGI middleware: a client that does not read is given up, and cannot keep an answer in memory for hours.

A server waits for its client's window before it takes the next piece. Large bodies go out in pieces, so that each has a
deadline of its own and a slow line is no reason to fail.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

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

        async def send_piece(message: Message) -> None:
            try:
                async with asyncio.timeout(self._seconds):
                    await send(message)
            except TimeoutError:
                raise SlowClient from None

        async def send_in_pieces(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) <= PIECE_BYTES:
                await send_piece(message)
                return
            last = (len(body) - 1) // PIECE_BYTES * PIECE_BYTES
            for start in range(0, last, PIECE_BYTES):
                await send_piece({**message, "body": body[start : start + PIECE_BYTES], "more_body": True})
            await send_piece({**message, "body": body[last:]})

        try:
            await self._app(scope, receive, send_in_pieces)
        except SlowClient:  # the server closes the connection: there is no telling a client that does not read
            log.warning("request.slow_client", path=scope["path"], seconds=self._seconds)
