"""The autoscaler against a real API server: /scale, field ownership, and no write where nothing changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from omni_crds.v1alpha1.conditions import Reason
from omni_operator.autoscale.loop import Autoscaler
from omni_operator.autoscale.scrape import Scraper, Target
from omni_operator.autoscale.snapshot import Labels, Scrape
from omni_operator.autoscale.types import Tuning
from omni_operator.errors import Conflict
from omni_operator.events import EventSink
from omni_operator.fleet import FleetReader
from omni_operator.kinds import POD, QUOTA, STAGE, JsonObject
from omni_operator.names import AUTOSCALER_MANAGER, STAGE_LABEL
from omni_operator.observed import Key
from tests.apiserver.kube import Refused
from tests.apiserver.operator.harness import Site, eventually

SCALING = {"minReplicas": 1, "maxReplicas": 4}
STAGE_NAMES = ("thinker", "talker", "code2wav")


class Played(Scraper):
    """A pipeline of which each stage ends `rate` requests a second, and whose queue grows as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.ended, self.slow, self.waiting, self.held = 0.0, 0.0, 0.0, 0
        self.bound: dict[str, int] | None = None  # by pod uid, where a test says who holds what

    async def scrape(self, entry: Target | None, pods: Iterable[Target], now: float) -> Scrape:
        def stage(name: str, **more: str) -> Labels:
            return tuple(sorted({"stage": name, **more}.items()))

        late, every = self.slow, self.ended
        families: dict[str, dict[Labels, float]] = {
            "stage_gen_time_s_count": {stage(n): every for n in STAGE_NAMES},
            "stage_gen_time_s_sum": {stage(n): 2.0 * every for n in STAGE_NAMES},
            "stage_waiting_requests": {stage("talker"): self.waiting},
            "audio_ttfp_s_bucket": {
                stage("code2wav", le="1.0"): every - late,
                stage("code2wav", le="10.0"): every,
                stage("code2wav", le="+Inf"): every,
            },
            "audio_ttfp_s_sum": {stage("code2wav"): every + 8 * late},
        }
        held = self.bound if self.bound is not None else {"a": self.held}
        return Scrape(now, families, {"talker": held}, entry_pod="entry")


class Scaled:
    def __init__(self, site: Site, tuning: Tuning) -> None:
        self.site, self.scraper, self.now = site, Played(), datetime.now(UTC)
        self.autoscaler = Autoscaler(
            site.api,
            lambda: None,
            EventSink(site.api),
            clock=lambda: self.now,
            scraper=self.scraper,
            fleet=FleetReader(site.api),
            tuning=tuning,
        )
        site.cluster.autoscaler = self.autoscaler

    async def step(self, requests: int = 0, *, late: bool = False, waiting: float = 0.0, held: int = 0) -> bool:
        self.now += timedelta(seconds=15)
        self.scraper.ended += requests
        self.scraper.slow += requests if late else 0
        self.scraper.waiting, self.scraper.held = waiting, held
        await self.look()
        return await self.autoscaler.step(Key(self.site.namespace, "p"))

    async def look(self) -> None:
        """A reconcile as the queue does it: whoever wrote in between is read again."""
        for _ in range(10):
            try:
                await self.site.reconcile()
            except Conflict:
                continue
            return
        raise AssertionError("somebody writes all the time")

    def count(self, stage: str = "talker") -> int:
        return int(self.site.get(STAGE, f"p-{stage}")["spec"]["replicas"])


async def scaled(site: Site, tuning: Tuning | None = None, **scaling: object) -> Scaled:
    site.apply(
        stages=[{"name": "talker", "scaling": {**SCALING, **scaling}}],
        objectives={"ttfpMilliseconds": {"p95": 1500}, "queueDepth": {"perReplica": 4}},
    )
    await site.converge()
    return Scaled(site, tuning or Tuning())


async def grow(it: Scaled) -> None:
    for _ in range(6):
        await it.step(40, late=True, waiting=60, held=30)


async def test_growth_goes_through_scale_under_its_own_manager_and_is_explained(site: Site) -> None:
    it = await scaled(site)
    await it.step()
    await grow(it)
    assert 1 < it.count() <= 4 and it.count("thinker") == 1
    managers = {
        entry["manager"]
        for entry in site.get(STAGE, "p-talker")["metadata"]["managedFields"]
        if "f:replicas" in (entry.get("fieldsV1", {}).get("f:spec") or {})
    }
    assert AUTOSCALER_MANAGER in managers
    await site.converge()
    condition, decisions = site.condition("ScalingReady"), site.status()["decisions"]
    assert (condition["status"], condition["reason"]) == ("True", Reason.AUTOSCALING)
    grown = next(d for d in decisions if any(s["replicas"] > s["before"] for s in d["stages"]))
    assert grown["limitingStage"] == "talker" and grown["inputs"]
    # The count outlives every later reconcile (T12), and one with a new generation.
    count = it.count()
    site.apply(
        stages=[{"name": "talker", "scaling": {**SCALING, "maxReplicas": 5}}],
        objectives={"ttfpMilliseconds": {"p95": 1500}, "queueDepth": {"perReplica": 4}},
    )
    await site.converge()
    assert it.count() == count


