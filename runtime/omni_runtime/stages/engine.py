"""The protocol that every stage engine implements, and the values that it exchanges with the stage worker. Torch-free.

The worker owns sockets, clocks and deadlines; an engine only computes. All calls come from one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from prometheus_client import Metric

from omni_runtime.protocol.payload import Payload


@dataclass(frozen=True, slots=True)
class StageRequest:
    request: str
    params: dict[str, Any]
    inputs: dict[str, Any] = field(default_factory=dict)
    upstream_edges: tuple[str, ...] = ()
    downstream_edges: tuple[str, ...] = ()  # only those that will be consumed
    emit_codes: bool = False


@dataclass(frozen=True, slots=True)
class TextOut:
    request: str
    text: str
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class AudioOut:
    request: str
    pcm: bytes  # float32 little-endian mono
    sample_rate: int
    frames: int


@dataclass(frozen=True, slots=True)
class CodesOut:
    request: str
    codes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class EdgeOut:
    """Rows for the consumer of one edge; the worker puts them on the connector in the order in which they come."""

    request: str
    edge: str
    payload: Payload


@dataclass(frozen=True, slots=True)
class Started:
    request: str


@dataclass(frozen=True, slots=True)
class Done:
    request: str
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    frames: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    request: str
    code: str
    message: str


StageOutput = TextOut | AudioOut | CodesOut | EdgeOut | Started | Done | Failed


@dataclass(frozen=True, slots=True)
class EngineStats:
    waiting: int
    running: int
    capacity: int


class StageEngine(Protocol):
    """One model component in one process.

    `poll` advances the engine by one step and returns what came out; it blocks at most `timeout_s`, and returns early
    when something happened. After `abort` no output of that request may follow. Every submitted request that is not
    aborted ends in exactly one Done or Failed.
    """

    def load(self) -> None: ...
    def submit(self, request: StageRequest) -> None: ...
    def feed(self, request: str, edge: str, payload: Payload) -> None: ...
    def poll(self, timeout_s: float) -> Sequence[StageOutput]: ...
    def wake(self) -> None:
        """Make a `poll` that is blocking in another thread return soon. The only thread-safe method."""

    def abort(self, request: str) -> None: ...
    def health(self) -> str | None:
        """None while healthy, else what is wrong."""

    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


@runtime_checkable
class Speaker(Protocol):
    """What an engine has beyond StageEngine if requests may choose a voice."""

    def voices(self) -> tuple[str, ...]:
        """Names that it takes for `StageParams.voice`; known once it is loaded."""


@runtime_checkable
class PacedEngine(Protocol):
    """What a producer has beyond StageEngine if it fits its chunks to the consumer (edges with sizing adaptive)."""

    def taken(self, request: str, edge: str, waiting: int) -> None:
        """The consumer has taken a chunk of this edge; `waiting` others are made and wait for it."""


@runtime_checkable
class MeasuredEngine(Protocol):
    """What an engine has beyond StageEngine if its library counts for itself."""

    def families(self) -> Iterable[Metric]:
        """As the library names and labels them. Thread-safe."""


@runtime_checkable
class SleepingEngine(Protocol):
    """What an engine has beyond StageEngine if it can give its memory back and keep its process.

    Called in the engine's thread, with no request in flight; between the two, nothing else is called but `wake` and
    `close`. Either raises OmniError if it cannot; the engine is then as before.
    """

    def sleep(self) -> None:
        """Level 1: weights to host memory, caches dropped."""

    def wake_up(self) -> None: ...
