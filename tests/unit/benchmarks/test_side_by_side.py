"""The figures of ours against vLLM's server: which requests are in them, and how launches are joined."""

from __future__ import annotations

import pytest

from benchmarks._client import Timeline
from benchmarks._side_by_side import Block, Launch, Pair, checked, figures_of


def an_answer(ttft: float) -> Timeline:
    return Timeline(kind="text-to-text", sent_at=0.0, ended=1.0, text=(ttft, 0.9), completion_tokens=2)


def a_block(first: float, *counted: float) -> Block:
    return Block((an_answer(first),), tuple(an_answer(ttft) for ttft in counted))


def a_launch(*pairs: Pair, equal: float = 1.0) -> Launch:
    return Launch(equal, {1: pairs}, {1: 0.5})


def test_a_launch_that_was_lucky_and_one_that_was_not_cancel_out() -> None:
    lucky = a_launch(Pair(a_block(0.1, 0.1), a_block(0.1, 0.2)))
    unlucky = a_launch(Pair(a_block(0.1, 0.2), a_block(0.1, 0.1)), equal=0.875)
    figures = figures_of([lucky, unlucky])
    assert figures["ttft_ratio_c1"] == pytest.approx(1.0)
    assert (figures["ttft_ratio_c1_low"], figures["ttft_ratio_c1_high"]) == pytest.approx((0.5, 2.0))
    assert figures["answers_equal"] == 0.875


def test_what_follows_a_pause_is_told_and_is_not_in_the_ratio() -> None:
    figures = figures_of([a_launch(Pair(a_block(0.8, 0.2, 0.2), a_block(0.4, 0.2, 0.2)))])
    assert figures["ttft_ratio_c1"] == pytest.approx(1.0)
    assert figures["ttft_ratio_c1_after_pause"] == pytest.approx(2.0)


def test_the_median_of_a_launch_is_over_all_its_requests_and_quartiles_are_over_pairs() -> None:
    pairs = [Pair(a_block(0.1, 0.1, 0.1, 0.1), a_block(0.1, 0.1)), Pair(a_block(0.1, 0.4), a_block(0.1, 0.1))]
    figures = figures_of([a_launch(*pairs)])
    assert figures["ttft_ratio_c1"] == pytest.approx(1.0)
    assert figures["ttft_ratio_c1_p75"] == pytest.approx(3.25)


def test_a_failed_request_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="1 of 2 requests failed: no place"):
        checked([an_answer(0.1), Timeline(kind="text-to-text", sent_at=0.0, ended=1.0, error="no place")])
