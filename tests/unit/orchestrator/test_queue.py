"""The queue as tables and properties: bounds, order, and fairness between tenants."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_runtime.orchestrator.admission import AdmissionRules, plan_admissions
from omni_runtime.orchestrator.queue import RequestQueue
from omni_runtime.orchestrator.spec import RequestSpec, build_request_spec
from omni_runtime.orchestrator.values import RequestId
from omni_runtime.topology.types import Modality
from tests.unit.orchestrator.plans import a_plan

PLAN = a_plan()


def spec(request: str, tenant: str = "") -> RequestSpec:
    return build_request_spec(PLAN, RequestId(request), frozenset({Modality.TEXT}), tenant=tenant)


def a_queue(*requests: str, **rules: int) -> RequestQueue:
    """Requests are "tenant/number"."""
    queue = RequestQueue(AdmissionRules(**{"max_queue": 100, **rules}))
    for request in requests:
        queue.add(spec(request, request.split("/")[0]))
    return queue


def order(queue: RequestQueue) -> list[str]:
    return [s.request for s in queue.in_order()]


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    assert order(a_queue("a/0", "a/1", "a/2")) == ["a/0", "a/1", "a/2"]


def test_a_flood_delays_another_tenants_first_request_by_nothing() -> None:
    assert order(a_queue("a/0", "a/1", "a/2", "b/0", "b/1"))[:4] == ["a/0", "b/0", "a/1", "b/1"]


def test_what_runs_already_counts() -> None:
    queue = a_queue("a/0", "a/1", "a/2", "b/0")
    queue.start(RequestId("a/0"))
    queue.start(RequestId("a/1"))
    assert order(queue) == ["b/0", "a/2"]
    queue.leave(RequestId("a/0"))
    queue.leave(RequestId("a/1"))
    assert order(queue) == ["a/2", "b/0"], "what has ended does not"


def test_a_request_that_starts_anew_goes_first() -> None:
    queue = a_queue("a/0", "a/1")
    queue.add(spec("a/again", "a"), again=True)
    assert order(queue)[0] == "a/again"


def test_a_tenant_at_its_limit_is_told_so() -> None:
    queue = a_queue("a/0", "a/1", max_per_tenant=2)
    queue.start(RequestId("a/0"))
    refused = queue.refusal("a", 7.4)
    assert refused is not None
    assert (refused.http_status, refused.retry_after_seconds) == (429, 7)
    assert "tenant 'a' has 2 running or waiting (limit 2)" in str(refused)
    assert queue.refusal("b", 1.0) is None
    queue.leave(RequestId("a/0"))
    assert queue.refusal("a", 1.0) is None


def test_a_full_queue_refuses() -> None:
    queue = a_queue("/0", "/1", max_queue=2)
    refused = queue.refusal("", 0.0)
    assert refused is not None
    assert "2 requests wait already (limit 2)" in str(refused)
    assert refused.retry_after_seconds == 1


def test_who_fills_the_queue_gives_way_to_who_does_not() -> None:
    queue = a_queue("a/0", "a/1", "a/2", max_queue=3)
    assert queue.refusal("b", 1.0) is None
    displaced = queue.to_displace("b", 1.0)
    assert displaced is not None
    assert displaced[0] == "a/2", "the last one"
    assert "tenant 'a' had the most in it (3)" in str(displaced[1])
    assert queue.refusal("a", 1.0) is not None, "nobody gives way to whoever fills the queue"


def test_equals_do_not_displace_each_other() -> None:
    queue = a_queue("a/0", "b/0", max_queue=2)
    assert queue.refusal("c", 1.0) is not None
    assert queue.to_displace("c", 1.0) is None


@pytest.mark.parametrize("floods", [2, 50])
def test_places_are_shared_evenly_however_large_the_flood(floods: int) -> None:
    queue = a_queue(*(f"a/{i}" for i in range(floods * 10)), *(f"b/{i}" for i in range(10)), max_queue=1000)
    free, served = 4, Counter[str]()
    for _ in range(10):
        admitted, _ = plan_admissions(queue.in_order(), {"thinker": free})
        for request in admitted:
            queue.start(request)
            served[request.split("/")[0]] += 1
        for request in admitted:
            queue.leave(request)
    assert served["b"] == 10, "4 places a turn, 2 of them b's, until all of b is served"


@given(
    st.lists(
        st.tuples(st.sampled_from(("add", "again", "start", "leave")), st.sampled_from("abc"), st.integers(0, 9)),
        max_size=60,
    )
)
def test_nobody_is_lost_and_nothing_of_a_tenant_remains(steps: list[tuple[str, str, int]]) -> None:
    queue = RequestQueue(AdmissionRules(max_queue=100))
    waiting: set[str] = set()
    running: set[str] = set()
    for what, tenant, n in steps:
        request = f"{tenant}/{n}"
        if what in ("add", "again") and request not in waiting | running:
            queue.add(spec(request, tenant), again=what == "again")
            waiting.add(request)
        elif what == "start" and request in waiting:
            queue.start(RequestId(request))
            waiting.remove(request)
            running.add(request)
        elif what == "leave":
            queue.leave(RequestId(request))
            waiting.discard(request)
            running.discard(request)
        assert set(order(queue)) == waiting == set(queue.requests)
        assert len(order(queue)) == len(queue) == len(waiting)
        assert queue.running == len(running)
        for free in ({"thinker": 0}, {"thinker": 1}):
            admitted, per_stage = plan_admissions(queue.in_order(), free)
            stuck = queue.stuck(free)
            assert stuck == (None if admitted else per_stage), "the short way says what the long way says"
    for request in waiting | running:
        queue.leave(RequestId(request))
    assert not queue._kinds
    assert not queue._waits_of
    assert not queue._runs_of
