"""A ZeroMQ socket in an asyncio loop, without a future per message: one wake-up hands over all that has arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio

from omni_runtime.logs import get_logger

log = get_logger(__name__)

BURST = 64  # messages handed over before other callbacks of the loop get their turn

Take = Callable[[list[bytes]], None]


class Mailbox:
    """Takes over `socket`: its own futures must not be used any more. Whoever made the socket closes it, after `close`.

    `take` gets the frames of each message, in order, inside the loop. If it raises, the message is logged and dropped:
    one peer must not end the service of all others.
    """

    def __init__(self, socket: zmq.asyncio.Socket, take: Take) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._planned: asyncio.Handle | None = None
        self._loop.add_reader(self._descriptor, self.drain)
        self._plan()  # what came before is not announced again

    def close(self) -> None:
        """Nothing is taken or sent after this."""
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        if self._planned is not None:
            self._planned.cancel()
        self._take = _ignore

    def send(self, frames: Sequence[bytes]) -> None:
        """Hand one message to the socket; never blocks. Raises zmq.ZMQError: EHOSTUNREACH for a peer that is gone."""
        self._socket.send_multipart(frames, zmq.NOBLOCK)
        # The descriptor tells of a change once, and sending may have used that up.
        if self._planned is None and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._plan()

    def _plan(self) -> None:
        self._planned = self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Hand over what has arrived; the loop calls it, too."""
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
        for _ in range(BURST):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                if error.errno in (zmq.ETERM, zmq.ENOTSOCK):  # closed under us: the process is ending
                    self.close()
                    return
                raise
            try:
                self._take(frames)
            except Exception:
                log.exception("mailbox.message_failed")
        self._plan()


def _ignore(_: list[bytes]) -> None:
    pass
