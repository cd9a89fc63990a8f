"""From device memory to device memory, by a real transfer engine over TCP. The pools are in host memory here: a fake of
the device and of nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import torch

from omni_runtime.connectors.mooncake import MooncakeOptions, MooncakeUnavailable
from omni_runtime.connectors.tensors import DTYPE_BYTES, ProtocolError
from omni_runtime.errors import CapacityExceeded, UpstreamLost
from omni_runtime.protocol.payload import Payload
from omni_runtime.stages import device_memory
from omni_runtime.stages.device_memory import LEASE_SECONDS, META, DeviceMemory, Place, Placed, is_exported, read_place
from tests.unit.connectors.kit import EDGE, Site, a_chunk, a_pair, producer, until

POOL = 4 << 20
CHUNK = Payload(7, 3, False, meta={"voice": "x"})


def a_pool() -> DeviceMemory:
    return DeviceMemory.over("127.0.0.1", MooncakeOptions(), torch.zeros(POOL, dtype=torch.uint8))


@pytest.fixture
async def up() -> AsyncIterator[DeviceMemory]:
    memory = a_pool()
    yield memory
    memory.close()


@pytest.fixture
async def down() -> AsyncIterator[DeviceMemory]:
    memory = a_pool()
    yield memory
    memory.close()


def some(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


async def exported(memory: DeviceMemory, **tensors: torch.Tensor) -> Payload:
    payload = await memory.export(CHUNK, tensors)
    assert payload is not None
    return payload


async def test_tensors_of_every_dtype_come_as_they_were(up: DeviceMemory, down: DeviceMemory) -> None:
    sent = {
        name: some(60 * DTYPE_BYTES[name], n).view(dtype).view(3, 4, 5)
        if name != "bool"
        else some(60, n).view(3, 4, 5) > 9
        for n, (name, dtype) in enumerate(device_memory._DTYPES.items())
    } | {"none": torch.zeros(0, 4), "strided": some(400).view(20, 20).t()}
    payload = await exported(up, **sent)
    assert not payload.tensors
    assert (payload.start, payload.rows, payload.meta["voice"]) == (7, 3, "x")
    got = await down.fetch(payload, 10)
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (got[name], tensor))
        assert torch.equal(a, b), name


async def test_what_was_fetched_is_free_again(up: DeviceMemory, down: DeviceMemory) -> None:
    """Without a message: more than the pool holds goes through it."""
    for n in range(12):
        payload = await exported(up, rows=some(POOL // 3, n))
        assert torch.equal((await down.fetch(payload, 10))["rows"], some(POOL // 3, n))
    up.collect(time.monotonic())
    assert up.used_bytes == down.used_bytes == 0
    assert len(up._rows) == len(down._scratch_rows) == device_memory.SLABS


async def test_over_an_edge_between_two_pods(site: Site, up: DeviceMemory, down: DeviceMemory) -> None:
    """The chunk that says where they are travels as any other, on its line."""
    async with a_pair(site, "mooncake") as pair:
        await pair.down.open("r", producer(pair.up))
        for n in range(5):
            await pair.up.put("r", EDGE, await exported(up, rows=some(900_000, n)))
            chunk = await a_chunk(pair.down)
            assert is_exported(chunk.payload)
            assert torch.equal((await down.fetch(chunk.payload, 10))["rows"], some(900_000, n))
        await pair.up.put("r", EDGE, Payload(9, 0, True))
        assert not is_exported((await a_chunk(pair.down)).payload)
        await pair.nothing_left()


async def test_a_full_pool_leaves_tensors_to_the_arena(up: DeviceMemory, down: DeviceMemory) -> None:
    payload = await exported(up, rows=some(POOL - 64))
    assert await up.export(CHUNK, {"rows": some(100)}) is None
    await down.fetch(payload, 10)
    assert await up.export(CHUNK, {"rows": some(100)}) is not None


async def test_what_nobody_fetches_is_freed_after_its_lease(up: DeviceMemory, down: DeviceMemory) -> None:
    """R11; and whoever comes later reads none of what is there then."""
    late = await exported(up, rows=some(1000, 1))
    up.collect(time.monotonic() + LEASE_SECONDS - 5)
    assert up.used_bytes
    up.collect(time.monotonic() + LEASE_SECONDS + 5)
    assert not up.used_bytes
    with pytest.raises(UpstreamLost, match="had freed them"):
        await down.fetch(late, 10)
    again = await exported(up, rows=some(1000, 2))
    with pytest.raises(UpstreamLost, match="had freed them"):
        await down.fetch(late, 10)
    assert torch.equal((await down.fetch(again, 10))["rows"], some(1000, 2))
    assert not down.used_bytes


async def test_a_late_reader_frees_nothing_of_another(up: DeviceMemory, down: DeviceMemory) -> None:
    """R62: its generation is not that of the slab any more."""
    late = await exported(up, rows=some(1000, 1))
    up.collect(time.monotonic() + LEASE_SECONDS + 5)
    await exported(up, rows=some(1000, 2))
    with pytest.raises(UpstreamLost):
        await down.fetch(late, 10)
    up.collect(time.monotonic())
    assert up.used_bytes


async def test_a_producer_that_is_gone_is_told(down: DeviceMemory) -> None:
    up = a_pool()
    payload = await exported(up, rows=some(1000))
    place = read_place(payload, POOL)
    up.close()
    nobody = msgspec.structs.replace(place, segment="127.0.0.1:1")
    gone = msgspec.structs.replace(payload, meta={META: msgspec.json.encode(nobody).decode()})
    with pytest.raises(UpstreamLost, match="127.0.0.1:1: the producer does not answer"):
        await asyncio.wait_for(down.fetch(gone, 10), 60)
    assert not down.used_bytes


async def test_a_pool_without_room_says_so_after_its_deadline(up: DeviceMemory, down: DeviceMemory) -> None:
    """R5."""
    payload = await exported(up, rows=some(2000))
    at = down._places.allocate(POOL - 64)
    assert at is not None
    with pytest.raises(CapacityExceeded, match="within 0.2 s"):
        await down.fetch(payload, 0.2)
    waiting = asyncio.create_task(down.fetch(payload, 30))
    await asyncio.sleep(0)
    down._places.free(at)
    down._freed.set()
    assert torch.equal((await waiting)["rows"], some(2000))


async def test_a_fetch_that_is_cancelled_keeps_its_place_until_it_is_over(up: DeviceMemory, down: DeviceMemory) -> None:
    """R12: the engine still writes there."""
    payload = await exported(up, rows=some(POOL // 2))
    fetching = asyncio.create_task(down.fetch(payload, 30))
    await until(lambda: down.used_bytes > 0)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    await until(lambda: down.used_bytes == 0)
    up.collect(time.monotonic())
    assert not up.used_bytes, "it was read to the end, so the producer was told"


GOOD = Place("10.0.0.1:5000", 4096, 256, 64, 1, (Placed("a", "uint8", (64,), 0), Placed("b", "float32", (2, 8), 64)))


def changed(**fields: object) -> Place:
    return msgspec.structs.replace(GOOD, **fields)


@pytest.mark.parametrize(
    ("place", "says"),
    [
        pytest.param(changed(segment="10.0.0.1"), "not host:port", id="segment"),
        pytest.param(changed(segment="../x:1"), "not host:port", id="segment that is a path"),
        pytest.param(changed(nbytes=POOL + 1), f"pool here has {POOL}", id="larger than the pool"),
        pytest.param(changed(generation=0), "no place", id="no generation"),
        pytest.param(changed(tensors=(Placed("a", "object", (1,), 0),)), "dtype 'object'", id="dtype"),
        pytest.param(changed(tensors=(Placed("a", "uint8", (257,), 0),)), "past the slab", id="too long"),
        pytest.param(changed(tensors=(Placed("a", "uint8", (1 << 40, 1 << 40), 0),)), "past the slab", id="overflow"),
        pytest.param(changed(tensors=(Placed("a", "uint8", (-1,), 0),)), "no place", id="negative shape"),
        pytest.param(changed(tensors=(Placed("a", "uint8", (1,), 8),)), "not aligned", id="offset"),
        pytest.param(changed(tensors=(*GOOD.tensors, Placed("c", "uint8", (1,), 64))), "over another", id="overlap"),
        pytest.param(changed(tensors=(*GOOD.tensors, Placed("a", "uint8", (1,), 128))), "twice", id="same name"),
    ],
)
def test_places_that_are_none(place: Place, says: str) -> None:
    """R58: before anything is allocated or asked for."""
    with pytest.raises(ProtocolError, match=says):
        read_place(Payload(0, 1, False, meta={META: msgspec.json.encode(place).decode()}), POOL)


@pytest.mark.parametrize("meta", [{}, {META: ""}, {META: "[]"}, {META: 5}, {META: "[" * 4000}])
def test_meta_that_is_no_place(meta: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        read_place(Payload(0, 1, False, meta=meta), POOL)


def test_a_good_place_is_read() -> None:
    assert read_place(Payload(0, 1, False, meta={META: msgspec.json.encode(GOOD).decode()}), POOL) == GOOD


async def test_dtypes_that_may_not_travel(up: DeviceMemory) -> None:
    with pytest.raises(ProtocolError, match="complex64"):
        await up.export(CHUNK, {"x": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(ProtocolError, match="too many"):
        await up.export(CHUNK, {f"{'t' * 60}{n}": torch.zeros(1) for n in range(60)})
    assert not up.used_bytes
    assert len(up._rows) == device_memory.SLABS


def test_without_a_device_there_is_no_such_path() -> None:
    """It says why; whoever asked goes through the arena."""
    with pytest.raises(MooncakeUnavailable, match="'cpu' cannot be registered"):
        DeviceMemory.start("127.0.0.1", MooncakeOptions(), torch.device("cpu"), POOL)
    if not torch.cuda.is_available():
        with pytest.raises(MooncakeUnavailable, match="no CUDA device"):
            DeviceMemory.start("127.0.0.1", MooncakeOptions("rdma"), torch.device("cuda", 0), POOL)


@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="there are RDMA devices")
async def test_an_engine_that_cannot_start_says_so() -> None:
    with pytest.raises(MooncakeUnavailable, match="no RDMA device"):
        DeviceMemory.over("127.0.0.1", MooncakeOptions("rdma", "nowhere0"), torch.zeros(64, dtype=torch.uint8))


@pytest.mark.gpu
async def test_between_two_pools_of_a_device() -> None:
    """On a GPU, if one is there."""
    device = torch.device("cuda", 0)
    up, down = (DeviceMemory.start("127.0.0.1", MooncakeOptions(), device, POOL) for _ in range(2))
    try:
        sent = some(1 << 20).to(device)
        got = (await down.fetch(await exported(up, rows=sent), 30))["rows"]
        assert got.device == sent.device
        assert torch.equal(got, sent)
    finally:
        up.close()
        down.close()
