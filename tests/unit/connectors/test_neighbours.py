"""Two pods on one node that share a folder of it: shared memory between them, and the network wherever that cannot be."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from omni_runtime.connectors import neighbours, wire
from omni_runtime.connectors.attachment import Attachment
from omni_runtime.connectors.node_folder import NodeFolder
from omni_runtime.connectors.tensors import ChunkHeader, ProtocolError
from omni_runtime.errors import StreamClosed
from omni_runtime.protocol.channels import generate_keys
from tests.unit.connectors.kit import (
    EDGE,
    Pair,
    Site,
    a_chunk,
    a_failure,
    a_plan,
    has_line,
    producer,
    put_many,
    rows,
    some_bytes,
    until,
    whole_stream,
)
from tests.unit.connectors.line_kit import LARGE, SMALL, exact

PLAN = a_plan(near=True)


@pytest.fixture
def node() -> Iterator[Path]:
    """A short one, as on a node: the name of a socket may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="node-") as folder:
        os.chmod(folder, 0o1733)
        yield Path(folder)


@asynccontextmanager
async def neighbouring(
    site: Site, up_dir: Path | None, down_dir: Path | None, near: bool = True
) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        plan = a_plan(near=near)
        up = await stack.enter_async_context(site.sidecar("pod-a", plan=plan, node_dir=up_dir))
        down = await stack.enter_async_context(site.sidecar("pod-b", plan=plan, node_dir=down_dir))
        producing = await stack.enter_async_context(up.engine("thinker-0"))
        consuming = await stack.enter_async_context(down.engine("talker-0"))
        yield Pair(producing, consuming, (up, down))


def sent_by(pair: Pair, connector: str) -> bool:
    return f'connector="{connector}"' in pair.hosts[0].sidecar.metrics.render().decode()


async def a_whole_stream(pair: Pair, request: str = "r") -> None:
    """Small chunks and large ones, exact."""
    await pair.down.open(request, producer(pair.up))
    sizes = [SMALL, LARGE, SMALL, 0, LARGE, SMALL]
    for n, size in enumerate(sizes):
        await pair.up.put(request, EDGE, rows(some_bytes(size, n), start=n, finished=n == len(sizes) - 1))
    got = await whole_stream(pair.down)
    assert [chunk.seq for chunk in got] == list(range(len(sizes)))
    for chunk, size in zip(got, sizes, strict=True):
        assert chunk.payload.tensors["rows"].tobytes() == some_bytes(size, chunk.seq).tobytes()


async def test_pods_of_one_node_share_memory(site: Site, node: Path) -> None:
    """Nothing of the stream passes the consumer's own sidecar, and its small chunks pass neither."""
    async with neighbouring(site, node, node) as pair:
        await a_whole_stream(pair)
        assert sent_by(pair, "SharedMemory")
        assert not sent_by(pair, "TCP")
        assert pair.hosts[1].sidecar.hub.remote_streams == 0
        await pair.down.open("s", producer(pair.up))
        await pair.up.put("s", EDGE, rows(some_bytes(SMALL, 0)))
        await a_chunk(pair.down)
        await until(lambda: has_line(pair.up, "s"))
        await pair.up.put("s", EDGE, rows(some_bytes(SMALL, 1), finished=True))
        assert exact([await a_chunk(pair.down)]) == [1]
        await pair.nothing_left()


@pytest.mark.parametrize("why", ["not allowed", "another node", "no folder here", "no folder there"])
async def test_whatever_is_not_near_goes_over_the_network(site: Site, node: Path, why: str) -> None:
    other = site.root / "other"
    other.mkdir()
    up = None if why == "no folder there" else node
    down = None if why == "no folder here" else other if why == "another node" else node
    async with neighbouring(site, up, down, near=why != "not allowed") as pair:
        await a_whole_stream(pair)
        assert sent_by(pair, "TCP")
        assert not sent_by(pair, "SharedMemory")
        await pair.nothing_left()


@pytest.mark.parametrize("folder", ["missing", "a file"])
async def test_a_folder_that_cannot_be_used_costs_its_speed_and_nothing_else(site: Site, folder: str) -> None:
    path = site.root / "f"
    if folder == "a file":
        path.write_text("")
    async with neighbouring(site, path, path) as pair:
        await a_whole_stream(pair)
        assert sent_by(pair, "TCP")


async def test_a_socket_that_nobody_answers_is_no_neighbour(site: Site, node: Path) -> None:
    """Of a sidecar that was killed with its pod."""
    async with neighbouring(site, None, node) as pair:
        folder = NodeFolder(node, site.keys).of("pod-a")
        folder.mkdir()
        (folder / "sidecar.sock").write_text("")
        await a_whole_stream(pair)
        assert sent_by(pair, "TCP")


async def test_an_image_of_another_release_is_reached_over_the_network_and_refused_there(
    site: Site, node: Path
) -> None:
    async with neighbouring(site, node, node) as pair:
        pair.hosts[0].sidecar.hub.contract_version = 9
        await pair.down.open("r", producer(pair.up))
        assert (await a_failure(pair.down)).code == "ContractMismatch"


