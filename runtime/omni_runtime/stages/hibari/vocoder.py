"""The code2wav of smol_omni: acoustic frames -> PCM, streamed. The signal processing is in `synthesis`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from omni_runtime.protocol.payload import Payload
from omni_runtime.serving.params import from_map
from omni_runtime.stages.context import EngineContext
from omni_runtime.stages.engine import AudioOut, StageRequest
from omni_runtime.stages.hibari.acoustic import SPECTRA
from omni_runtime.stages.hibari.synthesis import SAMPLE_RATE, Noise, PhraseSynthesis
from omni_runtime.stages.streaming import StreamingDecoder, Turn


@dataclass(slots=True)
class _Voice:
    noise: Noise
    phrase: PhraseSynthesis | None = None


class HibariVocoderEngine(StreamingDecoder[_Voice]):
    """One chunk a turn, round-robin over the requests.

    The noise of a request comes from its seed alone, so neither neighbours nor chunk sizes change its audio (R27).
    """

    def __init__(self, context: EngineContext) -> None:
        options = context.options()
        options.integer("threads", 1, minimum=1)
        self._seed = options.integer("seed", 0)
        options.reject_unknown()
        super().__init__(capacity=context.stage.max_concurrency, batch=1)

    def load(self) -> None:
        silence = {name: np.full((8, 601), -20.0, np.float32) for name in SPECTRA}
        PhraseSynthesis(Noise(0)).push(silence, np.zeros(8, np.float32), last=True)  # plans the transforms once

    def begin(self, request: StageRequest) -> _Voice:
        seed = from_map(request.params).seed
        return _Voice(Noise(self._seed if seed is None else abs(seed)))

    def pieces(self, payload: Payload) -> Iterable[Payload]:
        return (payload,)  # at most a phrase

    def decode(self, turn: Sequence[Turn[_Voice]]) -> Iterable[AudioOut]:
        for incoming, chunk in turn:
            voice = incoming.state
            voice.phrase = voice.phrase or PhraseSynthesis(voice.noise)
            last = bool(chunk.meta["phrase_end"])
            spectra = {name: np.asarray(chunk.tensors[name]) for name in SPECTRA}
            samples = voice.phrase.push(spectra, np.asarray(chunk.tensors["f0"]), last=last)
            voice.phrase = None if last else voice.phrase
            if samples.size:
                pcm = np.clip(samples, -1.0, 1.0).astype("<f4").tobytes()
                yield AudioOut(incoming.request, pcm, SAMPLE_RATE, chunk.rows)
