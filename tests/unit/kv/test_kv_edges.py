"""KV caches over real sidecars: within a pod, between pods over TCP, and by Mooncake."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from omni_runtime.connectors import payloads
from omni_runtime.connectors.api import EdgeFailed
from omni_runtime.connectors.client import ClientLimits
from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.errors import ContractMismatch, DeadlineExceeded, StreamClosed, UpstreamLost
from omni_runtime.kv.injection import KvInjector
from omni_runtime.kv.layout import KvLayout
from omni_runtime.kv.stores import ContiguousStore
from omni_runtime.kv.transfer import KvReceiver, KvSender, receive_kv, send_kv
from omni_runtime.protocol.payload import Payload
from tests.unit.connectors.kit import EDGE, MIB, Pair, Site, a_pair, producer, until
from tests.unit.kv.caches import Paged, Tape, a_paged, same_bits, some_bits

MODES = pytest.mark.parametrize("mode", ["same pod", "two pods", "mooncake"])
LAYOUT = KvLayout("m", layers=6, heads=4, head_dim=32, dtype="bfloat16")  # 3 KiB a token
TOKENS = 2000  # 6 MB


def a_source(layout: KvLayout = LAYOUT, tokens: int = TOKENS, seed: int = 1) -> Paged:
    return a_paged(layout, 16, range(-(-tokens // 16), 0, -1), seed=seed)


def a_target(layout: KvLayout = LAYOUT, tokens: int = TOKENS, seed: int = 9) -> Paged:
    return a_paged(layout, 128, range(3, 3 + -(-tokens // 128)), memory=(0, 2, 3, 1), seed=seed)


@pytest.fixture(autouse=True)
def needs_mooncake(request: pytest.FixtureRequest) -> None:
    if "mode" in request.fixturenames and request.getfixturevalue("mode") == "mooncake":
        pytest.importorskip("mooncake")


@MODES
@pytest.mark.parametrize("chunk_bytes", [20_000, MIB, 6 * MIB], ids=["small", "slabs", "larger than a slab"])
async def test_from_blocks_of_16_tokens_into_blocks_of_128(site: Site, mode: str, chunk_bytes: int) -> None:
    """Several times through an arena that one cache would fill: views go as soon as they are copied."""
    async with a_pair(site, mode) as pair:
        for n in range(4 if chunk_bytes > MIB else 2):
            source, target = a_source(seed=n), a_target()
            injector = KvInjector(target.store, f"r{n}", EDGE, stop=TOKENS)
            sending = send_kv(pair.up, f"r{n}", EDGE, source.store, range(TOKENS), chunk_bytes=chunk_bytes)
            await asyncio.gather(sending, receive_kv(pair.down, injector, producer(pair.up)))
            assert injector.complete
            assert same_bits(target.tokens(TOKENS), source.tokens(TOKENS))
        await pair.nothing_left()


async def test_blocks_are_copied_straight_into_the_arena(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_copy(*_: object) -> None:
        raise AssertionError("the bytes were copied once more")

    monkeypatch.setattr(payloads, "write", no_copy)
    monkeypatch.setattr(payloads, "flat", no_copy)
    async with a_pair(site, "same pod") as pair:
        source, target = a_source(), a_target()
        injector = KvInjector(target.store, "r", EDGE)
        sending = send_kv(pair.up, "r", EDGE, source.store, range(TOKENS), chunk_bytes=MIB)
        await asyncio.gather(sending, receive_kv(pair.down, injector, producer(pair.up)))
        assert same_bits(target.tokens(TOKENS), source.tokens(TOKENS))
        await pair.nothing_left()


async def test_a_chunk_that_is_taken_holds_no_room(site: Site) -> None:
    """While the next one is awaited, and after one that was refused."""
    async with a_pair(site, "same pod") as pair, KvReceiver(pair.down) as receiver:
        target = a_target()
        injector = KvInjector(target.store, "r", EDGE, stop=TOKENS)
        receiving = asyncio.create_task(receiver.receive(injector, producer(pair.up)))
        sender = KvSender(pair.up, "r", EDGE, a_source().store)
        await sender.advance(1000)
        await until(lambda: injector.unusable == target.store.blocks(range(1000)))
        await until(lambda: pair.hosts[0].arena_used == 0)
        assert not receiving.done()
        sender._sent[0] = 999  # sends a token of a layer again
        await sender.advance(1300)
        with pytest.raises(ProtocolError, match="overlap: layer 0, head 0: tokens 999 to 1300 came") as raised:
            await receiving
        await until(lambda: pair.hosts[0].arena_used == 0)
        assert raised.value is not None, "kept until here, with its traceback"
        del raised
        await pair.nothing_left()


@MODES
async def test_while_the_prompt_is_still_computed(site: Site, mode: str) -> None:
    """Chunked prefill: the producer's table grows, and the last chunk is the one that says so."""
    async with a_pair(site, mode) as pair:
        whole = a_source()
        source = a_paged(LAYOUT, 16, (), blocks=len(whole.table) + 2)
        source.cells[:] = whole.cells
        target = a_target()
        injector = KvInjector(target.store, "r", EDGE, stop=TOKENS)
        receiving = asyncio.create_task(receive_kv(pair.down, injector, producer(pair.up)))
        sender = KvSender(pair.up, "r", EDGE, source.store, chunk_bytes=MIB)
        for stop in (700, 1401, TOKENS):
            source.store.update(whole.table[: -(-stop // 16)])
            await sender.advance(stop)
            await until(lambda stop=stop: injector.unusable == target.store.blocks(range(stop)))
            assert not receiving.done(), "it is not told yet that this is all"
        await sender.advance(TOKENS, last=True)
        async with asyncio.timeout(30):
            await receiving
        assert same_bits(target.tokens(TOKENS), whole.tokens(TOKENS))
        await pair.nothing_left()


async def test_ar_to_dit(site: Site) -> None:
    """The consumer has no blocks: one array, in which a text prefix is there already."""
    layout = replace(LAYOUT, dtype="float8_e4m3fn")
    async with a_pair(site, "two pods") as pair:
        source = a_source(layout)
        array = some_bits((layout.layers, 2, TOKENS, layout.heads, layout.head_dim), layout, seed=5)
        before = array.copy()
        injector = KvInjector(ContiguousStore(layout, array), "r", EDGE, start=300)
        sending = send_kv(pair.up, "r", EDGE, source.store, range(290, TOKENS), chunk_bytes=MIB)
        await asyncio.gather(sending, receive_kv(pair.down, injector, producer(pair.up)))
        assert same_bits(array[:, :, 300:], source.tokens(TOKENS)[:, :, 300:])
        assert same_bits(array[:, :, :300], before[:, :, :300])
        await pair.nothing_left()


@MODES
async def test_many_at_once(site: Site, mode: str) -> None:
    """One of them fails, and no other."""
    tokens, count = 300, 6
    async with a_pair(site, mode) as pair, KvReceiver(pair.down) as receiver:
        sources = [a_source(tokens=tokens, seed=n) for n in range(count)]
        targets = [a_target(tokens=tokens) for _ in range(count)]
        injectors = [KvInjector(t.store, f"r{n}", EDGE, stop=tokens - (n == 2)) for n, t in enumerate(targets)]
        sends = [
            send_kv(pair.up, f"r{n}", EDGE, s.store, range(tokens), chunk_bytes=100_000) for n, s in enumerate(sources)
        ]
        receives = [receiver.receive(i, producer(pair.up)) for i in injectors]
        results = await asyncio.gather(*receives, *sends, return_exceptions=True)
        for n, (source, target, result) in enumerate(zip(sources, targets, results, strict=False)):
            if n == 2:
                assert isinstance(result, ProtocolError)
                assert "to 300 came, beyond the 299" in str(result)
            else:
                assert result is None
                assert same_bits(target.tokens(tokens), source.tokens(tokens))
        assert all(r is None or isinstance(r, StreamClosed) for r in results[count:])
        del results
        await pair.nothing_left()


@MODES
async def test_another_layout_is_refused_before_anything_is_written(site: Site, mode: str) -> None:
    async with a_pair(site, mode) as pair:
        target = a_target()
        before = target.cells.copy()
        injector = KvInjector(target.store, "r", EDGE)
        source = a_source(replace(LAYOUT, model="another"))
        sending = asyncio.create_task(send_kv(pair.up, "r", EDGE, source.store, range(TOKENS), chunk_bytes=100_000))
        with pytest.raises(ContractMismatch, match="model of the KV cache is 'another' at the producer and 'm'"):
            await receive_kv(pair.down, injector, producer(pair.up))
        assert same_bits(target.cells, before)
        assert injector.unusable == ()
        with pytest.raises(StreamClosed):
            await sending
        del sending
        await pair.nothing_left()


async def begun(pair: Pair, target: Paged, tokens: int = 1000) -> tuple[KvSender, KvInjector, asyncio.Task[None]]:
    """Some of a cache has been written at the consumer."""
    injector = KvInjector(target.store, "r", EDGE, stop=TOKENS)
    receiving = asyncio.create_task(receive_kv(pair.down, injector, producer(pair.up)))
    sender = KvSender(pair.up, "r", EDGE, a_source().store, chunk_bytes=MIB)
    await sender.advance(tokens)
    await until(lambda: injector.unusable == target.store.blocks(range(tokens)))
    return sender, injector, receiving


@MODES
@pytest.mark.parametrize("who", ["producer", "producer's store", "consumer"])
async def test_an_end_in_the_middle(site: Site, mode: str, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11: the other side is told, the blocks are named, and nothing stays in the arena."""
    async with a_pair(site, mode) as pair:
        target = a_target()
        sender, injector, receiving = await begun(pair, target)
        if who == "consumer":
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving

            async def until_told() -> None:
                for stop in range(1100, TOKENS + 1, 10):
                    await sender.advance(stop)
                    await asyncio.sleep(0.01)

            with pytest.raises(StreamClosed):
                await until_told()
        else:
            if who == "producer":
                await pair.up.abort("r")
            else:
                monkeypatch.setattr(type(a_source().store), "read", lambda *_: [][0])
                with pytest.raises(IndexError):
                    await sender.advance(1100)
            async with asyncio.timeout(30):
                with pytest.raises(UpstreamLost):
                    await receiving
        assert not injector.complete
        assert injector.unusable == target.store.blocks(range(1000))
        with pytest.raises(ProtocolError, match="broken off"):  # whatever else would be given to it
            injector.accept(Payload(1000, 0, False))
        await pair.nothing_left()


@MODES
async def test_a_stream_that_ends_short_is_an_error(site: Site, mode: str) -> None:
    async with a_pair(site, mode) as pair:
        target = a_target()
        sender, injector, receiving = await begun(pair, target)
        await sender.advance(1000, last=True)
        async with asyncio.timeout(30):
            with pytest.raises(ProtocolError, match="cache ends at token 1000, the request here has 2000"):
                await receiving
        assert not injector.complete
        assert injector.unusable == target.store.blocks(range(1000))
        await pair.nothing_left()


async def test_deadlines_are_the_clients(site: Site) -> None:
    limits = ClientLimits(put_deadline_s=0.5, chunk_deadline_s=0.5)
    async with a_pair(site, "same pod", up=limits, down=limits) as pair:
        target = a_target()
        _, injector, receiving = await begun(pair, target)
        async with asyncio.timeout(30):
            with pytest.raises(DeadlineExceeded, match="no chunk from upstream within 0.5 s"):
                await receiving
        assert injector.unusable == target.store.blocks(range(1000))
        with pytest.raises(DeadlineExceeded, match="the consumer granted nothing within 0.5 s"):
            await send_kv(pair.up, "alone", EDGE, a_source().store, range(TOKENS), chunk_bytes=20_000)
        await pair.nothing_left()


async def test_a_receiver_that_ends_tells_those_that_wait(site: Site) -> None:
    async with a_pair(site, "same pod") as pair:
        async with KvReceiver(pair.down) as receiver:
            injector = KvInjector(a_target().store, "r", EDGE)
            receiving = asyncio.create_task(receiver.receive(injector, producer(pair.up)))
            await until(lambda: len(receiver._open) == 1)
            with pytest.raises(StreamClosed, match="received already"):
                await receiver.receive(injector, producer(pair.up))
        with pytest.raises(StreamClosed, match="nobody reads"):
            await receiving
        await pair.nothing_left()


async def test_others_have_their_turn_between_chunks() -> None:
    """A put that has credit and room waits for nothing; a cache of many chunks must not hold up the stage's loop."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    tape, task = Tape(), asyncio.create_task(others())
    await send_kv(tape, "r", EDGE, a_source().store, range(TOKENS), chunk_bytes=MIB)  # type: ignore[arg-type]
    task.cancel()
    assert turns >= len(tape.payloads) > 3


async def test_a_stage_with_a_loop_of_its_own_feeds_the_receiver(site: Site) -> None:
    """The first failure counts; what comes behind it is still the receiver's, and what comes later is not."""
    async with a_pair(site, "same pod") as pair:
        receiver = KvReceiver(pair.down)
        injector = KvInjector(a_target().store, "r", EDGE)
        receiving = asyncio.create_task(receiver.receive(injector, producer(pair.up)))
        await until(lambda: len(receiver._open) == 1)
        assert not receiver.feed(EdgeFailed("another", EDGE, "UpstreamLost", "not ours"))
        assert receiver.feed(EdgeFailed("r", EDGE, "UpstreamLost", "gone"))
        assert receiver.feed(EdgeFailed("r", EDGE, "ProtocolError", "and more"))
        with pytest.raises(UpstreamLost, match="gone"):
            await receiving
        assert not receiver.feed(EdgeFailed("r", EDGE, "UpstreamLost", "late"))
        await pair.nothing_left()
