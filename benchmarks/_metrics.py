"""From moments to figures. Pure. The definitions are those of vLLM's and vLLM-Omni's benchmark clients:

TTFT: sent to first text chunk. TPOT: (last text chunk - first) / (tokens - 1), for answers of two tokens and more.
TTFP: sent to first audio chunk. E2E: sent to the end of the stream. RTF: sent to last audio chunk, per second of audio.
Underrun: seconds that a player which starts at the first chunk is silent before the last one; audible above 0.1 s.
Late: how long after its planned moment a request was sent. Far above a millisecond, the client was the bottleneck.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks._client import Timeline

AUDIBLE_UNDERRUN_S = 0.1
QUANTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one request is worth; NaN where it has no such thing."""

    ttft_s: float
    tpot_s: float
    ttfp_s: float
    e2e_s: float
    rtf: float
    underrun_s: float
    audio_s: float


def sample_of(timeline: Timeline) -> Sample:
    text, audio = timeline.text, [a for a in timeline.audio if a[1] > 0]
    seconds = sum(s for _, s in audio)
    tokens = timeline.completion_tokens or len(text)
    return Sample(
        ttft_s=text[0] if text else math.nan,
        tpot_s=(text[-1] - text[0]) / (tokens - 1) if text and tokens > 1 else math.nan,
        ttfp_s=audio[0][0] if audio else math.nan,
        e2e_s=timeline.ended,
        rtf=audio[-1][0] / seconds if audio else math.nan,
        underrun_s=underrun(audio) if audio else math.nan,
        audio_s=seconds,
    )


def underrun(audio: Sequence[tuple[float, float]]) -> float:
    """audio: (moment, seconds) in order of arrival. Silence moves the rest of the playback back, so each gap counts
    once."""
    if not audio:
        return 0.0
    first = audio[0][0]
    have = silent = 0.0
    for moment, seconds in audio:
        silent += max(0.0, (moment - first) - (have + silent))
        have += seconds
    return silent


def quantile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy does; NaN without values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarise(timelines: Iterable[Timeline], wall_s: float) -> dict[str, float]:
    """Figures of a run of `wall_s` seconds; failed requests count as failed and nowhere else."""
    everything = list(timelines)
    ended = [t for t in everything if not t.error]
    samples = [sample_of(t) for t in ended]
    figures: dict[str, float] = {
        "requests": len(everything),
        "failed": len(everything) - len(ended),
        "requests_per_s": len(ended) / wall_s if wall_s > 0 else math.nan,
        "tokens_per_s": sum(t.completion_tokens for t in ended) / wall_s if wall_s > 0 else math.nan,
        "audio_s_per_s": sum(s.audio_s for s in samples) / wall_s if wall_s > 0 else math.nan,
    }
    series: Mapping[str, tuple[float, list[float]]] = {
        "ttft_ms": (1e3, [s.ttft_s for s in samples]),
        "tpot_ms": (1e3, [s.tpot_s for s in samples]),
        "ttfp_ms": (1e3, [s.ttfp_s for s in samples]),
        "e2e_ms": (1e3, [s.e2e_s for s in samples]),
        "rtf": (1.0, [s.rtf for s in samples]),
        "underrun_ms": (1e3, [s.underrun_s for s in samples]),
        "late_ms": (1e3, [t.late_s for t in everything]),
    }
    for name, (scale, values) in series.items():
        known = [v for v in values if not math.isnan(v)]
        for percent in QUANTILES:
            figures[f"{name}_p{percent}"] = scale * quantile(known, percent)
    spoken = [s for s in samples if s.audio_s > 0]
    figures["underruns"] = sum(1 for s in spoken if s.underrun_s > AUDIBLE_UNDERRUN_S) if spoken else math.nan
    return figures
