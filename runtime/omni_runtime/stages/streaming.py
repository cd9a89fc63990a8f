"""What the generation engines share: chunks of many requests queue up, each step decodes some of them, and a request
ends with its last chunk. How a chunk becomes audio is the subclass's matter."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from omni_runtime.protocol.payload import Payload
from omni_runtime.stages.engine import AudioOut, Done, StageOutput, StageRequest, Started
from omni_runtime.stages.turns import TurnEngine

State = TypeVar("State")


@dataclass(slots=True, eq=False)
class Incoming(Generic[State]):
    """One request: what it has become so far, and the chunks that it waits to have decoded."""

    request: str
    state: State
    chunks: deque[Payload] = field(default_factory=deque)
    frames: int = 0
    started: bool = False


Turn = tuple[Incoming[State], Payload]


class StreamingDecoder(TurnEngine[Incoming[State]], Generic[State]):
    """A StageEngine without `load`. capacity: of the stage; batch: requests that one step decodes together.

    Requests take turns: whoever was served goes behind the others (R32).
    """

    def __init__(self, *, capacity: int, batch: int) -> None:
        super().__init__(capacity)
        self._batch = batch

    @abstractmethod
    def begin(self, request: StageRequest) -> State:
        """What decoding of a request starts from. Raises InvalidRequest."""

    @abstractmethod
    def pieces(self, payload: Payload) -> Iterable[Payload]:
        """A chunk in parts that one step decodes; raises EngineError if it is not what the edge promises."""

    @abstractmethod
    def decode(self, turn: Sequence[Turn[State]]) -> Iterable[AudioOut]:
        """Audio of one chunk (with rows) of each of several requests; moves their states on."""

    # --- StageEngine

    def submit(self, request: StageRequest) -> None:
        self._requests.add(request.request, Incoming(request.request, self.begin(request)))

    def feed(self, request: str, edge: str, payload: Payload) -> None:
        incoming = self._requests.get(request)
        if incoming is not None:
            incoming.chunks.extend(self.pieces(payload))
            self._requests.wake()

    def close(self) -> None:
        for request, _ in self._requests:
            self._requests.remove(request)

    def _work(self) -> list[StageOutput]:
        """Steps until something comes out; a small chunk may give no sample yet, and is no reason to wait."""
        while any(incoming.chunks for _, incoming in self._requests):
            if outputs := self._step():
                return outputs
        return []

    def _step(self) -> list[StageOutput]:
        chosen = [incoming for _, incoming in self._requests if incoming.chunks][: self._batch]
        turn = [(incoming, incoming.chunks.popleft()) for incoming in chosen]
        outputs: list[StageOutput] = []
        for incoming, _ in turn:
            self._requests.next_turn(incoming.request)
            if not incoming.started:
                incoming.started = True
                outputs.append(Started(incoming.request))
        outputs.extend(self.decode([(incoming, chunk) for incoming, chunk in turn if chunk.rows]))
        for incoming, chunk in turn:
            incoming.frames += chunk.rows
            if chunk.finished:
                self._requests.remove(incoming.request)
                outputs.append(Done(incoming.request, "stop", frames=incoming.frames))
        return outputs
