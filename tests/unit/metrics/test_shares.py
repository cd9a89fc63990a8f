"""Shares of the TTFP: whatever stages say and whenever they say it, they add up to the TTFP."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_runtime.metrics.shares import Component, Share, ttfp_shares
from omni_runtime.orchestrator.advance import advance
from omni_runtime.orchestrator.events import Bound, StageStarted
from omni_runtime.orchestrator.spec import build_request_spec
from omni_runtime.orchestrator.state import RequestState
from omni_runtime.orchestrator.values import RequestId
from omni_runtime.topology.types import Modality
from tests.unit.orchestrator.plans import a_plan

PLAN = a_plan()
PATH = ("thinker", "talker", "code2wav")
SPEC = build_request_spec(PLAN, RequestId("r"), frozenset({Modality.AUDIO}))
DURATION = st.floats(0, 1e4, allow_nan=False)


def a_request(queued: float, bound: float, *starts: tuple[str, float, float, float]) -> RequestState:
    """starts: stage, instant, and what the stage says of its queue and of its first rows' transfer."""
    state = RequestState(SPEC, queued_at=queued)
    state, _ = advance(state, Bound(tuple((s, f"{s}-0") for s in PATH)), bound)
    for stage, at, queue, transfer in starts:
        state, _ = advance(state, StageStarted(stage, f"{stage}-0", queue, transfer), at)
    return state


def test_a_request_as_it_should_be() -> None:
    state = a_request(
        10.0, 11.0, ("thinker", 11.5, 0.5, 0.0), ("talker", 14.5, 0.25, 0.25), ("code2wav", 16.0, 0.125, 0.25)
    )
    assert ttfp_shares(state, PATH, now=17.0) == (
        Share(Component.QUEUE, "entry", 1.0),
        Share(Component.QUEUE, "thinker", 0.5),
        Share(Component.COMPUTE, "thinker", 2.5),
        Share(Component.TRANSFER, "talker", 0.25),
        Share(Component.QUEUE, "talker", 0.25),
        Share(Component.COMPUTE, "talker", 1.125),
        Share(Component.TRANSFER, "code2wav", 0.25),
        Share(Component.QUEUE, "code2wav", 0.125),
        Share(Component.COMPUTE, "code2wav", 1.0),
    )


def test_stages_that_do_not_lead_to_the_audio_have_no_share() -> None:
    state = a_request(0.0, 1.0, ("thinker", 2.0, 0.0, 0.0), ("talker", 3.0, 0.0, 0.0))
    assert {s.stage for s in ttfp_shares(state, ("talker",), now=4.0)} == {"entry", "talker"}


@given(
    queued=st.floats(-1e6, 1e6, allow_nan=False),
    bound=st.floats(-1e6, 2e6, allow_nan=False),
    starts=st.lists(st.tuples(st.sampled_from(PATH), st.floats(-1e6, 2e6), DURATION, DURATION), max_size=6),
    ttfp=DURATION,
)
def test_shares_add_up_to_the_ttfp(
    queued: float, bound: float, starts: list[tuple[str, float, float, float]], ttfp: float
) -> None:
    """Also if stages start in the wrong order, not at all, later than their audio, or say nonsense."""
    now = queued + ttfp
    shares = ttfp_shares(a_request(queued, bound, *starts), PATH, now)
    assert sum(s.seconds for s in shares) == pytest.approx(now - queued, abs=1e-6)
    assert all(s.seconds >= 0 for s in shares)
    assert len({(s.component, s.stage) for s in shares}) == len(shares), "one observation per series and request"
