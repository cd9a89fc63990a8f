"""Messages of a client -> `Submit.inputs` of stage 0."""

from __future__ import annotations

from typing import Any

from omni_runtime.serving.fetch import MediaFetcher, MediaUrl
from omni_runtime.serving.media import (
    MAX_TOTAL_MEDIA_BYTES,
    decode_base64,
    decode_data_url,
    invalid_part,
)
from omni_runtime.serving.schema.chat import (
    AudioUrlPart,
    ChatMessage,
    ContentPart,
    ImageUrlPart,
    InputAudioPart,
    TextPart,
    VideoUrlPart,
)


async def build_inputs(
    messages: list[ChatMessage], accepted: tuple[str, ...], fetcher: MediaFetcher, root: str = "messages"
) -> dict[str, Any]:
    """{"messages": [...]} as `serving.params` describes. accepted: input kinds of the topology; root: the field of the
    request that the messages stand in, for errors.

    Raises InvalidRequest or FetchFailed, which name the part.
    """
    built: list[dict[str, Any]] = []
    pending: list[tuple[dict[str, Any], MediaUrl]] = []
    for i, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        content = message.content
        if isinstance(content, str):
            built.append({"role": role, "content": content})
            continue
        parts = []
        for j, part in enumerate(content):
            value, url = _build_part(part, f"{root}[{i}].content[{j}]", accepted)
            if url is not None:
                fetcher.check(url)  # all of them before the first is fetched
                pending.append((value, url))
            parts.append(value)
        built.append({"role": role, "content": parts})
    left = MAX_TOTAL_MEDIA_BYTES - _total(built)
    if left < 0:
        fix = f"send at most {MAX_TOTAL_MEDIA_BYTES} bytes"
        raise invalid_part(root, f"{MAX_TOTAL_MEDIA_BYTES - left} bytes", "too much media", fix)
    if pending:
        fetched = await fetcher.fetch_all([url for _, url in pending], left)
        for (value, _), (media_type, data) in zip(pending, fetched, strict=True):
            _fill(value, media_type, data)
    return {"messages": built}


def _total(built: list[dict[str, Any]]) -> int:
    return sum(len(p.get("data", b"")) for m in built if isinstance(m["content"], list) for p in m["content"])


def _build_part(part: ContentPart, path: str, accepted: tuple[str, ...]) -> tuple[dict[str, Any], MediaUrl | None]:
    """The part; with a URL, its bytes are still to come."""
    match part:
        case TextPart(text=text):
            return {"type": "text", "text": text}, None
        case InputAudioPart(input_audio=audio):
            _check_kind("audio", path, accepted)
            data = decode_base64(audio.data, f"{path}.input_audio.data")
            return {"type": "audio", "data": data, "format": audio.format}, None
        case ImageUrlPart(image_url=media):
            return _media("image", media.url, path, accepted)
        case AudioUrlPart(audio_url=media):
            return _media("audio", media.url, path, accepted)
        case VideoUrlPart(video_url=media):
            return _media("video", media.url, path, accepted)


def _media(kind: str, url: str, path: str, accepted: tuple[str, ...]) -> tuple[dict[str, Any], MediaUrl | None]:
    _check_kind(kind, path, accepted)
    value: dict[str, Any] = {"type": kind}
    where = f"{path}.{kind}_url.url"
    if not url.startswith("data:"):
        return value, MediaUrl(url, where, kind)
    _fill(value, *decode_data_url(url, where, kind))
    return value, None


def _fill(value: dict[str, Any], media_type: str, data: bytes) -> None:
    value["data"] = data
    if value["type"] == "audio":
        value["format"] = media_type.removeprefix("audio/").removeprefix("x-")
    else:
        value["media_type"] = media_type


def _check_kind(kind: str, path: str, accepted: tuple[str, ...]) -> None:
    if kind not in accepted:
        raise invalid_part(path, kind, "this model does not take such input", f"send {' or '.join(accepted)}")
