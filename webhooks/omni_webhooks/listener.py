"""The socket of the admission server: it knows each connection from the moment at which the kernel took it.

asyncio's own server tells nobody of a connection whose handshake goes on, and cuts it when it ends. Here a connection that
was led to this replica is answered, also one that waited while the process stood still.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable

from aiohttp import web

from omni_webhooks import logs

BACKLOG = 1024
HANDSHAKE_SECONDS = 10.0  # the API server gives up on a call after 5
RETRY_SECONDS = 1.0  # to accept, after the process ran out of files
LAST_SECONDS = 2.0  # for what is open at the end; whoever ends has waited for calls before
SHUTDOWN_SECONDS = 0.5  # for what is cut nevertheless
TICKS = 10


async def ticks(seconds: float, over: Callable[[], bool]) -> bool:
    """Until `over`, for so many seconds at most; whether it is over. They are counted in pieces: a process that stood still
    has looked at nothing meanwhile, and loses one of them, not all."""
    for _ in range(TICKS):
        if over():
            return True
        await asyncio.sleep(seconds / TICKS)
    return over()


class Listener:
    """Serves an application with TLS. came: called with each connection. The certificate may be exchanged at any time."""

    def __init__(self, app: web.Application, context: ssl.SSLContext, came: Callable[[], None]) -> None:
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
        self._context, self._came = context, came
        self._socket: socket.socket | None = None
        self._shaking: set[asyncio.Task[None]] = set()  # hands

    async def start(self, host: str, port: int) -> None:
        await self._runner.setup()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self._listen()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [] if self._socket is None else [self._socket.getsockname()[:2]]

    async def close(self) -> None:
        """Take what the kernel holds, then no more; end when everything that came is answered, or asks nothing."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._accept(self._socket)
            self._socket.close()
            self._socket = None
        if not await ticks(LAST_SECONDS, lambda: not self._shaking and not self._open()):
            logs.info("webhooks.connections_cut", shaking_hands=len(self._shaking), open=self._open())
        for task in self._shaking:
            task.cancel()
        await asyncio.gather(*self._shaking, return_exceptions=True)
        await self._runner.cleanup()

    def _open(self) -> int:
        server = self._runner.server
        return 0 if server is None else len(server.connections)

    def _listen(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket, self._accept, self._socket)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(BACKLOG):
            try:
                connection, _ = listening.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                # The socket stays readable: without a pause, the loop would do nothing else.
                logs.warning("webhooks.not_accepted", error=str(error))
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(RETRY_SECONDS, self._listen)
                return
            self._came()
            task = asyncio.create_task(self._shake_hands(connection))
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

    async def _shake_hands(self, connection: socket.socket) -> None:
        server = self._runner.server
        assert server is not None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                server, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError:
            return  # of TLS, too: whoever came does not trust us, or went away
