"""Shared skeleton of the engines that compute in their own thread: who has work, whose turn it is, and waking up."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from omni_runtime.errors import InvalidRequest
from omni_runtime.stages.engine import EngineStats, StageOutput


class Begun(Protocol):
    """What a request's state says of itself: whether the engine has taken it out of its queue."""

    started: bool


State = TypeVar("State")
BegunState = TypeVar("BegunState", bound=Begun)


class Turns(Generic[State]):
    """Requests by id, served round-robin, so that a long request cannot hold up the first packet of another (R32)."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._awake = threading.Event()

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[tuple[str, State]]:
        return iter(list(self._states.items()))

    def add(self, request: str, state: State) -> None:
        if request in self._states:
            raise InvalidRequest(f"request {request} is already here")
        self._states[request] = state
        self._awake.set()

    def get(self, request: str) -> State | None:
        return self._states.get(request)

    def remove(self, request: str) -> None:
        self._states.pop(request, None)

    def next_turn(self, request: str) -> None:
        """Put the request behind all others."""
        if request in self._states:
            self._states[request] = self._states.pop(request)

    def wake(self) -> None:
        """Thread-safe: end a `wait` now, or the next one at once."""
        self._awake.set()

    def wait(self, timeout_s: float) -> None:
        self._awake.wait(timeout_s)
        self._awake.clear()


class TurnEngine(ABC, Generic[BegunState]):
    """The part of a StageEngine that is the same wherever requests take turns in one thread."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._requests: Turns[BegunState] = Turns()

    @abstractmethod
    def _work(self) -> list[StageOutput]:
        """What can be computed now; empty when every request waits for its upstream."""

    def poll(self, timeout_s: float) -> Sequence[StageOutput]:
        outputs = self._work()
        if not outputs and timeout_s > 0:
            self._requests.wait(timeout_s)
            outputs = self._work()
        return outputs

    def wake(self) -> None:
        self._requests.wake()

    def abort(self, request: str) -> None:
        self._requests.remove(request)

    def health(self) -> str | None:
        return None

    def stats(self) -> EngineStats:
        waiting = sum(1 for _, state in self._requests if not state.started)
        return EngineStats(waiting=waiting, running=len(self._requests) - waiting, capacity=self._capacity)
