"""What a stream may do wrong, and what is said of it. Nothing of a refused chunk is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.errors import CapacityExceeded, ContractMismatch, EngineError
from omni_runtime.kv.injection import KvInjector
from omni_runtime.kv.layout import KvLayout, Span, cut
from omni_runtime.kv.stores import ContiguousStore, PagedStore, ShardedStore, StridedPlane
from omni_runtime.kv.transfer import KvSender
from omni_runtime.protocol.payload import Payload
from tests.unit.kv.caches import EDGE, LAYOUT, Paged, Tape, a_chunk, a_paged, hello, same_bits, some_bits, variants

TABLE = (5, 0, 3)  # blocks of 4 tokens: 12 have a place


@dataclass(frozen=True, slots=True)
class Rig:
    cache: Paged
    injector: KvInjector

    def refuses(self, payload: Payload, says: str, kind: type[Exception] = ProtocolError) -> None:
        before = self.cache.cells.copy()
        with pytest.raises(kind, match=says) as raised:
            self.injector.accept(payload)
        assert str(raised.value).startswith(f"{EDGE} of request r: "), "an error names its edge and request"
        assert same_bits(self.cache.cells, before), "something was written"
        assert not self.injector.complete
        with pytest.raises(kind, match=says):
            self.injector.accept(full(0, 1, **hello()))  # a stream that has failed takes nothing


def a_rig(start: int = 0, stop: int | None = None) -> Rig:
    cache = a_paged(LAYOUT, 4, TABLE, seed=3)
    return Rig(cache, KvInjector(cache.store, "r", EDGE, start=start, stop=stop))


def full(start: int, to: int, /, **meta: object) -> Payload:
    """Tokens start to `to` of all layers and heads."""
    shape = Span(range(LAYOUT.layers), range(LAYOUT.heads), range(start, to)).shape(LAYOUT)
    return a_chunk(some_bits(shape, LAYOUT, start), start=start, **meta)  # type: ignore[arg-type]


def part(layers: int = 1, tokens: int = 2, heads: int = 2, **where: object) -> Payload:
    return a_chunk(some_bits((layers, 2, tokens, heads, 4), LAYOUT), **where)  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "theirs"), list(variants(LAYOUT)), ids=lambda v: v if isinstance(v, str) else "")
def test_another_layout_is_refused_with_field_both_values_and_fix(field: str, theirs: KvLayout) -> None:
    ours_, theirs_ = repr(getattr(LAYOUT, field)), repr(getattr(theirs, field))
    fix = "kv_cache_dtype" if field == "dtype" else "the same model"
    says = rf"{field} of the KV cache is {re.escape(theirs_)} at the producer and {re.escape(ours_)} .*; .*{fix}"
    a_rig().refuses(full(0, 2, **hello(theirs)), says, ContractMismatch)


def test_numbers_that_only_look_alike_are_another_layout() -> None:
    layout = replace(LAYOUT, layers=1)
    store = ContiguousStore(layout, some_bits((1, 2, 4, 2, 4), layout))
    with pytest.raises(ContractMismatch, match="layers of the KV cache is True"):
        KvInjector(store, "r", EDGE).accept(part(**hello(layout, kv_layers=True)))


FIRST: dict[str, tuple[Callable[[], Payload], str, type[Exception]]] = {
    "no handshake": (
        lambda: full(0, 2),
        "layers of the KV cache is None|model of the KV cache is None",
        ContractMismatch,
    ),
    "no start": (
        lambda: full(0, 2, **hello(kv_start=None)),
        "meta kv_start is None; it must be a count",
        ProtocolError,
    ),
    "begins after what is here": (
        lambda: full(2, 4, **hello(start=2)),
        "gap: the producer begins at token 2, and only 0 are here; it must begin at 0 or before",
        ProtocolError,
    ),
    "skips tokens": (
        lambda: full(1, 4, **hello()),
        "gap: layer 0, head 0: tokens 1 to 4 came, 0 to 1 are missing",
        ProtocolError,
    ),
    "beyond the table": (
        lambda: full(0, 13, **hello()),
        "tokens 0 to 13 came, beyond the 12 that have a place",
        ProtocolError,
    ),
    "no such layer": (lambda: part(2, layer=2, **hello()), "layers 2 to 4, .* there are 3 layers", ProtocolError),
    "no such head": (
        lambda: part(head=1, **hello()),
        "heads 1 to 3 came; there are 3 layers of 2 heads",
        ProtocolError,
    ),
    "no layer": (lambda: part(**hello(), kv_layer=None), "meta kv_layer is None", ProtocolError),
    "a head below 0": (lambda: part(head=-1, **hello()), "meta kv_head is -1", ProtocolError),
    "rows that are not there": (
        lambda: Payload(0, 5, False, part().tensors, {**hello(), **part().meta}, LAYOUT.dtypes),
        r"kv is \[1, 2, 2, 2, 4\]; 5 rows need \[1, 2, 5, 2, 4\]",
        ProtocolError,
    ),
    "rows without a tensor": (
        lambda: Payload(0, 2, False, {}, {**hello(), "kv_layer": 0, "kv_head": 0}),
        r"tensors \[\]; it must have 'kv' alone",
        ProtocolError,
    ),
    "another number type": (
        lambda: Payload(0, 2, False, part().tensors, {**hello(), **part().meta}, {}),
        r"kv is uint16\[.*; it must be bfloat16",
        ProtocolError,
    ),
    "four axes": (
        lambda: a_chunk(some_bits((1, 2, 2, 8), LAYOUT), **hello()),
        "it must be bfloat16, with five axes",
        ProtocolError,
    ),
    "one plane": (lambda: a_chunk(some_bits((1, 1, 2, 2, 4), LAYOUT), **hello()), "2 rows need", ProtocolError),
    "no layers in it": (lambda: part(0, **hello()), "none of it 0", ProtocolError),
    "ends before all is there": (
        lambda: part(3, tokens=2, **hello(), stop=4),
        "ended at token 4, and layer 0, head 0 has tokens up to 2",
        ProtocolError,
    ),
    "ends without a layer": (
        lambda: part(2, tokens=4, **hello(), stop=4),
        "ended at token 4, and layer 2, head 0 has tokens up to 0",
        ProtocolError,
    ),
    "ends without a head": (
        lambda: part(3, tokens=4, heads=1, **hello(), stop=4),
        "ended at token 4, and layer 0, head 1 has tokens up to 0",
        ProtocolError,
    ),
    "does not say where it ends": (
        lambda: Payload(0, 0, True, {}, hello()),
        "meta kv_stop is None",
        ProtocolError,
    ),
}


@pytest.mark.parametrize(("payload", "says", "kind"), FIRST.values(), ids=list(FIRST))
def test_what_a_first_chunk_may_not_be(payload: Callable[[], Payload], says: str, kind: type[Exception]) -> None:
    rig = a_rig()
    if "ended at" in says:  # its bytes are in place, and of no use
        with pytest.raises(kind, match=says):
            rig.injector.accept(payload())
        assert not rig.injector.complete
        assert rig.injector.unusable == (5,)
    else:
        rig.refuses(payload(), says, kind)
        assert rig.injector.unusable == ()


LATER: dict[str, tuple[Callable[[], Payload], str]] = {
    "gap": (lambda: full(8, 9), "gap: layer 0, head 0: tokens 8 to 9 came, 6 to 8 are missing"),
    "overlap": (lambda: full(5, 8), "overlap: layer 0, head 0: tokens 5 to 8 came, and those before 6 had come"),
    "twice": (lambda: full(0, 6), "overlap"),
    "gap of one head": (lambda: part(tokens=1, start=7, layer=1, head=1, heads=1), "gap: layer 1, head 1"),
    "another sender begins elsewhere": (
        lambda: full(6, 7, **hello(start=6)),
        "one sender begins at token 0, another at 6",
    ),
    "takes tokens back": (
        lambda: Payload(0, 0, True, {}, {"kv_stop": 5}),
        "ended at token 5, and layer 0, head 0 has tokens up to 6",
    ),
}


@pytest.mark.parametrize(("payload", "says"), LATER.values(), ids=list(LATER))
def test_what_a_later_chunk_may_not_be(payload: Callable[[], Payload], says: str) -> None:
    rig = a_rig()
    rig.injector.accept(full(0, 6, **hello()))
    rig.refuses(payload(), says)
    assert rig.injector.unusable == (5, 0), "the blocks with tokens 0 to 6"


def test_another_senders_layout_is_looked_at_too() -> None:
    rig = a_rig()
    rig.injector.accept(full(0, 6, **hello()))
    other = replace(LAYOUT, model="another")
    rig.refuses(full(6, 7, **hello(other)), "model of the KV cache is 'another'", ContractMismatch)


def test_nothing_comes_after_the_end() -> None:
    rig = a_rig()
    rig.injector.accept(full(0, 6, **hello(), stop=6))
    assert rig.injector.complete
    rig.injector.abandon("too late to matter")
    assert rig.injector.complete
    before = rig.cache.cells.copy()
    with pytest.raises(ProtocolError, match="a chunk came after the finished one"):
        rig.injector.accept(full(6, 8))
    assert same_bits(rig.cache.cells, before)
    assert rig.injector.unusable == (5, 0), "who sends such chunks may have sent others"


@pytest.mark.parametrize(("stop", "says"), [(5, "beyond the 5 that have a place"), (7, "ends at token 6, .* has 7")])
def test_the_consumer_knows_how_many_tokens_there_are(stop: int, says: str) -> None:
    rig = a_rig(stop=stop)
    with pytest.raises(ProtocolError, match=says):
        rig.injector.accept(full(0, 6, **hello(), stop=6))
    assert not rig.injector.complete


def test_a_producer_with_less_than_is_here_already_is_refused() -> None:
    with pytest.raises(ProtocolError, match="ends at token 3, the request here has 4"):
        a_rig(start=4).injector.accept(full(0, 3, **hello(), stop=3))


def test_a_prefix_that_is_here_is_neither_written_nor_unusable() -> None:
    """Blocks of a prefix cache belong to other requests as well."""
    rig = a_rig(start=4)
    before = rig.cache.cells.copy()
    rig.injector.accept(full(0, 6, **hello()))
    assert same_bits(rig.cache.cells[:, :, 5], before[:, :, 5])
    assert rig.injector.unusable == (0,)
    rig.injector.abandon("gone")
    with pytest.raises(ProtocolError, match="of request r: gone"):
        rig.injector.accept(full(6, 7))
    assert not rig.injector.complete


def test_a_store_that_fails_makes_its_blocks_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = a_rig()

    def broken(*_: object) -> None:
        raise RuntimeError("no such memory")

    monkeypatch.setattr(PagedStore, "write", broken)
    with pytest.raises(EngineError, match=f"{EDGE} of request r: RuntimeError: no such memory"):
        rig.injector.accept(full(0, 6, **hello(), stop=6))
    assert not rig.injector.complete
    monkeypatch.undo()
    with pytest.raises(EngineError, match="no such memory"):
        rig.injector.accept(full(0, 6, stop=6))
    assert rig.injector.unusable == (5, 0)


# --- what is wrong on this side


@pytest.mark.parametrize(
    ("table", "says"),
    [((0, -1), "block -1"), ((0, 9), "block 9 is in the table; the cache has 3"), ((1, 1), "twice")],
)
def test_tables_that_are_none(table: tuple[int, ...], says: str) -> None:
    """A negative number would be another request's block, counted from the end."""
    with pytest.raises(ValueError, match=says):
        a_paged(LAYOUT, 4, table, blocks=3)


