"""Order and assembly at the consumer's end, sans-io: pieces in, whole chunks out. Free of numpy."""

from __future__ import annotations

import msgspec

from omni_runtime.connectors.tensors import ChunkHeader, ProtocolError
from omni_runtime.connectors.wire import Put


class Assembled(msgspec.Struct, frozen=True, eq=False, gc=False):
    seq: int
    chunk: ChunkHeader
    data: bytes | bytearray | memoryview
    whole: bool  # `data` is what came with the one piece, not a copy


class Duplicate(Exception):
    pass


class Inbound:
    """One incoming stream. Nothing of it may be missing, come twice, or come after its end."""

    def __init__(self, max_chunk_bytes: int) -> None:
        self._max = max_chunk_bytes
        self._seq = 0
        self._piece = 0
        self._chunk: ChunkHeader | None = None
        self._buffer = bytearray()
        self.finished = False

    @property
    def expected(self) -> int:
        """Number of the chunk that is next, or half here."""
        return self._seq

    def is_early(self, seq: int, piece: int = 0) -> bool:
        """Something that belongs before it has not come yet."""
        return seq > self._seq or (seq == self._seq and piece > self._piece)

    def next_whole(self, seq: int, chunk: ChunkHeader) -> None:
        """As `accept` of a chunk that came in one piece."""
        if self.finished or seq < self._seq:
            raise Duplicate
        if seq != self._seq or self._piece:
            raise ProtocolError(f"gap: piece {seq}.0 came, {self._seq}.{self._piece} is missing")
        if chunk.nbytes > self._max:
            raise ProtocolError(f"chunk of {chunk.nbytes} bytes; this consumer takes at most {self._max}")
        self._seq = seq + 1
        self.finished = chunk.finished

    def accept(self, put: Put, data: bytes | memoryview) -> Assembled | None:
        """The chunk that this piece completes, if it does.

        Raises Duplicate for a piece that came before, and ProtocolError for a gap, for bytes that do not add up to
        what the header announced, and for a chunk that is too large. Memory grows with what has come, not with what
        was announced.
        """
        if self.finished or (put.seq, put.piece) < (self._seq, self._piece):
            raise Duplicate
        if (put.seq, put.piece) != (self._seq, self._piece):
            raise ProtocolError(f"gap: piece {put.seq}.{put.piece} came, {self._seq}.{self._piece} is missing")
        if put.chunk is not None:
            self._chunk = put.chunk
        chunk = self._chunk
        assert chunk is not None  # piece 0 carries it (wire.check_put), and pieces come in order
        if chunk.nbytes > self._max:
            raise ProtocolError(f"chunk of {chunk.nbytes} bytes; this consumer takes at most {self._max}")
        if put.last and put.piece == 0:
            return self._complete(put.seq, chunk, data, whole=True)
        if len(self._buffer) + len(data) > chunk.nbytes:
            raise ProtocolError(f"chunk {put.seq} has more than the announced {chunk.nbytes} bytes")
        self._buffer += data
        if not put.last:
            self._piece += 1
            return None
        if len(self._buffer) != chunk.nbytes:
            raise ProtocolError(f"chunk {put.seq} has {len(self._buffer)} of the announced {chunk.nbytes} bytes")
        buffer, self._buffer = self._buffer, bytearray()
        return self._complete(put.seq, chunk, buffer, whole=False)

    def _complete(
        self, seq: int, chunk: ChunkHeader, data: bytes | bytearray | memoryview, *, whole: bool
    ) -> Assembled:
        self._seq, self._piece, self._chunk = seq + 1, 0, None
        self.finished = chunk.finished
        return Assembled(seq, chunk, data, whole)
