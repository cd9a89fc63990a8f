"""One attempt at a request in the loop: its state, its client, its timers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from omni_runtime.orchestrator.calls import Call, RequestHandle
from omni_runtime.orchestrator.events import Event, InputOverdue
from omni_runtime.orchestrator.inputs import TextInput
from omni_runtime.orchestrator.state import RequestState
from omni_runtime.orchestrator.values import RequestId

Dispatch = Callable[[RequestId, Event], None]


@dataclass(slots=True, eq=False)
class Attempt:
    """text: of a client that may send more of it. queued_since: of this attempt, not of the request."""

    call: Call
    state: RequestState
    handle: RequestHandle
    text: TextInput | None
    queued_since: float
    dispatch: Dispatch
    first_audio: bool = False
    _timers: list[asyncio.TimerHandle] = field(default_factory=list)
    _input_timer: asyncio.TimerHandle | None = None

    @property
    def request(self) -> RequestId:
        """What stages know it by; the client's handle keeps the id of the first attempt."""
        return self.state.spec.request

    def after(self, seconds: float, event: Event) -> None:
        self._timers.append(self._timer(seconds, event))

    def expect_input(self) -> None:
        """A client that has more to say says it within its input deadline, or loses its places."""
        if self._input_timer is not None:
            self._input_timer.cancel()
            self._input_timer = None
        if self.text is not None and not self.text.finished:
            seconds = self.call.input_deadline_seconds
            self._input_timer = self._timer(seconds, InputOverdue(seconds))

    def cancel_timers(self) -> None:
        for timer in (*self._timers, self._input_timer):
            if timer is not None:
                timer.cancel()

    def _timer(self, seconds: float, event: Event) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self.dispatch, self.request, event)
