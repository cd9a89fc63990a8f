"""Pods of one node: an engine attaches to the sidecar of another pod through a folder of the node, as if it were its own.

Only where the profiles of both stages name such a folder (`nodeLocalVolume`), and only where both pods are on one node,
which the presence of the other's socket tells; everything else goes over the network. Streams are only consumed this way:
a producer has its own sidecar.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import msgspec

from omni_runtime.connectors import wire
from omni_runtime.connectors.attachment import Attachment
from omni_runtime.connectors.ipc import SOCKET_NAME, Refusal
from omni_runtime.connectors.line import Heard, Held, Room
from omni_runtime.connectors.node_folder import NodeFolder
from omni_runtime.connectors.receiver import Receiver
from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.connectors.wire import Put
from omni_runtime.logs import get_logger

log = get_logger(__name__)

DIAL_SECONDS: Final = 2.0
UNUSED_SECONDS: Final = 30.0  # without a stream


class Neighbours:
    """Attachments to sidecars of other pods on this node, made when a stream needs one."""

    def __init__(self, folder: NodeFolder, attach: wire.Attach, receiver: Receiver) -> None:
        self._folder = folder
        self._attach = msgspec.structs.replace(attach, near=True)
        self._receiver = receiver
        self._attachments: dict[str, Attachment] = {}  # by domain
        self._used_at: dict[str, float] = {}
        self._dialling: dict[str, asyncio.Lock] = {}
        self._closed = False

    async def to(self, domain: str) -> Attachment | None:
        """None: the pod is not on this node, or its sidecar does not have us. Then there is the network."""
        self._used_at[domain] = asyncio.get_running_loop().time()
        path = self._folder.of(domain) / SOCKET_NAME
        async with self._dialling.setdefault(domain, asyncio.Lock()):
            known = self._attachments.get(domain)
            if known is not None or self._closed or not path.exists():
                return known
            try:
                attachment = await self._dial(path)
            except (OSError, TimeoutError, ProtocolError, Refusal) as error:
                log.warning("neighbour.unreachable", domain=domain, reason=str(error) or type(error).__name__)
                return None
            self._attachments[domain] = attachment
            log.info("neighbour.attached", domain=domain)
            return attachment

    async def _dial(self, path: Path) -> Attachment:
        heard = Heard(self._receiver.on_direct, _no_room, _none_refused, _none_lost)
        attachment = await Attachment.open(
            path, self._attach, DIAL_SECONDS, self._on_frame, lambda _: heard, self._lost
        )
        if not await attachment.ping(DIAL_SECONDS):
            attachment.close()
            raise TimeoutError(attachment.lost or "it attached this engine and then said nothing")
        return attachment

    def _on_frame(self, attachment: Attachment, header: bytes, body: bytes) -> None:
        message = wire.decode_to_engine(header)
        match message:
            case Put():
                self._receiver.on_put(attachment, message, body)
            case wire.Failed(number, code, text):
                self._receiver.on_failed(attachment, number, code, text)
            case wire.Pong():
                attachment.on_pong()
            case wire.Squeeze():
                pass  # nothing is put there
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__}")

    def _lost(self, attachment: Attachment, reason: str) -> None:
        attachment.end(reason)
        for domain in [d for d, a in self._attachments.items() if a is attachment]:
            del self._attachments[domain]
            log.info("neighbour.lost", domain=domain, reason=reason)
        if not self._closed:
            self._receiver.sidecar_lost(attachment, reason)

    def tick(self, now: float) -> None:
        """An attachment without streams is given up after a while."""
        for domain, attachment in list(self._attachments.items()):
            if self._receiver.uses(attachment):
                self._used_at[domain] = now
            elif now - self._used_at[domain] > UNUSED_SECONDS:
                attachment.close()
        for domain in [
            d for d in self._used_at if d not in self._attachments and now - self._used_at[d] > UNUSED_SECONDS
        ]:
            del self._used_at[domain]
            self._dialling.pop(domain, None)

    def close(self) -> None:
        self._closed = True
        for attachment in list(self._attachments.values()):
            attachment.close()


def _no_room(_: Room) -> None:
    """Nothing is put there."""


def _none_refused(_: list[Held]) -> None:
    """Nothing is put there."""


def _none_lost(_: int) -> None:
    """It leads to no other pod."""
