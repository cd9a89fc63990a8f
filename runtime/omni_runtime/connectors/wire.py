"""Messages of the data path: engine <-> sidecar (unix socket) and sidecar <-> sidecar (TCP, CURVE).

A message is a msgpack header and at most one raw buffer; there is no pickle and no object is built from a name that
a peer chose. Everything that a peer announces is checked here and in `tensors`, before any allocation, and a violation
is a ProtocolError. Free of numpy and torch: the sidecar only moves bytes.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from omni_runtime.connectors.tensors import MAX_CHUNK_BYTES, ChunkHeader, ProtocolError, check_chunk

MAX_HEADER_BYTES: Final = 64 << 10
MAX_BODY_BYTES: Final = 1 << 20
INLINE_BYTES: Final = 32 << 10  # a chunk up to this size travels in the message; above, through the arena
FRAGMENT_BYTES: Final = 512 << 10  # unit of fairness on TCP, and of a spill when the arena is full
WINDOW_PIECES: Final = 64  # of one stream that may wait at each hop: enough that a small one rarely wakes anybody
WINDOW_LARGE: Final = 16  # of more than INLINE_BYTES: none is put while so many pieces of any size wait
LINE_KEYS_BYTES: Final = 64  # of both directions of a line to another pod
WINDOW_FRAGMENTS: Final = 8  # unacknowledged fragments of one stream between two sidecars


def kept_back(length: int) -> int:
    """Credits that are not for a piece of so many bytes."""
    return WINDOW_PIECES - WINDOW_LARGE if length > INLINE_BYTES else 0


_U32 = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
_U63 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Count = Annotated[int, Meta(ge=1, le=1 << 16)]
_Inline = Annotated[int, Meta(ge=0, le=INLINE_BYTES)]
_Secret = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
_Id = Annotated[str, Meta(min_length=1, max_length=256)]
_Reason = Annotated[str, Meta(max_length=2048)]
_Segment = Annotated[str, Meta(max_length=300)]
_Code = Annotated[str, Meta(max_length=64)]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag_field="t", forbid_unknown_fields=True, gc=False):
    pass


class Slab(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A place in the arena. The generation is never used twice, so a stale handle cannot match (R62)."""

    offset: _U63
    length: _U63
    generation: _U63


class Put(_Message, frozen=True, tag=1):
    """One piece of a chunk. A chunk is one piece unless it is larger than a slab may be or the arena is full.

    The bytes are in `slab`, or in the message's body when `slab` is None. Between sidecars `slab` is always None
    and the body is the piece's first fragment; `Fragment`s carry the rest.
    """

    stream: _U32
    seq: _U63  # of the chunk in its stream, from 0
    piece: _U32  # in its chunk, from 0
    last: bool  # last piece of its chunk
    length: _U63
    slab: Slab | None = None
    chunk: ChunkHeader | None = None  # on piece 0 only


class Fragment(_Message, frozen=True, tag=2):
    """More bytes of the piece that the stream is in the middle of."""

    stream: _U32
    offset: _U63


class Credit(_Message, frozen=True, tag=3):
    """The receiver can take `pieces` more."""

    stream: _U32
    pieces: _Count


class Acknowledge(_Message, frozen=True, tag=4):
    """The receiving sidecar has stored `fragments` more."""

    stream: _U32
    fragments: _Count


class Cancel(_Message, frozen=True, tag=5):
    """From a consumer: wants no more. From a producer: the request is over here, nothing more will come."""

    stream: _U32
    reason: _Reason


class Failed(_Message, frozen=True, tag=6):
    """The stream has ended without its `finished` chunk; nothing of it follows."""

    stream: _U32
    code: _Code
    message: _Reason


class Ping(_Message, frozen=True, tag=7):
    pass


class Pong(_Message, frozen=True, tag=8):
    """`session`: what a producer's sidecar calls the link; another number than before means that it had given it up."""

    session: int = 0