def test_a_table_grows_and_does_not_change() -> None:
    cache = a_paged(LAYOUT, 4, (2, 0), blocks=5)
    cache.store.update((2, 0, 4))
    assert cache.store.capacity == 12
    assert cache.store.blocks(range(7, 9)) == (0, 4)
    with pytest.raises(ValueError, match="the request has moved"):
        cache.store.update((1, 0, 4))


def test_arrays_of_another_shape_are_no_stores() -> None:
    block = some_bits((2, 4, 2, 4), LAYOUT)
    for planes, says in (
        ([[StridedPlane(block)] * 2] * 2, "3 layers of 2 planes"),
        ([[StridedPlane(block)]] * 3, "3 layers of 2 planes"),
        ([[StridedPlane(block[:, :, :1])] * 2] * 3, "blocks have"),
        ([[StridedPlane(block.view(np.int16))] * 2] * 3, "blocks have"),
    ):
        with pytest.raises(ValueError, match=says):
            PagedStore(LAYOUT, planes, (0,))
    for array in (block, some_bits((3, 2, 5, 1, 4), LAYOUT), np.zeros((3, 2, 5, 2, 4), np.float32)):
        with pytest.raises(ValueError, match="does not hold"):
            ContiguousStore(LAYOUT, array)


def test_shards_have_no_gap() -> None:
    shards = [a_paged(replace(LAYOUT, heads=3), 4, (0,), heads=range(h, h + 1)).store for h in (0, 2)]
    with pytest.raises(ValueError, match="without gaps"):
        ShardedStore(shards)


