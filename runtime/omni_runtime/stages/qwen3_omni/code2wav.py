"""The code2wav engine: codec frames -> PCM, streamed with left context, several requests in one decoder run.

The decoder is causal, but its transposed convolutions drop a constant tail of samples at the end of every run; the
next run, which decodes its left context again, has them. Keeping them is what makes the joined chunks equal to one
run over all frames (clicks and 1.2 % shorter audio otherwise, R20).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from omni_runtime.errors import EngineError
from omni_runtime.platforms.devices import pick_device, pick_dtype
from omni_runtime.protocol.payload import Payload
from omni_runtime.stages.context import EngineContext
from omni_runtime.stages.engine import AudioOut, Done, EngineStats, StageOutput, StageRequest, Started
from omni_runtime.stages.qwen3_omni.loading import load_parts
from omni_runtime.stages.turns import Turns

SAMPLE_RATE = 24_000


@dataclass(slots=True, eq=False)
class _Decoding:
    chunks: deque[Payload] = field(default_factory=deque)
    context: np.ndarray | None = None  # int32 [frames, quantizers], the last frames that were decoded
    frames: int = 0
    started: bool = False


def kept_samples(context: int, frames: int, upsample: int, tail: int) -> tuple[int, int]:
    """Which samples of a run over `context` + `frames` frames are new: all that the run before did not give."""
    return max(0, context * upsample - tail), (context + frames) * upsample - tail


class Qwen3OmniCode2WavEngine:
    """At each step, one chunk of every request that has one, in one batch."""

    def __init__(self, context: EngineContext) -> None:
        options = context.options()
        self._context = context
        self._dtype_name = options.choice("dtype", "auto", ("auto", "float32", "bfloat16", "float16"))
        self._threads = options.integer("threads", 0)
        options.integer("seed", 0)
        options.reject_unknown()
        (edge,) = context.inputs
        self._left = edge.left_context_frames
        self._capacity = context.stage.max_concurrency
        self._requests: Turns[_Decoding] = Turns()

    # --- StageEngine

    def load(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        self._device = pick_device(self._context)
        model: Any = load_parts(
            self._context.model_path,
            revision=self._context.model.revision,
            dtype=pick_dtype(self._dtype_name, self._device),
            talker=False,
            code2wav=True,
        )
        self._decoder: Any = model.code2wav.to(self._device)
        self._quantizers = int(self._decoder.config.num_quantizers)
        self._codebook = int(self._decoder.config.codebook_size)
        self._upsample = int(self._decoder.total_upsample)
        probe = 4
        with torch.inference_mode():
            codes = torch.zeros((1, self._quantizers, probe), dtype=torch.long, device=self._device)
            self._tail = probe * self._upsample - int(self._decoder(codes).shape[-1])

    def submit(self, request: StageRequest) -> None:
        self._requests.add(request.request, _Decoding())

    def feed(self, request: str, edge: str, payload: Payload) -> None:
        state = self._requests.get(request)
        if state is None:
            return
        if payload.rows:
            codes = np.asarray(payload.tensors["codes"])
            if codes.shape != (payload.rows, self._quantizers) or codes.min() < 0 or codes.max() >= self._codebook:
                raise EngineError(
                    f"codes {codes.shape} in {codes.min()}..{codes.max()} are not {self._quantizers} codes below "
                    f"{self._codebook} for each of {payload.rows} frames"
                )
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

    # --- one step

    def _step(self) -> list[StageOutput]:
        turn = [(request, state, state.chunks.popleft()) for request, state in self._requests if state.chunks]
        outputs: list[StageOutput] = []
        for request, state, _ in turn:
            if not state.started:
                state.started = True
                outputs.append(Started(request))
        decoding = [(request, state, chunk) for request, state, chunk in turn if chunk.rows]
        if decoding:
            outputs.extend(self._decode(decoding))
        for request, state, chunk in turn:
            if chunk.finished:
                self._requests.remove(request)
                outputs.append(Done(request, "stop", frames=state.frames))
        return outputs

    @torch.inference_mode()
    def _decode(self, rows: list[tuple[str, _Decoding, Payload]]) -> list[StageOutput]:
        """Rows of different lengths are padded on the right: the decoder is causal, so that changes nothing."""
        windows = []
        for _, state, chunk in rows:
            new = np.asarray(chunk.tensors["codes"])
            windows.append(new if state.context is None else np.concatenate([state.context, new]))
        codes = np.zeros((len(rows), self._quantizers, max(len(w) for w in windows)), dtype=np.int64)
        for index, window in enumerate(windows):
            codes[index, :, : len(window)] = window.T
        waves = self._decoder(torch.from_numpy(codes).to(self._device))[:, 0].float().cpu().numpy()
        outputs: list[StageOutput] = []
        for (request, state, chunk), window, wave in zip(rows, windows, waves, strict=True):
            low, high = kept_samples(len(window) - chunk.rows, chunk.rows, self._upsample, self._tail)
            state.context = window[max(0, len(window) - self._left) :] if self._left else None
            state.frames += chunk.rows
            if high > low:
                pcm = np.ascontiguousarray(wave[low:high], dtype="<f4").tobytes()
                outputs.append(AudioOut(request, pcm, SAMPLE_RATE, chunk.rows))
        return outputs