class Open(_Message, frozen=True, tag=9):
    """The consumer of an edge stream. `endpoint` and `domain` say where the producer's sidecar is."""

    stream: _U32
    edge: _Id
    request: _Id
    producer: _Id  # replica
    consumer: _Id  # replica
    endpoint: Annotated[str, Meta(max_length=256)]
    domain: Annotated[str, Meta(max_length=256)]
    revision: Annotated[str, Meta(max_length=64)]
    contract_version: _U32
    credits: _Count
    fetches: bool = False  # the consumer's sidecar can read large pieces out of the producer's arena (Mooncake)
    token: _U63 = 0  # what the stream is called on the consumer's line; 0: it takes none


class Remote(_Message, frozen=True, tag=10):
    """A piece to be fetched. Its bytes stay until Fetched, and nothing else of the stream is sent until then."""

    stream: _U32
    put: Put
    segments: Annotated[tuple[_Segment, ...], Meta(min_length=1, max_length=8)]  # the engines that lend the arena
    address: Annotated[int, Meta(ge=0)]  # in the producer's sidecar


class Fetched(_Message, frozen=True, tag=11):
    """Answer to every Remote. `later`: whether the next pieces may be fetched as well."""

    stream: _U32
    done: bool  # False: send it over the link
    later: bool
    reason: _Reason = ""


class Bound(_Message, frozen=True, tag=12):
    """From a producer's sidecar: the stream's producer is an engine there, of this session. A line may be had to it."""

    stream: _U32
    session: _U32


class LineTo(_Message, frozen=True, tag=13):
    """The first on a connection for a line, from a consumer's sidecar: which engine it is to lead to, and its name."""

    session: _U32
    name: _Secret


class Lay(_Message, frozen=True, tag=14):
    """From a consumer's sidecar: the line of this name may be used for the stream."""

    stream: _U32
    name: _Secret


# --- engine -> sidecar


class Attach(_Message, frozen=True, tag=20):
    """`near`: an engine of another pod on this node (`neighbours`); it holds up nobody's end."""

    stage: _Id
    replica: _Id
    revision: Annotated[str, Meta(max_length=64)]
    contract_version: _U32
    near: bool = False


class Bind(_Message, frozen=True, tag=21):
    """The producer of an edge stream."""

    stream: _U32
    edge: _Id
    request: _Id


class Lease(_Message, frozen=True, tag=22):
    """Ask for an extent of at least `length` bytes of the arena."""

    length: _U63


class Return(_Message, frozen=True, tag=23):
    """Give an empty extent back."""

    offset: _U63


class Release(_Message, frozen=True, tag=24):
    """The consumer has let go of these slabs."""

    slabs: Annotated[tuple[Slab, ...], Meta(max_length=512)]


class Claim(_Message, frozen=True, tag=25):
    """All that a connection of its own says: an engine asks for the line to another (`line`)."""

    session: _U32


class Bypassed(_Message, frozen=True, tag=26):
    """What the producer has put on the line since it last said so: bytes, and seconds from put until it was sent.

    `starved`: it has no credit left.
    """

    stream: _U32
    chunks: Annotated[tuple[tuple[_Inline, float], ...], Meta(max_length=256)]
    starved: bool


class Taken(_Message, frozen=True, tag=27):
    """The consumer has taken so many chunks off the line, and cannot tell the producer itself."""

    stream: _U32
    pieces: _Count


class Received(_Message, frozen=True, tag=28):
    """Seconds from put until received of chunks that came on a line from another pod, past both sidecars."""

    edge: _Id
    producer: _Id  # replica
    seconds: Annotated[tuple[float, ...], Meta(max_length=256)]


# --- sidecar -> engine


class Attached(_Message, frozen=True, tag=30):
    """Comes with the file descriptors of the arena and of the reading end of the engine's line."""

    session: _U32
    arena_bytes: _U63
    endpoint: str
    domain: str


class Rejected(_Message, frozen=True, tag=31):
    code: _Code
    message: _Reason


class Extent(_Message, frozen=True, tag=32):
    """Answer to Lease; length 0: the arena is full now."""

    offset: _U63
    length: _U63


