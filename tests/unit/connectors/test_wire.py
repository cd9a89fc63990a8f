"""The wire accepts what it should and answers everything else with ProtocolError, before it allocates."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_runtime.connectors import ipc, payloads, wire
from omni_runtime.connectors.inbound import Duplicate, Inbound
from omni_runtime.connectors.tensors import DTYPE_BYTES, MAX_CHUNK_BYTES, ChunkHeader, ProtocolError, TensorSpec
from omni_runtime.connectors.wire import Put, Slab
from omni_runtime.protocol.payload import Payload

DECODERS = (
    wire.decode_from_engine,
    wire.decode_to_engine,
    wire.decode_from_consumer,
    wire.decode_from_producer,
    wire.decode_line_to,
)


def decode_all(data: bytes) -> None:
    for decode in DECODERS:
        with contextlib.suppress(ProtocolError):
            decode(data)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_never_crash(data: bytes) -> None:
    decode_all(data)


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=30,
)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 40), st.lists(_values, max_size=12))
def test_random_fields_never_crash(tag: int, fields: list[object]) -> None:
    decode_all(msgspec.msgpack.encode([tag, *fields]))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_flipped_bytes_never_crash(data: st.DataObject) -> None:
    chunk = ChunkHeader(3, 2, True, 64, 1.5, (TensorSpec("rows", "float32", (4, 4), 0),), {"voice": "x", "n": (1, 2)})
    message = bytearray(wire.encode(Put(1, 0, 0, True, 64, Slab(64, 64, 9), chunk)))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    decode_all(bytes(message))


def test_deep_nesting_is_refused() -> None:
    for decode in DECODERS:
        with pytest.raises(ProtocolError):
            decode(b"\x91" * 50_000)


def header(*tensors: TensorSpec, nbytes: int = 1024) -> bytes:
    return wire.encode(Put(1, 0, 0, True, nbytes, None, ChunkHeader(0, 1, False, nbytes, 0.0, tensors)))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(header(TensorSpec("x", "object", (1,), 0)), "dtype 'object'", id="a dtype that would be code"),
        pytest.param(header(TensorSpec("x", "save", (1,), 0)), "dtype 'save'", id="no getattr by a peer's name (R62)"),
        pytest.param(header(TensorSpec("x", "float32", (1 << 40, 1 << 40), 0)), "past the chunk", id="huge shape"),
        pytest.param(header(TensorSpec("x", "uint8", (1025,), 0)), "past the chunk", id="one byte too many"),
        pytest.param(header(TensorSpec("x", "uint8", (1,), 8)), "aligned", id="offset not aligned"),
        pytest.param(
            header(TensorSpec("x", "uint8", (65,), 0), TensorSpec("y", "uint8", (1,), 64)), "overlaps", id="overlap"
        ),
        pytest.param(
            header(TensorSpec("x", "uint8", (1,), 0), TensorSpec("x", "uint8", (1,), 64)), "twice", id="same name twice"
        ),
        pytest.param(header(nbytes=MAX_CHUNK_BYTES + 1), "<= 4294967296", id="chunk over the limit"),
        pytest.param(wire.encode(Put(1, 0, 0, True, 5, None, None)), "chunk header", id="piece 0 without header"),
        pytest.param(
            wire.encode(Put(1, 0, 1, True, 5, Slab(64, 6, 1), None)), "slab of 6", id="slab of another length"
        ),
        pytest.param(
            wire.encode(Put(1, 0, 0, True, 5, None, ChunkHeader(0, 1, False, 6, 0.0))), "only piece", id="bytes missing"
        ),
        pytest.param(wire.encode(wire.Failed(1, "X", "m")) + b"\x00" * (64 << 10), "header of", id="oversize header"),
        pytest.param(msgspec.msgpack.encode([1, -1, 0, 0, True, 0, None, None]), ">= 0", id="negative stream"),
    ],
)
def test_inconsistent_messages_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        wire.decode_from_producer(data)


def test_negative_shapes_are_refused() -> None:
    data = msgspec.msgpack.decode(header(TensorSpec("x", "uint8", (4,), 0)))
    data[7][5][0][2] = [-4]
    with pytest.raises(ProtocolError, match="shape|>= 0"):
        wire.decode_from_producer(msgspec.msgpack.encode(data))


@pytest.mark.parametrize(
    "sizes", [(wire.MAX_HEADER_BYTES + 1, 0), (10, wire.MAX_BODY_BYTES + 1), (0xFFFFFFFF, 0xFFFFFFFF)]
)
def test_frames_are_refused_by_their_prefix(sizes: tuple[int, int]) -> None:
    with pytest.raises(ProtocolError, match="frame of"):
        ipc.parse_prefix(ipc.FRAME_PREFIX.pack(*sizes))


def test_a_descriptor_is_small() -> None:
    tensors = tuple(TensorSpec(name, "bfloat16", (1024, 2048), i << 22) for i, name in enumerate(("embed", "hidden")))
    chunk = ChunkHeader(123_456, 1024, False, 8 << 20, 1.7e9, tensors, {"voice": "Ethan"})
    assert len(wire.encode(Put(70_000, 1000, 0, True, 8 << 20, Slab(1 << 28, 8 << 20, 7 << 32), chunk))) <= 256


_DTYPES = sorted(DTYPE_BYTES)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(_DTYPES), st.lists(st.integers(0, 5), max_size=4)), max_size=6),
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.integers(-(1 << 60), 1 << 60)
        | st.booleans()
        | st.text(max_size=9)
        | st.lists(st.integers(0, 9), max_size=4),
        max_size=4,
    ),
)
def test_payloads_come_back_equal(tensors: list[tuple[str, list[int]]], meta: dict[str, object]) -> None:
    arrays, dtypes = {}, {}
    rng = np.random.default_rng(1)
    for i, (dtype, shape) in enumerate(tensors):
        carrier = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}.get(dtype, dtype)
        arrays[f"t{i}"] = rng.integers(0, 2, shape).astype(carrier)
        if carrier != dtype:
            dtypes[f"t{i}"] = dtype
    payload = Payload(7, 3, False, arrays, meta, dtypes)
    chunk = payloads.describe(payload)
    memory = bytearray(chunk.nbytes)
    payloads.write(payload, chunk, memoryview(memory))
    (decoded := wire.decode_from_producer(wire.encode(Put(1, 0, 0, True, chunk.nbytes, None, chunk))))
    assert isinstance(decoded, Put)
    assert decoded.chunk is not None
    back = payloads.read(decoded.chunk, np.frombuffer(memory, np.uint8))
    assert (back.start, back.rows, back.finished, dict(back.dtypes)) == (7, 3, False, dtypes)
    assert list(back.tensors) == list(arrays)
    for name, array in arrays.items():
        assert back.tensors[name].dtype == array.dtype
        assert back.tensors[name].shape == array.shape
        assert np.array_equal(back.tensors[name], array)
    expected = {k: tuple(v) if isinstance(v, list) else v for k, v in meta.items()}
    assert dict(back.meta) == expected


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(Payload(0, 1, False, {"x": np.array([object()])}), id="object array"),
        pytest.param(Payload(0, 1, False, {"x": np.array(["a"])}), id="text array"),
        pytest.param(Payload(0, 1, False, {"x": np.zeros(2, ">f4")}), id="big endian"),
        pytest.param(
            Payload(0, 1, False, {"x": np.zeros(2, "f4")}, {}, {"x": "bfloat16"}), id="bfloat16 not in uint16"
        ),
        pytest.param(Payload(0, 1, False, {}, {"x": object()}), id="meta of an unknown kind"),
        pytest.param(Payload(-1, 1, False), id="negative position"),
        pytest.param(Payload(0, 1, False, {f"t{i}": np.zeros(1, "u1") for i in range(65)}), id="too many tensors"),
    ],
)
def test_payloads_that_may_not_travel(payload: Payload) -> None:
    with pytest.raises(ProtocolError):
        payloads.describe(payload)


def test_a_whole_chunk_has_its_place_among_pieces() -> None:
    """R18, R23: not before another, not twice, not in the middle of one, not after the last, not above the limit."""

    def piece(seq: int, number: int, *, last: bool) -> Put:
        return Put(1, seq, number, last, 5, None, chunk(10) if number == 0 else None)

    def chunk(nbytes: int, *, finished: bool = False) -> ChunkHeader:
        return ChunkHeader(0, 1, finished, nbytes, 0.0)

    inbound = Inbound(100)
    inbound.next_whole(0, chunk(10))
    for seq, nbytes, error, says in (
        (0, 10, Duplicate, None),
        (2, 10, ProtocolError, "2.0 came, 1.0 is missing"),
        (1, 101, ProtocolError, "at most 100"),
    ):
        with pytest.raises(error, match=says):
            inbound.next_whole(seq, chunk(nbytes))
    assert inbound.accept(piece(1, 0, last=False), b"01234") is None
    with pytest.raises(ProtocolError, match=r"1\.0 came, 1\.1 is missing"):
        inbound.next_whole(1, chunk(10))
    assert inbound.accept(piece(1, 1, last=True), b"56789") is not None
    inbound.next_whole(2, chunk(10, finished=True))
    with pytest.raises(Duplicate):
        inbound.next_whole(3, chunk(10))


@pytest.mark.parametrize(
    "meta",
    [{"n" * 65: 1}, {"x": 1 << 70}, {"x": -(1 << 70)}, {"x": [object()]}, {1: 1}, {"\ud800": 1}, {"x": "\ud800"}, {f"n{i}": i for i in range(65)}],
    ids=["long name", "large", "small", "object", "no name", "half a character", "half of one", "many"],
)  # fmt: skip
def test_meta_that_may_not_travel_is_refused_before_it_is_sent(meta: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        payloads.describe(Payload(0, 0, False, {}, meta))


@pytest.mark.parametrize("value", [0, (1 << 63) - 1, 1 << 63, -1, 0.5, True, None, "word", [1, 2.5]])
def test_meta_arrives_as_it_was_sent(value: object) -> None:
    header = payloads.describe(Payload(0, 0, False, {}, {"x": value, "n" * 64: 1}))
    came = msgspec.msgpack.decode(wire.encode(header), type=ChunkHeader)
    assert came.meta == {"x": tuple(value) if isinstance(value, list) else value, "n" * 64: 1}
