"""Quota, nodes, pending and draining replicas, the tenant and its fair share reach decide(): from objects to counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_operator.autoscale.loop import Autoscaler
from omni_operator.autoscale.record import read
from omni_operator.autoscale.scrape import Scraper, Target
from omni_operator.autoscale.sharing import Claim, fair_shares
from omni_operator.autoscale.snapshot import Labels, Scrape
from omni_operator.events import EventSink
from omni_operator.fleet import FleetReader
from omni_operator.kinds import NODE, POD, PROFILE, QUOTA, STAGE, TENANT
from omni_operator.names import DELETION_COST_ANNOTATION
from omni_operator.observe import observe
from omni_operator.observed import Key
from omni_operator.plan import plan_pipeline
from tests.unit.operator.test_placement import GPU, MODEL, a_node
from tests.unit.operator.world import NS, World, a_profile

ASKS = {"resources": {"requests": {GPU: "1"}, "limits": {GPU: "1"}}}
OBJECTIVES = {"ttfpMilliseconds": {"p95": 1500}, "queueDepth": {"perReplica": 4}}


class Load(Scraper):
    """Thirty requests between two scrapes; those of a pipeline named in `busy` wait for its talker, and are late."""

    def __init__(self) -> None:
        super().__init__()
        self.busy: set[str] = set()
        self.held: dict[str, int] = {}  # uid of a talker pod -> bound
        self._ended: Counter[str] = Counter()  # by entry pod
        self._late: Counter[str] = Counter()

    async def scrape(self, entry: Target | None, pods: Iterable[Target], now: float) -> Scrape:
        assert entry is not None
        busy = any(entry.pod.startswith(f"{name}-") for name in self.busy)
        self._ended[entry.pod] += 30
        self._late[entry.pod] += 30 if busy else 0
        ended, late = float(self._ended[entry.pod]), float(self._late[entry.pod])

        def stage(name: str, **more: str) -> Labels:
            return tuple(sorted({"stage": name, **more}.items()))

        families: dict[str, dict[Labels, float]] = {
            "stage_gen_time_s_count": {stage(n): ended for n in ("thinker", "talker", "code2wav")},
            "stage_gen_time_s_sum": {
                stage(n): 0.1 * ended + (8.0 * late if n == "talker" else 0.0)
                for n in ("thinker", "talker", "code2wav")
            },
            "stage_waiting_requests": {stage("talker"): 40.0 if busy else 0.0},
            "audio_ttfp_s_bucket": {
                stage("code2wav", le="1.0"): ended - late,
                stage("code2wav", le="10.0"): ended,
                stage("code2wav", le="+Inf"): ended,
            },
            "audio_ttfp_s_sum": {stage("code2wav"): 0.5 * ended + 8.0 * late},
        }
        held = self.held or ({"talker": 30} if busy else {})
        return Scrape(now, families, {"talker": held}, entry_pod=entry.uid)


class Site:
    """Pipelines whose stages ask for a device each, on one node; only the talker is scaled."""

    def __init__(self, devices: int, record: Path | None = None, missing_nodes: str | None = None) -> None:
        self.world, self.load = World(), Load()
        profile = a_profile(resource=GPU)
        if missing_nodes:
            profile["spec"]["missingNodes"] = missing_nodes
        self.world.kube.put(PROFILE, "", profile)
        self.world.kube.put(NODE, "", a_node("node", devices))
        self.now = datetime(2026, 6, 1, tzinfo=UTC)
        self._counts: dict[str, int] = {}  # as the pods follow them
        ticks = iter(range(0, 10**7, 60))  # each reading of the nodes is fresh
        fleet = FleetReader(self.world.kube, lambda: next(ticks))
        self.autoscaler = Autoscaler(
            self.world.kube,
            lambda: None,
            EventSink(self.world.kube),
            clock=lambda: self.now,
            scraper=self.load,
            fleet=fleet,
            record=record,
        )

    async def make(self, *names: str, **more: Any) -> None:
        scaling = {"minReplicas": 1, "maxReplicas": 8}
        for name in names:
            stages = [{"name": "talker", "scaling": scaling}]
            self.world.apply(name, model=MODEL, stages=stages, objectives=OBJECTIVES, **more)
            await self.world.converge(name)
            self._give_devices()

    def _give_devices(self) -> None:
        """The fake's pods carry no requests: what a stage's pod holds is written down, as the scheduler counts it."""
        for name, pod in self.world.kube.all(POD).items():
            if pod["metadata"]["labels"]["serving.omni.dev/stage"] != "entry" and not pod["spec"].get("containers"):
                self.world.kube.edit(POD, NS, name, lambda b: b["spec"].update(containers=[ASKS]))
        for name in self.world.kube.all(POD):
            self.world.kube.edit(POD, NS, name, lambda b: b["status"].update(podIP="192.0.2.1"))

    async def round(self, *names: str, settle: bool = True) -> None:
        self.now += timedelta(seconds=15)
        self.world.now = self.now
        for name in names:
            if settle and self._counts.get(name) != self.count(name):
                self._counts[name] = self.count(name)
                await self.world.converge(name)
                self._give_devices()
            observed = await observe(Key(NS, name), self.world.kube)
            self.autoscaler.track(observed, plan_pipeline(observed, now=self.now).resolved)
        await self.autoscaler.step_all()

    async def run(self, *names: str, seconds: float = 300, settle: bool = True) -> None:
        for _ in range(int(seconds / 15)):
            await self.round(*names, settle=settle)

    def count(self, name: str = "p") -> int:
        return int(self.world.kube.all(STAGE)[f"{name}-talker"]["spec"]["replicas"])

    def said(self, name: str = "p") -> str:
        tracked = self.autoscaler._tracked[Key(NS, name)]
        return " ".join(f"{d.reason} {d.message}" for d in tracked.decisions)


async def test_without_limits_the_load_wants_more_than_four() -> None:
    """What the tests below rely on."""
    site = Site(devices=64)
    await site.make("p")
    site.load.busy = {"p"}
    await site.run("p")
    assert site.count() > 4


async def test_free_devices_of_the_nodes_are_the_limit() -> None:
    """T38: no pod is asked for that no node has a device for; the entry's place is not counted as one."""
    site = Site(devices=5)
    await site.make("p")
    site.load.busy = {"p"}
    await site.run("p")
    assert site.count() == 3, "thinker, code2wav and three talkers"
    assert "Limited" in site.said() and "nodes" in site.said()


