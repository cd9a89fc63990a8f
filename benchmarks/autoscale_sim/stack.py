"""How fast the simulated stages are, with the published rows that the numbers come from.

Shape: at batch b one unit of work (token, codec frame, chunk) takes base + slope * b seconds. Sources: vLLM-Omni
docs/design/feature/async_chunk.md (H800, text 100 -> text 100 + audio, 25-frame chunks) for DOCUMENTED; the project's
blog of 2026-07-01 (Qwen3-Omni, three accelerators, 64 concurrent) for OPTIMISED. Codec: 12.5 frames a second.
"""

from __future__ import annotations

from dataclasses import dataclass

FRAME_SECONDS = 0.08
STAGES = ("thinker", "talker", "code2wav")
THINKER, TALKER, CODE2WAV = range(3)


@dataclass(frozen=True, slots=True)
class Server:
    """One replica of a stage. devices: accelerators per replica; slots: requests that it takes at once."""

    base: float
    slope: float
    slots: int
    devices: int
    cold_seconds: float  # median of a start, node, image and weights included


@dataclass(frozen=True, slots=True)
class Stack:
    servers: tuple[Server, Server, Server]
    prefill_seconds: float  # of a prompt without tokens
    prefill_token_seconds: float
    prefill_batch_seconds: float  # more for each request that decodes beside it
    first_tokens: int  # thinker tokens before the talker starts
    talker_prefill_seconds: float
    initial_frames: int
    chunk_frames: int
    transfer_seconds: float  # per edge


DOCUMENTED = Stack(
    servers=(
        Server(0.0075, 0.0010, 64, 2, 240.0),
        Server(0.0159, 0.0017, 48, 1, 150.0),
        Server(0.0150, 0.0080, 48, 1, 90.0),
    ),
    prefill_seconds=0.035,
    prefill_token_seconds=0.00005,
    prefill_batch_seconds=0.025,
    first_tokens=1,
    talker_prefill_seconds=0.020,
    initial_frames=25,
    chunk_frames=25,
    transfer_seconds=0.006,
)


def optimised(host_seconds: float) -> Stack:
    """The blog's stack. host_seconds: what the host adds to every talker step."""
    return Stack(
        servers=(
            Server(0.0060, 0.0001, 96, 1, 240.0),
            Server(0.0155 + host_seconds, 0.00035, 96, 1, 150.0),
            Server(0.0150, 0.0010, 96, 1, 90.0),
        ),
        prefill_seconds=0.030,
        prefill_token_seconds=0.00002,
        prefill_batch_seconds=0.001,
        first_tokens=1,
        talker_prefill_seconds=0.120,
        initial_frames=4,
        chunk_frames=25,
        transfer_seconds=0.006,
    )


ASYNC_CHUNK = optimised(0.0128)
ASYNC_OUTPUT = optimised(0.0)
