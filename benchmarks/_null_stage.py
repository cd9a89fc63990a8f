"""A stage replica whose engine computes nothing: what is left is the path of a request. Arguments: those of the worker.

    python -m benchmarks._null_stage --plan FILE --stage thinker ...

The last message of a request is its script, as JSON: {"chunks": 20, "interval_ms": 5}. Every chunk carries the moment at
which the engine gave it (`time.monotonic_ns`, one clock for all processes of a machine): a text chunk as its text, an
audio chunk in its first samples. The middle stage hands on what it gets.

A stage can be slowed while it runs: OMNI_NULL_KNOB names a JSON file, {"talker": 3000}: milliseconds that a stage lets pass
before a request's first chunk. It is read anew for each request.
"""

from __future__ import annotations

import heapq
import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from omni_runtime.protocol.payload import Payload
from omni_runtime.stages.context import EngineContext
from omni_runtime.stages.engine import AudioOut, Done, EdgeOut, EngineStats, StageOutput, StageRequest, Started, TextOut
from omni_runtime.stages.worker import main

SAMPLE_RATE = 24_000
AUDIO_CHUNK_SECONDS = 0.2
_WORDS, _BITS = 5, 15  # five samples of fifteen bits survive the way float32 -> PCM16


class Script(msgspec.Struct, frozen=True):
    chunks: int = 1
    interval_ms: float = 0.0


def stamped_audio(now_ns: int) -> bytes:
    """float32 samples: the moment, then silence up to AUDIO_CHUNK_SECONDS."""
    samples = np.zeros(round(AUDIO_CHUNK_SECONDS * SAMPLE_RATE), np.float32)
    for i in range(_WORDS):
        samples[i] = ((now_ns >> (_BITS * i)) & 0x7FFF) / 32767.0
    return samples.tobytes()


def stamp_of(pcm16: bytes) -> int:
    """The moment that `stamped_audio` wrote, from the PCM16 that a client got."""
    words: npt.NDArray[np.int16] = np.frombuffer(pcm16[: 2 * _WORDS], "<i2")
    return sum(int(word) << (_BITS * i) for i, word in enumerate(words))


KNOB = "OMNI_NULL_KNOB"


def slowed_seconds(stage: str) -> float:
    """What the knob says now; a file that is not there, or half written, says nothing."""
    try:
        knob = msgspec.json.decode(Path(os.environ[KNOB]).read_bytes(), type=dict[str, float])
    except (KeyError, OSError, msgspec.MsgspecError):
        return 0.0
    return knob.get(stage, 0.0) / 1000


@dataclass(slots=True)
class _Running:
    request: StageRequest
    script: Script
    given: int = 0
    slowed: float = 0.0
    begun: bool = False
    held: list[Payload] = field(default_factory=list)  # came while the stage is being slow


class NullEngine:
    """Gives what the script says, at once or at its interval."""

    def __init__(self, context: EngineContext) -> None:
        self._name = context.stage.name
        self._capacity = context.stage.max_concurrency
        self._edge = next((e.name for e in context.outputs), None)
        self._audio = "audio" in context.stage.emits
        self._running: dict[str, _Running] = {}
        self._due: list[tuple[float, int, str]] = []
        self._order = itertools.count()
        self._outputs: deque[StageOutput] = deque()
        self._awake = threading.Event()

    def load(self) -> None:
        pass

    def submit(self, request: StageRequest) -> None:
        slowed = slowed_seconds(self._name)
        if request.upstream_edges:  # it starts with its first input, as every engine does
            self._running[request.request] = _Running(request, Script(), slowed=slowed)
            return
        self._outputs.append(Started(request.request))
        script = msgspec.json.decode(str(request.inputs["messages"][-1]["content"]), type=Script)
        self._running[request.request] = _Running(request, script)
        self._plan(request.request, time.monotonic() + slowed if slowed else 0.0)

    def feed(self, request: str, edge: str, payload: Payload) -> None:
        running = self._running.get(request)
        if running is None:
            return
        if not running.begun:
            running.begun = True
            self._outputs.append(Started(request))
            if running.slowed:
                self._plan(request, time.monotonic() + running.slowed)
        if running.slowed:
            running.held.append(payload)
            return
        self._hand_on(request, running, payload)

    def _hand_on(self, request: str, running: _Running, payload: Payload) -> None:
        if self._audio:
            if payload.rows:
                pcm = stamped_audio(time.monotonic_ns())
                self._outputs.append(AudioOut(request, pcm, SAMPLE_RATE, payload.rows))
        elif self._edge in running.request.downstream_edges:
            self._outputs.append(EdgeOut(request, str(self._edge), payload))
        if payload.finished:
            self._end(request, running)

    def poll(self, timeout_s: float) -> Sequence[StageOutput]:
        now = time.monotonic()
        if not self._outputs and not (self._due and self._due[0][0] <= now):
            wait = min(timeout_s, self._due[0][0] - now) if self._due else timeout_s
            self._awake.wait(max(0.0, wait))
            now = time.monotonic()
        self._awake.clear()
        while self._due and self._due[0][0] <= now:
            self._step(heapq.heappop(self._due)[2])
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def wake(self) -> None:
        self._awake.set()

    def abort(self, request: str) -> None:
        self._running.pop(request, None)
        self._outputs = deque(o for o in self._outputs if o.request != request)

    def health(self) -> str | None:
        return None

    def stats(self) -> EngineStats:
        return EngineStats(waiting=0, running=len(self._running), capacity=self._capacity)

    def close(self) -> None:
        pass

    def _plan(self, request: str, at: float) -> None:
        heapq.heappush(self._due, (at, next(self._order), request))

    def _step(self, request: str) -> None:
        running = self._running.get(request)
        if running is None:
            return
        if running.request.upstream_edges:
            running.slowed = 0.0
            for payload in running.held:
                self._hand_on(request, running, payload)
            running.held.clear()
            return
        text = f"{time.monotonic_ns()} "
        self._outputs.append(TextOut(request, text))
        if self._edge in running.request.downstream_edges:
            last = running.given + 1 == running.script.chunks
            utf8 = np.frombuffer(text.encode(), np.uint8)
            payload = Payload(running.given * len(utf8), len(utf8), last, {"utf8": utf8})
            self._outputs.append(EdgeOut(request, str(self._edge), payload))
        running.given += 1
        if running.given == running.script.chunks:
            self._end(request, running)
        else:
            interval = running.script.interval_ms / 1000
            self._plan(request, time.monotonic() + interval if interval else 0.0)

    def _end(self, request: str, running: _Running) -> None:
        del self._running[request]
        self._outputs.append(Done(request, "stop", prompt_tokens=1, completion_tokens=running.given))


if __name__ == "__main__":
    sys.exit(main(build=NullEngine))
