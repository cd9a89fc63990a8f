"""The talker engine: continuous batching over slots, one decode step for all rows whose text is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from omni_runtime.errors import CapacityExceeded, InvalidRequest
from omni_runtime.platforms.devices import pick_device, pick_dtype
from omni_runtime.protocol.payload import Payload
from omni_runtime.serving.params import from_map
from omni_runtime.stages.context import EngineContext
from omni_runtime.stages.engine import CodesOut, Done, EdgeOut, EngineStats, Failed, StageOutput, StageRequest, Started
from omni_runtime.stages.qwen3_omni.conditioning import Conditioning, TalkerFrontend
from omni_runtime.stages.qwen3_omni.decoder import TalkerDecoder
from omni_runtime.stages.qwen3_omni.loading import load_parts
from omni_runtime.stages.qwen3_omni.sampling import penalise, sample
from omni_runtime.stages.turns import Turns

TEMPERATURE, TOP_K, TOP_P, REPETITION_PENALTY = 0.9, 50, 1.0, 1.05  # the model's own defaults
SUPPRESSED_TAIL = 1024  # special ids at the vocabulary's end; of them only the end of speech may be drawn
DEFAULT_SPEAKER = "ethan"
SPEAKER_ALIASES = frozenset({"default", "alloy"})  # OpenAI clients must send a voice; these mean the default one


@dataclass(slots=True, eq=False)
class _Speech:
    """One request. slot is None until its prefill ran."""

    conditioning: Conditioning
    generator: torch.Generator
    temperature: float
    max_tokens: int
    ignore_end: bool
    edge: str | None
    emit_codes: bool
    slot: int | None = None
    place: int = 0  # next free position of the slot
    delta: int = 0  # RoPE position minus place
    hidden: torch.Tensor | None = None  # of the step whose code 0 was drawn last
    code: int = 0  # that code 0, not yet completed to a frame
    pending: torch.Tensor | None = None  # sum of the last frame's embeddings, waiting for its text row
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
        self._threads = options.integer("threads", 0)
        self._seed = options.integer("seed", 42)
        options.reject_unknown()
        (self._edge,) = context.outputs
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
        codec_end = int(model.config.talker_config.codec_eos_token_id)
        vocabulary = self._decoder.vocabulary
        self._end = codec_end
        self._suppressed = torch.zeros(vocabulary, dtype=torch.bool, device=self._device)
        self._suppressed[vocabulary - SUPPRESSED_TAIL :] = True
        self._suppressed[codec_end] = False
        self._seen = torch.zeros((self._slots, vocabulary), dtype=torch.bool, device=self._device)

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
                ignore_end=params.ignore_eos,
                edge=self._edge.name if self._edge.name in request.downstream_edges else None,
                emit_codes=request.emit_codes,
            ),
        )

    @torch.inference_mode()
    def feed(self, request: str, edge: str, payload: Payload) -> None:
        speech = self._requests.get(request)
        if speech is not None:
            speech.conditioning.feed(payload)
            self._requests.wake()

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
        worked = self._admit(outputs)
        fresh = [(r, s) for r, s in self._requests if s.hidden is not None]
        if fresh:
            self._complete_frames(fresh, outputs)
        rows = [(r, s, text) for r, s in self._requests if (text := self._text_row(s)) is not None]
        if rows:
            self._decode(rows, outputs)
        return outputs if worked or fresh or rows else None

    def _text_row(self, speech: _Speech) -> torch.Tensor | None:
        if speech.pending is None:
            return None
        return speech.conditioning.text_row(speech.tokens - 1)

    def _admit(self, outputs: list[StageOutput]) -> bool:
        """At most one prefill a step, so that running speech goes on."""
        for request, speech in self._requests:
            if speech.slot is not None:
                continue
            if speech.conditioning.silent:
                outputs.append(Started(request))
                self._finish(request, speech, "stop", outputs)
                return True
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
                return True
            self._prefill(request, speech, outputs)
            return True
        return False

    def _prefill(self, request: str, speech: _Speech, outputs: list[StageOutput]) -> None:
        outputs.append(Started(request))
        prefill = speech.conditioning.prefill()
        assert prefill is not None
        slot = speech.slot = self._free.pop()
        self._seen[slot] = False
        hidden = self._decoder.prefill(slot, prefill)
        speech.place, speech.delta = prefill.embeds.shape[0], prefill.delta
        self._draw([(request, speech)], hidden, outputs)

    def _complete_frames(self, rows: list[tuple[str, _Speech]], outputs: list[StageOutput]) -> None:
        hidden = torch.stack([s.hidden for _, s in rows if s.hidden is not None])
        first = torch.tensor([s.code for _, s in rows], device=self._device)
        groups = self._decoder.groups - 1
        uniform = torch.stack([torch.rand(groups, generator=s.generator) for _, s in rows]).to(self._device)
        codes, sums = self._decoder.residual_codes(hidden, first, uniform, self._temperatures(rows))
        for (request, speech), frame, total in zip(rows, codes.tolist(), sums, strict=True):
            speech.hidden, speech.pending = None, total
            speech.frames += 1
            speech.unsent.append(frame)
            initial = speech.frames == len(speech.unsent)  # nothing has left yet
            if len(speech.unsent) >= (self._edge.initial_frames if initial else self._edge.frames):
                self._send(request, speech, outputs, finished=False)

    def _decode(self, rows: list[tuple[str, _Speech, torch.Tensor]], outputs: list[StageOutput]) -> None:
        embeds = torch.stack([s.pending + text for _, s, text in rows if s.pending is not None])
        slots = [s.slot for _, s, _ in rows if s.slot is not None]
        hidden = self._decoder.decode(embeds, slots, [s.place for _, s, _ in rows], [s.delta for _, s, _ in rows])
        for _, speech, _ in rows:
            speech.pending = None
            speech.place += 1
        self._draw([(r, s) for r, s, _ in rows], hidden, outputs)

    def _draw(self, rows: list[tuple[str, _Speech]], hidden: torch.Tensor, outputs: list[StageOutput]) -> None:
        """Code 0 of the next frame of each row; the token that ends the speech gives no frame."""
        slots = torch.tensor([s.slot for _, s in rows], device=self._device)
        logits = penalise(self._decoder.logits(hidden), self._seen[slots], REPETITION_PENALTY)
        logits = logits.masked_fill(self._suppressed, float("-inf"))
        if any(s.ignore_end for _, s in rows):
            ignoring = torch.tensor([s.ignore_end for _, s in rows], device=self._device)
            logits[ignoring, self._end] = float("-inf")
        uniform = torch.cat([torch.rand(1, generator=s.generator) for _, s in rows]).to(self._device)
        drawn = sample(logits, uniform, self._temperatures(rows), top_k=TOP_K, top_p=TOP_P)
        self._seen[slots, drawn] = True
        for index, ((request, speech), code) in enumerate(zip(rows, drawn.tolist(), strict=True)):
            speech.tokens += 1
            if code == self._end:
                self._finish(request, speech, "stop", outputs)
            elif speech.tokens >= speech.max_tokens:
                self._finish(request, speech, "length", outputs)
            else:
                speech.hidden, speech.code = hidden[index], code

    def _temperatures(self, rows: list[tuple[str, _Speech]]) -> torch.Tensor:
        return torch.tensor([s.temperature for _, s in rows], dtype=torch.float32, device=self._device)

    # --- leaving

    def _send(self, request: str, speech: _Speech, outputs: list[StageOutput], *, finished: bool) -> None:
        frames, speech.unsent = speech.unsent, []
        if speech.emit_codes and frames:
            outputs.append(CodesOut(request, tuple(tuple(f) for f in frames)))
        if speech.edge is not None:
            tensors = {"codes": np.asarray(frames, dtype=np.int32)} if frames else {}
            start = speech.frames - len(frames)
            payload = Payload(start=start, rows=len(frames), finished=finished, tensors=tensors)
            outputs.append(EdgeOut(request, speech.edge, payload))

    def _finish(self, request: str, speech: _Speech, reason: str, outputs: list[StageOutput]) -> None:
        self._send(request, speech, outputs, finished=True)
        outputs.append(Done(request, reason, completion_tokens=speech.tokens, frames=speech.frames))
        self._release(request)

    def _release(self, request: str) -> None:
        speech = self._requests.get(request)
        if speech is not None and speech.slot is not None:
            self._free.append(speech.slot)
        self._requests.remove(request)

    def _speaker(self, voice: str | None) -> int:
        speakers = self._frontend.speakers
        if voice is None or voice.lower() in SPEAKER_ALIASES:
            return speakers.get(DEFAULT_SPEAKER, next(iter(speakers.values())))
        if voice.lower() not in speakers:
            raise InvalidRequest(f"audio.voice: {voice!r} is unknown; use one of {', '.join(sorted(speakers))}")
        return speakers[voice.lower()]
