"""A very small HTTP server for probes and metrics: a web framework would cost more memory than the sidecar has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final

Response = tuple[HTTPStatus, str, bytes]  # status, content type, body
Handler = Callable[[], Response]

_READ_SECONDS: Final = 5.0
_MAX_REQUEST: Final = 8192
_MAX_CONNECTIONS: Final = 64


def text(status: HTTPStatus, body: str) -> Response:
    return status, "text/plain; charset=utf-8", body.encode()


class ProbeServer:
    """GET only, one request a connection."""

    def __init__(self, routes: Mapping[str, Handler]) -> None:
        self._routes = routes
        self._server: asyncio.Server | None = None
        self._open = 0

    async def start(self, host: str, port: int) -> int:
        """Returns the port."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_REQUEST)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= _MAX_CONNECTIONS:
                async with asyncio.timeout(_READ_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                    status, kind, body = self._answer(head)
                    writer.write(
                        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
                        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                        + body
                    )
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a prober that went away, or a slow one
        finally:
            self._open -= 1
            writer.close()

    def _answer(self, head: bytes) -> Response:
        parts = head.split(b"\r\n", 1)[0].split(b" ")
        if len(parts) != 3 or parts[0] != b"GET":
            return text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET\n")
        handler = self._routes.get(parts[1].split(b"?", 1)[0].decode("ascii", "replace"))
        return handler() if handler is not None else text(HTTPStatus.NOT_FOUND, "not found\n")

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
