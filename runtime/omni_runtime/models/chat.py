"""OpenAI chat messages -> what the thinker's engine takes. One class per model family; used by the thinker alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from omni_runtime.errors import InvalidRequest
from omni_runtime.models.media import SAMPLE_RATE, decode_audio, decode_image
from omni_runtime.models.video import FRAMES_PER_SECOND, MAX_TAKEN_PIXELS, decode_video

Message = Mapping[str, Any]
TURN_CHARACTERS = 40  # what a template writes around a message costs about as much


@dataclass(frozen=True, slots=True, eq=False)
class ChatPrompt:
    """prompt: a vLLM prompt (token ids or text, and media). row_meta: what the edge's first payload must say."""

    prompt: dict[str, Any]
    row_meta: dict[str, object] = field(default_factory=dict)


class ChatFamily(Protocol):
    """Thread-safe. `tokenizer`: a transformers tokenizer."""

    @property
    def tokenizer(self) -> Any: ...
    def prompt(self, messages: Sequence[Message]) -> ChatPrompt:
        """Raises InvalidRequest when a message or part cannot be read."""

    def completion(self, prompt: str | Sequence[int]) -> ChatPrompt:
        """Text or token ids to go on from, without a template. Raises InvalidRequest if the model needs one."""


class TextChat:
    """A text-only model with a chat template (smol_omni's thinker)."""

    def __init__(self, model_path: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def completion(self, prompt: str | Sequence[int]) -> ChatPrompt:
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else check_ids(self._tokenizer, prompt)
        if not ids:
            raise InvalidRequest("prompt: has no tokens; send some text")
        return ChatPrompt(prompt={"prompt_token_ids": [int(t) for t in ids]})

    def prompt(self, messages: Sequence[Message]) -> ChatPrompt:
        plain = [{"role": m["role"], "content": _text_only(m, i)} for i, m in enumerate(messages)]
        ids = self._tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=True, return_dict=True)
        return ChatPrompt(prompt={"prompt_token_ids": [int(t) for t in ids["input_ids"]]})


