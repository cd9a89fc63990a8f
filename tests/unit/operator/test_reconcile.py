"""Whole reconciles in memory: create, repair, scale, break, delete. One world per test, no clock but ours."""

from __future__ import annotations

import copy

import pytest

from omni_operator.errors import Conflict
from omni_operator.kinds import CONFIG_MAP, DEPLOYMENT, PIPELINE, PROFILE, SECRET, SERVICE, STAGE
from omni_operator.names import MANAGED_BY_LABEL
from tests.unit.operator.world import NS, STAGES, World, a_profile, made


async def test_first_pass_says_that_work_is_going_on() -> None:
    """An object without observedGeneration looks finished to kstatus: the first pass must say that it is not."""
    world = World()
    world.apply()
    await world.reconcile()
    assert world.status()["observedGeneration"] == 1
    assert world.truth("Ready") in ("Unknown", "False")
    assert world.truth("Reconciling") == "True"
    assert world.truth("Stalled") is None
    assert world.kube.writes[0] == ("patch_status", "omnipipelines", "p"), "before any child"


async def test_bad_spec_is_an_event_too() -> None:
    world = World()
    world.apply(topology="nonsense")
    await world.reconcile()
    assert world.events() == ["InvalidSpec"]
    reasons = {c["type"]: c["reason"] for c in world.status()["conditions"]}
    assert set(reasons.values()) == {"InvalidSpec"}, "nothing sounds as if it were still on its way"


async def test_converges_to_ready_with_every_child() -> None:
    world = await made()
    assert set(world.kube.all(STAGE)) == {f"p-{s}" for s in STAGES}
    assert set(world.stage_deployments()) == {(s, world.entry_revision()) for s in STAGES}
    assert set(world.kube.all(SERVICE)) == {"p", "p-entry-control", *(f"p-{s}" for s in STAGES)}
    assert set(world.kube.all(SECRET)) == {"p-curve"}
    assert len(world.kube.all(CONFIG_MAP)) == 1
    assert [world.truth(k) for k in ("Ready", "Serving", "Updated", "PlacementFeasible", "ConnectorsReady")] == [
        "True"
    ] * 5
    assert world.truth("Reconciling") is None
    assert world.truth("Stalled") is None
    assert world.status()["stagesReady"] == "3/3"
    assert world.status()["endpoint"] == "http://p.ns.svc/v1"
    assert {"Created", "AllStagesReady"} <= set(world.events())


async def test_idle_means_no_write() -> None:
    """T7: twenty resyncs, no mutating request, no resourceVersion moves."""
    world = await made()
    before = world.fingerprint()
    world.kube.calls.clear()
    for _ in range(20):
        world.wait(300)
        await world.reconcile()
    assert world.kube.writes == []
    assert world.fingerprint() == before


async def test_secret_is_tried_once_after_a_start_and_never_read() -> None:
    """T62: create-only; an idle resync never tries."""
    world = await made()
    world.kube.calls.clear()
    world.restart_operator()
    for _ in range(3):
        await world.reconcile()
    assert [c for c in world.kube.calls if c[1] == "secrets"] == [("create", "secrets", "p-curve")]


