"""Messages of a client -> `Submit.inputs` of stage 0: media decoded and bounded, never fetched, never parsed here.

Parsing media is the thinker's work, in a process of its own; fetching URLs would let a client reach our network
(R59, R60), so only data: URLs are taken.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any
from urllib.parse import unquote_to_bytes

from omni_runtime.errors import FieldError, InvalidRequest
from omni_runtime.serving.schema import (
    AudioUrlPart,
    ChatMessage,
    ContentPart,
    ImageUrlPart,
    InputAudioPart,
    TextPart,
)

MAX_MEDIA_BYTES = 25 << 20  # of one part, decoded
MAX_TOTAL_MEDIA_BYTES = 64 << 20  # of one request, decoded

_MEDIA_TYPES = {
    "image": ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"),
    "audio": ("audio/wav", "audio/x-wav", "audio/mpeg", "audio/mp3", "audio/flac", "audio/ogg", "audio/opus"),
}


def build_inputs(messages: list[ChatMessage], accepted: tuple[str, ...]) -> dict[str, Any]:
    """{"messages": [...]} as `serving.params` describes. `accepted`: input kinds of the topology.

    Raises InvalidRequest, which names the part.
    """
    built: list[dict[str, Any]] = []
    total = 0
    for i, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        content = message.content
        if content is None or isinstance(content, str):
            built.append({"role": role, "content": content or ""})
            continue
        parts = []
        for j, part in enumerate(content):
            value = _build_part(part, f"messages[{i}].content[{j}]", accepted)
            total += len(value.get("data", b""))
            parts.append(value)
        built.append({"role": role, "content": parts})
    if total > MAX_TOTAL_MEDIA_BYTES:
        raise _invalid("messages", f"{total} bytes", "too much media", f"send at most {MAX_TOTAL_MEDIA_BYTES} bytes")
    return {"messages": built}


def _build_part(part: ContentPart, path: str, accepted: tuple[str, ...]) -> dict[str, Any]:
    match part:
        case TextPart(text=text):
            return {"type": "text", "text": text}
        case InputAudioPart(input_audio=audio):
            _check_kind("audio", path, accepted)
            return {"type": "audio", "data": _base64(audio.data, f"{path}.input_audio.data"), "format": audio.format}
        case ImageUrlPart(image_url=image):
            _check_kind("image", path, accepted)
            media_type, data = _data_url(image.url, f"{path}.image_url.url", "image")
            return {"type": "image", "data": data, "media_type": media_type}
        case AudioUrlPart(audio_url=audio):
            _check_kind("audio", path, accepted)
            media_type, data = _data_url(audio.url, f"{path}.audio_url.url", "audio")
            return {"type": "audio", "data": data, "format": media_type.removeprefix("audio/").removeprefix("x-")}


def _check_kind(kind: str, path: str, accepted: tuple[str, ...]) -> None:
    if kind not in accepted:
        raise _invalid(path, kind, "this model does not take such input", f"send {' or '.join(accepted)}")


def _data_url(url: str, path: str, kind: str) -> tuple[str, bytes]:
    if not url.startswith("data:"):
        raise _invalid(path, url, "URLs are not fetched", f"send the {kind} itself: data:{kind}/...;base64,...")
    header, comma, body = url[5:].partition(",")
    fields = header.split(";")
    media_type = fields[0].lower()
    if not comma or media_type not in _MEDIA_TYPES[kind]:
        raise _invalid(path, url, f"not a data URL of a known {kind} type", f"use {', '.join(_MEDIA_TYPES[kind])}")
    if "base64" in fields[1:]:
        return media_type, _base64(body, path)
    data = unquote_to_bytes(body)
    _check_size(len(data), path)
    return media_type, data


def _base64(text: str, path: str) -> bytes:
    _check_size(len(text) * 3 // 4, path)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _invalid(path, text, "not base64", "encode the bytes of the file with standard base64") from None
    if not data:
        raise _invalid(path, "", "empty", "send the bytes of the file")
    return data


def _check_size(size: int, path: str) -> None:
    if size > MAX_MEDIA_BYTES:
        raise _invalid(path, f"{size} bytes", "too large", f"send at most {MAX_MEDIA_BYTES} bytes per part")


def _invalid(path: str, value: str, problem: str, fix: str) -> InvalidRequest:
    shown = value if len(value) <= 60 else f"{value[:57]}..."
    return InvalidRequest(str(FieldError(path, shown, problem, fix)))
