"""The code2wav of smol_omni: acoustic frames -> PCM, streamed. The signal processing is in `synthesis`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from omni_runtime.protocol.payload import Payload
from omni_runtime.serving.params import from_map
from omni_runtime.stages.context import EngineContext
from omni_runtime.stages.engine import AudioOut, Done, EngineStats, StageOutput, StageRequest, Started
from omni_runtime.stages.hibari.acoustic import SPECTRA
from omni_runtime.stages.hibari.synthesis import SAMPLE_RATE, Noise, PhraseSynthesis
from omni_runtime.stages.turns import Turns


@dataclass(slots=True)
class _Decoding:
    noise: Noise
    chunks: deque[Payload] = field(default_factory=deque)
    phrase: PhraseSynthesis | None = None
    started: bool = False
    upstream_finished: bool = False
    frames: int = 0


class HibariVocoderEngine:
    """One chunk a turn, round-robin over the requests.

    The noise of a request comes from its seed alone, so neither neighbours nor chunk sizes change its audio (R27).
    """

    def __init__(self, context: EngineContext) -> None:
        options = context.options()
        options.integer("threads", 1, minimum=1)
        self._seed = options.integer("seed", 0)
        options.reject_unknown()
        self._capacity = context.stage.max_concurrency
        self._requests: Turns[_Decoding] = Turns()

    def load(self) -> None:
        silence = {name: np.full((8, 601), -20.0, np.float32) for name in SPECTRA}
        PhraseSynthesis(Noise(0)).push(silence, np.zeros(8, np.float32), last=True)  # plans the transforms once

    def submit(self, request: StageRequest) -> None:
        seed = from_map(request.params).seed
        self._requests.add(request.request, _Decoding(Noise(self._seed if seed is None else abs(seed))))

    def feed(self, request: str, edge: str, payload: Payload) -> None:
        state = self._requests.get(request)
        if state is not None:
            state.chunks.append(payload)
            self._requests.wake()

    def poll(self, timeout_s: float) -> Sequence[StageOutput]:
        outputs = self._step()
        if not outputs and timeout_s > 0:
            self._requests.wait(timeout_s)
            outputs = self._step()
        return outputs

    def wake(self) -> None:
        self._requests.wake()

    def abort(self, request: str) -> None:
        self._requests.remove(request)

    def health(self) -> str | None:
        return None

    def stats(self) -> EngineStats:
        waiting = sum(1 for _, s in self._requests if not s.started)
        return EngineStats(waiting=waiting, running=len(self._requests) - waiting, capacity=self._capacity)

    def close(self) -> None:
        for request, _ in self._requests:
            self._requests.remove(request)

    def _step(self) -> list[StageOutput]:
        for request, state in self._requests:
            if state.chunks:
                self._requests.next_turn(request)
                return self._decode(request, state, state.chunks.popleft())
        return []

    def _decode(self, request: str, state: _Decoding, chunk: Payload) -> list[StageOutput]:
        outputs: list[StageOutput] = []
        if not state.started:
            state.started = True
            outputs.append(Started(request))
        if chunk.rows:
            state.phrase = state.phrase or PhraseSynthesis(state.noise)
            last = bool(chunk.meta["phrase_end"])
            spectra = {name: np.asarray(chunk.tensors[name]) for name in SPECTRA}
            samples = state.phrase.push(spectra, np.asarray(chunk.tensors["f0"]), last=last)
            state.phrase = None if last else state.phrase
            state.frames += chunk.rows
            if samples.size:
                pcm = np.clip(samples, -1.0, 1.0).astype("<f4").tobytes()
                outputs.append(AudioOut(request, pcm, SAMPLE_RATE, chunk.rows))
        if chunk.finished:
            self._requests.remove(request)
            outputs.append(Done(request, "stop", frames=state.frames))
        return outputs
