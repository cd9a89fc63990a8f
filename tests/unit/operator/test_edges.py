"""How edges do, in the status: what all of the last looks show, told once, and nothing that flutters (T7)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from omni_crds.v1alpha1.conditions import Condition, ConditionStatus, Reason
from omni_crds.v1alpha1.pipeline import ConnectorType
from omni_operator import sidecars
from omni_operator.edges import LOOKS, EdgeHealth, Look, SidecarReading, judge_edges
from omni_operator.kinds import PIPELINE, POD
from omni_operator.observed import Key
from omni_operator.plan.status import transitions
from omni_operator.sidecars import SidecarReader, reading_of
from omni_runtime.connectors.metrics import SidecarMetrics
from omni_runtime.connectors.streams import Key as StreamKey
from omni_runtime.deploy.plan import ResolvedPlan
from tests.unit.operator.served import served
from tests.unit.operator.world import NS, World, made
from tests.unit.stages.plans import a_plan

KEY = Key(NS, "p")
E = "thinker->talker"
OTHER = "talker->code2wav"


def a_pipelines_plan() -> ResolvedPlan:
    """Its first edge over Mooncake, the other over TCP."""
    plan = a_plan()
    first, second = plan.edges
    with_mooncake, with_tcp = (
        msgspec.structs.replace(edge, connector=kind) for edge, kind in ((first, "Mooncake"), (second, "TCP"))
    )
    return msgspec.structs.replace(plan, edges=(with_mooncake, with_tcp))


@pytest.fixture(scope="module")
def plan() -> ResolvedPlan:
    return a_pipelines_plan()


def look(**pods: SidecarReading) -> Look:
    return pods


def fine(group: str, **changes: object) -> SidecarReading:
    return replace(SidecarReading(group, mooncake=True), **changes)  # type: ignore[arg-type]


def judged(plan: ResolvedPlan, looks: list[Look]) -> Mapping[str, EdgeHealth]:
    """After all of them, one after the other."""
    health: Mapping[str, EdgeHealth] = {}
    for n in range(len(looks)):
        health = judge_edges(plan, looks[max(0, n + 1 - LOOKS) : n + 1], health)
    return health


STALLED = fine("thinker", stalled={E: 2})


def test_a_stall_is_told_once_it_lasts_and_until_it_is_over(plan: ResolvedPlan) -> None:
    quiet, stalled = look(a=fine("thinker")), look(a=STALLED)
    assert judged(plan, [stalled] * (LOOKS - 1))[E].reason is Reason.REACHABLE, (
        "streams wait for milliseconds all the time"
    )
    assert judged(plan, [stalled, quiet, stalled, stalled, stalled])[E].reason is Reason.REACHABLE
    lasting = [stalled] * LOOKS
    assert judged(plan, lasting)[E] == EdgeHealth(Reason.BACKPRESSURED, "streams wait for their consumer")
    assert judged(plan, lasting)[OTHER].reason is Reason.REACHABLE
    assert judged(plan, [*lasting, *[quiet] * (LOOKS - 1)])[E].reason is Reason.BACKPRESSURED, "it does not flutter"
    assert judged(plan, [*lasting, *[quiet] * LOOKS])[E].reason is Reason.REACHABLE


@given(st.lists(st.booleans(), max_size=40))
def test_a_minute_between_two_changes(stalls: list[bool]) -> None:
    """T7."""
    found = a_pipelines_plan()
    health: Mapping[str, EdgeHealth] = {}
    seen: list[Reason] = []
    looks = [look(a=STALLED if s else fine("thinker")) for s in stalls]
    for n in range(len(looks)):
        health = judge_edges(found, looks[max(0, n + 1 - LOOKS) : n + 1], health)
        seen.append(health[E].reason)
    changes = [n for n in range(1, len(seen)) if seen[n] != seen[n - 1]]
    assert all(later - earlier >= LOOKS for earlier, later in pairwise(changes))


def test_mooncake_that_does_not_run_is_told_at_once(plan: ResolvedPlan) -> None:
    """The edge works, over something slower."""
    without = look(a=fine("thinker"), b=fine("talker", mooncake=False), c=fine("talker"))
    health = judged(plan, [without])
    assert health[E].reason is Reason.DEGRADED
    assert health[E].text == "Mooncake's engine does not run in pods of talker: TCP instead"
    assert health[OTHER].reason is Reason.REACHABLE, "it is not to use it"
    elsewhere = look(a=fine("thinker"), b=fine("talker"), c=fine("code2wav", mooncake=False))
    assert judged(plan, [elsewhere])[E].reason is Reason.REACHABLE


def test_fetches_that_fail_are_told_while_they_do(plan: ResolvedPlan) -> None:
    def failed(count: int) -> Look:
        return look(a=fine("thinker", fetch_failures=count), b=fine("talker"))

    assert judged(plan, [failed(3)])[E].reason is Reason.REACHABLE, "before anybody looked"
    health = judged(plan, [failed(3), failed(4)])
    assert (health[E].reason, health[E].text) == (Reason.DEGRADED, "fetches through Mooncake fail: TCP instead")
    assert judged(plan, [failed(3), *[failed(4)] * LOOKS])[E].reason is Reason.REACHABLE
    assert judged(plan, [failed(3), failed(0)])[E].reason is Reason.REACHABLE, "a restart is no failure"


def test_over_what_an_edge_goes(plan: ResolvedPlan) -> None:
    """Two pods of one node share memory; others use the network."""
    health = judged(
        plan,
        [
            look(
                a=fine("thinker", carried={(E, "SharedMemory"): 3, (E, "Mooncake"): 0}),
                b=fine("thinker", carried={(E, "TCP"): 1, ("x->y", "Mooncake"): 9}),
            )
        ],
    )
    assert health[E].in_use == (ConnectorType.SHARED_MEMORY, ConnectorType.TCP)
    assert health[OTHER].in_use == ()


class TestReading:
    def test_what_a_sidecar_says(self) -> None:
        """The real exposition."""
        metrics = SidecarMetrics("x")
        metrics.gauge("omni:connector_streams", "", lambda: 1)
        metrics.gauge("omni:connector_mooncake_up", "", lambda: 1)
        metrics.waiting(lambda: [(StreamKey("p0", E, "r"), "", 3), (StreamKey("p0", E, "s"), "t1", 1)])
        for replica in ("t0", "t1"):
            metrics.of(metrics.edge(E, "p0", replica), "TCP").sent(5)
        metrics.fallbacks.labels("fetch").inc(2)
        metrics.fallbacks.labels("unavailable").inc()
        found = reading_of("thinker", metrics.render().decode())
        assert found == SidecarReading("thinker", {E: 2}, {(E, "TCP"): 2}, 2, True)

    @pytest.mark.parametrize("text", ["", "<html>", "up 1\n", "x{ 1", "omni:connector_streams"])
    def test_something_else(self, text: str) -> None:
        assert reading_of("thinker", text) is None


class Sidecar:
    """On loopback; says what it is told to."""

    def __init__(self) -> None:
        self.text: str | None = "omni:connector_streams 0\n"
        self.asked = 0

    async def metrics(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(text=self.text) if self.text is not None else web.Response(status=503)


@pytest.fixture
async def sidecar(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sidecar]:
    told = Sidecar()
    async with served("/metrics", told.metrics) as port:
        monkeypatch.setattr(sidecars, "SIDECAR_HTTP_PORT", port)
        yield told


@pytest.fixture
async def reader() -> AsyncIterator[SidecarReader]:
    reader = SidecarReader()
    yield reader
    await reader.close()


async def a_running_world(reader: SidecarReader) -> World:
    """Pods of which each has its sidecar at 127.0.0.1; nobody has asked one yet."""
    world = await made()
    for name in world.kube.all(POD):
        world.kube.edit(POD, NS, name, lambda b: b["status"].update(podIP="127.0.0.1"))
    world.cluster.sidecars = reader
    await world.reconcile()
    return world


def edge(world: World, source: str = "thinker") -> dict[str, object]:
    return next(e for e in world.status()["edges"] if e["from"] == source)


STALLS = (
    "omni:connector_streams 1\n"
    'omni:connector_chunks_total{connector="TCP",from_stage="thinker",from_replica="a",to_stage="talker",to_replica="b"} 4\n'
    'omni:connector_edge_stalled_streams{from_stage="thinker",from_replica="a",to_stage="talker",to_replica="b"} 1\n'
)


async def test_what_sidecars_say_comes_into_the_status(sidecar: Sidecar, reader: SidecarReader) -> None:
    """With the next reconcile, for which each change asks once; and an Event."""
    world = await a_running_world(reader)
    assert sidecar.asked == 0, "a reconcile waits for nobody"
    assert (edge(world)["ready"], edge(world)["reason"], "inUse" in edge(world)) == ("True", "Reachable", False)
    sidecar.text = STALLS
    asked = [await reader.refresh() for _ in range(LOOKS + 2)]
    assert asked == [(KEY,), *[()] * (LOOKS - 2), (KEY,), (), ()], "over TCP; and after a minute that it waits"
    await world.reconcile()
    assert edge(world)["inUse"] == ["TCP"]
    assert edge(world)["reason"] == "Backpressured: streams wait for their consumer"
    condition = world.condition("ConnectorsReady")
    assert condition is not None
    assert (condition["status"], condition["reason"]) == ("True", "Backpressured")
    assert condition["message"] == "thinker->talker: streams wait for their consumer"
    assert edge(world, "talker")["reason"] == "Reachable"
    assert "Backpressured" in world.events()
    assert world.truth("Ready") == "True", "it works"
    before = world.fingerprint()
    await reader.refresh()
    await world.reconcile()
    assert world.fingerprint() == before, "nothing new, nothing written"
    sidecar.text = "omni:connector_streams 0\n"
    for _ in range(LOOKS):
        await reader.refresh()
    await world.reconcile()
    assert edge(world)["reason"] == "Reachable"
    assert "Recovered" in world.events()


async def test_a_stage_that_is_down_goes_before_what_its_sidecars_said(sidecar: Sidecar, reader: SidecarReader) -> None:
    world = await a_running_world(reader)
    sidecar.text = STALLS
    for _ in range(LOOKS):
        await reader.refresh()
    world.broken.add("talker")
    for pod in world.pods("talker"):
        world.kube.remove(POD, NS, pod["metadata"]["name"])
    await world.converge()
    assert edge(world)["reason"] == "StageDown: talker"
    assert world.truth("ConnectorsReady") == "False"


@pytest.mark.parametrize("text", [None, "<html>", "up 1\n"])
async def test_where_no_sidecar_answers_pods_speak_for_edges(
    sidecar: Sidecar, reader: SidecarReader, text: str | None
) -> None:
    """An operator outside the pod network."""
    world = await a_running_world(reader)
    sidecar.text = text
    for _ in range(LOOKS):
        assert await reader.refresh() == ()
    assert sidecar.asked
    await world.converge()
    assert (edge(world)["ready"], edge(world)["reason"]) == ("True", "Reachable")


async def test_a_pipeline_that_is_gone_is_not_asked_for(sidecar: Sidecar, reader: SidecarReader) -> None:
    world = await a_running_world(reader)
    world.kube.remove(PIPELINE, NS, "p")
    await world.reconcile()
    assert await reader.refresh() == ()
    assert sidecar.asked == 0


def told(status: str, reason: str, message: str = "m") -> Condition:
    return Condition(
        type="ConnectorsReady",
        status=ConditionStatus(status),
        reason=reason,
        message=message,
        last_transition_time=datetime(2026, 1, 1, tzinfo=UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def test_events_say_when_edges_get_worse_and_well_again() -> None:
    good, bad, slow = told("True", "Reachable"), told("True", "Degraded"), told("True", "Backpressured")
    down = told("False", "StagesNotReady")

    def notes(old: Condition, new: Condition) -> list[tuple[Reason, bool]]:
        return [(note.reason, note.warning) for note in transitions([old], [new])]

    assert notes(good, bad) == [(Reason.DEGRADED, True)]
    assert notes(bad, slow) == [(Reason.BACKPRESSURED, True)]
    assert notes(slow, good) == [(Reason.RECOVERED, False)]
    assert notes(down, bad) == [(Reason.DEGRADED, True)]
    assert notes(good, good) == notes(bad, bad) == notes(good, down) == notes(down, good) == []
