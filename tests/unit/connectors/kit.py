"""Plans, keys, sidecars and clients for the tests of the connectors."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from omni_runtime.connectors.api import ChunkReceived, EdgeEvent, EdgeFailed
from omni_runtime.connectors.client import ClientLimits, SidecarEdgeClient
from omni_runtime.connectors.node_folder import NodeFolder
from omni_runtime.connectors.sidecar import Sidecar, SidecarOptions
from omni_runtime.deploy.plan import CONTRACT_VERSION, EdgePlan, EntryPlan, ModelRef, ResolvedPlan
from omni_runtime.protocol.channels import CurveKeys, generate_keys
from omni_runtime.protocol.control import Producer
from omni_runtime.protocol.payload import Payload
from omni_runtime.topology.types import PayloadContract

EDGE = "thinker->talker"
FULL = "encoder->decoder"
MIB = 1 << 20
MODES = pytest.mark.parametrize("mode", ["same pod", "two pods"])


def a_plan(revision: str = "r1", connector: str = "TCP", *, near: bool = False) -> ResolvedPlan:
    def edge(source: str, to: str, mode: str) -> EdgePlan:
        return EdgePlan(source, to, PayloadContract.THINKER_HIDDEN, mode, connector, 1, 1, 0, near=near)

    return ResolvedPlan(
        pipeline="p",
        topology="t",
        revision=revision,
        contract_version=CONTRACT_VERSION,
        model=ModelRef("packaged://x", None, "x"),
        stages=(),
        edges=(edge("thinker", "talker", "asyncChunk"), edge("encoder", "decoder", "fullPayload")),
        entry=EntryPlan("", "", (), "1", "1Gi", 80, 1, (), ()),
        drain_timeout_seconds=5,
        replicas={},
        origins={},
    )


@dataclass(frozen=True, slots=True)
class Host:
    """A running sidecar in this process."""

    sidecar: Sidecar
    options: SidecarOptions
    plan: ResolvedPlan
    keys: CurveKeys

    @asynccontextmanager
    async def engine(self, replica: str, *, limits: ClientLimits | None = None) -> AsyncIterator[SidecarEdgeClient]:
        node = None if self.options.node_dir is None else NodeFolder(self.options.node_dir, self.keys)
        client = SidecarEdgeClient(self.options.ipc_dir, self.plan, "stage", replica, limits, node)
        await client.connect(5)
        try:
            yield client
        finally:
            await client.close()

    @property
    def arena_used(self) -> int:
        return self.sidecar.hub.ledger.bytes


class Site:
    """A folder with keys in which sidecars can be started; each is a pod of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.keys = generate_keys(root / "curve")
        self.plan = a_plan()
        (root / "plan.json").write_bytes(msgspec.json.encode(self.plan))
        self.shm = root / "shm"
        self.shm.mkdir()
        self.node_dir: Path | None = None  # of the node that all pods are on, for processes

    def use(self, connector: str, *, near: bool = False) -> None:
        """The edges of this connector, for sidecars that start from now on."""
        self.plan = a_plan(connector=connector, near=near)
        (self.root / "plan.json").write_bytes(msgspec.json.encode(self.plan))

    def options(self, domain: str, arena_bytes: int = 16 * MIB, **changes: object) -> SidecarOptions:
        base = SidecarOptions(
            ipc_dir=self.root / domain,
            shm_dir=self.shm,
            arena_bytes=arena_bytes,
            advertise_host="127.0.0.1",
            domain=domain,
            data_host="127.0.0.1",
            data_port=0,
            http_host="127.0.0.1",
            http_port=0,
        )
        return replace(base, **changes)  # type: ignore[arg-type]

    @asynccontextmanager
    async def sidecar(
        self,
        domain: str = "pod-a",
        arena_bytes: int = 16 * MIB,
        *,
        plan: ResolvedPlan | None = None,
        keys: CurveKeys | None = None,
        **changes: object,
    ) -> AsyncIterator[Host]:
        plan = plan or self.plan
        options = self.options(domain, arena_bytes, **changes)
        sidecar = Sidecar(plan, keys or self.keys, options)
        await sidecar.start()
        try:
            yield Host(sidecar, options, plan, keys or self.keys)
        finally:
            await sidecar.close()


