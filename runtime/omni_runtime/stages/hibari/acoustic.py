"""The talker of smol_omni: text segments -> phonemes -> acoustic frames (ONNX).

A frame is 12.5 ms: five spectra of 601 bins and f0. A phrase is one run of the net; its frames leave in chunks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omni_runtime.errors import EngineError, InvalidRequest
from omni_runtime.protocol.payload import Payload
from omni_runtime.serving.params import StageParams, from_map
from omni_runtime.stages.chunks import ChunkPlanner, ChunkPolicy
from omni_runtime.stages.context import EngineContext
from omni_runtime.stages.engine import Done, EdgeOut, Failed, StageOutput, StageRequest, Started
from omni_runtime.stages.hibari.text import speakable
from omni_runtime.stages.turns import TurnEngine

SPECTRA = ("lh", "th", "ln", "lr", "phi")  # log harmonic, its phase, log noise, log residual, its phase
DEFAULT_VOICE = "heart"
VOICE_ALIASES = frozenset({"default", "alloy"})  # OpenAI clients must send a voice; these mean "yours"


@dataclass(frozen=True, slots=True, eq=False)
class PhraseFrames:
    """Output of the net for one phrase. spectra: float32 [frames, 601] each; f0: float32 [frames] in Hz."""

    spectra: dict[str, np.ndarray]
    f0: np.ndarray

    @property
    def frames(self) -> int:
        return int(self.f0.shape[0])


@dataclass(slots=True)
class _Speaking:
    edge: str | None
    chunks: ChunkPlanner
    speed: float = 1.0  # of the request, on top of the stage's own
    segments: deque[str] = field(default_factory=deque)
    upstream_finished: bool = False
    started: bool = False
    frames: int = 0
    phrases: int = 0
    withheld: list[EdgeOut] = field(default_factory=list)  # mode fullPayload
    characters: int = 0


class HibariAcousticEngine(TurnEngine[_Speaking]):
    """One ONNX session; phrases are served round-robin over the requests."""

    def __init__(self, context: EngineContext) -> None:
        options = context.options()
        self._voice = options.text("voice", DEFAULT_VOICE)
        self._speed = options.number("speed", 1.0)
        self._threads = options.integer("threads", 1, minimum=1)
        options.integer("seed", 0)
        options.reject_unknown()
        super().__init__(context.stage.max_concurrency)
        (edge,) = context.outputs
        self._edge = edge
        self._chunks = ChunkPolicy.of(edge)
        self._net: Any = None

    def load(self) -> None:
        from hibari import Hibari

        self._net = Hibari(voice=self._voice, threads=self._threads)
        self._net("Ready.", seed=0)  # loads the pronunciation tables and runs the net once

    def voices(self) -> tuple[str, ...]:
        return (self._voice,)

    def submit(self, request: StageRequest) -> None:
        params = from_map(request.params)
        self._check(params)
        edge = self._edge.name if self._edge.name in request.downstream_edges else None
        self._requests.add(request.request, _Speaking(edge=edge, chunks=ChunkPlanner(self._chunks), speed=params.speed))

    def _check(self, params: StageParams) -> None:
        """Only the voice that is loaded: a name of a client never becomes a path or a download (R58)."""
        if params.voice is not None and params.voice not in {self._voice, *VOICE_ALIASES}:
            raise InvalidRequest(
                f"audio.voice: {params.voice!r} is not loaded; use {self._voice!r} or leave the voice out"
            )

    def feed(self, request: str, edge: str, payload: Payload) -> None:
        state = self._requests.get(request)
        if state is None:
            return
        if payload.rows:
            text = bytes(np.asarray(payload.tensors["utf8"], dtype=np.uint8)).decode("utf-8", errors="replace")
            state.segments.append(text)
            state.characters += len(text)
        state.upstream_finished = state.upstream_finished or payload.finished
        self._requests.wake()

    def taken(self, request: str, edge: str, waiting: int) -> None:
        state = self._requests.get(request)
        if state is not None:
            state.chunks.feedback(waiting)

    def close(self) -> None:
        self._net = None

    def _work(self) -> list[StageOutput]:
        for request, state in self._requests:
            if state.segments:
                text = state.segments.popleft()
                try:
                    phrases = self._phrases(text)
                except Exception as error:  # noqa: BLE001 - a text that cannot be read fails its request, not the stage
                    return self._unreadable(request, text, error)
                outputs = self._speak(request, state, phrases)
                self._requests.next_turn(request)
                if state.upstream_finished and not state.segments:
                    outputs.extend(self._finish(request, state))
                return outputs
            if state.upstream_finished:
                return self._finish(request, state)
        return []

    def _phrases(self, text: str) -> list[str]:
        try:
            return list(self._net.phonemize(text))
        except (IndexError, ValueError):  # a number that its rules cannot read
            return list(self._net.phonemize(speakable(text)))

    def _unreadable(self, request: str, text: str, error: Exception) -> list[StageOutput]:
        self._requests.remove(request)
        return [Failed(request, EngineError.code, f"cannot pronounce {text[:80]!r}: {type(error).__name__}: {error}")]

    def _speak(self, request: str, state: _Speaking, phrases: list[str]) -> list[StageOutput]:
        outputs: list[StageOutput] = []
        if not state.started:
            state.started = True
            outputs.append(Started(request))
        for phonemes in phrases:
            phrase = self.run(phonemes, state.speed)
            if phrase is None:
                continue
            end = 0
            for size in state.chunks.take(phrase.frames, flush=True):  # a chunk belongs to one phrase
                start, end = end, end + size
                payload = Payload(
                    start=state.frames + start,
                    rows=size,
                    finished=False,
                    tensors={
                        **{name: np.ascontiguousarray(phrase.spectra[name][start:end]) for name in SPECTRA},
                        "f0": np.ascontiguousarray(phrase.f0[start:end]),
                    },
                    meta={"phrase": state.phrases, "phrase_end": end == phrase.frames},
                )
                if state.edge is not None:
                    (state.withheld if self._chunks.whole else outputs).append(EdgeOut(request, state.edge, payload))
            state.frames += phrase.frames
            state.phrases += 1
        return outputs

    def run(self, phonemes: str, speed: float = 1.0) -> PhraseFrames | None:
        """One run of the net; None for a phrase without a sound. speed: on top of the stage's own."""
        ids = self._net.ids(phonemes)
        if len(ids) < 3:
            return None
        inputs = {"ids": np.asarray([ids], np.int64), "speed": np.asarray([self._speed * speed], np.float32)}
        *spectra, f0 = (output[0] for output in self._net.sess.run(None, inputs))
        return PhraseFrames({n: s.T for n, s in zip(SPECTRA, spectra, strict=True)}, np.asarray(f0, np.float32))

    def _finish(self, request: str, state: _Speaking) -> list[StageOutput]:
        self._requests.remove(request)
        outputs: list[StageOutput] = [] if state.started else [Started(request)]
        outputs.extend(state.withheld)
        if state.edge is not None:
            outputs.append(EdgeOut(request, state.edge, Payload(start=state.frames, rows=0, finished=True)))
        outputs.append(Done(request, "stop", prompt_tokens=state.characters, frames=state.frames))
        return outputs
