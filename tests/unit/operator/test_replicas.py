"""Who owns the replica count: the pipeline's request is applied when it changes, otherwise whoever scales keeps it."""

from __future__ import annotations

import pytest

from omni_operator.kinds import STAGE
from omni_operator.names import REQUESTED_ANNOTATION
from omni_operator.observe import parse_stage
from omni_operator.observed import Live, LiveStage
from omni_operator.plan.replicas import outside_bounds, plan_replica_request
from omni_runtime.deploy.plan import ReplicaBounds
from tests.unit.operator.world import World

FIXED_2 = ReplicaBounds(requested=2, minimum=2, maximum=2)
FIXED_3 = ReplicaBounds(requested=3, minimum=3, maximum=3)
FREE = ReplicaBounds(requested=None, minimum=1, maximum=None)
RANGE = ReplicaBounds(requested=None, minimum=2, maximum=4)


def stage(replicas: int | None, requested: str | None) -> LiveStage:
    body = {
        "metadata": {"name": "p-talker", "annotations": {REQUESTED_ANNOTATION: requested} if requested else {}},
        "spec": {"pipelineRef": {"name": "p"}, "stageName": "talker"},
    }
    if replicas is not None:
        body["spec"]["replicas"] = replicas
    return LiveStage(Live(STAGE, body), parse_stage(body))


@pytest.mark.parametrize(
    ("observed", "bounds", "expected"),
    [
        pytest.param(None, FIXED_2, (2, "2"), id="new: seeded with the request"),
        pytest.param(None, FREE, (1, "auto"), id="new: seeded with the minimum"),
        pytest.param(None, RANGE, (2, "auto"), id="new: seeded with minReplicas"),
        pytest.param(stage(None, None), FREE, (1, "auto"), id="without a count GET /scale is an error: seeded"),
        pytest.param(stage(5, "2"), FIXED_2, None, id="T12: kubectl scale to 5 holds"),
        pytest.param(stage(5, "auto"), FREE, None, id="T12: HPA holds"),
        pytest.param(stage(5, "2"), FIXED_3, (3, "3"), id="the pipeline's request changed: applied"),
        pytest.param(stage(4, "2"), FREE, (4, "auto"), id="T13: request left out: the count that runs stays"),
        pytest.param(stage(4, "auto"), FIXED_2, (2, "2"), id="request came back: applied"),
        pytest.param(stage(9, "auto"), RANGE, None, id="out of range: said, never corrected"),
        pytest.param(stage(0, "auto"), FREE, None, id="scaled to zero is a count"),
        pytest.param(stage(4, "2"), None, None, id="spec invalid: untouched"),
        pytest.param(None, None, (1, "auto"), id="spec invalid and the stage gone: seeded"),
    ],
)
def test_replica_request(
    observed: LiveStage | None, bounds: ReplicaBounds | None, expected: tuple[int, str] | None
) -> None:
    assert plan_replica_request(observed, bounds) == expected


@pytest.mark.parametrize(
    ("count", "bounds", "problem"),
    [(1, RANGE, "minReplicas"), (5, RANGE, "maxReplicas"), (3, RANGE, None), (9, FIXED_2, None), (9, None, None)],
)
def test_out_of_range(count: int, bounds: ReplicaBounds | None, problem: str | None) -> None:
    found = outside_bounds(count, bounds)
    assert found is None if problem is None else problem in (found or "")


async def test_kubectl_scale_holds_through_reconciles_and_a_restart() -> None:
    """T12."""
    world = World()
    world.apply(stages=[{"name": "talker", "replicas": 2}])
    await world.converge()
    assert world.replicas("talker") == 2
    world.scale("talker", 5)
    await world.converge()
    for _ in range(10):
        await world.reconcile()
    world.restart_operator()
    await world.converge()
    assert world.replicas("talker") == 5
    assert world.stage_deployments()[("talker", world.entry_revision())] == 5
    assert world.truth("Ready") == "True"
    world.apply(stages=[{"name": "talker", "replicas": 3}])
    await world.converge()
    assert world.replicas("talker") == 3
    assert "Scaled" in world.events()
    world.apply(stages=[{"name": "talker"}])
    await world.converge()
    assert world.replicas("talker") == 3, "T13"


async def test_a_change_of_replicas_restarts_nothing() -> None:
    world = World()
    world.apply(stages=[{"name": "talker", "replicas": 1}])
    await world.converge()
    before = {p["metadata"]["name"] for p in world.pods("talker")}
    world.apply(stages=[{"name": "talker", "replicas": 2}])
    await world.converge()
    assert before < {p["metadata"]["name"] for p in world.pods("talker")}


async def test_scaled_to_zero_is_neither_an_error_nor_progress() -> None:
    world = World()
    world.apply()
    await world.converge()
    world.scale("talker", 0)
    await world.converge()
    ready = world.condition("Ready")
    assert ready is not None
    assert (ready["status"], ready["reason"]) == ("False", "ScaledToZero")
    assert world.condition("Serving")["reason"] == "ScaledToZero"  # type: ignore[index]
    assert world.truth("Stalled") is None


async def test_follower_says_that_its_count_has_no_effect() -> None:
    world = World()
    world.apply(stages=[{"name": "talker", "podGroup": "voice"}, {"name": "code2wav", "podGroup": "voice"}])
    await world.converge()
    world.scale("talker", 2)
    world.scale("code2wav", 4)
    await world.converge()
    follower = world.kube.all(STAGE)["p-code2wav"]
    assert follower["spec"]["colocatedWith"] == "talker"
    assert follower["status"]["replicas"] == 2
    scaling = next(c for c in follower["status"]["conditions"] if c["type"] == "ScalingReady")
    assert (scaling["status"], scaling["reason"]) == ("False", "FollowsLeader")
    assert "4" in scaling["message"]
    assert follower["status"]["selector"] == world.kube.all(STAGE)["p-talker"]["status"]["selector"]
    assert follower["spec"]["replicas"] == 4, "said, never corrected"
