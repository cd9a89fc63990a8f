"""Deadlines and sizes of a connector client."""

from __future__ import annotations

from dataclasses import dataclass

StreamId = tuple[str, str]  # request, edge


@dataclass(frozen=True, slots=True)
class ClientLimits:
    attach_wait_s: float = 5.0  # for a sidecar that restarts, before a stream fails for want of it
    put_deadline_s: float = 60.0  # wait for the consumer's credit
    chunk_deadline_s: float = 300.0  # wait for the next chunk of an open stream (R5)
    line_wait_s: float = 20.0  # for what is on a line to another pod, once something later has come another way
    arena_wait_s: float = 1.0  # wait for room in the arena before a chunk goes inline
    max_chunk_bytes: int = 1 << 30
    max_withheld_bytes: int = 1 << 30  # of one fullPayload stream
