"""What the orchestrator's modules speak of: names, instants, and what stages send to the client. No I/O, no clock.

Instants are seconds of a monotonic clock.
"""

from __future__ import annotations

from typing import NewType

import msgspec

RequestId = NewType("RequestId", str)  # ours (uuid4 hex), never the client's (R62)
StageName = str
ReplicaId = str
Instant = float


class Value(msgspec.Struct, frozen=True):
    """An immutable value. Structs, because several are made for every chunk of every request."""


class TextPiece(Value, frozen=True):
    text: str
    token_ids: tuple[int, ...] = ()


class AudioPiece(Value, frozen=True, eq=False):
    """float32 little-endian mono."""

    pcm: bytes
    sample_rate: int
    frames: int

    @property
    def seconds(self) -> float:
        return len(self.pcm) / 4 / self.sample_rate


class CodesPiece(Value, frozen=True):
    """frames x quantizers"""

    codes: tuple[tuple[int, ...], ...]


Piece = TextPiece | AudioPiece | CodesPiece


class StageUsage(Value, frozen=True):
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    frames: int = 0
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    transfer_seconds: float = 0.0
