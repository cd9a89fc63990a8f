"""The sidecar's centre: attached engines, their streams and slabs, and the way to other sidecars.

Decisions are in `streams` (what happens to a stream) and `ledger` (who holds a slab); here they meet sockets.
"""

from __future__ import annotations

import time
from typing import Protocol

from omni_runtime.connectors import wire
from omni_runtime.connectors.arena import PAGE, Allocator, Arena, SlabPool, aligned, extent_length, largest_slab
from omni_runtime.connectors.far_lines import FarLines
from omni_runtime.connectors.ipc import FrameChannel, Line
from omni_runtime.connectors.ledger import QUEUE, SIDECAR, SlabLedger
from omni_runtime.connectors.metrics import SidecarMetrics
from omni_runtime.connectors.mooncake import Mooncake
from omni_runtime.connectors.streams import Action, Count, Deliver, Drop, Fail, Grant, Key, Limits, Port, StreamTable
from omni_runtime.connectors.tensors import ALIGNMENT, ProtocolError
from omni_runtime.connectors.wire import Slab
from omni_runtime.deploy.plan import CONTRACT_VERSION, ResolvedPlan
from omni_runtime.logs import get_logger

log = get_logger(__name__)

MAX_ENGINES = 256


class Engine(Protocol):
    """An attached engine."""

    session: int
    stage: str
    replica: str
    near: bool
    line: Line
    channel: FrameChannel | None

    def send(self, message: wire._Message) -> None: ...
    def deliver(self, stream: int, put: wire.Put, body: bytes | memoryview) -> None: ...
    def grant(self, stream: int, pieces: int) -> None: ...
    def freed(self, slab: Slab) -> None: ...


class RemoteConsumer(Protocol):
    """A consumer's sidecar, as a session of this one."""

    def deliver(self, deliver: Deliver) -> None: ...
    def fail(self, stream: int, code: str, message: str) -> None: ...
    def bound(self, stream: int, producer: int) -> None:
        """The producer of the stream is the engine of this session."""

    def connector(self, stream: int) -> str: ...


class RemoteStreams(Protocol):
    """Streams that engines here have opened at other sidecars."""

    def open(self, port: Port, message: wire.Open) -> None: ...
    def credit(self, port: Port, pieces: int) -> bool: ...
    def taken(self, port: Port, pieces: int) -> bool: ...
    def cancel(self, port: Port, reason: str) -> bool: ...
    def session_lost(self, session: int) -> None: ...
    def room(self) -> None:
        """Slabs were freed: pieces that wait for room may go on."""

    def __len__(self) -> int: ...


