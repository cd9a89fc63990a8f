"""Audio as clients get it: float32 samples of the stages -> PCM16, WAV, or a compressed file. Mono."""

from __future__ import annotations

import asyncio
import io
import struct
from types import MappingProxyType

import numpy as np

STREAMING_SIZE = 0xFFFFFFFF  # of a WAV whose length is not known yet (R48)
DEFAULT_SAMPLE_RATE = 24_000  # of an answer without a sample
SILENCE_SECONDS = 0.05
INLINE_BYTES = 1 << 20  # larger ones are encoded in a thread, or they would hold up every other stream

MEDIA_TYPES = MappingProxyType(
    {
        "wav": "audio/wav",
        "pcm": "audio/pcm",
        "pcm16": "audio/pcm",
        "flac": "audio/flac",
        "mp3": "audio/mpeg",
        "opus": "audio/ogg",
    }
)
_SOUNDFILE = MappingProxyType({"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", None), "opus": ("OGG", "OPUS")})


def pcm16(samples: bytes) -> bytes:
    """float32 little-endian [n] in -1..1 -> int16 little-endian [n]; louder samples are clipped, NaN is silence."""
    values = np.frombuffer(samples, dtype="<f4")
    scaled = np.clip(np.nan_to_num(values), -1.0, 1.0) * 32767.0
    data: bytes = np.rint(scaled).astype("<i2").tobytes()
    return data


def wav_header(sample_rate: int, data_bytes: int | None) -> bytes:
    """44 bytes for mono PCM16. `data_bytes` None: streaming sizes."""
    riff = STREAMING_SIZE if data_bytes is None else 36 + data_bytes
    data = STREAMING_SIZE if data_bytes is None else data_bytes
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        riff,
        b"WAVE",
        b"fmt ",
        16,
        1,
        1,
        sample_rate,
        sample_rate * 2,
        2,
        16,
        b"data",
        data,
    )


def wav(pcm: bytes, sample_rate: int) -> bytes:
    """A whole file from int16 samples."""
    return wav_header(sample_rate, len(pcm)) + pcm


def silence(sample_rate: int) -> bytes:
    """What a file has whose text has no sound ("..."): whoever reads a text out sentence by sentence would break at an
    error, and players and browsers break at a file without samples. float32."""
    return bytes(4 * round(SILENCE_SECONDS * sample_rate))


def encode_file(samples: bytes, sample_rate: int, audio_format: str) -> bytes:
    """A whole file, or bare int16 samples for pcm and pcm16. samples: float32 little-endian [n]."""
    rate = sample_rate or DEFAULT_SAMPLE_RATE
    if audio_format in ("pcm", "pcm16"):
        return pcm16(samples)
    samples = samples or silence(rate)
    if audio_format == "wav":
        return wav(pcm16(samples), rate)
    import soundfile

    container, subtype = _SOUNDFILE[audio_format]
    file = io.BytesIO()
    values = np.clip(np.nan_to_num(np.frombuffer(samples, dtype="<f4")), -1.0, 1.0)
    soundfile.write(file, values, rate, format=container, subtype=subtype)
    return file.getvalue()


async def encode_whole(samples: bytes, sample_rate: int, audio_format: str) -> bytes:
    """`encode_file` that does not hold up the loop."""
    if audio_format not in _SOUNDFILE and len(samples) <= INLINE_BYTES:
        return encode_file(samples, sample_rate, audio_format)
    return await asyncio.to_thread(encode_file, samples, sample_rate, audio_format)


class StreamEncoder:
    """Pieces of one stream. `audio_format`: pcm or pcm16: bare samples; wav: one header, before the first samples, with
    sizes that are open (R48, R50); None: each piece is a WAV file of its own, as vLLM-Omni's clients read them.
    """

    def __init__(self, audio_format: str | None) -> None:
        self._each = audio_format is None
        self._header_due = audio_format == "wav"

    def encode(self, samples: bytes, sample_rate: int) -> bytes:
        data = pcm16(samples)
        if self._each:
            return wav(data, sample_rate)
        if self._header_due and data:
            self._header_due = False
            return wav_header(sample_rate, None) + data
        return data

    def finish(self) -> bytes:
        """Behind the last piece. A WAV stream of which nothing came is a file of silence."""
        return encode_file(b"", 0, "wav") if self._header_due else b""