async def test_secret_is_made_again_while_pods_wait_for_it() -> None:
    world = await made()
    world.kube.remove(SECRET, NS, "p-curve")
    pod = world.pods("talker")[0]["metadata"]["name"]
    waiting = {"state": {"waiting": {"reason": "ContainerCreating"}}, "name": "engine"}
    world.kube.edit(
        world.kube.kinds["pods"],
        NS,
        pod,
        lambda b: b["status"].update(
            containerStatuses=[waiting],
            conditions=[{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
        ),
    )
    world.wait(30)
    await world.reconcile()
    assert set(world.kube.all(SECRET)) == {"p-curve"}


async def test_user_edits_of_our_fields_are_reverted_others_stay() -> None:
    """T8: by field owner."""
    world = await made()
    revision = world.entry_revision()

    def meddle(body: dict[str, object]) -> None:
        body["spec"]["replicas"] = 7  # type: ignore[index]
        body["metadata"]["labels"]["team"] = "speech"  # type: ignore[index]

    world.kube.edit(DEPLOYMENT, NS, f"p-talker-{revision}", meddle)
    world.kube.edit(SERVICE, NS, "p", lambda b: b["spec"].update(selector={"app": "other"}))
    await world.converge()
    deployment = world.kube.all(DEPLOYMENT)[f"p-talker-{revision}"]
    assert deployment["spec"]["replicas"] == 1
    assert deployment["metadata"]["labels"]["team"] == "speech"
    assert world.kube.all(SERVICE)["p"]["spec"]["selector"]["serving.omni.dev/stage"] == "entry"


async def test_deleted_children_come_back() -> None:
    world = await made()
    for kind, name in [(SERVICE, "p"), (STAGE, "p-talker"), (DEPLOYMENT, "p-entry")]:
        world.kube.remove(kind, NS, name)
    await world.converge()
    assert world.truth("Ready") == "True"
    assert set(world.kube.all(STAGE)) == {f"p-{s}" for s in STAGES}


async def test_unset_field_leaves_the_child() -> None:
    """T6: a field that the spec no longer sets is removed from the child, not kept by a merge."""
    stages = [{"name": "talker", "scaling": {"minReplicas": 1, "maxReplicas": 4}}]
    world = await made(stages=stages)
    assert world.kube.all(STAGE)["p-talker"]["spec"]["maxReplicas"] == 4
    world.apply()
    await world.converge()
    assert "maxReplicas" not in world.kube.all(STAGE)["p-talker"]["spec"]
    assert world.replicas("talker") == 1


async def test_deletion_makes_nothing_anew() -> None:
    """T51: foreground deletion: the pipeline is going, its children are collected, nothing is made again."""
    world = await made()
    world.kube.edit(PIPELINE, NS, "p", lambda b: b["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"))
    world.kube.remove(DEPLOYMENT, NS, "p-entry")
    world.kube.calls.clear()
    await world.reconcile()
    assert world.kube.writes == []


async def test_a_stage_that_is_being_deleted_gets_no_children() -> None:
    world = await made()
    world.kube.edit(STAGE, NS, "p-talker", lambda b: b["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"))
    world.kube.remove(SERVICE, NS, "p-talker")
    world.kube.calls.clear()
    await world.reconcile()
    assert [c for c in world.kube.writes if c[2].startswith("p-talker")] == []


async def test_foreign_object_is_never_taken() -> None:
    """Adoption only of what our uid controls: a user's Service of the same name stays untouched and is named."""
    world = World()
    mine = {"metadata": {"name": "p", "labels": {}}, "spec": {"selector": {"app": "shop"}, "ports": []}}
    world.kube.put(SERVICE, NS, mine)
    world.apply()
    for _ in range(3):
        await world.reconcile()
        world.settle()
    assert world.kube.all(SERVICE)["p"]["spec"]["selector"] == {"app": "shop"}
    stalled = world.condition("Stalled")
    assert stalled is not None
    assert stalled["reason"] == "NameConflict"
    assert "Service p" in stalled["message"]
    world.kube.remove(SERVICE, NS, "p")
    await world.converge()
    assert world.truth("Stalled") is None
    assert world.truth("Ready") == "True"


async def test_labels_alone_make_nothing_ours() -> None:
    """Somebody copies our labels onto an object: it is neither deleted nor changed."""
    world = await made()
    copied = copy.deepcopy(world.kube.all(CONFIG_MAP)[next(iter(world.kube.all(CONFIG_MAP)))])
    copied["metadata"] = {"name": "copy", "labels": {**copied["metadata"]["labels"], MANAGED_BY_LABEL: "omni-operator"}}
    world.kube.put(CONFIG_MAP, NS, copied)
    await world.converge()
    assert "copy" in world.kube.all(CONFIG_MAP)


async def test_recreated_pipeline_waits_for_the_garbage_collector() -> None:
    """Deleted and made anew under one name: children of the old uid are not adopted."""
    world = await made()
    old = copy.deepcopy(world.kube.objects[(PIPELINE.plural, NS, "p")])
    del world.kube.objects[(PIPELINE.plural, NS, "p")]  # without collecting
    world.apply()
    await world.reconcile()
    refs = world.kube.all(SERVICE)["p"]["metadata"]["ownerReferences"]
    assert refs[0]["uid"] == old["metadata"]["uid"]
    assert world.truth("Stalled") is None
    for kind in (SERVICE, STAGE, DEPLOYMENT, CONFIG_MAP, SECRET):
        for name, body in list(world.kube.all(kind).items()):
            if any(r["uid"] == old["metadata"]["uid"] for r in body["metadata"].get("ownerReferences", [])):
                world.kube.remove(kind, NS, name)
    for plural, ns, name in list(world.kube.objects):
        body = world.kube.objects.get((plural, ns, name), {"metadata": {}})
        if any(r["uid"] == old["metadata"]["uid"] for r in body["metadata"].get("ownerReferences", [])):
            world.kube.remove(world.kube.kinds[plural], ns, name)
    await world.converge()
    assert world.truth("Ready") == "True"


async def test_status_conflict_is_retried_and_not_forced() -> None:
    world = await made()
    world.scale("talker", 2)
    await world.reconcile()
    world.settle()

    def somebody_writes(verb: str, plural: str, name: str) -> None:
        if verb == "patch_status" and plural == "omnipipelines":
            world.kube.before = lambda *_: None
            world.kube.edit(PIPELINE, NS, "p", lambda b: b["metadata"].setdefault("labels", {}).update(x="y"))

    world.kube.before = somebody_writes
    with pytest.raises(Conflict):
        await world.reconcile()
    await world.converge()
    assert world.truth("Ready") == "True"


async def test_stage_of_a_user_is_answered_not_adopted() -> None:
    world = await made()
    for name, pipeline in [("mine", "p"), ("lost", "no-such-pipeline")]:
        body = {"metadata": {"name": name}, "spec": {"pipelineRef": {"name": pipeline}, "stageName": "talker"}}
        world.kube.put(STAGE, NS, body)
        await world.reconcile(pipeline)
        status = world.kube.all(STAGE)[name]["status"]
        stalled = next(c for c in status["conditions"] if c["type"] == "Stalled")
        assert stalled["reason"] == "NotOwned"
        world.kube.calls.clear()
        await world.reconcile(pipeline)
        assert world.kube.writes == []
    assert "mine" in world.kube.all(STAGE)


async def test_profile_change_rolls_out_and_profile_loss_keeps_what_runs() -> None:
    world = await made()
    old = world.entry_revision()
    world.kube.put(PROFILE, "", a_profile(image="localhost/omni:2"))
    await world.converge()
    assert world.entry_revision() != old
    assert world.revisions() == {world.entry_revision()}
    running = world.stage_deployments()
    world.kube.remove(PROFILE, "", "cpu")
    await world.converge()
    stalled = world.condition("Stalled")
    assert stalled is not None
    assert stalled["reason"] == "ProfileNotFound"
    assert world.stage_deployments() == running


async def test_serving_false_names_the_stage_that_is_down() -> None:
    """T69."""
    world = await made()
    world.broken.add("talker")
    world.settle()
    await world.converge()
    serving = world.condition("Serving")
    assert serving is not None
    assert (serving["status"], serving["reason"]) == ("False", "StageDown")
    assert "talker" in serving["message"]
    assert "thinker" not in serving["message"]
    world.broken.clear()
    world.settle()
    await world.converge()
    assert world.truth("Serving") == "True"
    assert "Recovered" in world.events()
