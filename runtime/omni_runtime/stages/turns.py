"""Shared skeleton of the engines that compute in their own thread: who has work, whose turn it is, and waking up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

from omni_runtime.errors import InvalidRequest

State = TypeVar("State")


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
