"""Rows of hidden states on their way out of vLLM: the message between the process that computes and the engine, and the
assembly of rows and token ids into payloads. Torch-free and free of I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from omni_runtime.errors import EngineError
from omni_runtime.protocol.payload import Payload

TAPPED = "tap-"  # prefix of the vLLM request ids whose rows are wanted
UNTAPPED = "txt-"


class RowsHeader(msgspec.Struct, frozen=True, array_like=True):
    """First frame of a tap message; one raw buffer per layer follows, `embed` first, then `hidden`."""

    request: str
    start: int
    rows: int
    width: int
    dtype: str  # float32 | float16 | bfloat16 (travels as uint16)
    problem: str = ""  # set instead of buffers when rows of this request were never computed


encode_header = msgspec.msgpack.Encoder().encode
decode_header = msgspec.msgpack.Decoder(RowsHeader).decode

_WIRE = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def vllm_request_id(request: str, *, tapped: bool) -> str:
    return (TAPPED if tapped else UNTAPPED) + request


def external_request_id(internal: str) -> str | None:
    """Our request id of a tapped vLLM-internal one (`tap-<id>-<8 hex>`); None if its rows are not wanted."""
    if not internal.startswith(TAPPED):
        return None
    return internal[len(TAPPED) :].rpartition("-")[0]


@dataclass(slots=True, eq=False)
class RowAssembler:
    """Joins the two streams of one request: rows (from the process that computes) and token ids (from vLLM's outputs).

    Position p has a row and a token id; the last sampled token has an id but no row, because it is never forwarded.
    """

    prompt_tokens: int = -1  # unknown until the first output
    token_ids: list[int] = field(default_factory=list)
    first_meta: dict[str, object] = field(default_factory=dict)
    _chunks: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)
    _dtype: str = "float32"
    _rows: int = 0
    _sent: int = 0
    _finished: bool = False
    _closed: bool = False

    def add_rows(self, header: RowsHeader, embed: bytes | memoryview, hidden: bytes | memoryview) -> None:
        """Raises EngineError if the rows do not continue where the last ones ended."""
        if header.problem:
            raise EngineError(header.problem)
        if header.start != self._rows:
            raise EngineError(f"hidden-state rows {self._rows} to {header.start} are missing")
        shape = (header.rows, header.width)
        wire = _WIRE[header.dtype]
        chunk = (
            header.start,
            np.frombuffer(embed, wire).reshape(shape),
            np.frombuffer(hidden, wire).reshape(shape),
        )
        self._chunks.append(chunk)
        self._dtype = header.dtype
        self._rows += header.rows

    def add_tokens(self, prompt: list[int] | None, tokens: list[int]) -> None:
        if self.prompt_tokens < 0:
            self.token_ids.extend(prompt or [])
            self.prompt_tokens = len(self.token_ids)
        self.token_ids.extend(tokens)

    def finish(self) -> None:
        """No more tokens: the row count is now known."""
        self._finished = True

    @property
    def expected_rows(self) -> int | None:
        return len(self.token_ids) - 1 if self._finished else None

    @property
    def missing_rows(self) -> int:
        return max(0, (self.expected_rows or 0) - self._rows)

    @property
    def complete(self) -> bool:
        """Every row and token id is here."""
        return self.expected_rows is not None and self._rows >= self.expected_rows

    def take(self) -> Payload | None:
        """What can leave now, one payload; the last one is `finished`.

        The newest token's row stays until another token follows: a step that vLLM ran beyond the end of the answer
        (asynchronous scheduling) gives a row for the last token, too, and nobody wants that one.
        """
        if self._closed or self.prompt_tokens < 0:
            return None
        end = min(self._rows, len(self.token_ids) - 1)
        complete = self.expected_rows is not None and end == self.expected_rows
        if end == self._sent and not complete:
            return None
        start = self._sent
        pieces = self._slice(start, end)
        meta: dict[str, object] = {}
        if start == 0:
            meta = {"prompt_tokens": self.prompt_tokens, **self.first_meta}
        if complete:
            meta["output_tokens"] = len(self.token_ids) - self.prompt_tokens
        self._sent, self._closed = end, complete
        rows = end - start
        if not rows:
            return Payload(start=start, rows=0, finished=complete, meta=meta)
        return Payload(
            start=start,
            rows=rows,
            finished=complete,
            tensors={
                "token_ids": np.asarray(self.token_ids[start:end], dtype=np.int64),
                **{name: arrays[0] for name, arrays in pieces.items() if len(arrays) == 1},
            },
            meta=meta,
            dtypes={"embed": "bfloat16", "hidden": "bfloat16"} if self._dtype == "bfloat16" else {},
            parts={name: tuple(arrays) for name, arrays in pieces.items() if len(arrays) > 1},
        )

    def _slice(self, start: int, end: int) -> dict[str, list[np.ndarray]]:
        embeds, hiddens, keep = [], [], []
        for first, embed, hidden in self._chunks:
            low, high = max(start, first), min(end, first + embed.shape[0])
            if low < high:
                embeds.append(embed[low - first : high - first])
                hiddens.append(hidden[low - first : high - first])
            if first + embed.shape[0] > end:
                keep.append((first, embed, hidden))
        self._chunks = keep
        return {"embed": embeds, "hidden": hiddens}
