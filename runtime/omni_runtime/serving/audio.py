"""PCM as clients get it: float32 samples of the stages -> PCM16, raw or behind one WAV header."""

from __future__ import annotations

import base64
import struct

import numpy as np

STREAMING_SIZE = 0xFFFFFFFF  # of a WAV whose length is not known yet (R48)


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


class AudioEncoder:
    """Pieces of one stream in the client's format; a WAV header comes once, before the first samples (R50)."""

    def __init__(self, audio_format: str) -> None:
        self._header_due = audio_format == "wav"

    def encode(self, samples: bytes, sample_rate: int) -> str:
        data = pcm16(samples)
        if self._header_due and data:
            self._header_due = False
            data = wav_header(sample_rate, None) + data
        return base64.b64encode(data).decode("ascii")
