"""Thinker rows -> what the talker is fed: its prefill, and one text row per decode step.

As in transformers' `generate`: user turns of the prompt, then nine rows that open the answer, then the answer's text
row by row, `tts_eos` after the last one, `tts_pad` from then on. A row that has not arrived is waited for; feeding
padding instead would change the speech.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from omni_runtime.errors import EngineError
from omni_runtime.protocol.payload import Payload

OPENING_ROWS = 3  # <|im_start|>, assistant, newline


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """embeds [rows, hidden]; positions int64 [3, rows]; delta: what to add to later positions."""

    embeds: torch.Tensor
    positions: torch.Tensor
    delta: int


@dataclass(frozen=True, slots=True)
class Media:
    """What the positions of a prompt with media depend on; from the first payload of the edge."""

    image_grid_thw: tuple[int, ...] = ()  # three numbers an image
    audio_lengths: tuple[int, ...] = ()  # feature frames of each clip
    video_grid_thw: tuple[int, ...] = ()  # three numbers a video
    video_second_per_grid: tuple[float, ...] = ()  # seconds between two steps of a video's grid

    @classmethod
    def from_meta(cls, meta: Mapping[str, object]) -> Media:
        return cls(
            image_grid_thw=tuple(map(int, _numbers(meta, "image_grid_thw"))),
            audio_lengths=tuple(map(int, _numbers(meta, "audio_lengths"))),
            video_grid_thw=tuple(map(int, _numbers(meta, "video_grid_thw"))),
            video_second_per_grid=_numbers(meta, "video_second_per_grid"),
        )


def _numbers(meta: Mapping[str, object], name: str) -> tuple[float, ...]:
    value = meta.get(name)
    return tuple(float(v) for v in value) if isinstance(value, list | tuple) else ()


class TalkerFrontend:
    """Projections and special rows, shared by all requests."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.config = model.config
        self.talker = model.talker
        # transformers' talker asks its own configuration for it where sound comes together with images, and fails.
        self.talker.config.audio_config = model.config.thinker_config.audio_config
        self.device = device
        self.dtype = model.talker.dtype
        specials = torch.tensor(
            [self.config.tts_bos_token_id, self.config.tts_eos_token_id, self.config.tts_pad_token_id], device=device
        )
        with torch.inference_mode():
            rows = self.talker.text_projection(model.thinker.get_input_embeddings()(specials).to(self.dtype))
            codec = self.config.talker_config
            opening = torch.tensor(
                [codec.codec_nothink_id, codec.codec_think_bos_id, codec.codec_think_eos_id], device=device
            )
            closing = torch.tensor([codec.codec_pad_id, codec.codec_bos_id], device=device)
            embed = self.talker.get_input_embeddings()
            self._codec_opening, self._codec_closing = embed(opening), embed(closing)
        self.tts_bos, self.tts_eos, self.tts_pad = rows[0], rows[1], rows[2]
        self.speakers: dict[str, int] = {k.lower(): int(v) for k, v in codec.speaker_id.items()}

    def text_rows(self, embed: torch.Tensor) -> torch.Tensor:
        return self.talker.text_projection(embed)  # type: ignore[no-any-return]

    def build_prefill(
        self, ids: torch.Tensor, embed: torch.Tensor, hidden: torch.Tensor, prompt: int, speaker: int, media: Media
    ) -> Prefill:
        """ids int64 [rows]; embed, hidden [rows, thinker hidden]; rows = prompt + 1: the first text row is there."""
        config = self.config
        thinker = config.thinker_config
        starts = torch.nonzero(ids[:prompt] == config.im_start_token_id).flatten().tolist()
        answer = self._answer_start(ids, starts, prompt)
        is_media = torch.isin(
            ids[:prompt],
            torch.tensor([thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id], device=self.device),
        )
        keep = self._user_mask(ids, starts, prompt)
        rows = self.text_rows(embed[:prompt])
        if bool(is_media.any()):
            rows = torch.where(is_media[:, None], self.talker.hidden_projection(hidden[:prompt]), rows)
        embeds = torch.cat([rows[keep], self._answer_rows(embed[answer : answer + OPENING_ROWS + 1], speaker)])
        padding = torch.full((embeds.shape[0] - int(keep.sum()),), config.tts_pad_token_id, device=self.device)
        positions, delta = self._positions(torch.cat([ids[:prompt][keep], padding]), media)
        return Prefill(embeds, positions, delta)

    def _answer_start(self, ids: torch.Tensor, starts: list[int], prompt: int) -> int:
        answers = [s for s in starts if s + 1 < prompt and int(ids[s + 1]) == self.config.assistant_token_id]
        if not answers:
            raise EngineError("the prompt does not open an assistant turn; check the model's chat template")
        return answers[-1]

    def _user_mask(self, ids: torch.Tensor, starts: list[int], prompt: int) -> torch.Tensor:
        mask = torch.zeros(prompt, dtype=torch.bool, device=self.device)
        for start, end in zip(starts, [*starts[1:], prompt], strict=True):
            if start + 1 < prompt and int(ids[start + 1]) == self.config.user_token_id:
                mask[start:end] = True
        return mask

    def _answer_rows(self, embed: torch.Tensor, speaker: int) -> torch.Tensor:
        text = self.text_rows(embed)
        pad = self.tts_pad.expand(4, -1)
        words = torch.cat([text[:OPENING_ROWS], pad, self.tts_bos[None], text[OPENING_ROWS:]])
        voice = self.talker.get_input_embeddings()(torch.tensor([speaker], device=self.device))
        silence = torch.zeros_like(words[:OPENING_ROWS])
        return words + torch.cat([silence, self._codec_opening, voice, self._codec_closing])

    def _positions(self, ids: torch.Tensor, media: Media) -> tuple[torch.Tensor, int]:
        """Linear for text and audio; with images or video, the 3-D positions of the model (they change the codes)."""
        if not (media.image_grid_thw or media.video_grid_thw):
            return torch.arange(ids.shape[0], device=self.device).expand(3, -1), 0
        images, videos = self._maybe(media.image_grid_thw), self._maybe(media.video_grid_thw)
        positions, delta = self.talker.get_rope_index(
            ids[None],
            image_grid_thw=None if images is None else images.reshape(-1, 3),
            video_grid_thw=None if videos is None else videos.reshape(-1, 3),
            attention_mask=torch.ones_like(ids)[None],
            audio_seqlens=self._maybe(media.audio_lengths),
            second_per_grids=self._maybe(media.video_second_per_grid),
        )
        return positions[:, 0].to(torch.long), int(delta.reshape(-1)[0])

    def _maybe(self, values: tuple[float, ...]) -> torch.Tensor | None:
        return torch.tensor(values, device=self.device) if values else None


