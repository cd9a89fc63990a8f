"""Media of clients: small files that would take all memory, and files that are none (R58)."""

from __future__ import annotations

import io

import numpy as np
import pytest

from omni_runtime.errors import InvalidRequest
from omni_runtime.models.media import MAX_AUDIO_SECONDS, SAMPLE_RATE, decode_audio, decode_image

soundfile = pytest.importorskip("soundfile")
Image = pytest.importorskip("PIL.Image")


def sound(seconds: float, rate: int = SAMPLE_RATE, channels: int = 1, kind: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros((int(seconds * rate), channels), np.int16), rate, format=kind)
    return file.getvalue()


def a_wav_that_says_its_rate_is(rate: int) -> bytes:
    """100 samples; byte 24 of the header is the rate."""
    plain = sound(100 / SAMPLE_RATE)
    return plain[:24] + rate.to_bytes(4, "little") + plain[28:]


def picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 48_000])
def test_sound_of_usual_rates_is_taken(rate: int) -> None:
    assert decode_audio(sound(0.5, rate, channels=2), "part").shape == (SAMPLE_RATE // 2,)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(a_wav_that_says_its_rate_is(2**31 - 1), "2147483647 samples a second", id="a filter of 320 GiB"),
        pytest.param(a_wav_that_says_its_rate_is(9_999_991), "9999991 samples a second", id="a filter of 1.5 GiB"),
        pytest.param(a_wav_that_says_its_rate_is(1), "1 samples a second", id="a second for each sample"),
        pytest.param(sound(MAX_AUDIO_SECONDS + 1, 4_000, kind="FLAC"), "601 s of audio", id="long"),
        pytest.param(sound(310, 48_000, 4, "FLAC"), "in 4 channels; send one channel", id="wide"),
        pytest.param(sound(0), "no samples", id="empty"),
        pytest.param(b"RIFF\xff\xff\xff\xffWAVEfmt ", r"not an audio file that can be read \([^<]*\);", id="a header"),
        pytest.param(bytes(range(256)), r"not an audio file that can be read \([^<]*\);", id="anything"),
    ],
)
def test_sound_that_is_refused(data: bytes, says: str) -> None:
    assert len(data) < 10 << 20
    with pytest.raises(InvalidRequest, match=f"^part: .*{says}"):
        decode_audio(data, "part")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_pictures_of_known_kinds_are_taken(kind: str) -> None:
    assert decode_image(picture(kind), "part").size == (4, 4)


@pytest.mark.parametrize("kind", ["EPS", "TIFF", "ICO", "PCX"])
def test_pictures_of_other_kinds_are_refused(kind: str) -> None:
    """EPS is a program: Pillow gives it to Ghostscript where that is installed."""
    with pytest.raises(InvalidRequest, match=r"^part: not an image of a known kind; send PNG or JPEG$"):
        decode_image(picture(kind), "part")


def test_a_picture_that_says_it_is_huge_is_refused() -> None:
    plain = picture("BMP")  # width and height stand at 18 and 22
    data = plain[:18] + (9_000).to_bytes(4, "little") + (9_000).to_bytes(4, "little") + plain[26:]
    with pytest.raises(InvalidRequest, match="9000x9000 pixels"):
        decode_image(data, "part")
