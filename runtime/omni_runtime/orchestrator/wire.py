"""The orchestrator's socket: bytes in, messages out, and back. Knows nothing of requests or pools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import zmq

from omni_runtime.logs import get_logger
from omni_runtime.protocol import control
from omni_runtime.protocol.channels import Channels, bound_port

log = get_logger(__name__)

BURST = 64  # messages handled before other tasks get their turn

Take = Callable[[bytes, control.StageMessage], None]


class ControlSocket:
    """A ROUTER with CURVE. A peer is the routing id of one connection."""

    def __init__(self, channels: Channels, endpoint: str) -> None:
        self._channels = channels
        self._router = channels.serve(zmq.ROUTER, endpoint)

    @property
    def port(self) -> int:
        return bound_port(self._router)

    def close(self) -> None:
        self._channels.release(self._router)

    async def receive(self, take: Take) -> None:
        """Hand every message to `take`, for ever. What cannot be decoded is answered with a reason."""
        handled = 0
        while True:
            frames = await self._router.recv_multipart()
            try:
                self._decode(frames, take)
            except Exception:  # one replica's message must not end the service of all others
                log.exception("orchestrator.message_failed")
            handled += 1
            if handled % BURST == 0:
                await asyncio.sleep(0)

    def _decode(self, frames: list[bytes], take: Take) -> None:
        peer, raw = frames[0], frames[-1]
        try:
            message = control.decode_stage_message(raw)
        except msgspec.DecodeError as error:
            log.warning("orchestrator.undecodable", error=str(error), bytes=len(raw))
            self.send(peer, control.Refused(f"message cannot be decoded: {error}; use images of one release"))
            return
        take(peer, message)

    def send(self, peer: bytes, message: control.OrchestratorMessage) -> bool:
        """Hand one message to the socket; never blocks. False: the peer's connection is closed."""
        future = self._router.send_multipart([peer, control.encode(message)])
        assert isinstance(future, asyncio.Future)
        if not future.done():  # there is no high-water mark, so this is a closing context
            future.cancel()
            return False
        error = future.exception()
        if error is None:
            return True
        if isinstance(error, zmq.ZMQError) and error.errno == zmq.EHOSTUNREACH:
            return False
        raise error
