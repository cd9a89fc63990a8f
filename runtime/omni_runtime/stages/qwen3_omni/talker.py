"""The talker engine: continuous batching over slots, one decode step for all rows whose text is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch

from omni_runtime.errors import CapacityExceeded, InvalidRequest
from omni_runtime.platforms.devices import pick_device, pick_dtype
from omni_runtime.protocol.payload import Payload
from omni_runtime.serving.params import from_map
from omni_runtime.stages.chunks import ChunkPlanner, ChunkPolicy
from omni_runtime.stages.context import EngineContext
from omni_runtime.stages.engine import CodesOut, Done, EdgeOut, EngineStats, Failed, StageOutput, StageRequest, Started
from omni_runtime.stages.qwen3_omni.conditioning import Conditioning, TalkerFrontend
from omni_runtime.stages.qwen3_omni.decoder import RANDOM_FRAMES, TalkerDecoder
from omni_runtime.stages.qwen3_omni.loading import load_parts
from omni_runtime.stages.turns import Turns

TEMPERATURE = 0.9  # the model's own default
DEFAULT_SPEAKER = "ethan"
SPEAKER_ALIASES = frozenset({"default", "alloy"})  # OpenAI clients must send a voice; these mean the default one


@dataclass(slots=True, eq=False)
class _Speech:
    """One request. slot is None until its prefill ran."""

    conditioning: Conditioning
    generator: torch.Generator
    temperature: float
    max_tokens: int
    may_end: bool
    edge: str | None
    emit_codes: bool
    chunks: ChunkPlanner
    slot: int | None = None
    place: int = 0  # next free position of the slot
    tokens: int = 0  # codes 0 drawn
    frames: int = 0
    unsent: list[list[int]] = field(default_factory=list)


class Qwen3OmniTalkerEngine:
    """Waits for text instead of padding, admits by worst-case cache, draws from one random stream per request."""

    def __init__(self, context: EngineContext) -> None:
        options = context.options()
        self._context = context
        self._slots = context.stage.max_concurrency
        self._dtype_name = options.choice("dtype", "auto", ("auto", "float32", "bfloat16", "float16"))
        self._max_frames = options.integer("max_frames", 4096, minimum=1)
        self._max_prefill = options.integer("max_prefill_rows", 4096, minimum=16)
        self._experts = options.text("experts_implementation", "")
        self._graphs = options.flag("cuda_graphs", True)
        self._fixed = options.flag("batch_invariant", False)
        self._threads = options.integer("threads", 0)
        self._seed = options.integer("seed", 42)
        options.reject_unknown()
        (self._edge,) = context.outputs
        self._chunks = ChunkPolicy.of(self._edge)
        self._requests: Turns[_Speech] = Turns()
        self._free: list[int] = list(range(self._slots))

    # --- StageEngine

    def load(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        self._device = pick_device(self._context)
        dtype = pick_dtype(self._dtype_name, self._device)
        model: Any = load_parts(
            self._context.model_path,
            revision=self._context.model.revision,
            dtype=dtype,
            talker=True,
            code2wav=False,
            experts=self._experts or None,
        ).to(self._device)
        self._frontend = TalkerFrontend(model, self._device)
        self._decoder = TalkerDecoder(
            model.talker, slots=self._slots, length=self._max_prefill + self._max_frames, device=self._device
        )
        if self._graphs and self._device.type == "cuda":
            graphs = self._decoder.graphed(fixed=self._fixed)
            self._decoder.use(graphs)
            with torch.inference_mode():
                graphs.warm()
        elif self._fixed:
            self._decoder.use(self._decoder.bucketed(fixed=True))

    def submit(self, request: StageRequest) -> None:
        params = from_map(request.params)
        seed = self._seed if params.seed is None else params.seed
        temperature = TEMPERATURE if params.talker_temperature is None else params.talker_temperature
        limit = min(params.talker_max_tokens or self._max_frames, self._max_frames)
        self._requests.add(
            request.request,
            _Speech(
                conditioning=Conditioning(self._frontend, self._speaker(params.voice)),
                generator=torch.Generator().manual_seed(seed & 0x7FFFFFFFFFFFFFFF),
                temperature=temperature,
                max_tokens=limit,
                may_end=not params.ignore_eos,
                edge=self._edge.name if self._edge.name in request.downstream_edges else None,
                emit_codes=request.emit_codes,
                chunks=ChunkPlanner(self._chunks),
            ),
        )

    @torch.inference_mode()
    def feed(self, request: str, edge: str, payload: Payload) -> None:
        speech = self._requests.get(request)
        if speech is not None:
            speech.conditioning.feed(payload)
            self._requests.wake()

    def taken(self, request: str, edge: str, waiting: int) -> None:
        speech = self._requests.get(request)
        if speech is not None:
            speech.chunks.feedback(waiting)

    def poll(self, timeout_s: float) -> Sequence[StageOutput]:
        outputs = self._step()
        if outputs is None and timeout_s > 0:
            self._requests.wait(timeout_s)
            outputs = self._step()
        return outputs or ()

    def wake(self) -> None:
        self._requests.wake()

    def abort(self, request: str) -> None:
        self._release(request)

    def health(self) -> str | None:
        return None

    def stats(self) -> EngineStats:
        running = self._slots - len(self._free)
        return EngineStats(waiting=len(self._requests) - running, running=running, capacity=self._slots)

    def close(self) -> None:
        for request, _ in self._requests:
            self._release(request)

    # --- one step

    @torch.inference_mode()
    def _step(self) -> list[StageOutput] | None:
        """None: nothing to do until something arrives."""
        outputs: list[StageOutput] = []
        fresh = self._admit(outputs)
        speaking: list[tuple[str, _Speech]] = []
        texts: list[torch.Tensor] = []
        for request, speech in self._requests:
            if speech.slot is None or speech is fresh:
                continue
            text = speech.conditioning.text_row(speech.tokens - 1)
            if text is not None:  # else the thinker is behind: this row stands still, the others go on
                speaking.append((request, speech))
                texts.append(text)
        if fresh is not None or speaking:
            self._advance(speaking, texts, fresh, outputs)
        return outputs or ([] if fresh is not None or speaking else None)

    def _admit(self, outputs: list[StageOutput]) -> _Speech | None:
        """At most one prefill a step, so that running speech goes on."""
        for request, speech in self._requests:
            if speech.slot is not None:
                continue
            if speech.conditioning.silent:
                outputs.append(Started(request))
                self._finish(request, speech, "stop", outputs)
                continue
            if not speech.conditioning.ready or not self._free:
                continue
            rows = speech.conditioning.prefill_rows
            if rows > self._max_prefill:
                error = CapacityExceeded(
                    f"the prompt needs {rows} talker positions, this stage has {self._max_prefill}; "
                    "shorten it, or raise engineArgs.max_prefill_rows"
                )
                self._requests.remove(request)
                outputs.append(Failed(request, error.code, str(error)))
                continue
            self._prefill(request, speech, outputs)
            return speech
        return None

    def _prefill(self, request: str, speech: _Speech, outputs: list[StageOutput]) -> None:
        outputs.append(Started(request))
        prefill = speech.conditioning.prefill()
        assert prefill is not None
        speech.slot = heappop(self._free)  # the lowest one: a step computes all slots up to the highest in use
        self._decoder.prefill(speech.slot, prefill, temperature=speech.temperature, may_end=speech.may_end)
        speech.place = prefill.embeds.shape[0]

    def _advance(
        self,
        speaking: list[tuple[str, _Speech]],
        texts: list[torch.Tensor],
        fresh: _Speech | None,
        outputs: list[StageOutput],
    ) -> None:
        turn = [s for _, s in speaking] + ([fresh] if fresh is not None else [])
        for speech in turn:
            if speech.temperature > 0 and speech.tokens % RANDOM_FRAMES == 0:
                uniform = torch.rand(RANDOM_FRAMES, self._decoder.groups, generator=speech.generator)
                self._decoder.set_random(_slot(speech), uniform)
        codes = self._decoder.advance(
            [_slot(s) for _, s in speaking],
            texts,
            [_slot(fresh)] if fresh is not None else [],
            length=1 + max((s.place for _, s in speaking), default=0),
            greedy=all(s.temperature <= 0 for s in turn),
        )
        for request, speech in speaking:
            speech.place += 1
            self._take_frame(request, speech, codes[_slot(speech)], outputs)
        if fresh is not None:
            request = next(r for r, s in self._requests if s is fresh)
            self._take_frame(request, fresh, codes[_slot(fresh)], outputs)

    def _take_frame(self, request: str, speech: _Speech, codes: list[int], outputs: list[StageOutput]) -> None:
        """The token that ends the speech, or is one too many, gives no frame."""
        speech.tokens += 1
        if codes[0] == self._decoder.end:
            self._finish(request, speech, "stop", outputs)
            return
        if speech.tokens >= speech.max_tokens:
            self._finish(request, speech, "length", outputs)
            return
        speech.frames += 1
        speech.unsent.append(codes)
        for size in speech.chunks.take(len(speech.unsent), flush=False):
            self._send(request, speech, size, outputs, finished=False)

    # --- leaving

    def _send(self, request: str, speech: _Speech, size: int, outputs: list[StageOutput], *, finished: bool) -> None:
        start = speech.frames - len(speech.unsent)
        frames, speech.unsent = speech.unsent[:size], speech.unsent[size:]
        if speech.emit_codes and frames:
            outputs.append(CodesOut(request, tuple(tuple(f) for f in frames)))
        if speech.edge is not None:
            tensors = {"codes": np.asarray(frames, dtype=np.int32)} if frames else {}
            payload = Payload(start=start, rows=size, finished=finished, tensors=tensors)
            outputs.append(EdgeOut(request, speech.edge, payload))

    def _finish(self, request: str, speech: _Speech, reason: str, outputs: list[StageOutput]) -> None:
        *before, last = speech.chunks.take(len(speech.unsent), flush=True) or (0,)
        for size in before:
            self._send(request, speech, size, outputs, finished=False)
        self._send(request, speech, last, outputs, finished=True)
        outputs.append(Done(request, reason, completion_tokens=speech.tokens, frames=speech.frames))
        self._release(request)

    def _release(self, request: str) -> None:
        speech = self._requests.get(request)
        if speech is not None and speech.slot is not None:
            heappush(self._free, speech.slot)
        self._requests.remove(request)

    def voices(self) -> tuple[str, ...]:
        return tuple(sorted(self._frontend.speakers))

    def _speaker(self, voice: str | None) -> int:
        speakers = self._frontend.speakers
        if voice is None or voice.lower() in SPEAKER_ALIASES:
            return speakers.get(DEFAULT_SPEAKER, next(iter(speakers.values())))
        if voice.lower() not in speakers:
            raise InvalidRequest(f"audio.voice: {voice!r} is unknown; use one of {', '.join(sorted(speakers))}")
        return speakers[voice.lower()]


def _slot(speech: _Speech) -> int:
    assert speech.slot is not None
    return speech.slot
