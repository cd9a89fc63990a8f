"""KV caches through an EdgeClient: what its reservations, credits and deadlines mean for a cache.

A stage that has its own loop over `events` gives the KV streams' events to `KvReceiver.feed`, or its payloads to a
`KvInjector`; who has a client for KV caches alone uses `async with KvReceiver(client)`.
"""

from __future__ import annotations

import asyncio
import contextlib
from itertools import groupby
from types import TracebackType

import numpy as np

from omni_runtime.connectors.api import ChunkReceived, EdgeClient, EdgeEvent
from omni_runtime.errors import OmniError, StreamClosed, by_code
from omni_runtime.kv.injection import KvInjector
from omni_runtime.kv.layout import Span, cut
from omni_runtime.kv.stores import KvStore, common
from omni_runtime.protocol.control import Producer
from omni_runtime.protocol.payload import Payload
from omni_runtime.topology.types import KV_CHUNK_BYTES


class KvSender:
    """One request's cache onto one edge, as it comes to be: `advance` whenever more of it is computed.

    start: tokens that the consumer has already. heads: what to send of the store's, all by default. Several senders
    (one a shard, say) may share a stream; then all but the last to end leave `last` away.
    """

    def __init__(
        self,
        client: EdgeClient,
        request: str,
        edge: str,
        store: KvStore,
        *,
        start: int = 0,
        heads: range | None = None,
        chunk_bytes: int = KV_CHUNK_BYTES,
    ) -> None:
        self._client, self._request, self._edge, self._store = client, request, edge, store
        self._start, self._chunk_bytes = start, chunk_bytes
        self._heads = store.heads if heads is None else heads
        if common(self._heads, store.heads) != self._heads:
            raise ValueError(f"heads {self._heads} of a store that has {store.heads}")
        self._sent = [start] * store.layout.layers
        self._announced = False

    async def advance(self, stop: int, *, layers: range | None = None, last: bool = False) -> None:
        """The tokens before `stop` are computed, in these layers (all by default): send what has not been sent.

        Written from the blocks straight into the arena. last: the cache ends here. Raises as EdgeClient.put; whatever
        is raised, the stream has failed at its consumer and the request is over in this client.
        """
        try:
            await self._advance(stop, range(len(self._sent)) if layers is None else layers, last)
        except BaseException:
            await self._client.cleanup(self._request)
            raise

    async def _advance(self, stop: int, layers: range, last: bool) -> None:
        if stop > self._store.capacity:
            raise ValueError(f"tokens up to {stop} of a store with room for {self._store.capacity}")
        behind = [n for n, sent in enumerate(self._sent) if sent > stop or (last and n not in layers and sent < stop)]
        if behind:
            raise ValueError(f"layer {behind[0]} is at token {self._sent[behind[0]]}, and not at {stop}")
        spans: list[Span] = []
        for at, group in groupby(layers, self._sent.__getitem__):
            span = Span(_range(list(group)), self._heads, range(at, stop))
            spans += cut(self._store.layout, span, self._chunk_bytes)
        for n, span in enumerate(spans):
            await self._send(span, finished=last and n == len(spans) - 1)
            await asyncio.sleep(0)  # a put with credit and room waits for nothing, and others have their turn
        if last and not spans:
            nothing = Span(range(0), self._heads, range(stop, stop))
            await self._client.put(self._request, self._edge, self._payload(nothing, None, finished=True))

    async def _send(self, span: Span, *, finished: bool) -> None:
        layout = self._store.layout
        shape = span.shape(layout)
        room = await self._client.reserve({"kv": (shape, layout.dtype)})
        array = np.empty(shape, layout.carrier) if room is None else room.tensors["kv"]
        self._store.read(span, array)
        await self._client.put(self._request, self._edge, self._payload(span, array, finished=finished), room)
        for layer in span.layers:
            self._sent[layer] = span.tokens.stop

    def _payload(self, span: Span, array: np.ndarray | None, *, finished: bool) -> Payload:
        meta: dict[str, object] = {}
        if not self._announced:
            meta = {**self._store.layout.meta(), "kv_start": self._start}
            self._announced = True
        if array is not None:
            meta |= {"kv_layer": span.layers.start, "kv_head": span.heads.start}
        if finished:
            meta["kv_stop"] = span.tokens.stop
        tensors = {} if array is None else {"kv": array}
        dtypes = {} if array is None else self._store.layout.dtypes
        return Payload(span.tokens.start, len(span.tokens), finished, tensors, meta, dtypes)


async def send_kv(
    client: EdgeClient,
    request: str,
    edge: str,
    store: KvStore,
    tokens: range,
    *,
    chunk_bytes: int = KV_CHUNK_BYTES,
) -> None:
    """A cache that is whole. Raises as KvSender.advance."""
    sender = KvSender(client, request, edge, store, start=tokens.start, chunk_bytes=chunk_bytes)
    await sender.advance(tokens.stop, last=True)


class KvReceiver:
    """The KV streams of one client, any number at once."""

    def __init__(self, client: EdgeClient) -> None:
        self._client = client
        self._open: dict[tuple[str, str], tuple[KvInjector, asyncio.Future[None]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> KvReceiver:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def receive(self, injector: KvInjector, producer: Producer) -> None:
        """Open the stream and return when the cache is complete.

        Raises ContractMismatch or ProtocolError as KvInjector.accept, and what the stream failed with: DeadlineExceeded
        by the client's deadline, UpstreamLost, ... Whatever is raised, the request is over in this client and
        `injector.unusable` says which blocks have been written.
        """
        key = injector.request, injector.edge
        if producer.edge != injector.edge or key in self._open:
            raise StreamClosed(f"{key[1]} of request {key[0]} is received already, or is not {producer.edge}")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[key] = injector, done
        try:
            await self._client.open(injector.request, producer)
            await done
        except BaseException as error:
            injector.abandon(f"broken off: {str(error) or type(error).__name__}")
            await self._client.cleanup(injector.request)
            raise
        finally:
            del self._open[key]

    def feed(self, event: EdgeEvent) -> bool:
        """An event of the client; whether it was of a stream that is received here. Keeps nothing of a chunk."""
        injector, done = self._open.get((event.request, event.edge), (None, None))
        if injector is None or done is None:
            return False
        if done.done():
            return True
        if not isinstance(event, ChunkReceived):
            done.set_exception(by_code(event.code)(event.message))
            return True
        try:
            injector.accept(event.payload)
        except OmniError as error:
            done.set_exception(type(error)(str(error)))  # a new one: the traceback of this one keeps the chunk
        else:
            if injector.complete:
                done.set_result(None)
        return True

    async def _run(self) -> None:
        try:
            async for event in self._client.events():
                self.feed(event)
                del event  # it would keep its place in the arena until the next one comes
        finally:
            for _, done in self._open.values():
                if not done.done():
                    done.set_exception(StreamClosed("nobody reads this client's events any more"))


async def receive_kv(client: EdgeClient, injector: KvInjector, producer: Producer) -> None:
    """One cache, over a client whose only stream it is. Raises as KvReceiver.receive."""
    async with KvReceiver(client) as receiver:
        await receiver.receive(injector, producer)


def _range(numbers: list[int]) -> range:
    return range(numbers[0], numbers[-1] + 1)
