"""A client's own text at a stage that an upstream stage feeds otherwise: pieces -> the payloads of that edge. Pure.

The same phrases come out as from an upstream stage with the same text, however the client cut it; so the same text is
the same audio, and an engine needs no second way in.
"""

from __future__ import annotations

import numpy as np

from omni_runtime.errors import InputLost
from omni_runtime.protocol.payload import Payload
from omni_runtime.stages.ar_vllm.segments import SpeechSegmenter

SLICE_CHARACTERS = 2_048  # looked through at once: the search for a phrase's end goes over all of it


class TextFeed:
    """Text of one request, in numbered pieces. `phrases`: cut it (an edge); otherwise it is only gathered."""

    def __init__(self, phrases: bool) -> None:
        self._segmenter = SpeechSegmenter() if phrases else None
        self._gathered: list[str] = []
        self._next = 0
        self._position = 0  # bytes of UTF-8 that have left
        self.finished = False

    @property
    def text(self) -> str:
        """What was gathered."""
        return "".join(self._gathered)

    def take(self, seq: int, text: str, finished: bool) -> tuple[Payload, ...]:
        """The payloads that are complete now: utf8 uint8 [R], at absolute byte positions.

        A piece that came before is dropped. Raises InputLost if one is missing.
        """
        if self.finished or seq < self._next:
            return ()
        if seq > self._next:
            raise InputLost(f"piece {self._next} of the client's text did not arrive, piece {seq} did")
        self._next += 1
        self.finished = finished
        if self._segmenter is None:
            self._gathered.append(text)
            return ()
        phrases: list[str] = []
        for i in range(0, len(text), SLICE_CHARACTERS):
            phrases.extend(self._segmenter.push(text[i : i + SLICE_CHARACTERS]))
        if finished:
            phrases.extend(self._segmenter.flush())
        payloads = [self._payload(phrase) for phrase in phrases]
        if finished:
            payloads.append(Payload(start=self._position, rows=0, finished=True))
        return tuple(payloads)

    def _payload(self, phrase: str) -> Payload:
        utf8 = np.frombuffer(phrase.encode("utf-8", "replace"), dtype=np.uint8)
        payload = Payload(start=self._position, rows=len(utf8), finished=False, tensors={"utf8": utf8})
        self._position += len(utf8)
        return payload
