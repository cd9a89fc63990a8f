"""Bytes of a chat's media parts -> arrays and images. Bad bytes are the client's error and say which part."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from omni_runtime.errors import InvalidRequest

SAMPLE_RATE = 16_000
RATES = (4_000, 192_000)  # of files; resampling from others takes memory by their rate, not by their length
MAX_AUDIO_SECONDS = 600
MAX_AUDIO_VALUES = 600 * 48_000 * 2  # of all channels: silence of hours is a small FLAC file
MAX_PIXELS = 64_000_000
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others bring readers that nobody asked for, even programs


def decode_audio(data: bytes, where: str) -> np.ndarray:
    """Any file that libsndfile reads -> float32 [samples], mono, 16 kHz. Raises InvalidRequest."""
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.frames > MAX_AUDIO_SECONDS * file.samplerate:
                seconds = file.frames / file.samplerate
                raise InvalidRequest(f"{where}: {seconds:.0f} s of audio; at most {MAX_AUDIO_SECONDS} s are taken")
            if not RATES[0] <= file.samplerate <= RATES[1]:
                raise InvalidRequest(f"{where}: {file.samplerate} samples a second; send {RATES[0]} to {RATES[1]}")
            if file.frames * file.channels > MAX_AUDIO_VALUES:
                problem = f"{file.frames * file.channels} samples in {file.channels} channels"
                raise InvalidRequest(f"{where}: {problem}; send one channel at {SAMPLE_RATE} Hz")
            samples, rate = file.read(dtype="float32", always_2d=True), file.samplerate
    except (soundfile.LibsndfileError, RuntimeError) as error:
        reason = getattr(error, "error_string", str(error)).rstrip(".")
        raise InvalidRequest(
            f"{where}: not an audio file that can be read ({reason}); send WAV, FLAC or OGG"
        ) from error
    mono = samples.mean(axis=1)
    if mono.size == 0:
        raise InvalidRequest(f"{where}: the audio has no samples")
    if rate != SAMPLE_RATE:
        from scipy.signal import resample_poly

        divisor = int(np.gcd(rate, SAMPLE_RATE))
        mono = resample_poly(mono, SAMPLE_RATE // divisor, rate // divisor)
    return np.ascontiguousarray(mono, dtype=np.float32)


def decode_image(data: bytes, where: str) -> Any:
    """PNG, JPEG, WebP ... -> PIL image in RGB. Raises InvalidRequest."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise InvalidRequest(f"{where}: {image.width}x{image.height} pixels; at most {MAX_PIXELS} are taken")
        return image.convert("RGB")
    except UnidentifiedImageError as error:
        raise InvalidRequest(f"{where}: not an image of a known kind; send PNG or JPEG") from error
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise InvalidRequest(f"{where}: not an image that can be read ({error}); send PNG or JPEG") from error
