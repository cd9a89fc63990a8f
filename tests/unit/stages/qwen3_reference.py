"""transformers' own `generate` on the tiny Qwen3-Omni, taken apart: text ids, codec codes, thinker rows."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omni_runtime.models import catalogue
from omni_runtime.protocol.payload import Payload

MODEL = "qwen3-omni-tiny"
VIDEO_SIZE = {"shortest_edge": 64, "longest_edge": 1024}  # pixels of a frame; of images it is the model's own

CACHE = Path(tempfile.gettempdir()) / f"omni-test-{os.getuid()}"


def tiny_model_path() -> str:
    """The prepared model; built once per machine, in a second."""
    return str(catalogue.prepare(MODEL, CACHE / "models", lambda _: None))


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    prompt_ids: list[int]
    text_ids: list[int]  # generated, end token included
    codes: np.ndarray  # [frames, quantizers]
    embed: np.ndarray  # [rows, hidden], rows = prompt + generated - 1
    hidden: np.ndarray

    def payloads(self, sizes: int, media: dict[str, object] | None = None) -> list[Payload]:
        """The thinker's edge: the prompt in one chunk, then `sizes` rows a chunk. media: what it says of media."""
        rows, prompt = len(self.embed), len(self.prompt_ids)
        ids = np.asarray([*self.prompt_ids, *self.text_ids][:rows], dtype=np.int64)
        bounds = [0, *range(prompt, rows, sizes), rows]
        out = []
        for start, end in pairwise(bounds):
            meta: dict[str, object] = {"prompt_tokens": prompt} if start == 0 else {}
            if start == 0:
                meta |= media or {}
            tensors = {n: v[start:end] for n, v in (("token_ids", ids), ("embed", self.embed), ("hidden", self.hidden))}
            out.append(Payload(start=start, rows=end - start, finished=end == rows, tensors=tensors, meta=meta))
        return out


class Reference:
    """`shift`: negative control, conditioning rows moved by that many rows."""

    def __init__(self, path: str) -> None:
        from transformers import AutoProcessor, Qwen3OmniMoeForConditionalGeneration

        self.model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
        # Its talker lacks it, and fails on sound together with images: the positions are then those of the thinker.
        self.model.talker.config.audio_config = self.model.config.thinker_config.audio_config
        self.processor: Any = AutoProcessor.from_pretrained(path)
        self.end = int(self.model.config.im_end_token_id)
        weights = hashlib.sha256((Path(path) / "model.safetensors").read_bytes()).hexdigest()
        self._identity = f"{weights} transformers {version('transformers')} torch {version('torch')}"

    def generate(self, inputs: dict[str, Any], *, max_text: int, max_codes: int, shift: int = 0) -> Expected:
        """What transformers gives. Kept on disk: its residual codes cost a third of a second of CPU per frame."""
        digest = hashlib.sha256(f"{self._identity} {max_text} {max_codes} {shift}".encode())
        for name in sorted(inputs):
            digest.update(name.encode() + inputs[name].numpy().tobytes())
        file = CACHE / "expected" / f"{digest.hexdigest()[:32]}.npz"
        if not file.exists():
            expected = self._generate(inputs, max_text=max_text, max_codes=max_codes, shift=shift)
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}.npz")
            np.savez(part, **{f.name: np.asarray(getattr(expected, f.name)) for f in fields(expected)})
            part.rename(file)
        with np.load(file, allow_pickle=False) as stored:
            values = dict(stored)
        ids = {name: [int(t) for t in values.pop(name)] for name in ("prompt_ids", "text_ids")}
        return Expected(**ids, **values)

    @torch.no_grad()
    def _generate(self, inputs: dict[str, Any], *, max_text: int, max_codes: int, shift: int) -> Expected:
        captured: dict[str, Any] = {}
        with self._spied(captured, shift):
            try:
                self.model.generate(
                    **inputs,
                    speaker="Ethan",
                    thinker_max_new_tokens=max_text,
                    thinker_do_sample=False,
                    thinker_eos_token_id=self.end,
                    talker_do_sample=False,
                    talker_max_new_tokens=max_codes,
                )
            except RuntimeError:  # transformers fails on one-token answers and on speech that ends at once
                captured.setdefault("codes", torch.zeros((1, self.model.talker.config.num_code_groups, 0)))
        thinker = captured["thinker"]
        prompt = inputs["input_ids"][0].tolist()
        accept = self.model.config.talker_config.accept_hidden_layer
        return Expected(
            prompt_ids=prompt,
            text_ids=thinker.sequences[0, len(prompt) :].tolist(),
            codes=captured["codes"][0].T.numpy().astype(np.int32),
            embed=torch.cat([h[0][0] for h in thinker.hidden_states]).numpy(),
            hidden=torch.cat([h[accept][0] for h in thinker.hidden_states]).numpy(),
        )

    @torch.no_grad()
    def decode(self, codes: np.ndarray) -> np.ndarray:
        """One-shot PCM of [frames, quantizers]."""
        if not len(codes):
            return np.zeros(0, np.float32)
        wave = self.model.code2wav(torch.from_numpy(codes.T[None].astype(np.int64)))
        return np.asarray(wave[0, 0].numpy())

    @contextmanager
    def _spied(self, captured: dict[str, Any], shift: int) -> Iterator[None]:
        thinker, code2wav = self.model.thinker, self.model.code2wav
        generate, decode, parts = thinker.generate, code2wav.chunked_decode, self.model._get_talker_assistant_parts

        def spy_generate(*args: Any, **kwargs: Any) -> Any:
            captured["thinker"] = generate(*args, **kwargs)
            return captured["thinker"]

        def spy_decode(codes: Any, **kwargs: Any) -> Any:
            captured["codes"] = codes.clone()
            return decode(codes, **kwargs)

        def shifted(start: int, end: int, speaker: int, embed: Any, *rest: Any) -> Any:
            return parts(start, end, speaker, embed.roll(shift, dims=1), *rest)

        thinker.generate, code2wav.chunked_decode = spy_generate, spy_decode
        self.model._get_talker_assistant_parts = shifted
        try:
            yield
        finally:
            thinker.generate, code2wav.chunked_decode = generate, decode
            self.model._get_talker_assistant_parts = parts

    def inputs(
        self, messages: list[dict[str, Any]], audio: Any = None, images: Any = None, videos: Any = None
    ) -> dict[str, Any]:
        """videos: uint8 [frames, height, width, 3] each, two frames a second."""
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        sampled = {} if videos is None else {"videos": videos, "fps": 2.0, "size": VIDEO_SIZE}
        return dict(self.processor(text=text, audio=audio, images=images, **sampled, return_tensors="pt"))
