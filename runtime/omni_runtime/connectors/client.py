"""SidecarEdgeClient: the stage worker's end of the connector (connectors.api.EdgeClient)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final

from omni_runtime.connectors import wire
from omni_runtime.connectors.api import ConnectorHealth, EdgeEvent, Reservation
from omni_runtime.connectors.attachment import Attachment
from omni_runtime.connectors.ipc import SOCKET_NAME, Refusal
from omni_runtime.connectors.limits import ClientLimits
from omni_runtime.connectors.line import Heard
from omni_runtime.connectors.neighbours import Neighbours
from omni_runtime.connectors.node_folder import NodeFolder
from omni_runtime.connectors.receiver import Events, Receiver
from omni_runtime.connectors.sender import Sender
from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.connectors.wire import WINDOW_PIECES, Put
from omni_runtime.deploy.plan import CONTRACT_VERSION, ResolvedPlan
from omni_runtime.errors import DeadlineExceeded, OmniError, StreamClosed, UpstreamLost, by_code
from omni_runtime.logs import get_logger
from omni_runtime.protocol.control import Producer
from omni_runtime.protocol.payload import Payload

__all__ = ["ClientLimits", "SidecarEdgeClient"]

log = get_logger(__name__)

_TICK_SECONDS: Final = 0.25
_DIAL_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
_HELD_SECONDS: Final = 1.0  # an attachment that ends sooner counts as one that failed


class SidecarEdgeClient:
    """See connectors.api.EdgeClient. Create it, and use it, inside one running loop."""

    def __init__(
        self,
        ipc_dir: Path,
        plan: ResolvedPlan,
        stage: str,
        replica: str,
        limits: ClientLimits | None = None,
        node: NodeFolder | None = None,
    ) -> None:
        self._path = ipc_dir / SOCKET_NAME
        self._plan = plan
        self._attach = wire.Attach(stage, replica, plan.revision, CONTRACT_VERSION)
        self._full_payload = {edge.name for edge in plan.edges if edge.mode == "fullPayload"}
        self._near = {edge.name for edge in plan.edges if edge.near}
        self._limits = limits or ClientLimits()
        numbers = itertools.count(1)
        self._sender = Sender(self._limits, numbers, self._current, self._attached_soon)
        self._receiver = Receiver(self._limits, numbers)
        self._neighbours = None if node is None else Neighbours(node, self._attach, self._receiver)
        self._attachment: Attachment | None = None
        self._changed = asyncio.Event()  # attached, refused, or given up
        self._why_not = "not tried yet"
        self._refusal: OmniError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    # --- the sidecar

    async def connect(self, deadline_s: float) -> None:
        if not self._tasks:
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._keep_attached()), loop.create_task(self._watch_deadlines())]
        await self._attached(deadline_s)

    @property
    def missing(self) -> str | None:
        if self._attachment is not None and self._attachment.lost is None:
            return None
        return f"no connector sidecar at {self._path}: {self._why_not}"

    @property
    def data_endpoint(self) -> str:
        return self._last_attached().endpoint

    @property
    def shared_memory_domain(self) -> str:
        return self._last_attached().domain

    def _last_attached(self) -> wire.Attached:
        if self._attachment is None:
            raise RuntimeError("connect() first: the sidecar tells its endpoint and domain")
        return self._attachment.attached

    def _current(self) -> Attachment | None:
        attachment = self._attachment
        return attachment if attachment is not None and attachment.lost is None and not self._closed else None

    async def _attached(self, deadline_s: float) -> Attachment:
        deadline = asyncio.get_running_loop().time() + deadline_s
        while True:
            attachment = self._attachment
            if attachment is not None and attachment.lost is None:
                return attachment
            if self._closed:
                raise StreamClosed("the connector client is closed")
            if self._refusal is not None:
                raise self._refusal
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"no connector sidecar at {self._path} within {deadline_s:g} s: {self._why_not}"
                ) from None

    async def _attached_soon(self) -> Attachment:
        """For a stream: a sidecar that restarts is back within seconds, and a request should not wait for another."""
        try:
            return await self._attached(self._limits.attach_wait_s)
        except DeadlineExceeded as error:
            raise UpstreamLost(str(error)) from None

    async def _keep_attached(self) -> None:
        failures = 0
        loop = asyncio.get_running_loop()
        while not self._closed:
            lost = asyncio.Event()
            try:
                attachment = await self._attach_once(lost)
            except Refusal as refusal:
                self._why_not = str(refusal)
                self._refusal = by_code(refusal.code)(f"the connector sidecar refused this engine: {refusal}")
            except (OSError, TimeoutError, ProtocolError) as error:
                self._why_not = str(error) or type(error).__name__
            else:
                self._refusal = None
                self._attachment = attachment
                self._changed.set()
                log.info("connector.attached", endpoint=attachment.attached.endpoint)
                since = loop.time()
                await lost.wait()
                if loop.time() - since > _HELD_SECONDS:
                    failures = 0
                    continue
            self._changed.set()
            await asyncio.sleep(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)])
            failures += 1

    async def _attach_once(self, lost: asyncio.Event) -> Attachment:
        def on_lost(attachment: Attachment, reason: str) -> None:
            self._on_lost(attachment, reason)
            lost.set()

        attachment = await Attachment.open(
            self._path,
            self._attach,
            _DIAL_SECONDS,
            self._on_frame,
            self._heard,
            on_lost,
        )
        if not await attachment.ping(_DIAL_SECONDS):  # only a sidecar that answers is one
            attachment.close()
            raise TimeoutError(self._why_not if attachment.lost else "it attached this engine and then said nothing")
        return attachment

    def _heard(self, attachment: Attachment) -> Heard:
        def lost(session: int) -> None:
            self._sender.line_lost(attachment, session)
            self._receiver.line_lost(attachment, session)

        return Heard(self._receiver.on_direct, self._sender.on_room, self._sender.on_refused, lost)

    def _on_lost(self, attachment: Attachment, reason: str) -> None:
        attachment.end(reason)
        self._why_not = f"connection lost: {reason}"
        if not self._closed:
            log.warning("connector.lost", reason=reason)
            self._sender.sidecar_lost(attachment, reason)
            self._receiver.sidecar_lost(attachment, reason)

    def _on_frame(self, attachment: Attachment, header: bytes, body: bytes) -> None:
        message = wire.decode_to_engine(header)
        match message:
            case Put():
                self._receiver.on_put(attachment, message, body)
            case wire.Credit(number, pieces):
                self._sender.on_credit(number, pieces)
            case wire.Paired():
                self._sender.on_paired(message)
            case wire.Lined(session):
                attachment.want_line(session)
            case wire.Freed(slabs):
                attachment.on_freed(slabs)
            case wire.Squeeze():
                attachment.squeeze()
            case wire.Extent():
                attachment.on_extent(message)
            case wire.Failed(number, code, text):
                self._sender.on_failed(number, code, text)
                self._receiver.on_failed(attachment, number, code, text)
            case wire.Pong():
                attachment.on_pong()
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__}")

    async def _watch_deadlines(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._receiver.check_deadlines(loop.time())
            self._sender.check_deadlines(loop.time())
            self._sender.report()
            self._receiver.report()
            if self._attachment is not None:
                self._attachment.tick(loop.time())
            if self._neighbours is not None:
                self._neighbours.tick(loop.time())

    # --- streams

    async def reserve(self, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> Reservation | None:
        return await self._sender.reserve(shapes)

    def put(
        self, request: str, edge: str, payload: Payload, reservation: Reservation | None = None
    ) -> Coroutine[Any, Any, None]:
        return self._sender.put(request, edge, payload, reservation)

    async def open(self, request: str, producer: Producer) -> None:
        attachment = await self._attached_soon()
        elsewhere = producer.shared_memory_domain != attachment.attached.domain
        if elsewhere and self._neighbours is not None and producer.edge in self._near:
            attachment = await self._neighbours.to(producer.shared_memory_domain) or attachment
        if self._sender.is_over(request):
            raise StreamClosed(f"open of {producer.edge}: request {request} is over in this replica")
        withhold = producer.edge in self._full_payload
        far = producer.shared_memory_domain != attachment.attached.domain
        id = request, producer.edge
        stream = self._receiver.new(id, producer.replica, attachment, withhold=withhold, far=far)
        attachment.send(
            wire.Open(
                stream=stream.number,
                edge=producer.edge,
                request=request,
                producer=producer.replica,
                consumer=self._attach.replica,
                endpoint=producer.data_endpoint,
                domain=producer.shared_memory_domain,
                revision=self._plan.revision,
                contract_version=CONTRACT_VERSION,
                credits=WINDOW_PIECES,
                token=stream.token,
            )
        )

    def events(self) -> AsyncIterator[EdgeEvent]:
        return Events(self._receiver.next_event)

    async def cleanup(self, request: str) -> None:
        self._receiver.end_request(request, "cleanup")
        self._sender.end_request(request, "cleanup", drop_finished=False)

    async def abort(self, request: str) -> None:
        self._receiver.end_request(request, "abort")
        self._sender.end_request(request, "abort", drop_finished=True)

    async def health(self) -> ConnectorHealth:
        attachment, streams = self._attachment, len(self._sender) + len(self._receiver)
        if attachment is None or attachment.lost is not None or not await attachment.ping(1.0):
            return ConnectorHealth(False, f"no connector sidecar: {self._why_not}", 0, 0, streams)
        used = attachment.pool.used_bytes + attachment.pinned_bytes
        return ConnectorHealth(True, "attached", attachment.arena.length, used, streams)

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        self._sender.close()
        self._receiver.close()
        if self._neighbours is not None:
            self._neighbours.close()
        if self._attachment is not None:
            self._attachment.close()
        self._changed.set()