async def test_where_an_autoscaler_adds_nodes_they_are_no_limit() -> None:
    site = Site(devices=5, missing_nodes="Warn")
    await site.make("p")
    site.load.busy = {"p"}
    await site.run("p")
    assert site.count() > 4


@pytest.mark.parametrize(
    ("hard", "most"), [({f"requests.{GPU}": "4"}, 2), ({"pods": "6"}, 3), ({"requests.storage": "1"}, 8)]
)
async def test_a_quota_is_the_limit(hard: dict[str, str], most: int) -> None:
    """T65. The pods that the quota counts already are the pipeline's own."""
    site = Site(devices=64)
    await site.make("p")
    site.world.kube.put(QUOTA, NS, {"metadata": {"name": "q"}, "spec": {"hard": hard}, "status": {}})
    site.load.busy = {"p"}
    grown = 0
    for _ in range(20):
        pods = len(site.world.kube.all(POD))
        used = {f"requests.{GPU}": str(pods - 1), "pods": str(pods), "requests.storage": "0"}
        status = {"used": {key: used[key] for key in hard}}
        site.world.kube.edit(QUOTA, NS, "q", partial(_with_status, status))
        await site.round("p")
        grown = max(grown, site.count())
    assert grown == most if most < 8 else grown > 4


def _with_status(status: dict[str, Any], body: dict[str, Any]) -> None:
    body["status"] = status


async def test_the_budget_of_the_tenant_is_a_limit() -> None:
    """What its other pipelines hold is taken off."""
    site = Site(devices=64)
    tenant = {
        "metadata": {"name": "t"},
        "spec": {"namespaces": [NS], "acceleratorBudget": [{"class": "cpu", "count": 8}]},
    }
    site.world.kube.put(TENANT, "", tenant)
    await site.make("other", "p")
    site.load.busy = {"p"}
    await site.run("other", "p")
    assert site.count() == 3, "8, less 3 of the other one, less thinker and code2wav"


async def test_a_full_cluster_is_shared() -> None:
    """Who was there first gives back what is more than its share; the same without the other one stays."""
    site = Site(devices=12)
    await site.make("first", "second")
    site.load.busy = {"first"}
    await site.run("first", "second", seconds=180)
    assert site.count("first") == 7 and site.count("second") == 1
    site.load.busy = {"first", "second"}
    await site.run("first", "second", seconds=300)
    assert site.count("first") == site.count("second") == 4
    assert "fair share" in site.said("first")
    site.load.busy = {"first"}
    await site.run("first", "second", seconds=825)
    assert site.count("first") > 4, "what nobody else wants is free again"