def test_only_the_key_leads_to_a_folder(tmp_path: Path) -> None:
    """R62: pods of other pipelines may use the same folder of the node."""
    keys = [generate_keys(tmp_path / name) for name in ("a", "b")]
    names = {NodeFolder(tmp_path, key).of(domain) for key in keys for domain in ("pod-a", "pod-b")}
    assert len(names) == 4
    assert all(name.parent == tmp_path and len(name.name) == 32 for name in names)
    assert NodeFolder(tmp_path, keys[0]).of("../../etc").parent == tmp_path


async def test_a_producers_sidecar_that_goes_ends_its_streams_and_is_found_again(site: Site, node: Path) -> None:
    """R11: the consumer is told by the lost connection; the pod's next sidecar has the same name."""
    async with site.sidecar("pod-b", plan=PLAN, node_dir=node) as here, here.engine("talker-0") as down:
        async with site.sidecar("pod-a", plan=PLAN, node_dir=node) as there, there.engine("thinker-0") as up:
            await down.open("r", producer(up))
            await up.put("r", EDGE, rows(some_bytes(SMALL, 0)))
            assert exact([await a_chunk(down)]) == [0]
            await there.sidecar.close()
            assert (await a_failure(down)).code == "UpstreamLost"
        assert os.listdir(node) == [NodeFolder(node, site.keys).of("pod-b").name]
        async with site.sidecar("pod-a", plan=PLAN, node_dir=node) as there, there.engine("thinker-0") as up:
            pair = Pair(up, down, (there, here))
            await a_whole_stream(pair, "s")
            assert sent_by(pair, "SharedMemory")
            await pair.nothing_left()
    assert os.listdir(node) == []


async def test_a_consumer_that_goes_leaves_nothing_at_its_neighbour(site: Site, node: Path) -> None:
    async with site.sidecar("pod-a", plan=PLAN, node_dir=node) as there, there.engine("thinker-0") as up:
        async with site.sidecar("pod-b", plan=PLAN, node_dir=node) as here, here.engine("talker-0") as down:
            await down.open("r", producer(up))
            for n in range(8):
                await up.put("r", EDGE, rows(some_bytes(LARGE, n), start=n))
            held = await a_chunk(down)
            assert there.arena_used > 0
        await until(lambda: up._sender._streams["r", EDGE].error is not None)
        with pytest.raises(StreamClosed):
            await up.put("r", EDGE, rows(some_bytes(LARGE, 9), start=9))
        assert held.payload.tensors["rows"].tobytes() == some_bytes(LARGE, 0).tobytes(), "what it kept stays readable"
        await until(lambda: there.arena_used == 0 and not len(there.sidecar.hub.table))


async def test_a_neighbour_without_streams_holds_up_no_drain(site: Site, node: Path) -> None:
    """But one with streams does: the tail is kept (R6)."""
    async with neighbouring(site, node, node) as pair:
        await a_whole_stream(pair)
        await pair.down.open("s", producer(pair.up))
        await put_many(pair.up, "s", 3)
        await pair.up.close()
        draining = asyncio.create_task(pair.hosts[0].sidecar.drain())
        assert [chunk.seq for chunk in await whole_stream(pair.down)] == [0, 1, 2]
        async with asyncio.timeout(30):
            assert await draining, "nothing was cut off"
        assert [engine.near for engine in pair.hosts[0].sidecar.hub.engines.values()] == [True]


async def test_a_neighbour_that_is_not_needed_is_let_go(
    site: Site, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with neighbouring(site, node, node) as pair:
        engines = pair.hosts[0].sidecar.hub.engines
        await pair.down.open("open", producer(pair.up))
        await a_whole_stream(pair)
        monkeypatch.setattr(neighbours, "UNUSED_SECONDS", 0.0)
        ticks = 0
        tick = neighbours.Neighbours.tick

        def counted(*arguments: object) -> None:
            nonlocal ticks
            ticks += 1
            tick(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(neighbours.Neighbours, "tick", counted)
        await until(lambda: ticks > 2)
        assert len(engines) == 2, "a stream is open"
        await pair.down.cleanup("open")
        await until(lambda: len(engines) == 1)
        await a_whole_stream(pair, "again")
        await pair.nothing_left()


async def test_a_neighbour_speaks_of_its_own_streams_only(site: Site, node: Path) -> None:
    """R62: a piece, or an end, of a stream that is open at another sidecar."""
    async with neighbouring(site, node, node) as pair, pair.hosts[1].engine("thinker-1") as local:
        await pair.down.open("mine", producer(local, "thinker-1"))
        await pair.down.open("theirs", producer(pair.up))
        receiver = pair.down._receiver
        near: Attachment = receiver._streams["theirs", EDGE].attachment
        own: Attachment = receiver._streams["mine", EDGE].attachment
        assert near is not own
        number = receiver._streams["mine", EDGE].number
        receiver.on_failed(near, number, "UpstreamLost", "forged")
        with pytest.raises(ProtocolError, match="another sidecar"):
            receiver.on_put(near, wire.Put(number, 0, 0, True, 0, None, ChunkHeader(0, 0, True, 0, 0.0)), b"")
        await local.put("mine", EDGE, rows(some_bytes(SMALL, 0), finished=True))
        assert exact([await a_chunk(pair.down)]) == [0]
