"""A client's own text as the payloads of a text_segments edge."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_runtime.errors import InputLost
from omni_runtime.protocol import control
from omni_runtime.protocol.payload import Payload
from omni_runtime.stages import actions
from omni_runtime.stages.text_input import TextFeed
from tests.unit.stages.test_requests import ORCHESTRATOR, a_book, messages

EDGE = "thinker->talker"
STORY = (
    "It was a dark night. The wind, cold and loud, came from the sea; nobody slept. “Who is there?” she asked. 3.14!"
)


def phrases(payloads: tuple[Payload, ...]) -> list[str]:
    return [bytes(p.tensors["utf8"]).decode() for p in payloads if p.rows]


@given(st.lists(st.integers(0, len(STORY)), max_size=8))
def test_however_the_client_cuts_it_the_phrases_are_the_same(cuts: list[int]) -> None:
    """The same text is the same audio (R19, R23, R27)."""
    whole = TextFeed(phrases=True).take(0, STORY, finished=True)
    bounds = [0, *sorted(cuts), len(STORY)]
    feed = TextFeed(phrases=True)
    got: list[Payload] = []
    for seq, (a, b) in enumerate(pairwise(bounds)):
        got.extend(feed.take(seq, STORY[a:b], finished=seq == len(bounds) - 2))
    assert phrases(tuple(got)) == phrases(whole)
    assert [p.finished for p in got] == [False] * (len(got) - 1) + [True]
    for earlier, later in pairwise(got):
        assert later.start == earlier.start + earlier.rows, "positions are bytes, without gaps"


def test_empty_text_is_a_bare_end() -> None:
    (end,) = TextFeed(phrases=True).take(0, "", finished=True)
    assert (end.start, end.rows, end.finished) == (0, 0, True)


def test_a_piece_that_came_before_is_dropped_and_a_missing_one_is_an_error() -> None:
    feed = TextFeed(phrases=True)
    feed.take(0, "Hello there my friend. And ", finished=False)
    assert feed.take(0, "Hello there my friend. And ", finished=False) == ()
    with pytest.raises(InputLost, match="piece 1 of the client's text did not arrive, piece 2 did"):
        feed.take(2, "x", finished=False)


def a_text_submit(text: str, *, finished: bool, edge: str = EDGE) -> control.Submit:
    return control.Submit(
        request="r1", params={}, inputs={"text": text, "finished": finished}, text_edge=edge, deadline_seconds=100
    )


def fed(todo: tuple[actions.Action, ...]) -> str:
    return "|".join(
        bytes(np.asarray(a.payload.tensors["utf8"])).decode() if a.payload.rows else "END"
        for a in todo
        if isinstance(a, actions.Feed) and a.edge == EDGE
    )


def test_text_is_fed_as_the_edge_would() -> None:
    b = a_book()
    start, *rest = b.submit(a_text_submit("It was a dark night. The", finished=False), ORCHESTRATOR, now=0.0)
    assert isinstance(start, actions.StartEngine)
    assert start.request.upstream_edges == (EDGE,)
    assert start.request.inputs == {}
    assert fed(tuple(rest)) == "It was a dark night."
    assert b.append(control.Append("r1", 1, " wind"), ORCHESTRATOR, now=1.0) == ()
    assert (
        fed(b.append(control.Append("r1", 2, " blew.", finished=True), ORCHESTRATOR, now=2.0)) == "The wind blew.|END"
    )
    assert b.append(control.Append("r1", 3, "more"), ORCHESTRATOR, now=3.0) == (), "after the end"


def test_unknown_ended_and_foreign_ids_are_dropped_r4() -> None:
    b = a_book()
    assert b.append(control.Append("nobody", 1, "x"), ORCHESTRATOR, now=0.0) == ()
    b.submit(a_text_submit("", finished=False), ORCHESTRATOR, now=0.0)
    assert b.append(control.Append("r1", 1, "Hello, hello, hello. "), "another", now=0.0) == ()
    b.abort("r1", ORCHESTRATOR)
    assert b.append(control.Append("r1", 1, "Hello, hello, hello. "), ORCHESTRATOR, now=0.0) == ()


def test_a_gap_fails_the_request_with_a_reason() -> None:
    b = a_book()
    b.submit(a_text_submit("One", finished=False), ORCHESTRATOR, now=0.0)
    todo = b.append(control.Append("r1", 2, "three"), ORCHESTRATOR, now=0.0)
    (failed,) = messages(todo)
    assert isinstance(failed, control.StageFailed)
    assert (failed.code, "piece 1" in failed.message, "stage talker" in failed.message) == ("InputLost", True, True)
    assert actions.StopEngine("r1") in todo


def test_a_silent_client_is_told_apart_from_a_silent_stage_r5() -> None:
    b = a_book()
    b.submit(a_text_submit("One", finished=False), ORCHESTRATOR, now=0.0)
    (failed,) = messages(b.tick(now=11.0))
    assert isinstance(failed, control.StageFailed)
    assert "no text from the client for 11 s" in failed.message


def test_a_first_stage_starts_when_it_has_the_whole_message() -> None:
    b = a_book(stage="thinker")
    assert b.submit(a_text_submit("What is ", finished=False, edge=""), ORCHESTRATOR, now=0.0) == ()
    assert (b.waiting, b.running) == (0, 1), "it is the client's turn: no queue"
    (start,) = b.append(control.Append("r1", 1, "love?", finished=True), ORCHESTRATOR, now=5.0)
    assert isinstance(start, actions.StartEngine)
    assert start.request.inputs == {"messages": [{"role": "user", "content": "What is love?"}]}
    (started,) = b.submit(
        control.Submit(request="r2", params={}, inputs={"text": "All of it", "finished": True}), ORCHESTRATOR, now=6.0
    )
    assert isinstance(started, actions.StartEngine)
