"""Chunks of a KV cache into the consumer's own blocks, sans-io: a cache is whole, or it is not used."""

from __future__ import annotations

import numpy as np

from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.errors import EngineError, OmniError
from omni_runtime.kv.layout import Span
from omni_runtime.kv.stores import KvStore, common
from omni_runtime.protocol.payload import Payload


class KvInjector:
    """Takes the chunks of one stream, each (layer, head, token) exactly once.

    Chunks of different layers and heads may come in any order; the tokens of one (layer, head) come in order, so that a
    gap is seen at once. start: tokens that are here already, of a prefix cache; they are never written, since other
    requests may share their blocks. stop: tokens that the request has, where the consumer knows it.
    """

    def __init__(self, store: KvStore, request: str, edge: str, *, start: int = 0, stop: int | None = None) -> None:
        limit = store.capacity if stop is None else stop
        if not 0 <= start <= limit <= store.capacity:
            raise ValueError(f"tokens {start} to {limit} of a store with room for {store.capacity}")
        self.request, self.edge = request, edge
        self._store, self._start, self._stop = store, start, stop
        self._where = f"{edge} of request {request}"
        self._begun: int | None = None  # the first token that the producer sends
        self._next = np.zeros((store.layout.layers, len(store.heads)), np.int64)  # by layer and head
        self._written = range(0)
        self._failure: tuple[type[OmniError], str] | None = None
        self._finished = False

    @property
    def complete(self) -> bool:
        """Every token of every layer and head is in its place, and nothing more comes."""
        return self._finished and self._failure is None

    @property
    def unusable(self) -> tuple[int, ...]:
        """Blocks that have been written and are not part of a complete cache: free them, and never share them."""
        return () if self.complete else self._store.blocks(self._written)

    def abandon(self, reason: str) -> None:
        """Nothing more comes, though it is not complete."""
        if not self._finished:
            self._fail(ProtocolError(f"{self._where}: {reason}"))

    def accept(self, payload: Payload) -> None:
        """Copy a chunk to its place; nothing of the payload is kept. Nothing of a chunk that is refused is written.

        Raises ContractMismatch for another layout, ProtocolError for everything else that is wrong with the stream,
        EngineError where the store fails; after any of them nothing is taken any more.
        """
        if self._failure is not None:
            kind, message = self._failure
            raise kind(message)
        try:
            self._accept(payload)
        except OmniError as error:
            self._fail(error)
            raise
        except Exception as error:
            broken = EngineError(f"{self._where}: {type(error).__name__}: {error}")
            self._fail(broken)
            raise broken from error

    def _fail(self, error: OmniError) -> None:
        if self._failure is None:
            self._failure = type(error), str(error)  # not the error: its traceback would keep the chunk

    def _accept(self, payload: Payload) -> None:
        if self._finished:
            raise self._wrong("a chunk came after the finished one")
        self._begin(payload)
        if payload.tensors or payload.rows:
            self._place(self._span(payload), payload.tensors["kv"])
        if payload.finished:
            self._finish(payload)

    def _begin(self, payload: Payload) -> None:
        """The handshake, with the first chunk of each sender; the stream's first chunk must have it."""
        if self._begun is not None and "kv_start" not in payload.meta:
            return
        self._store.layout.check(payload.meta, self._where)
        start = self._count(payload, "kv_start")
        if self._begun is None:
            if start > self._start:
                raise self._wrong(
                    f"gap: the producer begins at token {start}, and only {self._start} are here;"
                    f" it must begin at {self._start} or before"
                )
            self._begun = start
            self._next[:] = start
        elif start != self._begun:
            raise self._wrong(f"one sender begins at token {self._begun}, another at {start}")

    def _span(self, payload: Payload) -> Span:
        """What the chunk covers, checked against its tensor and the layout."""
        layout = self._store.layout
        shapes = payload.shapes()
        if list(shapes) != ["kv"]:
            raise self._wrong(f"a chunk has tensors {sorted(shapes)}; it must have 'kv' alone")
        shape, dtype = shapes["kv"]
        first, head = self._count(payload, "kv_layer"), self._count(payload, "kv_head")
        if dtype != layout.dtype or len(shape) != 5:
            raise self._wrong(f"kv is {dtype}{list(shape)}; it must be {layout.dtype}, with five axes")
        span = Span(
            range(first, first + shape[0]),
            range(head, head + shape[3]),
            range(payload.start, payload.start + payload.rows),
        )
        if span.shape(layout) != shape or 0 in shape:
            raise self._wrong(f"kv is {list(shape)}; {payload.rows} rows need {list(span.shape(layout))}, none of it 0")
        if span.layers.stop > layout.layers or span.heads.stop > layout.heads:
            raise self._wrong(
                f"layers {_text(span.layers)}, heads {_text(span.heads)} came;"
                f" there are {layout.layers} layers of {layout.heads} heads"
            )
        limit = self._store.capacity if self._stop is None else self._stop
        if span.tokens.stop > limit:
            raise self._wrong(f"tokens {_text(span.tokens)} came, beyond the {limit} that have a place")
        return span

    def _place(self, span: Span, values: np.ndarray) -> None:
        heads = common(span.heads, self._store.heads)
        if not heads:  # of another shard
            return
        first = self._store.heads.start
        here = self._next[span.layers.start : span.layers.stop, heads.start - first : heads.stop - first]
        wrong = np.argwhere(here != span.tokens.start)
        if len(wrong):
            layer, head = (int(n) for n in wrong[0])
            have = int(here[layer, head])
            of = f"layer {span.layers[layer]}, head {heads[head]}: tokens {_text(span.tokens)} came,"
            if have < span.tokens.start:
                raise self._wrong(f"gap: {of} {_text(range(have, span.tokens.start))} are missing")
            raise self._wrong(f"overlap: {of} and those before {have} had come already")
        skip = max(0, self._start - span.tokens.start)
        tokens = span.tokens[skip:]
        if tokens:
            at = slice(heads.start - span.heads.start, heads.stop - span.heads.start)
            written = self._written or tokens
            self._written = range(min(written.start, tokens.start), max(written.stop, tokens.stop))
            self._store.write(Span(span.layers, heads, tokens), values[:, :, skip:, at])
        here[:] = span.tokens.stop

    def _finish(self, payload: Payload) -> None:
        stop = self._count(payload, "kv_stop")
        short = np.argwhere(self._next != stop)
        if len(short):
            layer, head = (int(n) for n in short[0])
            have = int(self._next[layer, head])
            raise self._wrong(
                f"the stream ended at token {stop}, and layer {layer}, head {self._store.heads[head]} has"
                f" tokens up to {have}"
            )
        if (self._stop is not None and stop != self._stop) or stop < self._start:
            want = self._start if self._stop is None else self._stop
            raise self._wrong(f"the producer's cache ends at token {stop}, the request here has {want}")
        self._finished = True

    def _count(self, payload: Payload, name: str) -> int:
        value = payload.meta.get(name)
        if type(value) is not int or not 0 <= value < 1 << 40:
            raise self._wrong(f"meta {name} is {value!r}; it must be a count")
        return value

    def _wrong(self, problem: str) -> ProtocolError:
        return ProtocolError(f"{self._where}: {problem}")


def _text(span: range) -> str:
    return f"{span.start} to {span.stop}"