class Freed(_Message, frozen=True, tag=33):
    """Slabs that this engine allocated are unused again."""

    slabs: Annotated[tuple[Slab, ...], Meta(max_length=512)]


class Squeeze(_Message, frozen=True, tag=34):
    """The arena is full and somebody waits: give empty extents back now."""


class Granted(_Message, frozen=True, tag=36):
    """Answer to Claim; comes with the descriptor of the writing end, or of the connection to another pod and its keys
    (of what is sent, of what is received).
    """

    keys: Annotated[bytes, Meta(max_length=LINE_KEYS_BYTES)] = b""


class Lined(_Message, frozen=True, tag=37):
    """To the consumer: a line to another pod is there to be claimed, by this number."""

    session: _U32


class Paired(_Message, frozen=True, tag=35):
    """To the producer: the line of this session leads to its consumer, who calls the stream so on it."""

    stream: _U32
    session: _U32
    token: _U63


FromEngine = (
    Attach | Claim | Bind | Put | Bypassed | Open | Credit | Taken | Received | Cancel | Release | Lease | Return | Ping
)
ToEngine = Attached | Granted | Lined | Paired | Rejected | Extent | Freed | Squeeze | Put | Credit | Failed | Pong
FromConsumerSidecar = Open | Lay | Credit | Taken | Acknowledge | Fetched | Cancel | Ping
FromProducerSidecar = Put | Fragment | Remote | Bound | Failed | Pong

_Decoded = TypeVar("_Decoded")
encode = msgspec.msgpack.Encoder().encode
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_consumer = msgspec.msgpack.Decoder(FromConsumerSidecar)
_from_producer = msgspec.msgpack.Decoder(FromProducerSidecar)
_line_to = msgspec.msgpack.Decoder(LineTo)


def decode_from_engine(header: bytes | memoryview) -> FromEngine:
    return _checked(_decode(_from_engine, header))


def decode_to_engine(header: bytes | memoryview) -> ToEngine:
    return _checked(_decode(_to_engine, header))


def decode_from_consumer(header: bytes | memoryview) -> FromConsumerSidecar:
    return _decode(_from_consumer, header)


def decode_from_producer(header: bytes | memoryview) -> FromProducerSidecar:
    return _checked(_decode(_from_producer, header))


def decode_line_to(header: bytes) -> LineTo:
    return _decode(_line_to, header)


def _decode(decoder: msgspec.msgpack.Decoder[_Decoded], header: bytes | memoryview) -> _Decoded:
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(header)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    try:
        return decoder.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"undecodable message: {error}") from error


def _checked(message: _Decoded) -> _Decoded:
    if isinstance(message, Put | Remote):
        check_put(message if isinstance(message, Put) else message.put)
    return message


def check_put(put: Put) -> None:
    """Raises ProtocolError unless the piece is consistent in itself."""
    if (put.piece == 0) != (put.chunk is not None):
        raise ProtocolError(f"piece {put.piece} of chunk {put.seq}: the chunk header belongs to piece 0 only")
    if put.slab is not None and put.slab.length != put.length:
        raise ProtocolError(f"piece of {put.length} bytes in a slab of {put.slab.length}")
    if put.length > MAX_CHUNK_BYTES:
        raise ProtocolError(f"piece of {put.length} bytes; at most {MAX_CHUNK_BYTES} are allowed")
    if put.chunk is not None:
        check_chunk(put.chunk)
        if put.last and put.length != put.chunk.nbytes:
            raise ProtocolError(f"only piece has {put.length} bytes of a chunk of {put.chunk.nbytes}")
        if put.length > put.chunk.nbytes:
            raise ProtocolError(f"piece of {put.length} bytes in a chunk of {put.chunk.nbytes}")


def check_body(put: Put, body_length: int) -> None:
    """On the unix socket the body is exactly the piece, or nothing if the piece is in the arena."""
    expected = 0 if put.slab is not None else put.length
    if body_length != expected:
        raise ProtocolError(f"piece of {put.length} bytes came with a body of {body_length}")
