"""Any layout, any block sizes, any tables, any chunks, in any order that is allowed: the same bits, and no others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_runtime.connectors.payloads import describe
from omni_runtime.kv.injection import KvInjector
from omni_runtime.kv.layout import CARRIERS, KvLayout, Span, cut
from omni_runtime.kv.stores import ContiguousStore, KvStore, ShardedStore
from omni_runtime.kv.transfer import KvSender
from omni_runtime.protocol.payload import Payload
from tests.unit.kv.caches import EDGE, Paged, Tape, a_paged, same_bits, some_bits

MEMORY = ((0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 3, 1), (2, 0, 1, 3))  # NHD, HND, column-major, heads outermost


@dataclass(frozen=True, slots=True)
class Case:
    layout: KvLayout
    tokens: int
    begin: int  # of the producer
    have: int  # of the consumer
    limit: int  # bytes of a chunk


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = KvLayout(
        "m",
        layers=draw(st.integers(1, 4)),
        heads=draw(st.integers(1, 4)),
        head_dim=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(sorted(CARRIERS))),
        planes=draw(st.integers(1, 2)),
    )
    tokens = draw(st.integers(0, 24))
    have = draw(st.integers(0, tokens))
    row = layout.planes * layout.heads * layout.head_dim * layout.carrier.itemsize
    limit = draw(st.integers(row, row * max(1, tokens) * layout.layers * 2))
    return Case(layout, tokens, draw(st.integers(0, have)), have, limit)


def a_cache(draw: st.DrawFn, layout: KvLayout, tokens: int, heads: range, seed: int) -> Paged:
    size = draw(st.integers(1, 7))
    needed = -(-tokens // size)
    order = draw(st.permutations(range(needed + 3)))
    where = np.random.default_rng(seed).permutation(size * layout.head_dim).reshape(size, layout.head_dim)
    return a_paged(
        layout,
        size,
        order[: needed + draw(st.integers(0, 1))],
        blocks=needed + 3,
        heads=heads,
        memory=draw(st.sampled_from(MEMORY)),
        where=where if draw(st.booleans()) else None,
        seed=seed,
    )


def shards(draw: st.DrawFn, layout: KvLayout, tokens: int, seed: int) -> list[tuple[range, Paged]]:
    borders = sorted({0, layout.heads, *draw(st.sets(st.integers(0, layout.heads), max_size=3))})
    spans = [range(a, b) for a, b in pairwise(borders)]
    return [(heads, a_cache(draw, layout, tokens, heads, seed + n)) for n, heads in enumerate(spans)]


def together(parts: list[tuple[range, Paged]]) -> KvStore:
    return parts[0][1].store if len(parts) == 1 else ShardedStore([paged.store for _, paged in parts])


def tokens_of(parts: list[tuple[range, Paged]], count: int) -> np.ndarray:
    return np.concatenate([paged.tokens(count) for _, paged in parts], axis=3)


@settings(deadline=None)
@given(case=cases(), data=st.data())
def test_what_arrives_is_what_was_there(case: Case, data: st.DataObject) -> None:
    """Prefill in steps, over any number of shards with blocks of any size, into any other; some of it there already."""
    layout, count = case.layout, case.tokens
    source = shards(data.draw, layout, count, seed=1)
    target = shards(data.draw, layout, count, seed=100)
    tape = Tape()
    sender = KvSender(tape, "r", EDGE, together(source), start=case.begin, chunk_bytes=case.limit)  # type: ignore[arg-type]
    steps = sorted(data.draw(st.lists(st.integers(case.begin, count), max_size=3)))
    layer = data.draw(st.integers(0, layout.layers))

    async def prefill() -> None:
        for stop in steps:
            for layers in (range(layer), range(layer, layout.layers)):  # one half is computed before the other
                await sender.advance(stop, layers=layers)
        await sender.advance(count, last=True)

    asyncio.run(prefill())
    injector = KvInjector(together(target), "r", EDGE, start=case.have, stop=data.draw(st.sampled_from([None, count])))
    before = tokens_of(target, count)
    others = [paged.others() for _, paged in target]
    for payload in tape.payloads:
        assert not injector.complete
        assert describe(payload).nbytes <= case.limit
        injector.accept(payload)
    assert injector.complete
    assert injector.unusable == ()
    after = tokens_of(target, count)
    assert same_bits(after[:, :, : case.have], before[:, :, : case.have]), "a prefix that others share"
    assert same_bits(after[:, :, case.have :], tokens_of(source, count)[:, :, case.have :])
    assert all(same_bits(paged.others(), was) for (_, paged), was in zip(target, others, strict=True))


@settings(deadline=None, max_examples=50)
@given(case=cases(), data=st.data())
def test_shards_share_a_stream(case: Case, data: st.DataObject) -> None:
    """Each shard sends by itself; their chunks interleave in any way, and one of them is the last to end."""
    layout, count = case.layout, case.tokens
    source = shards(data.draw, layout, count, seed=1)
    tapes: list[list[Payload]] = []
    for _, paged in source:
        tape = Tape()
        sender = KvSender(tape, "r", EDGE, paged.store, start=case.begin, chunk_bytes=case.limit)  # type: ignore[arg-type]
        asyncio.run(sender.advance(count))
        tapes.append(tape.payloads)
    end = Tape()
    ender = KvSender(end, "r", EDGE, source[0][1].store, start=case.begin)  # type: ignore[arg-type]
    ender._sent = [count] * layout.layers
    asyncio.run(ender.advance(count, last=True))
    array = some_bits((layout.layers, layout.planes, count, layout.heads, layout.head_dim), layout, seed=7)
    before = array.copy()
    injector = KvInjector(ContiguousStore(layout, array), "r", EDGE, start=case.have)
    while any(tapes):
        tape_ = data.draw(st.sampled_from([t for t in tapes if t]))
        injector.accept(tape_.pop(0))
    assert not injector.complete
    injector.accept(end.payloads[0])
    assert injector.complete
    assert same_bits(array[:, :, : case.have], before[:, :, : case.have])
    assert same_bits(array[:, :, case.have :], tokens_of(source, count)[:, :, case.have :])


@given(
    layers=st.integers(1, 9),
    tokens=st.integers(0, 40),
    heads=st.integers(1, 4),
    room=st.integers(1, 200),
)
def test_chunks_cover_a_range_once(layers: int, tokens: int, heads: int, room: int) -> None:
    layout = KvLayout("m", layers, heads, 2, "float16")
    row = 2 * heads * 2 * 2
    seen = np.zeros((layers, tokens + 5), int)
    ordered: list[tuple[int, int]] = []
    whole = Span(range(layers), range(heads), range(5, 5 + tokens))
    for span in cut(layout, whole, row * room):
        assert np.prod(span.shape(layout)) * 2 <= row * room
        seen[span.layers.start : span.layers.stop, span.tokens.start : span.tokens.stop] += 1
        ordered.append((span.layers.start, span.tokens.start))
        one_more = (len(span.layers) + 1) * len(span.tokens) if len(span.tokens) == tokens else len(span.tokens) + 1
        last = span.tokens.stop == whole.tokens.stop and (len(span.tokens) < tokens or span.layers.stop == layers)
        assert last or one_more > room, "no needlessly small ones"
    assert (seen[:, 5:] == 1).all()
    assert not seen[:, :5].any()
    assert ordered == sorted(ordered), "layers in order, and the tokens of each"