async def test_weights_of_tenants_count() -> None:
    shares = fair_shares([Claim("a", "x", 3, 100), Claim("b", "y", 1, 100)], 16)
    assert shares == {"a": 12, "b": 4}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 40), st.integers(0, 4)), max_size=8),
    st.integers(0, 120),
)
def test_shares_are_whole_bounded_and_fair(given_claims: list[tuple[int, int, int, int]], capacity: int) -> None:
    weights = {tenant: weight for tenant, weight, _, _ in given_claims}
    claims = [Claim(str(i), f"t{t}", weights[t], wants, floor) for i, (t, _, wants, floor) in enumerate(given_claims)]
    shares = fair_shares(claims, capacity)
    if sum(c.wants for c in claims) <= capacity:
        assert shares == {}
        return
    floors = sum(min(c.floor, c.wants) for c in claims)
    assert sum(shares.values()) == max(capacity, floors), "nothing is left over while somebody wants it"
    assert all(min(c.floor, c.wants) <= shares[c.pipeline] <= c.wants for c in claims)
    for a in claims:
        for b in claims:
            if a.tenant == b.tenant and shares[a.pipeline] < a.wants and shares[b.pipeline] > b.floor:
                assert shares[b.pipeline] <= shares[a.pipeline] + 1, "pipelines of a tenant are equal"


async def test_replicas_that_start_are_not_asked_for_again() -> None:
    """T23: pending replicas reach decide(). Ready ones do not come, and the count does not run away."""
    site = Site(devices=64)
    await site.make("p")
    site.world.broken = {"talker"}
    site.load.busy = {"p"}
    await site.run("p", seconds=60)
    asked = site.count()
    await site.run("p", seconds=300)
    assert 1 < site.count() <= asked + 1
    fleet = read_fleet(site)
    assert fleet.pending == site.count()


async def test_draining_replicas_are_seen(tmp_path: Path) -> None:
    """They reach decide(): a stage of which one drains is not shrunk again at the same time."""
    site = Site(devices=64, record=tmp_path)
    await site.make("p")
    leaving = {"metadata": {"deletionTimestamp": "2026-06-01T00:00:00Z"}}
    (name,) = (p["metadata"]["name"] for p in site.world.pods("talker"))
    extra = {
        "metadata": {
            **site.world.kube.all(POD)[name]["metadata"],
            "name": "leaving",
            "uid": "other",
            **leaving["metadata"],
        },
        "spec": site.world.kube.all(POD)[name]["spec"],
        "status": site.world.kube.all(POD)[name]["status"],
    }
    await site.run("p", seconds=30)
    site.world.kube.put(POD, NS, extra)
    await site.round("p", settle=False)
    records = list(read(tmp_path / f"{NS}.p.jsonl"))
    assert [f.draining for f in records[-1].fleet if f.name == "talker"] == [1]
    assert [f.draining for f in records[0].fleet if f.name == "talker"] == [0]


def read_fleet(site: Site) -> Any:
    from omni_operator.autoscale.target import fleet_of

    tracked = site.autoscaler._tracked[Key(NS, "p")]
    return fleet_of(tracked.observed, tracked.spec)["talker"]


async def test_the_emptiest_replica_is_marked_to_leave_first() -> None:
    site = Site(devices=64)
    await site.make("p")
    site.load.busy = {"p"}
    await site.run("p", seconds=120)
    before = site.count()
    assert before >= 3
    site.load.busy = set()
    pods = site.world.pods("talker")
    site.load.held = {p["metadata"]["uid"]: 1 for p in pods}
    empty = pods[1]["metadata"]
    site.load.held[empty["uid"]] = 0
    while site.count() == before:
        assert site.now < datetime(2026, 6, 1, 2, tzinfo=UTC)
        await site.round("p", settle=False)
    left = before - site.count()
    marked = [
        p["metadata"] for p in site.world.pods("talker") if DELETION_COST_ANNOTATION in p["metadata"]["annotations"]
    ]
    assert len(marked) == left and empty["name"] in [m["name"] for m in marked]
    order = [c for c in site.world.kube.calls if c[0] in ("annotate", "scale")]
    assert [verb for verb, _, _ in order][-1 - left :] == ["annotate"] * left + ["scale"], (
        "marked before the count falls"
    )


async def test_what_was_decided_within_limits_is_replayed_within_them(tmp_path: Path) -> None:
    site = Site(devices=5, record=tmp_path)
    await site.make("p")
    site.load.busy = {"p"}
    await site.run("p")
    records = list(read(tmp_path / f"{NS}.p.jsonl"))
    assert {r.limits.placeable for r in records} >= {5}
