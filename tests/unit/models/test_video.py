"""Videos of clients: which frames the model sees, and files that would take all memory or time, or are none (R58)."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest

from omni_runtime.errors import InvalidRequest
from omni_runtime.models import video
from omni_runtime.models.video import decode_video
from tests.unit.models.videos import a_video, noise

av = pytest.importorskip("av")


@pytest.mark.parametrize(
    ("frames", "rate", "taken"),
    [
        pytest.param(5, 2, [0, 1, 2, 3, 4], id="as it is"),
        pytest.param(1, 2, [0], id="one frame"),
        pytest.param(12, 8, [0, 4, 8], id="every fourth"),
        pytest.param(13, 8, [0, 4, 8, 12], id="a last one that is shown for a moment"),
        pytest.param(3, 1, [0, 0, 1, 1, 2, 2], id="slower than two a second: what is shown at that moment"),
        pytest.param(7, 3, [0, 1, 3, 4, 6], id="between two frames: the earlier one"),
    ],
)
def test_two_frames_a_second_are_taken(frames: int, rate: int, taken: list[int]) -> None:
    made = noise(frames)
    got = decode_video(a_video(made, rate), "part")
    assert got.dtype == np.uint8
    assert np.array_equal(got, made[taken])


@pytest.mark.parametrize(
    ("codec", "container"), [("libx264", "mov"), ("libvpx-vp9", "webm"), ("libvpx", "matroska"), ("mpeg2video", "mpeg")]
)
def test_usual_containers_and_codecs_are_taken(codec: str, container: str) -> None:
    rate = 25 if container == "mpeg" else 4
    data = a_video(np.full((rate, 64, 64, 3), 128, np.uint8), rate, codec=codec, container=container)
    got = decode_video(data, "part")
    assert got.shape == (2, 64, 64, 3)
    assert abs(int(got.mean()) - 128) < 8


def test_a_video_that_was_filmed_sideways_is_turned() -> None:
    made = noise(1)
    data = bytearray(a_video(made))
    at = data.index(b"tkhd") + 4 + 40  # of version 0: the matrix
    assert struct.unpack(">i", data[at : at + 4]) == (0x10000,)
    data[at : at + 36] = struct.pack(">9i", 0, 0x10000, 0, -0x10000, 0, 0, 0, 0, 0x40000000)  # a quarter clockwise
    assert np.array_equal(decode_video(bytes(data), "part")[0], np.rot90(made[0], k=-1))


def without_frames() -> bytes:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, np.zeros(800, np.float32), 8_000, format="WAV")
    sound = io.BytesIO()
    with av.open(sound, "w", format="mp4") as output, av.open(io.BytesIO(file.getvalue())) as source:
        stream = output.add_stream("aac", rate=8_000)
        for frame in source.decode(audio=0):
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return sound.getvalue()


PLAY_LIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(PLAY_LIST, "not a video of a known kind; send MP4 or WebM", id="a list of other files"),
        pytest.param(b"ffconcat version 1.0\nfile /etc/hostname\n", "not a video of a known kind", id="another list"),
        pytest.param(b"", "not a video of a known kind", id="nothing"),
        pytest.param(b"\0\0\0\x18ftypmp42" + PLAY_LIST, "not a video that can be read", id="a list in disguise"),
        pytest.param(a_video(noise(4))[:2_000], "not a video that can be read", id="half a file"),
        pytest.param(without_frames(), "no video; send sound as input_audio", id="sound"),
        pytest.param(a_video(noise(2), codec="ffv1", container="matroska"), "codec ffv1 is not read", id="codec"),
    ],
)
def test_what_is_no_video_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^part: .*{says}"):
        decode_video(data, "part")


def test_limits_hold_while_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = a_video(noise(20, 32, 48), 10)
    with pytest.raises(InvalidRequest, match="the videos of this request have over .* pixels at 2 frames a second"):
        decode_video(data, "part", pixels=3 * 32 * 48)
    assert len(decode_video(data, "part", pixels=4 * 32 * 48)) == 4
    for limit, value, says in (
        ("MAX_VIDEO_SECONDS", 1, "2 s of video; at most 1 s are taken"),
        ("MAX_FRAME_PIXELS", 32 * 48 - 1, "frames of 48x32 pixels"),
        ("MAX_DECODED_PIXELS", 19 * 32 * 48, "more than 19 frames of 48x32"),
    ):
        with monkeypatch.context() as patched, pytest.raises(InvalidRequest, match=f"^part: .*{says}"):
            patched.setattr(video, limit, value)
            decode_video(data, "part")


def test_a_header_that_lies_about_the_length_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """WebM may leave the length out: it is counted, not believed."""
    monkeypatch.setattr(video, "MAX_VIDEO_SECONDS", 1)
    data = bytearray(a_video(np.full((8, 64, 64, 3), 9, np.uint8), 4, codec="libvpx", container="webm"))
    at = data.index(b"\x44\x89\x88")  # Duration, 8 bytes
    data[at + 3 : at + 11] = struct.pack(">d", 10.0)  # milliseconds
    with pytest.raises(InvalidRequest, match="s of video; at most 1 s"):
        decode_video(bytes(data), "part")
