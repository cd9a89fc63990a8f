"""The site: readiness, the ledger that follows profiles and pipelines, and what is read again before a refusal."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import pytest

from omni_operator.errors import NotFound, Transient
from omni_operator.kinds import PROFILE, STAGE, Kind
from omni_operator.kube import Kube, Listing
from omni_webhooks.context import NODES, PROFILES
from omni_webhooks.ledger import StageCount
from omni_webhooks.site import PlacementOptions, Site
from tests.apiserver.webhooks.corpus import World

ALL = 75.0


@dataclass
class Live(Kube):
    """What the API server says now."""

    profiles: list[dict[str, Any]] = field(default_factory=list)
    stage: dict[str, Any] | None = None
    lists: int = 0
    error: Exception | None = None

    async def list(self, kind: Kind, namespace: str | None, selector: str = "") -> Listing:
        self.lists += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return Listing(tuple(self.profiles) if kind is PROFILE else (), "1")

    async def get(self, kind: Kind, namespace: str | None, name: str, timeout: float = 1.0) -> dict[str, Any]:
        assert kind is STAGE
        if self.stage is None:
            raise NotFound("no such stage", 404)
        return self.stage


class Clock:
    now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def site(live: Live | None = None, **options: Any) -> Site:
    return Site(live or Live(), PlacementOptions(**options), monotonic=Clock())


def _revised(body: dict[str, Any], version: str) -> dict[str, Any]:
    return {**body, "metadata": {**body["metadata"], "resourceVersion": version}}


def profile(name: str) -> dict[str, Any]:
    return next(p for p in World().profiles() if p["metadata"]["name"] == name)


class TestReadiness:
    def test_not_before_everything_is_listed(self) -> None:
        assert "omnipipelines not listed yet" in str(site().problem(ALL))

    def test_old_copies_are_named(self) -> None:
        made = site()
        for mirror in made.mirrors:
            mirror._complete_at = made._monotonic()
        assert made.problem(ALL) is None
        made.pods._complete_at = made._monotonic() - 80
        assert made.problem(ALL) == "cache: pods 80 s old"

    def test_nodes_that_nobody_asks_about_are_not_waited_for(self) -> None:
        kinds = {mirror.kind.plural for mirror in site(nodes=False).mirrors}
        assert not {"nodes", "pods", "resourcequotas"} & kinds
        context = site(nodes=False).context()
        assert context.ages[NODES] == 0.0
        assert not context.nodes_are_known


class TestLedger:
    def test_it_follows_pipelines_and_stages(self) -> None:
        made = site()
        for given in World().profiles():
            key = ("", given["metadata"]["name"])
            made.profiles._take("ADDED", given)
            assert key in made.profiles.items
        running = next(p for p in World().pipelines() if p["metadata"]["name"] == "running")
        made.pipelines._take("ADDED", running)
        for tenant in World().tenants():
            made.tenants._take("ADDED", tenant)
        context = made.context()
        tenant = context.tenant_of("team-a")
        assert tenant is not None
        assert dict(context.in_use(tenant)) == {"nvidia-h100-80gb": 3}
        assert dict(context.in_use(tenant, without=("team-a", "running"))) == {}
        stage = {
            "metadata": {"namespace": "team-a", "name": "running-thinker"},
            "spec": {"pipelineRef": {"name": "running"}, "stageName": "thinker", "replicas": 4},
        }
        made.stages._take("ADDED", stage)
        assert dict(made.context().in_use(tenant)) == {"nvidia-h100-80gb": 9}, "four thinkers of two, one talker"
        made.stages._take("DELETED", stage)
        made.pipelines._take("DELETED", running)
        assert dict(made.context().in_use(tenant)) == {}
        assert made.ledger.owners("team-a", "running-thinker") == frozenset()

    async def test_a_profile_that_comes_later_counts(self) -> None:
        made = site()
        running = next(p for p in World().pipelines() if p["metadata"]["name"] == "running")
        made.pipelines._take("ADDED", running)
        assert made.ledger.pools_of(("team-a", "running")) == ()
        reckoning = asyncio.create_task(made._keep_reckoning())
        made.profiles._take("ADDED", profile("cuda"))
        for _ in range(20):  # turns of the loop
            await asyncio.sleep(0)
        reckoning.cancel()
        assert made.ledger.pools_of(("team-a", "running"))

    def test_a_context_that_is_in_use_does_not_change(self) -> None:
        made = site()
        made.profiles._take("ADDED", profile("cuda"))
        before = made.context()
        made.profiles._take("DELETED", profile("cuda"))
        assert set(before.profiles) == {"cuda"}
        assert set(made.context().profiles) == set()


class Followed(Live):
    """Lists and watches that say nothing more."""

    async def pages(self, kind: Kind, namespace: str | None, selector: str = "") -> AsyncGenerator[Listing, None]:
        yield Listing((), "1")

    async def watch(self, kind: Kind, **_: Any) -> AsyncGenerator[dict[str, Any], None]:
        await asyncio.Event().wait()
        yield {}


async def test_complete_copies_are_no_work_for_the_garbage_collector() -> None:
    """A look through two thousand pipelines takes a quarter of a second, in which no review is answered."""
    made = site(Followed())
    before = gc.get_freeze_count()
    following = asyncio.create_task(made.run())
    try:
        for _ in range(100):  # turns of the loop
            await asyncio.sleep(0)
        assert made.problem(ALL) is None
        assert gc.get_freeze_count() > before
    finally:
        following.cancel()
        gc.unfreeze()


class TestConfirm:
    async def test_profiles_as_they_are_now(self) -> None:
        live = Live(profiles=[profile("cuda")])
        made = site(live)
        assert made.context().profiles == {}
        context = await made.confirm(made._monotonic(), made.context())
        assert context is not None
        assert set(context.profiles) == {"cuda"}
        assert context.ages[PROFILES] == 0.0, "fresh, however old the copy is"

    async def test_calls_at_the_same_time_share_one_reading(self) -> None:
        live = Live()
        made = site(live)
        asked = made._monotonic()
        await asyncio.gather(*(made.confirm(asked, made.context()) for _ in range(5)))
        assert live.lists == 2, "profiles and tenants, once"
        await made.confirm(made._monotonic(), made.context())
        assert live.lists == 4, "a later call reads again"

    async def test_an_api_server_that_does_not_answer_is_not_waited_for(self) -> None:
        made = site(Live(error=Transient("refused")))
        assert await made.confirm(0.0, made.context()) is None

    async def test_what_was_seen_already_is_not_judged_twice(self) -> None:
        """Unless the watch brought something in between, or the API server says what the watch has not brought."""
        old, new = _revised(profile("cuda"), "1"), _revised(profile("cuda"), "2")
        live = Live(profiles=[old])
        made = site(live)
        made.profiles._take("ADDED", old)
        seen = made.context()
        assert await made.confirm(made._monotonic(), seen) is None
        live.profiles = [new]
        assert await made.confirm(made._monotonic(), seen) is not None
        made.profiles._take("MODIFIED", new)
        assert await made.confirm(made._monotonic(), seen) is not None
        assert await made.confirm(made._monotonic(), made.context()) is None
        live.profiles = []
        gone = await made.confirm(made._monotonic(), made.context())
        assert gone is not None
        assert gone.profiles == {}

    async def test_a_profile_that_cannot_be_read_does_not_end_a_review(self) -> None:
        made = site(Live(profiles=[profile("cuda"), {"metadata": {"name": "odd", "resourceVersion": "7"}}]))
        context = await made.confirm(made._monotonic(), made.context())
        assert context is not None
        assert set(context.profiles) == {"cuda"}


class TestStage:
    async def test_one_that_the_watch_has_not_brought_yet(self) -> None:
        spec = {"pipelineRef": {"name": "p"}, "stageName": "talker", "replicas": 1, "minReplicas": 1, "maxReplicas": 4}
        made = site(Live(stage={"spec": spec}))
        assert await made.stage(("ns", "p-talker")) == StageCount("p", "talker", 1, 1, 4, None)

    async def test_none(self) -> None:
        assert await site().stage(("ns", "p-talker")) is None


@pytest.mark.parametrize("namespace", ["free", "elsewhere"])
def test_a_namespace_of_no_tenant(namespace: str) -> None:
    assert World().context().tenant_of(namespace) is None
