"""The orchestrator's socket: bytes in, messages out, and back. Knows nothing of requests or pools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import zmq

from omni_runtime.logs import get_logger
from omni_runtime.protocol import control
from omni_runtime.protocol.channels import Channels, bound_port
from omni_runtime.protocol.mailbox import Mailbox

log = get_logger(__name__)

FAREWELL_MS = 500  # for what was said last to leave a closing socket

Take = Callable[[bytes, control.StageMessage], None]


class ControlSocket:
    """A ROUTER with CURVE. A peer is the routing id of one connection."""

    def __init__(self, channels: Channels, endpoint: str) -> None:
        self._channels = channels
        self._router = channels.serve(zmq.ROUTER, endpoint)
        self._take: Take = _too_early
        self._mailbox = Mailbox(self._router, self._decode)

    @property
    def port(self) -> int:
        return bound_port(self._router)

    def close(self) -> None:
        self._mailbox.close()
        self._channels.release(self._router, linger_ms=FAREWELL_MS)  # aborts free the replicas' places at once

    async def receive(self, take: Take) -> None:
        """Hand every message to `take`, until cancelled. What cannot be decoded is answered with a reason."""
        self._take = take
        await asyncio.get_running_loop().create_future()

    def _decode(self, frames: list[bytes]) -> None:
        peer, raw = frames[0], frames[-1]
        try:
            messages = control.decode_stage_messages(raw)
        except msgspec.DecodeError as error:
            log.warning("orchestrator.undecodable", error=str(error), bytes=len(raw))
            self.send(peer, control.Refused(f"message cannot be decoded: {error}; use images of one release"))
            return
        for message in messages:
            try:
                self._take(peer, message)
            except Exception:  # what else the replica said at that moment is about other requests
                request = getattr(message, "request", None)
                log.exception("orchestrator.message_failed", kind=type(message).__name__, request=request)

    def send(self, peer: bytes, message: control.OrchestratorMessage) -> bool:
        """Hand one message to the socket; never blocks. False: the peer's connection is closed."""
        try:
            self._mailbox.send((peer, control.encode(message)))
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True


def _too_early(_: bytes, message: control.StageMessage) -> None:
    """Before anybody listens nothing is registered; replicas say hello again."""
