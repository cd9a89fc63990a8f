"""PlacementFeasible after admission: what stands in the way and what helps, asked only while something waits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from omni_operator.errors import Transient
from omni_operator.fleet import FRESH_SECONDS, FleetReader
from omni_operator.kinds import DEPLOYMENT, DEVICE_CLASS, NODE, PIPELINE, POD, PROFILE, QUOTA, SLICE, TENANT, JsonObject
from omni_operator.observed import Key
from omni_operator.placement.budgets import exceeds
from omni_operator.plan.placement import LOOK_AGAIN_SECONDS
from tests.unit.operator.world import NS, STAGES, World, a_profile
from tests.unit.placement.dra_objects import a_class, a_device, a_slice

GPU = "nvidia.com/gpu"
MODEL = {"uri": "hf://someone/smol"}  # packaged models are in the CPU image only


def a_node(name: str, devices: int, **spec: Any) -> JsonObject:
    allocatable = {"cpu": "64", "memory": "512Gi", "pods": "110", GPU: str(devices)}
    return {"metadata": {"name": name}, "spec": spec, "status": {"allocatable": allocatable}}


def a_world(devices: int, missing_nodes: str | None = None) -> World:
    """One node; three stages that want a device each."""
    world = World()
    profile = a_profile(resource=GPU)
    if missing_nodes:
        profile["spec"]["missingNodes"] = missing_nodes
    world.kube.put(PROFILE, "", profile)
    world.kube.put(NODE, "", a_node("n1", devices))
    now = iter(range(0, 10**6, int(FRESH_SECONDS) + 1))  # each reading is fresh
    world.cluster.fleet = FleetReader(world.kube, lambda: next(now))
    return world


def _created(at: str, body: JsonObject) -> None:
    body["metadata"]["creationTimestamp"] = at


def asked_for_nodes(world: World) -> int:
    return sum(1 for verb, plural, _ in world.kube.calls if verb == "list" and plural == "nodes")


async def test_a_pipeline_with_room_says_so_and_nobody_reads_nodes_any_more() -> None:
    world = a_world(devices=3)
    world.apply(model=MODEL)
    await world.converge()
    assert world.truth("PlacementFeasible") == "True"
    before = world.fingerprint()
    world.kube.calls.clear()
    for _ in range(20):
        world.wait(300)
        await world.reconcile()
    assert asked_for_nodes(world) == 0
    assert world.kube.writes == []
    assert world.fingerprint() == before


async def test_what_is_missing_and_what_helps_stand_in_the_condition() -> None:
    """T38, T65: the pods exist (an autoscaler may look at them), and the condition says more than the scheduler can."""
    world = a_world(devices=2)
    world.room = {"code2wav": 0}
    world.apply(model=MODEL)
    await world.converge()
    assert world.stage_deployments()
    found = world.condition("PlacementFeasible")
    assert found is not None
    assert (found["status"], found["reason"]) == ("False", "Unschedulable")
    assert f"= 3 x {GPU}, the fitting nodes have 2 left" in found["message"]
    assert "fix: add a node like n1" in found["message"]


async def test_the_message_rests_while_nothing_changes() -> None:
    world = a_world(devices=2)
    world.room = {"code2wav": 0}
    world.apply(model=MODEL)
    await world.converge()
    world.kube.calls.clear()
    for _ in range(5):
        world.wait(LOOK_AGAIN_SECONDS)
        requeue = await world.reconcile()
        assert requeue.after is not None
        assert requeue.after <= LOOK_AGAIN_SECONDS, "nodes are not watched"
    assert asked_for_nodes(world) == 5
    assert world.kube.writes == []


async def test_reject_makes_no_half_placed_pipeline() -> None:
    world = a_world(devices=2, missing_nodes="Reject")
    world.apply(model=MODEL)
    await world.converge()
    assert world.kube.all(DEPLOYMENT) == {}
    assert world.truth("PlacementFeasible") == "False"
    assert world.truth("Ready") == "False"
    world.kube.put(NODE, "", a_node("n2", 1))
    await world.converge()
    assert {stage for stage, _ in world.stage_deployments()} == set(STAGES)
    assert world.truth("PlacementFeasible") == "True"


async def test_reject_takes_nothing_from_what_runs() -> None:
    """A node that goes away under a running pipeline is no reason to stop the rest of it."""
    world = a_world(devices=3, missing_nodes="Reject")
    world.apply(model=MODEL)
    await world.converge()
    world.kube.put(NODE, "", a_node("n1", 2))
    world.room = {"talker": 0}
    for name, pod in world.kube.all(POD).items():
        if pod["metadata"]["labels"]["serving.omni.dev/stage"] == "talker":
            world.kube.remove(POD, NS, name)
    await world.converge()
    assert {stage for stage, _ in world.stage_deployments()} == set(STAGES)
    assert world.truth("PlacementFeasible") == "False"


async def test_an_autoscaler_is_waited_for() -> None:
    world = a_world(devices=2, missing_nodes="Warn")
    world.apply(model=MODEL)
    await world.reconcile()
    found = world.condition("PlacementFeasible")
    assert found is not None
    assert (found["status"], found["reason"]) == ("Unknown", "Progressing")
    assert found["message"].startswith("waits for 1 more node: ")
    assert world.stage_deployments(), "pods that pend are what an autoscaler looks at"


async def test_ignore_leaves_it_to_the_scheduler() -> None:
    world = a_world(devices=0, missing_nodes="Ignore")
    world.apply(model=MODEL)
    await world.reconcile()
    found = world.condition("PlacementFeasible")
    assert found is not None
    assert found["status"] == "Unknown"
    assert "node" not in found["message"]


async def test_quota_is_named_as_such() -> None:
    world = a_world(devices=8)
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {f"requests.{GPU}": "1"}}, "status": {"used": {}}}
    world.kube.put(QUOTA, NS, quota)
    world.apply(model=MODEL)
    await world.reconcile()
    found = world.condition("PlacementFeasible")
    assert found is not None
    assert (found["status"], found["reason"]) == ("False", "QuotaExceeded")
    assert "ResourceQuota few" in found["message"]


class TestBudget:
    """What two creates at the same moment got past admission: the older pipeline runs, the younger one waits."""

    def a_world(self, budget: int, missing_nodes: str | None = None) -> World:
        world = a_world(devices=8, missing_nodes=missing_nodes)
        self.allow(world, budget)
        for name, created in (("z", "2026-01-01T00:00:00Z"), ("p", "2026-01-01T00:00:01Z")):
            world.apply(name, model=MODEL)
            world.kube.edit(PIPELINE, NS, name, partial(_created, created))
        return world

    def allow(self, world: World, budget: int) -> None:
        spec = {"namespaces": [NS], "acceleratorBudget": [{"class": "cpu", "count": budget}]}
        world.kube.put(TENANT, "", {"metadata": {"name": "team"}, "spec": spec})

    @pytest.mark.parametrize("missing_nodes", [None, "Reject", "Warn", "Ignore"])
    async def test_the_older_one_goes_first_and_the_younger_one_says_why_it_waits(
        self, missing_nodes: str | None
    ) -> None:
        world = self.a_world(budget=4, missing_nodes=missing_nodes)
        await world.reconcile("p")  # before the older one runs anything
        assert world.stage_deployments() == {}
        found = world.condition("PlacementFeasible")
        assert found is not None
        assert (found["status"], found["reason"]) == ("False", "QuotaExceeded")
        assert exceeds("team", "cpu", 3, 4, 3) in found["message"]
        assert "raise acceleratorBudget of cpu for OmniTenant team to 6" in found["message"]
        await world.converge("z")
        assert world.truth("Ready", "z") == "True"

    async def test_when_the_older_one_goes_the_younger_one_runs(self) -> None:
        world = self.a_world(budget=4)
        await world.converge("z")
        requeue = await world.reconcile("p")
        assert requeue.after is not None
        assert requeue.after <= LOOK_AGAIN_SECONDS
        world.kube.remove(PIPELINE, NS, "z")
        await world.converge("p")
        assert world.truth("Ready") == "True"

    async def test_what_runs_already_counts_for_the_older_one(self) -> None:
        """It came first by the clock, and second to the devices."""
        world = self.a_world(budget=6)
        await world.converge("p")
        assert world.truth("Ready") == "True"
        self.allow(world, 5)
        await world.reconcile("z")
        found = world.condition("PlacementFeasible", "z")
        assert found is not None
        assert exceeds("team", "cpu", 3, 5, 3) in found["message"]

    async def test_enough_for_both(self) -> None:
        world = self.a_world(budget=6)
        for name in ("p", "z", "p"):
            await world.converge(name)
        assert (world.truth("Ready"), world.truth("Ready", "z")) == ("True", "True")

    async def test_nothing_that_runs_is_stopped_when_a_budget_shrinks(self) -> None:
        world = self.a_world(budget=6)
        await world.converge("p")
        before = world.stage_deployments()
        self.allow(world, 1)
        await world.converge("p")
        assert world.stage_deployments() == before
        assert world.truth("Ready") == "True"

    async def test_a_status_of_another_version_changes_nothing(self) -> None:
        """The reconciler runs such a pipeline; its devices are in use all the same."""
        world = self.a_world(budget=4)
        world.kube.edit(PIPELINE, NS, "z", lambda body: body.__setitem__("status", {"conditions": "of old"}))
        await world.reconcile("p")
        found = world.condition("PlacementFeasible")
        assert found is not None
        assert exceeds("team", "cpu", 3, 4, 3) in found["message"]

    async def test_tenants_that_cannot_be_read_stop_nothing(self) -> None:
        world = self.a_world(budget=0)

        def refuse(verb: str, plural: str, _: str) -> None:
            if plural == "omnitenants":
                raise Transient("no", 500, "InternalError")

        world.kube.before = refuse
        await world.converge("p")
        assert world.truth("Ready") == "True"


async def test_pods_of_others_take_room_and_own_ones_do_not() -> None:
    world = a_world(devices=3)
    other = {"resources": {"requests": {"cpu": "1"}, "limits": {GPU: "1"}}}
    pod = {
        "metadata": {"name": "other", "namespace": "elsewhere", "labels": {}},
        "spec": {"nodeName": "n1", "containers": [other]},
        "status": {"phase": "Running"},
    }
    world.kube.put(POD, "elsewhere", pod)
    world.apply(model=MODEL)
    await world.reconcile()
    found = world.condition("PlacementFeasible")
    assert found is not None
    assert "have 2 left" in found["message"]


async def test_nodes_that_cannot_be_read_stop_nothing() -> None:
    world = a_world(devices=3)

    def refuse(verb: str, plural: str, _: str) -> None:
        if plural == "nodes":
            raise Transient("no", 500, "InternalError")

    world.kube.before = refuse
    world.apply(model=MODEL)
    await world.converge()
    assert world.truth("Ready") == "True"


async def test_devices_that_a_dra_driver_offers_are_devices() -> None:
    world = a_world(devices=0)
    world.kube.put(DEVICE_CLASS, "", a_class(resource=GPU))
    world.kube.put(SLICE, "", a_slice([a_device(f"gpu-{i}") for i in range(3)]))
    world.apply(model=MODEL)
    await world.converge()
    assert world.truth("PlacementFeasible") == "True"
    view = await FleetReader(world.kube).view(Key(NS, "p"))
    assert view is not None and view.nodes is not None
    assert view.nodes[0].allocatable[GPU] == 3


@pytest.mark.parametrize(("status", "known"), [(404, True), (500, False)])
async def test_an_api_server_without_dra(status: int, known: bool) -> None:
    """Not served is an answer; any other error is none (T60)."""
    world = a_world(devices=3)

    def refuse(verb: str, plural: str, _: str) -> None:
        if plural in ("resourceslices", "deviceclasses"):
            raise Transient("no", status)

    world.kube.before = refuse
    assert (await FleetReader(world.kube).view(Key(NS, "p")) is not None) is known


async def test_one_reading_serves_many_pipelines_for_a_moment() -> None:
    world = a_world(devices=3)
    clock = [0.0]
    reader = FleetReader(world.kube, lambda: clock[0])
    for name in "abc":
        assert await reader.view(Key(NS, name)) is not None
    assert asked_for_nodes(world) == 1
    clock[0] = FRESH_SECONDS + 1
    view = await reader.view(Key(NS, "a"))
    assert view is not None
    assert view.age_seconds == 0
    assert asked_for_nodes(world) == 2


async def test_a_control_plane_without_nodes_says_nothing() -> None:
    world = a_world(devices=3)
    world.kube.remove(NODE, "", "n1")
    assert await FleetReader(world.kube).view(Key(NS, "p")) is None
