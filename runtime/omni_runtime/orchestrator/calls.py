"""What crosses between the API surfaces and the orchestrator: a call, and the handle that yields its outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from omni_runtime.errors import StreamClosed
from omni_runtime.orchestrator.actions import Cancelled, Complete, Emit, EmitStageEnd, Fail
from omni_runtime.orchestrator.values import AudioPiece, Instant, RequestId, StageName, TextPiece
from omni_runtime.serving.params import StageParams
from omni_runtime.topology.types import Modality

DEFAULT_DEADLINE_SECONDS = 600.0
DEFAULT_INPUT_DEADLINE_SECONDS = 60.0  # shorter than the stages' own patience with a silent edge
CLIENT_DISCONNECT = "client_disconnect"  # the reason when nobody reads the outputs any more
SLOW_CLIENT = "slow_client"  # the reason when somebody does, but far too slowly
MAX_BACKLOG_BYTES = 32 << 20  # of outputs that wait for the client: almost 6 minutes of 24 kHz audio


@dataclass(frozen=True, slots=True)
class Call:
    """One request for the pipeline, validated and free of any API's wire format.

    inputs: {"messages": [...]} as `serving.params` describes, or {"text": str, "finished": bool} for plain text, of
    which more may follow with `RequestHandle.append`.
    start_stage: the stage that takes the input, None = the first; stages before it have no part in the request.
    tenant: whose request it is, "" = nobody's in particular. session: requests that should meet the same replicas.
    input_deadline_seconds: how long a client may send nothing before it has ended its input.
    """

    modalities: frozenset[Modality]
    params: StageParams
    inputs: dict[str, Any]
    emit_codes: bool = False
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS
    label: str = ""  # the client's x-request-id, for logs only
    start_stage: StageName | None = None
    tenant: str = ""
    session: str = ""
    trace_parent: str = ""  # the client's W3C traceparent
    input_deadline_seconds: float = DEFAULT_INPUT_DEADLINE_SECONDS


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Seconds since the request was queued; None: did not happen."""

    bound: float | None = None
    first_text: float | None = None
    first_audio: float | None = None


Output = Emit | EmitStageEnd
_END = (Complete, Fail, Cancelled)
_CANCELLED = {SLOW_CLIENT: f"the client reads too slowly: over {MAX_BACKLOG_BYTES} bytes of the answer wait for it"}


def _size(item: Output | Complete | Fail | Cancelled) -> int:
    """Bytes, roughly, of what can be large."""
    match item:
        case Emit(piece=AudioPiece(pcm=pcm)):
            return len(pcm)
        case Emit(piece=TextPiece(text=text)):
            return len(text)
        case _:
            return 0


@dataclass(slots=True, eq=False)
class RequestHandle:
    """The client's side of one request. Iterate `outputs`; `append` the rest of an input that comes in pieces; call
    `cancel` when the client is gone.

    What the client has not read yet waits here, up to MAX_BACKLOG_BYTES; then the request ends, because a stage cannot
    be slowed down for one of its requests.
    """

    request: RequestId
    queued_at: Instant
    _cancel: Callable[[RequestId, str], None]
    _append: Callable[[RequestId, str, bool], None]
    _queue: asyncio.Queue[Output | Complete | Fail | Cancelled] = field(default_factory=asyncio.Queue)
    ended: bool = False
    backlog: int = 0  # bytes in the queue
    _overflowed: bool = False
    replicas: dict[StageName, str] = field(default_factory=dict)

    def put(self, item: Output | Complete | Fail | Cancelled) -> None:
        if self.ended:
            return
        self.ended = isinstance(item, _END)
        if self._overflowed and not self.ended:
            return
        self._queue.put_nowait(item)
        self.backlog += _size(item)
        if self.backlog > MAX_BACKLOG_BYTES and not self.ended:
            self._overflowed = True
            # Not from in here: the state machine is in the middle of its actions.
            asyncio.get_running_loop().call_soon(self.cancel, SLOW_CLIENT)

    def cancel(self, reason: str) -> None:
        """Abort everywhere (R16). Harmless after the end."""
        if not self.ended:
            self._cancel(self.request, reason)

    def append(self, text: str, finished: bool = False) -> None:
        """More of the input. Dropped if the request has ended: it cannot come back (R4).

        Raises InvalidRequest if the input has ended, or never was in pieces.
        """
        if not self.ended:
            self._append(self.request, text, finished)

    async def outputs(self) -> AsyncIterator[Output]:
        """Pieces and stage ends, in order, until the request is complete.

        Raises the request's OmniError if it failed, StreamClosed if it was cancelled. Leaving the iteration
        early aborts the request.
        """
        try:
            while True:
                item = await self._queue.get()
                self.backlog -= _size(item)
                match item:
                    case Complete():
                        return
                    case Fail(error):
                        raise error
                    case Cancelled(reason):
                        raise StreamClosed(_CANCELLED.get(reason, reason))
                    case _:
                        yield item
        finally:
            self.cancel(CLIENT_DISCONNECT)
