"""StagePool and admission as tables; time is a number."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_runtime.orchestrator.admission import plan_admissions, unavailable
from omni_runtime.orchestrator.pool import Ask, LivenessRules, Policy, Replica, StagePool
from omni_runtime.orchestrator.routing import POLICIES, least_queue, power_of_two, round_robin, session_affine
from omni_runtime.orchestrator.spec import RequestSpec, build_request_spec
from omni_runtime.orchestrator.values import RequestId
from omni_runtime.protocol.control import Heartbeat, Hello, StageLoad
from omni_runtime.topology.types import Modality
from tests.unit.orchestrator.plans import a_plan

RULES = LivenessRules(heartbeat_seconds=1, suspect_seconds=3, lost_seconds=10, unreachable_seconds=2)


def hello(replica: str, capacity: int = 4, incarnation: str = "i") -> Hello:
    return Hello("talker", replica, "rev", 1, "tcp://h:1", "d", capacity, incarnation)


def a_pool(*replicas: str, capacity: int = 4) -> StagePool:
    pool = StagePool("talker", RULES, least_queue)
    for replica in replicas:
        pool.join(hello(replica, capacity), peer=replica.encode(), now=0.0)
    return pool


def bind(pool: StagePool, request: str, now: float = 0.0) -> str | None:
    replica = pool.bind(RequestId(request), now)
    return replica.id if replica is not None else None


def test_bindings_are_sticky() -> None:
    """T70"""
    pool = a_pool("a", "b")
    assert len({bind(pool, "r") for _ in range(10)}) == 1


def test_a_binding_outlives_draining_and_suspicion() -> None:
    pool = a_pool("a", "b")
    chosen = bind(pool, "r")
    assert chosen is not None
    pool.leave(chosen)
    assert bind(pool, "r", now=5.0) == chosen


def test_least_loaded_spreads_and_weighs_by_capacity() -> None:
    pool = StagePool("talker", RULES, least_queue)
    pool.join(hello("small", 2), b"s", 0.0)
    pool.join(hello("large", 6), b"l", 0.0)
    assert Counter(bind(pool, f"r{i}") for i in range(8)) == {"small": 2, "large": 6}
    assert bind(pool, "too many") is None


def test_ties_go_round() -> None:
    pool = a_pool("a", "b", "c")
    chosen = []
    for i in range(6):
        replica = bind(pool, f"r{i}")
        assert replica is not None
        pool.release(RequestId(f"r{i}"), replica)
        chosen.append(replica)
    assert Counter(chosen) == {"a": 2, "b": 2, "c": 2}


def test_round_robin() -> None:
    pool = StagePool("talker", RULES, round_robin)
    for name in "abc":
        pool.join(hello(name), name.encode(), 0.0)
    assert [bind(pool, f"r{i}") for i in range(4)] == ["a", "b", "c", "a"]


def a_choice(policy: Policy, request: str = "r", session: str = "", *, among: str = "abcde", full: str = "") -> str:
    replicas = tuple(Replica(hello(name), name.encode(), 0.0, 0.0) for name in among if name not in full)
    return policy(replicas, Ask(0, RequestId(request), session)).id


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
def test_every_policy_takes_a_replica_that_stands_alone(policy: Policy) -> None:
    assert a_choice(policy, session="s", among="a") == "a"


def test_power_of_two_takes_the_emptier_and_spreads() -> None:
    pool = StagePool("talker", RULES, power_of_two)
    for name in "abcd":
        pool.join(hello(name, 100), name.encode(), 0.0)
    counts = Counter(bind(pool, f"r{i}") for i in range(200))
    assert set(counts) == set("abcd")
    assert max(counts.values()) - min(counts.values()) <= 8


def test_a_session_keeps_its_replica_while_that_has_room() -> None:
    home = a_choice(session_affine, "r1", "anna")
    assert a_choice(session_affine, "r2", "anna") == home
    second = a_choice(session_affine, "r3", "anna", full=home)
    assert second != home
    assert a_choice(session_affine, "r4", "anna", full=home) == second, "the session's second one is its own as well"
    assert a_choice(session_affine, "r5", "anna") == home


def test_a_replica_that_leaves_moves_its_own_sessions_only() -> None:
    sessions = [f"session-{i}" for i in range(200)]
    before = {s: a_choice(session_affine, session=s) for s in sessions}
    after = {s: a_choice(session_affine, session=s, full="c") for s in sessions}
    assert all(after[s] == before[s] for s in sessions if before[s] != "c")
    assert all(count > 15 for count in Counter(before.values()).values()), "spread over all"


def test_requests_without_a_session_go_where_there_is_room() -> None:
    pool = StagePool("talker", RULES, session_affine)
    for name in "ab":
        pool.join(hello(name), name.encode(), 0.0)
    assert {bind(pool, "r1"), bind(pool, "r2")} == {"a", "b"}


def test_suspect_gets_nothing_new_and_recovers() -> None:
    pool = a_pool("a")
    assert bind(pool, "r1", now=2.9) == "a"
    assert bind(pool, "r2", now=3.1) is None
    pool.heartbeat("a", Heartbeat(StageLoad()), 4.0)
    assert bind(pool, "r2", now=4.1) == "a"


def test_unhealthy_gets_nothing_new() -> None:
    pool = a_pool("a")
    pool.heartbeat("a", Heartbeat(StageLoad(), healthy=False, detail="CUDA error"), 1.0)
    assert bind(pool, "r", now=1.0) is None
    pool.heartbeat("a", Heartbeat(StageLoad()), 2.0)
    assert bind(pool, "r", now=2.0) == "a"


def test_loss_by_silence_names_the_requests() -> None:
    pool = a_pool("a", "b")
    bind(pool, "r1"), bind(pool, "r2")
    pool.heartbeat("a", Heartbeat(StageLoad()), 9.0)
    lost = pool.expire(10.0)
    assert [(x.replica, len(x.requests)) for x in lost] == [("b", 1)]
    assert "no heartbeat" in lost[0].reason


def test_loss_by_closed_connection_is_quick() -> None:
    pool = a_pool("a")
    pool.unreachable("a", 1.0)
    assert bind(pool, "r", now=1.1) is None
    assert not pool.expire(2.9)
    assert pool.expire(3.0)[0].replica == "a"


def test_our_own_stall_is_excused() -> None:
    pool = a_pool("a")
    pool.excuse(60.0)
    assert not pool.expire(61.0)


def test_rejoin_of_the_same_process_keeps_and_of_another_loses() -> None:
    """R35, R37"""
    pool = a_pool("a")
    bind(pool, "r")
    assert pool.join(hello("a"), b"other-connection", 1.0) is None
    assert bind(pool, "r") == "a"
    lost = pool.join(hello("a", incarnation="j"), b"third", 2.0)
    assert lost is not None
    assert lost.requests == ("r",)
    assert pool.get("a") is not None


@given(
    capacities=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=80),
)
def test_never_over_capacity_and_never_idle_with_work(capacities: list[int], steps: list[tuple[bool, int]]) -> None:
    pool = StagePool("talker", RULES, least_queue)
    for i, capacity in enumerate(capacities):
        pool.join(hello(str(i), capacity), str(i).encode(), 0.0)
    held: dict[str, str] = {}
    for is_bind, n in steps:
        request = f"r{n}"
        if is_bind:
            replica = bind(pool, request)
            assert (replica is None) == (request not in held and len(held) == sum(capacities))
            if replica is not None:
                assert held.setdefault(request, replica) == replica
        elif request in held:
            pool.release(RequestId(request), held.pop(request))
    for i, capacity in enumerate(capacities):
        member = pool.get(str(i))
        assert member is not None
        assert len(member.bound) == list(held.values()).count(str(i)) <= capacity


def spec(request: str, *modalities: Modality) -> RequestSpec:
    return build_request_spec(a_plan(), RequestId(request), frozenset(modalities))


def test_admission_is_fifo_per_stage_and_text_passes_speech() -> None:
    speech = [spec(f"s{i}", Modality.TEXT, Modality.AUDIO) for i in range(3)]
    text = spec("t", Modality.TEXT)
    admitted, waiting = plan_admissions([*speech, text], {"thinker": 9, "talker": 1, "code2wav": 9})
    assert admitted == ("s0", "t")
    assert waiting == {"talker": 2}


def test_nobody_overtakes_at_a_full_stage() -> None:
    queue = [spec("s", Modality.TEXT, Modality.AUDIO), spec("t", Modality.TEXT)]
    admitted, waiting = plan_admissions(queue, {"thinker": 0, "talker": 1, "code2wav": 1})
    assert admitted == ()
    assert waiting == {"thinker": 2}


@pytest.mark.parametrize(
    ("states", "message"),
    [
        pytest.param(
            (), r"talker \(none registered\); waited 5.0 s; look at the pods of OmniStage p-talker", id="none"
        ),
        pytest.param(("Suspect", "Draining", "Suspect"), r"talker \(1 Draining, 2 Suspect\)", id="some"),
        pytest.param(("Asleep",), r"talker \(1 Asleep\).*POST /v1/omni/wakeup", id="asleep"),
    ],
)
def test_a_missing_stage_says_what_became_of_its_replicas(states: tuple[str, ...], message: str) -> None:
    """T69"""
    assert re.search(message, str(unavailable("p", ("talker",), 5.0, lambda _: states)))


def test_a_request_is_forgotten_after_three_beats_without_it() -> None:
    """R6; a Submit that was still on its way must not look like a loss."""
    pool = a_pool("a")
    bind(pool, "r")
    without = Heartbeat(StageLoad(), requests=(), answers=1)
    with_it = Heartbeat(StageLoad(), requests=("r",), answers=1)
    assert [pool.forgotten("a", b) for b in (without, without, with_it, without, without)] == [()] * 5
    assert pool.forgotten("a", without) == ("r",)
    assert pool.forgotten("a", Heartbeat(StageLoad())) == ()


def test_heartbeats_that_were_sent_before_the_submit_was_read_say_nothing() -> None:
    """R6: on a busy host any number of them may overtake the Submit."""
    pool = a_pool("a")
    pool.pinged(7)
    bind(pool, "r")
    earlier, later = (Heartbeat(StageLoad(), requests=(), answers=n) for n in (7, 8))
    assert [pool.forgotten("a", b) for b in (earlier,) * 5 + (later,) * 2] == [()] * 7
    assert pool.forgotten("a", later) == ("r",)
