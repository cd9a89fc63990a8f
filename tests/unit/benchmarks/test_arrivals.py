"""Arrival processes: what a rate, a burstiness and a trace mean."""

from __future__ import annotations

import itertools
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._arrivals import Arrival, UnknownTrace, at_rate, gamma, mean_rate, poisson, read_trace, window

TRACES = Path(__file__).resolve().parents[3] / "benchmarks" / "traces"


@given(st.floats(0.1, 500), st.floats(0.2, 5), st.integers(0, 2**32))
def test_moments_ascend_within_the_time(rate: float, burstiness: float, seed: int) -> None:
    moments = gamma(rate, 20.0, burstiness, random.Random(seed))
    assert moments == sorted(moments)
    assert all(0.0 < m < 20.0 for m in moments)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_mean_and_variation_of_the_gaps(burstiness: float) -> None:
    """Mean 1/rate whatever the burstiness; coefficient of variation 1/sqrt(burstiness)."""
    moments = gamma(50.0, 1000.0, burstiness, random.Random(1))
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_poisson_is_gamma_of_shape_one_and_the_seed_decides() -> None:
    assert poisson(5.0, 10.0, random.Random(3)) == gamma(5.0, 10.0, 1.0, random.Random(3))
    assert poisson(5.0, 10.0, random.Random(3)) != poisson(5.0, 10.0, random.Random(4))


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_an_impossible_process_is_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        gamma(rate, 10.0, burstiness, random.Random(0))


def test_azure_rows() -> None:
    arrivals = read_trace(TRACES / "azure" / "AzureLLMInferenceTrace_code.head200.csv")
    assert len(arrivals) == 200
    assert arrivals[0] == Arrival(0.0, 4808, 10)
    assert arrivals[1].at_s == pytest.approx(0.052, abs=1e-5), "18:17:03.97996 to 18:17:04.03196"


def test_mooncake_lines() -> None:
    arrivals = read_trace(TRACES / "mooncake" / "conversation_trace.head60.jsonl")
    assert len(arrivals) == 60
    assert arrivals[0].at_s == 0.0
    assert (arrivals[0].input_tokens, arrivals[0].output_tokens) == (6758, 500)
    assert arrivals[-1].at_s > 1.0, "milliseconds have become seconds"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.csv", "when,how\n1,2\n", "no TIMESTAMP"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no arrivals"),
        ("t.csv", "", "no TIMESTAMP"),
        ("t.jsonl", '{"timestamp": "soon"}\n', "line 1"),
        ("t.jsonl", "\n", "no arrivals"),
    ],
)
def test_a_file_that_is_no_trace_says_where(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UnknownTrace, match=says):
        read_trace(tmp_path / name)


def test_rows_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"timestamp": 3000}\n{"timestamp": 1000}\n')
    assert [a.at_s for a in read_trace(file)] == [0.0, 2.0]


moments = st.lists(st.floats(0, 1000), min_size=2, max_size=50).map(lambda m: tuple(Arrival(x) for x in sorted(m)))


@given(moments, st.floats(0.01, 100))
def test_another_rate_keeps_the_pattern(arrivals: tuple[Arrival, ...], rate: float) -> None:
    scaled = at_rate(arrivals, rate)
    assert len(scaled) == len(arrivals)
    if mean_rate(arrivals) > 0 and mean_rate(scaled) > 0:
        assert mean_rate(scaled) == pytest.approx(rate, rel=1e-6)


def test_a_window_counts_from_its_start() -> None:
    arrivals = tuple(Arrival(float(i), i) for i in range(10))
    assert window(arrivals, 3.0, 2.0) == (Arrival(0.0, 3), Arrival(1.0, 4))
