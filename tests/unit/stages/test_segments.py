"""Text deltas -> spoken phrases: nothing lost, nothing spoken that is only markup (R19, R23)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_runtime.stages.ar_vllm.segments import SpeechSegmenter, speakable


def phrases_of(text: str, size: int = 3) -> list[str]:
    segmenter = SpeechSegmenter()
    out: list[str] = []
    for i in range(0, len(text), size):
        out += segmenter.push(text[i : i + size])
    return out + segmenter.flush()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "The sky is blue. It is wide. And deep",
            ["The sky is blue.", "It is wide. And deep"],
            id="a short sentence joins the next one",
        ),
        pytest.param(
            "Pi is about 3.14159 and e is 2.71 or so.",
            ["Pi is about 3.14159 and e is 2.71 or so."],
            id="decimals stay whole",
        ),
        pytest.param(
            "Dr. Smith met Mrs. Jones at noon. Fine.", ["Dr. Smith met Mrs. Jones at noon.", "Fine."], id="titles"
        ),
        pytest.param(
            "**Bold** and `code` here now.\n- item", ["Bold and code here now.", "item"], id="markdown is not spoken"
        ),
        pytest.param(
            "1. First thing to do\n2. Second thing", ["1, First thing to do", "2, Second thing"], id="numbered lists"
        ),
        pytest.param("---\n\n***\n", [], id="only markup: silence"),
        pytest.param("", [], id="empty answer"),
        pytest.param("Hi", ["Hi"], id="the last words come with the flush (R19)"),
    ],
)
def test_phrases(text: str, expected: list[str]) -> None:
    assert phrases_of(text) == expected


@given(st.text(alphabet=st.sampled_from("abc .,!?\nABZ019"), max_size=400), st.integers(1, 9))
def test_no_word_is_lost_or_doubled_whatever_the_deltas(text: str, size: int) -> None:
    whole = phrases_of(text, max(1, len(text)))
    assert "".join(phrases_of(text, size)).replace(" ", "") == "".join(whole).replace(" ", "")


def test_a_text_without_punctuation_is_cut_at_a_space() -> None:
    phrases = phrases_of("word " * 200)
    assert all(len(p) <= 280 for p in phrases)
    assert " ".join(phrases).split() == ["word"] * 200


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("[docs](https://x.y/z) help", "docs help"),
        ("| a | b |", "a, b"),
        ("snake_case stays", "snake_case stays"),
        ("# Title", "Title"),
    ],
)
def test_speakable(text: str, spoken: str) -> None:
    assert speakable(text) == spoken
