"""What crosses between the API surfaces and the orchestrator: a call, and the handle that yields its outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from omni_runtime.errors import StreamClosed
from omni_runtime.orchestrator.state import (
    Cancelled,
    Complete,
    Emit,
    EmitStageEnd,
    Fail,
    Instant,
    RequestId,
    StageName,
)
from omni_runtime.serving.params import StageParams
from omni_runtime.topology.types import Modality

DEFAULT_DEADLINE_SECONDS = 600.0
CLIENT_DISCONNECT = "client_disconnect"  # the reason when nobody reads the outputs any more


@dataclass(frozen=True, slots=True)
class Call:
    """One request for the pipeline, validated and free of any API's wire format."""

    modalities: frozenset[Modality]
    params: StageParams
    inputs: dict[str, Any]
    emit_codes: bool = False
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS
    label: str = ""  # the client's x-request-id, for logs only


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Seconds since the request was queued; None: did not happen."""

    bound: float | None = None
    first_text: float | None = None
    first_audio: float | None = None


Output = Emit | EmitStageEnd
_END = (Complete, Fail, Cancelled)


@dataclass(slots=True, eq=False)
class RequestHandle:
    """The client's side of one request. Iterate `outputs`; call `cancel` when the client is gone."""

    request: RequestId
    queued_at: Instant
    _cancel: Callable[[RequestId, str], None]
    _queue: asyncio.Queue[Output | Complete | Fail | Cancelled] = field(default_factory=asyncio.Queue)
    ended: bool = False
    replicas: dict[StageName, str] = field(default_factory=dict)

    def put(self, item: Output | Complete | Fail | Cancelled) -> None:
        if not self.ended:
            self.ended = isinstance(item, _END)
            self._queue.put_nowait(item)

    def cancel(self, reason: str) -> None:
        """Abort everywhere (R16). Harmless after the end."""
        if not self.ended:
            self._cancel(self.request, reason)

    async def outputs(self) -> AsyncIterator[Output]:
        """Pieces and stage ends, in order, until the request is complete.

        Raises the request's OmniError if it failed, StreamClosed if it was cancelled. Leaving the iteration
        early aborts the request.
        """
        try:
            while True:
                item = await self._queue.get()
                match item:
                    case Complete():
                        return
                    case Fail(error):
                        raise error
                    case Cancelled(reason):
                        raise StreamClosed(reason)
                    case _:
                        yield item
        finally:
            self.cancel(CLIENT_DISCONNECT)