class Hub:
    def __init__(
        self,
        plan: ResolvedPlan,
        arena: Arena,
        metrics: SidecarMetrics,
        *,
        domain: str,
        limits: Limits | None = None,
    ) -> None:
        self.plan = plan
        self.arena = arena
        self.metrics = metrics
        self.endpoint = ""  # of the data port, once it is bound
        self.domain = domain
        self.table = StreamTable(limits or Limits())
        self.ledger = SlabLedger()
        self.engines: dict[int, Engine] = {}
        self.consumers: dict[int, RemoteConsumer] = {}
        self.remote: RemoteStreams | None = None
        self.far_lines: FarLines | None = None
        self.contract_version = CONTRACT_VERSION  # of this image, whatever the plan's operator had
        self.mooncake: Mooncake | None = None  # started only where an edge of the plan asks for it
        self._mooncake_edges = frozenset(edge.name for edge in plan.edges if edge.connector == "Mooncake")
        self.draining = False
        self._extents = Allocator(0, arena.length // PAGE * PAGE)
        self._leases: dict[int, dict[int, int]] = {}  # session -> extents, offset -> length
        self._pool = SlabPool(arena, SIDECAR)
        self._sessions = 0
        self._declare_gauges()

    def new_session(self) -> int:
        self._sessions += 1
        return self._sessions

    def can_fetch(self, edge: str) -> bool:
        """Whether large pieces of this edge go through the transfer engine, as far as this end is concerned."""
        if edge not in self._mooncake_edges:
            return False
        if self.mooncake is None:
            self.metrics.fallbacks.labels("unavailable").inc()
        return self.mooncake is not None

    # --- engines come and go

    def refusal(self, attach: wire.Attach) -> wire.Rejected | None:
        """Why this engine cannot attach."""
        refusal = self.mismatch(attach.revision, attach.contract_version)
        if refusal is not None:
            self.metrics.refused.labels("contract").inc()
            return wire.Rejected("ContractMismatch", refusal)
        if len(self.engines) >= MAX_ENGINES:
            self.metrics.refused.labels("engines").inc()
            return wire.Rejected("CapacityExceeded", f"{MAX_ENGINES} engines are attached")
        return None

    def attach(self, engine: Engine) -> None:
        self.engines[engine.session] = engine
        self._leases[engine.session] = {}
        log.info(
            "engine.attached", stage=engine.stage, replica=engine.replica, session=engine.session, near=engine.near
        )

    def mismatch(self, revision: str, contract_version: int) -> str | None:
        """Why a peer of this revision and contract cannot be served, or None. Revisions never mix."""
        if contract_version != self.contract_version:
            return f"contract version {contract_version}, this sidecar speaks {self.contract_version}; use images of one release"
        if revision != self.plan.revision:
            return f"pipeline revision {revision!r}, this sidecar serves {self.plan.revision!r}"
        return None

    def engine_lost(self, engine: Engine, reason: str) -> None:
        session = engine.session
        if self.engines.pop(session, None) is None:
            return
        engine.line.close()
        if self.far_lines is not None:
            self.far_lines.engine_lost(session)
        log.info("engine.detached", stage=engine.stage, replica=engine.replica, session=session, reason=reason)
        self.session_lost(session, f"{engine.stage} {engine.replica}: {reason}")
        self._reclaim(session)

    def session_lost(self, session: int, reason: str) -> None:
        self.apply(self.table.session_lost(session, reason))
        if self.remote is not None:
            self.remote.session_lost(session)
        for slab in self.ledger.held_by(session):
            self.free(slab, session)

    def has_engine(self, session: int) -> bool:
        return session in self.engines

    def tell_of_line(self, engine: int, session: int) -> None:
        self.engines[engine].send(wire.Lined(session))

    def claim(self, session: int) -> tuple[int, wire.Granted] | None:
        """What an engine needs for the line of this session: of another engine here, or its own to another pod."""
        engine = self.engines.get(session)
        if engine is not None:
            return engine.line.writing.fileno(), wire.Granted()
        return None if self.far_lines is None else self.far_lines.claim(session)

    def pair(self, port: Port) -> None:
        """Once both ends of a stream are there: tell the producer that its consumer here has a line, or the consumer's
        sidecar to which engine one may be had.
        """
        found = self.table.line(port)
        if found is None:
            return
        producer, consumer, token = found
        if consumer.session in self.engines:
            self.engines[producer.session].send(wire.Paired(producer.stream, consumer.session, token))
        elif (there := self.consumers.get(consumer.session)) is not None:
            there.bound(consumer.stream, producer.session)

    def lay(self, port: Port, name: int) -> None:
        """The consumer's sidecar has made a line that this stream may use."""
        found = self.table.line(port)
        end = None if self.far_lines is None else self.far_lines.named(name)
        if found is not None and end is not None and end.engine == found[0].session:
            producer, _, token = found
            self.engines[producer.session].send(wire.Paired(producer.stream, end.session, token))

    # --- actions of the stream table

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Deliver():
                    self._deliver(action)
                case Grant(producer, pieces):
                    if (engine := self.engines.get(producer.session)) is not None:
                        engine.grant(producer.stream, pieces)
                case Count():
                    self._count_bypassed(action)
                case Fail(port, code, message):
                    self.fail(port, code, message)
                case Drop(piece):
                    if piece.put.slab is not None:
                        self.free(piece.put.slab, QUEUE)

    def fail(self, port: Port, code: str, message: str) -> None:
        self.metrics.failures.labels(code).inc()
        if (engine := self.engines.get(port.session)) is not None:
            engine.send(wire.Failed(port.stream, code, message[:2000]))
        elif (consumer := self.consumers.get(port.session)) is not None:
            consumer.fail(port.stream, code, message[:2000])

    def _deliver(self, deliver: Deliver) -> None:
        put, session = deliver.piece.put, deliver.consumer.session
        if put.slab is not None:
            self.ledger.deliver(put.slab, session)
        if (engine := self.engines.get(session)) is not None:
            engine.deliver(deliver.consumer.stream, put, deliver.piece.body)
            if put.chunk is not None:
                self._count(deliver.key, deliver.to, put.chunk.nbytes, time.time() - put.chunk.sent_at)
        elif (consumer := self.consumers.get(session)) is not None:
            consumer.deliver(deliver)
            if put.chunk is not None:
                edge = self.metrics.edge(deliver.key.edge, deliver.key.producer, deliver.to)
                self.metrics.of(edge, consumer.connector(deliver.consumer.stream)).sent(put.chunk.nbytes)
        elif put.slab is not None:
            self.free(put.slab, session)

    def _count_bypassed(self, count: Count) -> None:
        there = self.consumers.get(count.consumer.session)
        labels = self.metrics.edge(count.key.edge, count.key.producer, count.to)
        connector = "SharedMemory" if there is None else there.connector(count.consumer.stream)
        edge = self.metrics.of(labels, connector)
        seconds = [max(0.0, one) for _, one in count.chunks]  # whatever an engine said
        edge.sent_all([nbytes for nbytes, _ in count.chunks])
        edge.tx.observe_all(seconds)
        if there is None:  # else the consumer's sidecar hears from the consumer
            edge.in_flight.observe_all(seconds)

    def received(self, edge: str, producer: str, consumer: str, seconds: tuple[float, ...]) -> None:
        """Chunks that an engine here has taken off a line from another pod: each came at once."""
        counted = self.metrics.of(self.metrics.edge(edge, producer, consumer), "TCP")
        counted.rx.observe_all([0.0] * len(seconds))
        counted.in_flight.observe_all([max(0.0, one) for one in seconds])

    def _count(self, key: Key, to: str, nbytes: int, seconds: float) -> None:
        """A chunk from engine to engine of this pod."""
        seconds = max(0.0, seconds)  # whatever an engine said
        metrics = self.metrics.of(self.metrics.edge(key.edge, key.producer, to), "SharedMemory")
        metrics.sent(nbytes)
        metrics.tx.observe(seconds)
        metrics.in_flight.observe(seconds)

    # --- slabs

    def free(self, slab: Slab, holder: int) -> None:
        owner = self.ledger.release(slab, holder)
        if owner is None:
            return
        if owner == SIDECAR:
            self._pool.free(slab)
            self._return_empty()
        elif (engine := self.engines.get(owner)) is not None:
            engine.freed(slab)
        else:
            self._reclaim(owner)
        if self.remote is not None:
            self.remote.room()

    def allocate(self, length: int) -> Slab | None:
        """A slab for bytes that came from another pod, entered in the ledger; None while the arena is full."""
        if length > largest_slab(self.arena.length):
            return None
        slab = self._pool.allocate(length)
        if slab is None:
            extent = self.lease(SIDECAR, length)
            if not extent.length:
                return None
            if not self._pool.add_extent(extent.offset, extent.length):
                self.give_back(SIDECAR, extent.offset)
                return None
            slab = self._pool.allocate(length)
            if slab is None:
                return None
        self.ledger.enter(slab, SIDECAR)
        return slab

    def _return_empty(self) -> None:
        for offset in self._pool.take_empty_extents(keep=1):
            self.give_back(SIDECAR, offset)

    def lease(self, session: int, length: int) -> wire.Extent:
        for size in (extent_length(self.arena.length, length), aligned(length + 2 * ALIGNMENT, PAGE)):
            at = self._extents.allocate(size)
            if at is not None:
                self._leases.setdefault(session, {})[at] = size
                return wire.Extent(at, size)
        for engine in self.engines.values():
            engine.send(wire.Squeeze())
        return wire.Extent(0, 0)

    def give_back(self, session: int, offset: int) -> None:
        leases = self._leases.get(session, {})
        if leases.pop(offset, None) is None:
            raise ProtocolError(f"extent {offset} is not leased to session {session}")
        self._extents.free(offset)
        if self.remote is not None:
            self.remote.room()

    def holds(self, session: int, slab: Slab) -> bool:
        """Whether the slab and its header lie in an extent of this session."""
        return any(
            at <= slab.offset - ALIGNMENT and slab.offset + slab.length <= at + length
            for at, length in self._leases[session].items()
        )

    def _reclaim(self, session: int) -> None:
        """The extents of a dead engine return once no consumer reads from them any more."""
        if session in self.engines or self.ledger.outstanding(session):
            return
        for offset in self._leases.pop(session, {}):
            self._extents.free(offset)

    # --- janitor, drain, numbers

    def tick(self) -> None:
        self.apply(self.table.tick(time.monotonic()))

    @property
    def idle(self) -> bool:
        """No engine of this pod is attached and nothing is on its way: the sidecar may exit."""
        if self.far_lines is not None and not self.far_lines.idle:
            return False
        return all(e.near for e in self.engines.values()) and not len(self.table) and not len(self.ledger)

    @property
    def remote_streams(self) -> int:
        return 0 if self.remote is None else len(self.remote)

    @property
    def leased_bytes(self) -> int:
        return self._extents.used

    def _declare_gauges(self) -> None:
        gauge = self.metrics.gauge
        gauge("omni:connector_arena_bytes", "Size of the arena", lambda: self.arena.length)
        gauge("omni:connector_arena_used_bytes", "Bytes of slabs in use", lambda: self.ledger.bytes)
        gauge("omni:connector_arena_leased_bytes", "Bytes of extents handed out", lambda: self.leased_bytes)
        gauge("omni:connector_engines", "Attached engines", lambda: len(self.engines))
        gauge("omni:connector_streams", "Streams produced here", lambda: len(self.table))
        gauge("omni:connector_remote_streams", "Streams consumed from other pods", lambda: self.remote_streams)
        gauge("omni:connector_stalled_streams", "Streams that wait for their consumer", lambda: self.table.stalled)
        gauge("omni:connector_mooncake_up", "Whether the transfer engine runs", lambda: self.mooncake is not None)
        self.metrics.waiting(self.table.waiting)
        gauge("omni:connector_in_flight_pieces", "Pieces that wait here", lambda: self.table.queued_pieces)
