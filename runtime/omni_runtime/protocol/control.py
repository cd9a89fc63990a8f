"""Messages between orchestrator and stage replicas: msgspec tagged unions over ZeroMQ (CURVE), msgpack, no pickle.

A replica dials every orchestrator that the entry's headless Service resolves to (registration, not discovery).
The orchestrator never carries tensors between stages; `ClientAudio.pcm` is output bound for the client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class _Message(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    pass


# --- stage replica -> orchestrator


class Hello(_Message, frozen=True, tag="hello"):
    """First message of a replica; answered by Welcome or Refused."""

    stage: str
    replica: str  # pod uid or a uuid; never an index, so that two replicas can never share an identity (R37)
    revision: str
    contract_version: int
    data_endpoint: str  # tcp://host:port of this replica's sidecar, where consumers open edge streams
    shared_memory_domain: str  # replicas with the same value share an arena (same pod, same host process group)
    capacity: int  # requests in flight
    incarnation: str = ""  # one uuid per process start: a restarted container has the pod uid of the one before (R37)
    voices: tuple[str, ...] = ()  # names that this stage takes for a request's `voice`


class StageLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    waiting: int = 0
    running: int = 0


class Heartbeat(_Message, frozen=True, tag="hb"):
    load: StageLoad
    healthy: bool = True
    detail: str = ""
    requests: tuple[str, ...] | None = None
    """The requests of this orchestrator that the replica holds; None: not told. Each side drops what the other lost."""
    asleep: bool = False
    answers: int = 0
    """Number of the last Ping that was read: what `requests` says holds for every Submit that was sent before it."""


class Leaving(_Message, frozen=True, tag="leaving"):
    """Drain begins: no new requests; those bound to this replica go on."""

    reason: str


class PowerChanged(_Message, frozen=True, tag="power"):
    """Answer to Sleep and Wake: what the replica is now, and why it is not what was asked for."""

    asleep: bool
    problem: str = ""


class ClientText(_Message, frozen=True, tag="text"):
    request: str
    text: str
    token_ids: tuple[int, ...] = ()


class ClientAudio(_Message, frozen=True, tag="audio"):
    request: str
    pcm: bytes  # float32 little-endian, mono
    sample_rate: int
    frames: int  # codec or acoustic frames in this piece


class ClientCodes(_Message, frozen=True, tag="codes"):
    """Codec codes for a client that asked for them (`return_codec_codes`); frames x quantizers."""

    request: str
    codes: tuple[tuple[int, ...], ...]


class StageStarted(_Message, frozen=True, tag="started"):
    """The engine took the request out of its queue (queue share of TTFP ends here). Durations, because clocks differ."""

    request: str
    queue_seconds: float = 0.0  # from the first rows at hand to here
    transfer_seconds: float = 0.0  # of the first rows, from the producer's put


class StageFinished(_Message, frozen=True, tag="finished"):
    request: str
    finish_reason: str  # stop | length
    prompt_tokens: int = 0
    completion_tokens: int = 0
    frames: int = 0
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    transfer_seconds: float = 0.0  # waiting for upstream rows


class StageFailed(_Message, frozen=True, tag="failed"):
    request: str
    code: str  # InvalidRequest | DeadlineExceeded | UpstreamLost | EngineError | CapacityExceeded
    message: str


class Aborted(_Message, frozen=True, tag="aborted"):
    """Answer to Abort: everything of the request is free here."""

    request: str


StageMessage = (
    Hello
    | Heartbeat
    | Leaving
    | PowerChanged
    | ClientText
    | ClientAudio
    | ClientCodes
    | StageStarted
    | StageFinished
    | StageFailed
    | Aborted
)


# --- orchestrator -> stage replica


class Welcome(_Message, frozen=True, tag="welcome"):
    orchestrator: str
    heartbeat_seconds: float


class Refused(_Message, frozen=True, tag="refused"):
    """Wrong revision or contract; the replica logs it, stays unready and tries again."""

    reason: str


class Producer(msgspec.Struct, frozen=True):
    """Where a consumer opens an edge stream."""

    edge: str  # "thinker->talker"
    stage: str
    replica: str
    data_endpoint: str
    shared_memory_domain: str


class Submit(_Message, frozen=True, tag="submit"):
    """Start a request on one stage. `request` is our own id (uuid4 hex), never the client's."""

    request: str
    params: dict[str, Any]  # sampling and stage options: see serving.params
    inputs: dict[str, Any] = {}
    """Of the start stage only: {"messages": [...OpenAI parts, media as bytes...]}, or {"text": str, "finished": bool},
    which more `Append` follow until one is finished."""
    text_edge: str = ""
    """The text_segments edge that the client's text takes the place of; "": the text is the user's whole message."""
    producers: tuple[Producer, ...] = ()
    deadline_seconds: float = 600.0
    emit_codes: bool = False
    consumers: tuple[str, ...] = ()  # names of outgoing edges that some consumer will open; others are not produced


class Append(_Message, frozen=True, tag="append"):
    """More of the client's text. `seq` counts from 1; the text of Submit was piece 0."""

    request: str
    seq: int
    text: str = ""
    finished: bool = False


class Abort(_Message, frozen=True, tag="abort"):
    request: str
    reason: str


class Sleep(_Message, frozen=True, tag="sleep"):
    """Give memory back, keep the process (level 1: weights to host memory, caches dropped). Only without requests."""


class Wake(_Message, frozen=True, tag="wake"):
    """Take the memory again and serve."""


class Ping(_Message, frozen=True, tag="ping"):
    """Also the sign of life of an orchestrator: a replica that hears nothing dials again."""

    number: int = 0


OrchestratorMessage = Welcome | Refused | Submit | Append | Abort | Sleep | Wake | Ping

encode = msgspec.msgpack.Encoder().encode
decode_orchestrator_message = msgspec.msgpack.Decoder(OrchestratorMessage).decode
_decode_stage = msgspec.msgpack.Decoder(StageMessage | tuple[StageMessage, ...]).decode


def encode_stage_messages(messages: Sequence[StageMessage]) -> bytes:
    """What a replica has to say at one moment, in order, as one message: a wake-up costs more than what it brings."""
    return encode(messages[0]) if len(messages) == 1 else encode(messages)


def decode_stage_messages(raw: bytes) -> tuple[StageMessage, ...]:
    """Raises msgspec.MsgspecError."""
    said = _decode_stage(raw)
    return said if isinstance(said, tuple) else (said,)