@pytest.mark.parametrize("field", ["dtype", "layers"])
def test_layouts_that_are_none(field: str) -> None:
    with pytest.raises(ValueError, match="dtype 'int4' is not one of|at least 1"):
        replace(LAYOUT, **{field: "int4" if field == "dtype" else 0})


def test_a_chunk_has_room_for_a_token() -> None:
    with pytest.raises(CapacityExceeded, match="one token of one layer has 32 bytes, a chunk at most 31"):
        list(cut(LAYOUT, Span(range(3), range(2), range(1)), 31))


@pytest.mark.parametrize(
    ("then", "says"),
    [
        ({"stop": 13}, "up to 13 of a store with room for 12"),
        ({"stop": 3}, "layer 0 is at token 4, and not at 3"),
        ({"stop": 4, "layers": range(1, 2), "last": True}, "layer 2 is at token 0, and not at 4"),
    ],
)
async def test_a_sender_that_is_told_nonsense_ends_its_stream(then: dict[str, object], says: str) -> None:
    """A consumer must not wait for what will not come."""
    tape = Tape()
    sender = KvSender(tape, "r", EDGE, a_paged(LAYOUT, 4, TABLE).store)  # type: ignore[arg-type]
    await sender.advance(4, layers=range(2))
    assert not tape.ended
    with pytest.raises(ValueError, match=says):
        await sender.advance(**then)  # type: ignore[arg-type]
    assert tape.ended


def test_a_sender_of_heads_that_are_elsewhere() -> None:
    with pytest.raises(ValueError, match="heads"):
        KvSender(Tape(), "r", EDGE, a_paged(LAYOUT, 4, (0,)).store, heads=range(1, 3))  # type: ignore[arg-type]
