"""The arithmetic of the figures, with vLLM's and vLLM-Omni's definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._client import Timeline
from benchmarks._metrics import quantile, sample_of, summarise, underrun
from omni_runtime.metrics.entry import AUDIBLE_UNDERRUN_SECONDS


def a_timeline(**fields: object) -> Timeline:
    return Timeline(**{"kind": "text-to-text", "sent_at": 0.0, "ended": 1.0, **fields})  # type: ignore[arg-type]


def test_text_figures() -> None:
    sample = sample_of(a_timeline(text=(0.2, 0.3, 0.8), completion_tokens=4, ended=0.9))
    assert sample.ttft_s == 0.2
    assert sample.tpot_s == pytest.approx(0.2), "three tokens after the first, in 0.6 s"
    assert sample.e2e_s == 0.9
    assert math.isnan(sample.ttfp_s)
    assert math.isnan(sample.rtf)


def test_one_token_has_no_time_per_further_token() -> None:
    assert math.isnan(sample_of(a_timeline(text=(0.2,), completion_tokens=1)).tpot_s)


def test_without_usage_a_chunk_is_a_token() -> None:
    assert sample_of(a_timeline(text=(0.1, 0.2, 0.3))).tpot_s == pytest.approx(0.1)


def test_audio_figures() -> None:
    """RTF ends with the last audio chunk, not with the stream."""
    sample = sample_of(a_timeline(audio=((0.5, 1.0), (1.0, 2.0), (1.1, 0.0)), ended=3.0))
    assert sample.ttfp_s == 0.5
    assert sample.audio_s == 3.0
    assert sample.rtf == pytest.approx(1.0 / 3.0)
    assert sample.underrun_s == 0.0


@pytest.mark.parametrize(
    ("audio", "silent"),
    [
        pytest.param([], 0.0, id="no audio"),
        pytest.param([(5.0, 1.0)], 0.0, id="waiting for the first chunk is TTFP, not an underrun"),
        pytest.param([(0.0, 1.0), (1.0, 1.0)], 0.0, id="just in time"),
        pytest.param([(0.0, 1.0), (1.5, 1.0)], 0.5, id="half a second late"),
        pytest.param([(0.0, 1.0), (1.5, 1.0), (2.5, 1.0)], 0.5, id="the gap moves the rest back and counts once"),
        pytest.param([(0.0, 1.0), (1.5, 1.0), (3.0, 1.0)], 1.0, id="two gaps"),
        pytest.param([(0.0, 5.0), (1.0, 0.1), (6.0, 1.0)], 0.9, id="what was ahead is used up"),
    ],
)
def test_underrun(audio: list[tuple[float, float]], silent: float) -> None:
    assert underrun(audio) == pytest.approx(silent)


gaps = st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 3)), min_size=1, max_size=20)


@given(gaps)
def test_silence_and_sound_fill_the_time_to_the_last_chunk(steps: list[tuple[float, float]]) -> None:
    """A player is silent or plays: until the last chunk comes it has played at most what it had."""
    now, audio = 0.0, []
    for wait, seconds in steps:
        now += wait
        audio.append((now, seconds))
    silent = underrun(audio)
    before_last = sum(s for _, s in audio[:-1])
    elapsed = audio[-1][0] - audio[0][0]
    assert silent >= max(0.0, elapsed - before_last) - 1e-9
    assert silent <= elapsed + 1e-9


@given(gaps, st.floats(0.1, 10))
def test_a_later_start_changes_no_underrun(steps: list[tuple[float, float]], shift: float) -> None:
    audio = [(sum(w for w, _ in steps[: i + 1]), s) for i, (_, s) in enumerate(steps)]
    assert underrun([(t + shift, s) for t, s in audio]) == pytest.approx(underrun(audio), abs=1e-9)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_quantiles_are_numpys(values: list[float], percent: float) -> None:
    assert quantile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-6)


def test_a_run() -> None:
    ended = [a_timeline(text=(0.1 * i,), completion_tokens=10, ended=float(i)) for i in range(1, 5)]
    failed = a_timeline(error="HTTP 429: full", ended=0.01, text=(0.001,))
    figures = summarise([*ended, failed], wall_s=8.0)
    assert (figures["requests"], figures["failed"]) == (5, 1)
    assert figures["requests_per_s"] == 0.5, "a failed request is no throughput"
    assert figures["tokens_per_s"] == 5.0
    assert figures["ttft_ms_p50"] == pytest.approx(250.0), "and its times are in no figure"
    assert figures["e2e_ms_p90"] == pytest.approx(3700.0)
    assert math.isnan(figures["ttfp_ms_p50"])
    assert math.isnan(figures["underruns"])


def test_underruns_counts_what_can_be_heard() -> None:
    audible = AUDIBLE_UNDERRUN_SECONDS + 0.05
    runs = [a_timeline(audio=((0.0, 1.0), (1.0 + late, 1.0))) for late in (0.0, AUDIBLE_UNDERRUN_SECONDS / 2, audible)]
    assert summarise(runs, 1.0)["underruns"] == 1


def test_a_run_without_any_answer_has_figures() -> None:
    figures = summarise([a_timeline(error="x")], 1.0)
    assert figures["failed"] == 1
    assert math.isnan(figures["e2e_ms_p50"])