class Conditioning:
    """The rows of one request. `prefill` and `text_row` answer None while the thinker is behind."""

    def __init__(self, frontend: TalkerFrontend, speaker: int) -> None:
        self._frontend = frontend
        self._speaker = speaker
        self._ids: list[torch.Tensor] = []
        self._embed: list[torch.Tensor] = []
        self._hidden: list[torch.Tensor] = []
        self._rows = 0
        self._prompt = 0
        self._media = Media()
        self._text: list[torch.Tensor] | None = None  # projected rows of the answer, from its second token on
        self.finished = False

    def feed(self, payload: Payload) -> None:
        """Raises EngineError on a gap or a chunk that comes twice."""
        if payload.start != self._rows:
            raise EngineError(f"thinker rows {self._rows} to {payload.start} are missing")
        if "prompt_tokens" in payload.meta:
            self._prompt = int(str(payload.meta["prompt_tokens"]))
            self._media = Media.from_meta(payload.meta)
        self._rows += payload.rows
        self.finished = self.finished or payload.finished
        if payload.rows == 0:
            return
        embed = self._tensor(payload, "embed")
        if self._text is not None:
            self._text.extend(self._frontend.text_rows(embed).unbind())
            return
        self._ids.append(torch.from_numpy(np.array(payload.tensors["token_ids"])).to(self._frontend.device))
        self._embed.append(embed)
        self._hidden.append(self._tensor(payload, "hidden"))

    @property
    def prefill_rows(self) -> int:
        """Upper bound of the prefill's length, for admission."""
        return self._prompt + 9

    @property
    def silent(self) -> bool:
        """The answer has no text that could be spoken (its one token has no row)."""
        return self.finished and self._rows <= self._prompt

    @property
    def ready(self) -> bool:
        return self._prompt > 0 and self._rows > self._prompt

    def prefill(self) -> Prefill | None:
        """Once; needs the whole prompt and the first row of the answer."""
        if not self.ready or self._text is not None:
            return None
        ids, embed, hidden = torch.cat(self._ids), torch.cat(self._embed), torch.cat(self._hidden)
        first_text = self._prompt + 1
        prefill = self._frontend.build_prefill(
            ids, embed[:first_text], hidden[:first_text], self._prompt, self._speaker, self._media
        )
        later = embed[first_text:]
        self._text = list(self._frontend.text_rows(later).unbind()) if later.shape[0] else []
        self._ids.clear()
        self._embed.clear()
        self._hidden.clear()
        return prefill

    def text_row(self, step: int) -> torch.Tensor | None:
        """The row of decode step `step` [hidden]."""
        rows = self._text or []
        if step < len(rows):
            return rows[step]
        if not self.finished:
            return None
        return self._frontend.tts_eos if step == len(rows) else self._frontend.tts_pad

    def _tensor(self, payload: Payload, name: str) -> torch.Tensor:
        tensor = torch.from_numpy(np.array(payload.tensors[name]))
        if payload.dtypes.get(name) == "bfloat16":
            tensor = tensor.view(torch.bfloat16)
        return tensor.to(self._frontend.device, self._frontend.dtype)