def producer(client: SidecarEdgeClient, replica: str = "thinker-0", edge: str = EDGE) -> Producer:
    return Producer(edge, edge.split("->")[0], replica, client.data_endpoint, client.shared_memory_domain)


def rows(values: np.ndarray, *, start: int = 0, finished: bool = False, **meta: object) -> Payload:
    return Payload(start, len(values), finished, {"rows": values}, meta)


def some_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def has_line(client: SidecarEdgeClient, request: str, edge: str = EDGE) -> bool:
    """The next small chunk of the stream goes on the line."""
    stream = client._sender._streams[request, edge]
    lines = stream.attachment.lines
    return stream.line is not None and lines is not None and lines.leads_to(stream.line[0])


async def take(client: SidecarEdgeClient, count: int, deadline_s: float = 30) -> list[EdgeEvent]:
    """The next `count` events."""
    taken: list[EdgeEvent] = []
    if count:
        async with asyncio.timeout(deadline_s):
            async for event in client.events():
                taken.append(event)
                if len(taken) == count:
                    break
    return taken


async def a_chunk(client: SidecarEdgeClient, deadline_s: float = 30) -> ChunkReceived:
    (event,) = await take(client, 1, deadline_s)
    assert isinstance(event, ChunkReceived), event
    return event


async def a_failure(client: SidecarEdgeClient, deadline_s: float = 30) -> EdgeFailed:
    (event,) = await take(client, 1, deadline_s)
    assert isinstance(event, EdgeFailed), event
    return event


async def until(condition: Callable[[], bool], deadline_s: float = 30) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - whatever changes it has no event to set
            await asyncio.sleep(0.005)


async def whole_stream(client: SidecarEdgeClient, deadline_s: float = 60) -> list[ChunkReceived]:
    """All chunks of the one stream that is open, until its finished chunk."""
    chunks: list[ChunkReceived] = []
    async with asyncio.timeout(deadline_s):
        async for event in client.events():
            assert isinstance(event, ChunkReceived), event
            chunks.append(event)
            if event.payload.finished:
                break
    return chunks


@dataclass(frozen=True, slots=True)
class Pair:
    up: SidecarEdgeClient
    down: SidecarEdgeClient
    hosts: tuple[Host, ...]

    async def nothing_left(self) -> None:
        gc.collect()
        await until(lambda: all(h.arena_used == 0 for h in self.hosts))
        await until(lambda: all(len(h.sidecar.hub.table) == 0 and len(h.sidecar.links) == 0 for h in self.hosts))
        await until(lambda: all(h.sidecar.listener.idle for h in self.hosts))


@asynccontextmanager
async def a_pair(
    site: Site,
    mode: str,
    *,
    arena_bytes: int = 16 * MIB,
    up: ClientLimits | None = None,
    down: ClientLimits | None = None,
    **options: object,
) -> AsyncIterator[Pair]:
    """Modes: same pod, two pods (TCP), mooncake (two pods)."""
    async with AsyncExitStack() as stack:
        plan = a_plan(connector="Mooncake") if mode == "mooncake" else site.plan
        host = await stack.enter_async_context(site.sidecar("pod-a", arena_bytes, plan=plan, **options))
        hosts = (host,)
        if mode != "same pod":
            hosts = (host, await stack.enter_async_context(site.sidecar("pod-b", arena_bytes, plan=plan, **options)))
        producing = await stack.enter_async_context(hosts[0].engine("thinker-0", limits=up))
        consuming = await stack.enter_async_context(hosts[-1].engine("talker-0", limits=down))
        yield Pair(producing, consuming, hosts)


async def put_many(client: SidecarEdgeClient, request: str, count: int, size: int = 1000) -> None:
    for n in range(count):
        await client.put(request, EDGE, rows(some_bytes(size, n), start=n, finished=n == count - 1))


async def until_failure(client: SidecarEdgeClient) -> AsyncIterator:  # type: ignore[type-arg]
    """Every event up to the first that is no chunk, that one included."""
    async with asyncio.timeout(30):
        async for event in client.events():
            yield event
            if not isinstance(event, ChunkReceived):
                return
