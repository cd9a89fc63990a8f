"""Bytes of a video part -> the frames that the model sees. Its sound is not heard. Bad bytes are the client's error.

A video is decoded by FFmpeg, which knows hundreds of formats, among them play lists that name other files. So: containers
and codecs from a short list, chosen by the first bytes and never by a guess of FFmpeg's.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import numpy as np

from omni_runtime.errors import InvalidRequest

FRAMES_PER_SECOND = 2  # as Qwen's own tools sample
MAX_VIDEO_SECONDS = 300
MAX_FRAME_PIXELS = 4096 * 2304
MAX_TAKEN_PIXELS = 128_000_000  # of all frames that one request keeps: 30 s at 1920x1080, 4 minutes at 640x360
MAX_DECODED_PIXELS = 4_000_000_000  # of all frames that lie between them: 30 s at 1920x1080 and 60 frames a second
CODECS = frozenset({"av1", "h264", "hevc", "mpeg1video", "mpeg2video", "mpeg4", "vp8", "vp9"})
_SIGNATURES = MappingProxyType(
    {
        (4, b"ftyp"): "mp4",
        (4, b"moov"): "mp4",  # QuickTime without a type
        (0, b"\x1aE\xdf\xa3"): "matroska",  # WebM too
        (0, b"\x00\x00\x01\xba"): "mpeg",
    }
)


def decode_video(data: bytes, where: str, pixels: int = MAX_TAKEN_PIXELS) -> np.ndarray:
    """uint8 [frames, height, width, 3], RGB: what is shown at 0 s, 0.5 s, 1 s ... pixels: what the request may still keep.

    Raises InvalidRequest.
    """
    import av

    kind = next((k for (at, mark), k in _SIGNATURES.items() if data[at : at + len(mark)] == mark), None)
    if kind is None:
        raise InvalidRequest(f"{where}: not a video of a known kind; send MP4 or WebM")
    try:
        with av.open(io.BytesIO(data), format=kind) as container:
            taken = list(_frames(container, where, pixels))
    except av.error.FFmpegError as error:
        reason = error.strerror or type(error).__name__
        raise InvalidRequest(f"{where}: not a video that can be read ({reason}); send MP4 or WebM") from error
    if not taken:
        raise InvalidRequest(f"{where}: the video has no frames; send at least one")
    return np.stack(taken)


def _frames(container: Any, where: str, pixels: int) -> Iterator[np.ndarray]:
    if not container.streams.video:
        raise InvalidRequest(f"{where}: the file has no video; send sound as input_audio")
    stream = container.streams.video[0]
    codec = stream.codec_context.codec.canonical_name
    if codec not in CODECS:
        raise InvalidRequest(f"{where}: codec {codec} is not read; use one of {', '.join(sorted(CODECS))}")
    if container.duration is not None:
        _check_length(container.duration / 1_000_000, where)
    _check_size(stream.codec_context.width, stream.codec_context.height, where)
    stream.codec_context.thread_count = 1  # the other cores are the engine's
    stream.codec_context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}  # before it allocates, whatever the file says
    start = 0.0
    shown: Any = None
    asked, decoded, size = 0, 0, None
    for number, frame in enumerate(container.decode(stream)):
        _check_size(frame.width, frame.height, where)
        size = size or (frame.width, frame.height)
        if size != (frame.width, frame.height):
            raise InvalidRequest(f"{where}: the video changes its size within; send it in one size")
        decoded += frame.width * frame.height
        if decoded > MAX_DECODED_PIXELS:
            problem = f"more than {number} frames of {frame.width}x{frame.height}"
            raise InvalidRequest(f"{where}: {problem}; send a shorter, smaller or slower video")
        at = frame.time if frame.time is not None else number / float(stream.average_rate or 25)
        start = at if shown is None else start
        _check_length(at - start, where)
        while shown is not None and asked / FRAMES_PER_SECOND < at - start - 1e-6:
            pixels = _spend(pixels, frame, where)
            yield _pixels(shown)
            asked += 1
        shown = frame
    if shown is None:
        return
    end = at - start + (float(shown.duration * shown.time_base) if shown.duration else 1e-3)
    _check_length(end, where)
    while asked == 0 or asked / FRAMES_PER_SECOND < end - 1e-6:
        pixels = _spend(pixels, shown, where)
        yield _pixels(shown)
        asked += 1


def _pixels(frame: Any) -> np.ndarray:
    """As a player shows them: telephones film sideways and say so."""
    picture: np.ndarray = frame.to_ndarray(format="rgb24")
    return np.rot90(picture, k=round(frame.rotation / 90))


def _check_length(seconds: float, where: str) -> None:
    if seconds > MAX_VIDEO_SECONDS:
        raise InvalidRequest(f"{where}: {seconds:.0f} s of video; at most {MAX_VIDEO_SECONDS} s are taken")


def _check_size(width: int, height: int, where: str) -> None:
    if width * height > MAX_FRAME_PIXELS:
        raise InvalidRequest(f"{where}: frames of {width}x{height} pixels; at most {MAX_FRAME_PIXELS} are taken")


def _spend(pixels: int, frame: Any, where: str) -> int:
    left = pixels - frame.width * frame.height
    if left < 0:
        problem = (
            f"the videos of this request have over {MAX_TAKEN_PIXELS} pixels at {FRAMES_PER_SECOND} frames a second"
        )
        raise InvalidRequest(f"{where}: {problem}; send a shorter or smaller one, such as 640x360")
    return left
