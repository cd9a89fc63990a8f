"""The code2wav engine: codec frames -> PCM, streamed with left context, several requests in one decoder run.

The decoder is causal, but its transposed convolutions drop a constant tail of samples at the end of every run; the
next run, which decodes its left context again, has them. Keeping them is what makes the joined chunks equal to one
run over all frames (clicks and 1.2 % shorter audio otherwise, R20).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from omni_runtime.errors import EngineError
from omni_runtime.platforms.devices import pick_device, pick_dtype
from omni_runtime.protocol.payload import Payload
from omni_runtime.stages.chunks import kept_samples
from omni_runtime.stages.context import EngineContext
from omni_runtime.stages.engine import AudioOut, StageRequest
from omni_runtime.stages.qwen3_omni.loading import load_parts
from omni_runtime.stages.streaming import StreamingDecoder, Turn

SAMPLE_RATE = 24_000
PIECE_FRAMES = 128  # of a long chunk in one step: bounds memory, and what others wait for


@dataclass(slots=True)
class _Decoded:
    context: np.ndarray | None = None  # int32 [frames, quantizers], the last frames that were decoded


class Qwen3OmniCode2WavEngine(StreamingDecoder[_Decoded]):
    """At each step, one chunk of every request that has one; those of similar length in one run of the decoder."""

    def __init__(self, context: EngineContext) -> None:
        options = context.options()
        self._context = context
        self._dtype_name = options.choice("dtype", "auto", ("auto", "float32", "bfloat16", "float16"))
        self._threads = options.integer("threads", 0)
        options.integer("seed", 0)
        options.reject_unknown()
        (edge,) = context.inputs
        self._left = edge.left_context_frames
        concurrency = context.stage.max_concurrency
        super().__init__(capacity=concurrency, batch=concurrency)

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

    def begin(self, request: StageRequest) -> _Decoded:
        return _Decoded()

    def pieces(self, payload: Payload) -> Iterable[Payload]:
        if not payload.rows:
            return (payload,)
        codes = np.asarray(payload.tensors["codes"])
        if codes.shape != (payload.rows, self._quantizers) or codes.min() < 0 or codes.max() >= self._codebook:
            raise EngineError(
                f"codes {codes.shape} in {codes.min()}..{codes.max()} are not {self._quantizers} codes below "
                f"{self._codebook} for each of {payload.rows} frames"
            )
        return [
            Payload(
                start=payload.start + first,
                rows=min(PIECE_FRAMES, payload.rows - first),
                finished=payload.finished and first + PIECE_FRAMES >= payload.rows,
                tensors={"codes": codes[first : first + PIECE_FRAMES]},
            )
            for first in range(0, payload.rows, PIECE_FRAMES)
        ]

    @torch.inference_mode()
    def decode(self, turn: Sequence[Turn[_Decoded]]) -> Iterable[AudioOut]:
        windows = [(incoming, chunk, self._window(incoming.state, chunk)) for incoming, chunk in turn]
        windows.sort(key=lambda w: len(w[2]))
        outputs: list[AudioOut] = []
        for _, group in groupby(windows, key=lambda w: (len(w[2]) - 1).bit_length()):
            outputs.extend(self._run(list(group)))
        return outputs

    def _window(self, state: _Decoded, chunk: Payload) -> np.ndarray:
        """The chunk's frames behind their left context; the context of the next one is kept."""
        new = np.asarray(chunk.tensors["codes"])
        window = new if state.context is None else np.concatenate([state.context, new])
        state.context = window[max(0, len(window) - self._left) :] if self._left else None
        return window

    def _run(self, group: Sequence[tuple[Any, Payload, np.ndarray]]) -> Iterable[AudioOut]:
        """Shorter rows are padded on the right: the decoder is causal, so that changes nothing."""
        codes = np.zeros((len(group), self._quantizers, len(group[-1][2])), dtype=np.int64)
        for index, (_, _, window) in enumerate(group):
            codes[index, :, : len(window)] = window.T
        waves = self._decoder(torch.from_numpy(codes).to(self._device))[:, 0].float().cpu().numpy()
        for (incoming, chunk, window), wave in zip(group, waves, strict=True):
            low, high = kept_samples(len(window) - chunk.rows, chunk.rows, self._upsample, self._tail)
            if high > low:
                pcm = np.ascontiguousarray(wave[low:high], dtype="<f4").tobytes()
                yield AudioOut(incoming.request, pcm, SAMPLE_RATE, chunk.rows)
