"""Videos for tests, made here: what was put in comes out again bit by bit, where the codec is `LOSSLESS`."""

from __future__ import annotations

import io
from fractions import Fraction

import numpy as np

LOSSLESS = "libx264rgb"


def noise(frames: int, height: int = 32, width: int = 48, seed: int = 0) -> np.ndarray:
    """uint8 [frames, height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 255, (frames, height, width, 3), dtype=np.uint8)


def a_video(frames: np.ndarray, rate: Fraction | int = 2, *, codec: str = LOSSLESS, container: str = "mp4") -> bytes:
    """frames: uint8 [frames, height, width, 3], `rate` of them a second."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        if codec == LOSSLESS:
            stream.pix_fmt, stream.options = "rgb24", {"crf": "0"}
        else:
            stream.pix_fmt = "yuv420p"
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
    return file.getvalue()