async def test_steady_load_writes_nothing(site: Site) -> None:
    """T7: but for what it has learned, at first and then once in five minutes at most."""
    it = await scaled(site)
    for _ in range(4):
        await it.step(3, held=1)
    await it.look()
    site.api.writes.clear()
    news = []
    for _ in range(60):
        news.append(await it.step(3, held=1))
        if news[-1]:
            await it.look()
    assert sum(news) <= 1 + len(news) * 15 // 300
    assert len(site.api.writes) == sum(news)


async def test_kubectl_scale_wins_in_external_mode(site: Site) -> None:
    it = await scaled(site, mode="External")
    site.scale("talker", 3)
    for _ in range(40):  # ten minutes
        await it.step(40, late=True, waiting=60, held=30)
    assert it.count() == 3
    assert site.condition("ScalingReady")["reason"] == Reason.MANUAL


async def test_whoever_scales_beside_it_is_named_and_obeyed(site: Site) -> None:
    """T19."""
    it = await scaled(site)
    await it.step()
    it.now = datetime.now(UTC)
    site.scale("talker", 2)
    await grow(it)
    assert it.count() == 2
    await it.look()
    condition = site.condition("ScalingReady")
    assert (condition["status"], condition["reason"]) == ("False", Reason.SECOND_OWNER)
    assert "talker" in condition["message"]


async def test_the_emptiest_replica_leaves_first(site: Site) -> None:
    """The ReplicaSet of a real controller manager obeys the mark, which is there before the count falls."""
    it = await scaled(site, replace(Tuning(), scale_down_seconds=45.0, reversal_seconds=0.0))
    await it.step()
    await grow(it)
    await site.converge(until=lambda: len(talkers(site)) == it.count() and site.truth("Ready") == "True")
    pods, grown = talkers(site), it.count()
    assert grown >= 3
    empty = sorted(pods)[1]
    it.scraper.bound = {p["metadata"]["uid"]: 0 if name == empty else 2 for name, p in pods.items()}
    for _ in range(40):
        if it.count() < grown:
            break
        await it.step(2)
    left = grown - it.count()
    assert left > 0
    await site.converge(until=lambda: len(talkers(site)) == it.count())
    assert empty not in talkers(site)
    assert set(talkers(site)) < set(pods), "nobody was replaced"


def talkers(site: Site) -> dict[str, JsonObject]:
    return {
        name: pod
        for name, pod in site.all(POD).items()
        if pod["metadata"]["labels"][STAGE_LABEL] == "talker" and "deletionTimestamp" not in pod["metadata"]
    }


async def test_a_quota_of_the_real_server_limits_growth(site: Site) -> None:
    """T65: its own pods are in `used` and not counted twice."""
    it = await scaled(site)
    pods = len(site.all(POD))
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few", "namespace": site.namespace},
        "spec": {"hard": {"pods": str(pods + 1)}},
    }
    site.test.apply(quota)

    def counted() -> bool:
        status = site.get(QUOTA, "few").get("status", {})
        return str(status.get("used", {}).get("pods")) == str(pods)

    await eventually(counted, "the quota has counted")
    await it.step()
    await grow(it)
    assert it.count() == 2


@pytest.mark.parametrize("mode", ["Nobody", ""])
def test_a_mode_that_does_not_exist_is_refused(site: Site, mode: str) -> None:
    with pytest.raises(Refused, match="Operator"):
        site.apply(stages=[{"name": "talker", "scaling": {**SCALING, "mode": mode}}])


async def test_what_was_learned_is_in_the_status_and_outlives_the_operator(site: Site) -> None:
    """Through the schema of the real server: nothing of it is pruned, and a second process goes on from it."""
    it = await scaled(site, maxReplicas=1)
    await it.step()
    for _ in range(45):
        it.now += timedelta(seconds=15)
        it.scraper.ended += 4
        await it.autoscaler.step(Key(site.namespace, "p"))
    await it.look()
    kept = site.status()["learned"]
    talker = next(s for s in kept["stages"] if s["name"] == "talker")
    assert talker["learnedFor"] and talker["stepNanoseconds"] == pytest.approx(2e9, rel=0.01)
    assert talker["arrivalsPerMinute"] and talker["cautionThousandths"] > 0
    successor = Scaled(site, Tuning())
    successor.scraper, successor.now = it.scraper, it.now
    await successor.look()
    assert site.status()["learned"] == kept, "a restart alone writes nothing"
    for _ in range(3):
        await successor.step(4)
    assert successor.autoscaler._tracked[Key(site.namespace, "p")].state.learned[1].weight > 4
