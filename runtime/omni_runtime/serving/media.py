"""Media parts of a message: base64 and data: URLs decoded and bounded, other URLs handed to the fetcher. No parsing.

Parsing media is the thinker's work, in a process of its own. Fetching lets a client reach out from inside our network
(R59, R60), so it happens only for hosts that the operator named; see `fetch`.
"""

from __future__ import annotations

import base64
import binascii
from types import MappingProxyType
from urllib.parse import unquote_to_bytes

from omni_runtime.errors import FieldError, InvalidRequest

MAX_MEDIA_BYTES = 25 << 20  # of one part, decoded
MAX_TOTAL_MEDIA_BYTES = 64 << 20  # of one request, decoded

MEDIA_TYPES = MappingProxyType(
    {
        "image": ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"),
        "audio": ("audio/wav", "audio/x-wav", "audio/mpeg", "audio/mp3", "audio/flac", "audio/ogg", "audio/opus"),
        "video": ("video/mp4", "video/webm", "video/x-matroska", "video/quicktime", "video/mpeg"),
    }
)


def invalid_part(path: str, value: str, problem: str, fix: str) -> InvalidRequest:
    shown = value if len(value) <= 60 else f"{value[:57]}..."
    return InvalidRequest(str(FieldError(path, shown, problem, fix)))


def decode_data_url(url: str, path: str, kind: str) -> tuple[str, bytes]:
    """Media type and bytes. Raises InvalidRequest."""
    header, comma, body = url[5:].partition(",")
    fields = header.split(";")
    media_type = fields[0].lower()
    if not comma or media_type not in MEDIA_TYPES[kind]:
        fix = f"use {', '.join(MEDIA_TYPES[kind])}"
        raise invalid_part(path, url, f"not a data URL of a known {kind} type", fix)
    if "base64" in fields[1:]:
        return media_type, decode_base64(body, path)
    data = unquote_to_bytes(body)
    check_size(len(data), path)
    return media_type, data


def decode_base64(text: str, path: str) -> bytes:
    check_size(len(text) * 3 // 4, path)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid_part(path, text, "not base64", "encode the bytes of the file with standard base64") from None
    if not data:
        raise invalid_part(path, "", "empty", "send the bytes of the file")
    return data


def check_size(size: int, path: str) -> None:
    if size > MAX_MEDIA_BYTES:
        raise invalid_part(path, f"{size} bytes", "too large", f"send at most {MAX_MEDIA_BYTES} bytes per part")