@dataclass(slots=True, eq=False)
class _Media:
    """What the parts of one request brought, in their order. video: uint8 [frames, height, width, 3] each."""

    audio: list[Any] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)

    def pixels_left(self) -> int:
        return MAX_TAKEN_PIXELS - sum(v.size // 3 for v in self.videos)


class Qwen3OmniChat:
    """Text, audio, images and video; media become placeholder tokens that vLLM expands.

    options: of the processor, as vLLM has them in `mm_processor_kwargs`.
    """

    def __init__(self, model_path: str, options: Mapping[str, Any] | None = None) -> None:
        from transformers import AutoProcessor

        self._processor: Any = AutoProcessor.from_pretrained(model_path)
        self._options = dict(options or {})

    @property
    def tokenizer(self) -> Any:
        return self._processor.tokenizer

    def completion(self, prompt: str | Sequence[int]) -> ChatPrompt:
        raise InvalidRequest("prompt: this model needs its chat template; use /v1/chat/completions")

    def prompt(self, messages: Sequence[Message]) -> ChatPrompt:
        media = _Media()
        turns = [
            {
                "role": m["role"],
                "content": [self._part(p, f"messages[{i}].content[{j}]", media) for j, p in parts],
            }
            for i, m in enumerate(messages)
            for parts in [list(enumerate(_parts(m)))]
        ]
        text = self._processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        data: dict[str, Any] = {}
        meta: dict[str, object] = {}
        prompt: dict[str, Any] = {"prompt": text}
        if media.audio:
            data["audio"] = [(samples, SAMPLE_RATE) for samples in media.audio]
            extractor = self._processor.feature_extractor
            hop, limit = int(extractor.hop_length), int(extractor.n_samples)
            meta["audio_lengths"] = mel_frames([min(len(samples), limit) for samples in media.audio], hop)
        if media.images:
            data["image"] = media.images
            grid = self._processor.image_processor(images=media.images, return_tensors="np")["image_grid_thw"]
            meta["image_grid_thw"] = [int(v) for v in grid.reshape(-1)]
        if media.videos:
            data["video"] = media.videos
            grids = [self._video_grid(frames) for frames in media.videos]
            meta["video_grid_thw"] = [v for grid, _ in grids for v in grid]
            meta["video_second_per_grid"] = [seconds for _, seconds in grids]
            prompt["mm_processor_kwargs"] = {"fps": float(FRAMES_PER_SECOND)}
        if data:
            prompt["multi_modal_data"] = data
        return ChatPrompt(prompt=prompt, row_meta=meta)

    def _part(self, part: Message, where: str, media: _Media) -> dict[str, Any]:
        match part.get("type"):
            case "text":
                return {"type": "text", "text": str(part.get("text", ""))}
            case "audio":
                media.audio.append(decode_audio(part["data"], where))
                return {"type": "audio"}
            case "image":
                media.images.append(decode_image(part["data"], where))
                return {"type": "image"}
            case "video":
                media.videos.append(decode_video(part["data"], where, media.pixels_left()))
                return {"type": "video"}
            case kind:
                fix = "use text, input_audio, image_url or video_url"
                raise InvalidRequest(f"{where}.type: {kind!r} is not supported; {fix}")

    def _video_grid(self, frames: np.ndarray) -> tuple[list[int], float]:
        """[time, height, width] in patches, and the seconds between two of them, as vLLM gets them from the processor.

        One frame says how all are scaled, unless the processor shares out a budget of pixels among them.
        """
        video = self._processor.video_processor
        shared = getattr(video, "cap_pixels_per_frame", None) or self._options.get("cap_pixels_per_frame")
        found = self._processor(
            text=[self._processor.video_token],
            videos=[frames if shared else frames[:1]],
            return_tensors="np",
            **{**self._options, "fps": float(FRAMES_PER_SECOND)},
        )
        _, height, width = (int(v) for v in found["video_grid_thw"][0])
        steps = -(-len(frames) // int(video.temporal_patch_size))
        return [steps, height, width], float(found["video_second_per_grid"][0])


def characters_of(inputs: Mapping[str, Any]) -> float:
    """How much text there is to read in `Submit.inputs`; infinite where there is something else to decode."""
    if "prompt" in inputs:
        return len(inputs["prompt"])
    found = 0
    for message in inputs["messages"]:
        found += TURN_CHARACTERS
        for part in _parts(message):
            if part.get("type") != "text":
                return math.inf
            found += len(str(part.get("text", "")))
    return found


def check_ids(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Raises InvalidRequest for an id that the vocabulary does not have."""
    size = len(tokenizer)
    for i, token in enumerate(ids):
        if not 0 <= int(token) < size:
            raise InvalidRequest(f"token {i}: {token}: the vocabulary has ids 0 to {size - 1}")
    return [int(t) for t in ids]


def tokenize(family: ChatFamily, asked: Mapping[str, Any]) -> list[int]:
    """`Submit.inputs["tokenize"]`: {"text", "add_special_tokens"} or {"messages"} -> ids, as the model would read them;
    media are one placeholder each. Raises InvalidRequest."""
    if "messages" not in asked:
        return [int(t) for t in family.tokenizer.encode(asked["text"], add_special_tokens=asked["add_special_tokens"])]
    prompt = family.prompt(asked["messages"]).prompt
    if "prompt_token_ids" in prompt:
        return list(prompt["prompt_token_ids"])
    return [int(t) for t in family.tokenizer.encode(prompt["prompt"], add_special_tokens=False)]


def detokenize(family: ChatFamily, ids: Sequence[int]) -> str:
    """Raises InvalidRequest."""
    return str(family.tokenizer.decode(check_ids(family.tokenizer, ids), skip_special_tokens=False))


def mel_frames(samples: Sequence[int], hop: int) -> list[int]:
    """Feature frames of each clip of one request, as the feature extractor's mask counts them: it pads all clips to
    the longest, keeps a frame that starts inside the clip, and drops a last incomplete one."""
    most = max(samples, default=0) // hop
    return [min(-(-n // hop), most) for n in samples]


def chat_family(topology: str, model_path: str, options: Mapping[str, Any] | None = None) -> ChatFamily:
    """options: see `Qwen3OmniChat`; nothing to a model without media."""
    if topology.startswith("qwen3_omni"):
        return Qwen3OmniChat(model_path, options)
    return TextChat(model_path)


def _parts(message: Message) -> Sequence[Message]:
    content = message.get("content")
    if content is None:
        return ()
    if isinstance(content, str):
        return ({"type": "text", "text": content},)
    return tuple(content)


def _text_only(message: Message, index: int) -> str:
    texts = []
    for j, part in enumerate(_parts(message)):
        if part.get("type") != "text":
            where = f"messages[{index}].content[{j}].type"
            raise InvalidRequest(f"{where}: {part.get('type')!r} is not understood by this model; send text only")
        texts.append(str(part.get("text", "")))
    return "".join(texts)
