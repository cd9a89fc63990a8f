"""Rollouts: which revisions run, what gives way, and that any sequence of edits ends with one revision and no orphan."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_operator.kinds import CONFIG_MAP, DEPLOYMENT, PIPELINE, SERVICE, STAGE
from tests.unit.operator.world import NS, STAGES, World


def revision_args(number: int) -> list[dict[str, object]]:
    """A spec that differs from others by an engine argument alone: a new revision of the same shape."""
    return [{"name": "thinker", "engineArgs": [{"name": "seed", "value": str(number)}]}]


async def made(strategy: str = "Auto", replicas: int = 1, **rollout: object) -> World:
    world = World()
    world.apply(stages=revision_args(0), rollout={"strategy": strategy, **rollout})
    await world.converge()
    for stage in STAGES:
        if replicas != 1:
            world.scale(stage, replicas)
    await world.converge()
    assert world.truth("Ready") == "True"
    return world


def edit(world: World, number: int, strategy: str = "Auto", **rollout: object) -> None:
    world.apply(stages=revision_args(number), rollout={"strategy": strategy, **rollout})


async def test_surge_keeps_the_old_revision_until_the_entry_has_moved() -> None:
    """T42, T44: Serving never goes False in a rollout with room; old stages go only after the new entry is Ready."""
    world = await made("Surge")
    old = world.entry_revision()
    world.broken = {"code2wav"}  # new pods of the last stage take their time
    edit(world, 1, "Surge")
    await world.reconcile()
    new = world.entry_revision()
    assert new != old
    assert world.revisions() == {old, new}
    assert world.condition("Updated")["status"] == "False"  # type: ignore[index]
    world.broken = {f"code2wav@{new}"}
    for _ in range(5):
        world.settle()
        await world.reconcile()
        assert world.truth("Serving") == "True"
        assert world.revisions() == {old, new}
    assert world.status()["servingRevision"] == old
    world.broken = set()
    await world.converge()
    assert world.revisions() == {new}
    assert world.status()["servingRevision"] == new
    assert world.truth("Ready") == "True"
    assert len(world.kube.all(CONFIG_MAP)) == 1


async def test_recreate_lets_the_old_pods_go_first() -> None:
    world = await made("Recreate")
    old = world.entry_revision()
    edit(world, 1, "Recreate")
    await world.reconcile()
    assert world.revisions() == set(), "old ones deleted, new ones wait for the pods to be gone"
    await world.reconcile()
    assert world.revisions() == set()
    await world.converge()
    assert world.revisions() == {world.entry_revision()}
    assert world.entry_revision() != old


async def test_surge_without_room_waits() -> None:
    world = await made("Surge")
    old = world.entry_revision()
    world.room = dict.fromkeys(STAGES, 1)
    edit(world, 1, "Surge")
    for _ in range(10):
        world.settle()
        world.wait(60)
        await world.reconcile()
    assert world.revisions() == {old, world.entry_revision()}
    assert world.truth("Serving") == "True"
    assert world.condition("PlacementFeasible")["reason"] == "Unschedulable"  # type: ignore[index]


async def test_auto_takes_the_place_of_a_single_old_pod() -> None:
    """T38: full node: the surge would wait for ever; the old pod gives way, an Event names the blocker."""
    world = await made("Auto")
    world.room = {"talker": 1}
    edit(world, 1)
    await world.reconcile()
    world.settle()
    requeue = await world.reconcile()
    assert requeue.after is not None, "somebody must look again when the grace is over"
    assert "SurgeBlocked" not in world.events(), "the node autoscaler gets a chance first"
    assert len(world.revisions()) == 2
    world.wait(20)
    await world.converge()
    assert "SurgeBlocked" in world.events()
    assert world.revisions() == {world.entry_revision()}
    assert world.truth("Ready") == "True"


async def test_auto_never_takes_the_last_old_pod_before_the_new_one_answers() -> None:
    """T38, T39: two replicas on a full node: one at a time, requests are answered throughout."""
    world = await made("Auto", replicas=2)
    world.room = dict.fromkeys(STAGES, 2)
    edit(world, 1)
    for _ in range(30):
        world.wait(20)
        await world.reconcile()
        world.settle()
        await world.reconcile()
        assert world.truth("Serving") == "True"
    assert world.revisions() == {world.entry_revision()}
    assert world.truth("Ready") == "True"
    assert {n for (_, _), n in world.stage_deployments().items()} == {2}


async def test_auto_gives_the_last_pod_when_one_place_is_not_enough() -> None:
    """Two old pods of half a node each, one new pod that needs the whole node: after the second grace all give way."""
    world = await made("Auto", replicas=2)
    edit(world, 1)
    await world.reconcile()
    new = world.entry_revision()

    def nothing_fits_beside_old() -> None:
        old_talkers = [p for p in world.pods("talker") if p["metadata"]["labels"]["serving.omni.dev/revision"] != new]
        world.room["talker"] = len(old_talkers) if old_talkers else 2

    for _ in range(30):
        nothing_fits_beside_old()
        world.settle()
        world.wait(20)
        await world.reconcile()
    assert world.revisions() == {new}
    assert world.truth("Ready") == "True"


async def test_revert_in_the_middle_of_a_rollout() -> None:
    """T39: R1 -> R2 (never ready) -> R1: R2 leaves nothing behind, R1 never stopped answering."""
    world = await made()
    old = world.entry_revision()
    world.broken = {"talker"}
    edit(world, 1)
    await world.reconcile()
    middle = world.entry_revision()
    world.broken = {f"talker@{middle}"}
    world.settle()
    await world.reconcile()
    assert world.revisions() == {old, middle}
    edit(world, 0)
    for _ in range(6):
        await world.reconcile()
        assert world.truth("Serving") == "True"
        world.settle()
    assert world.revisions() == {old}
    assert world.truth("Ready") == "True"


async def test_bad_revision_does_not_block_the_next_one() -> None:
    """A revision that never gets ready is dropped as soon as the next one comes; two at most exist."""
    world = await made()
    old = world.entry_revision()
    for number in range(1, 5):
        edit(world, number)
        await world.reconcile()
        world.broken = {f"*@{world.entry_revision()}"}
        world.settle()
        await world.reconcile()
        assert world.revisions() == {old, world.entry_revision()}
        assert world.truth("Serving") == "True"
    world.broken = set()
    await world.converge()
    assert world.revisions() == {world.entry_revision()}


async def test_entry_that_blinks_does_not_lose_its_stages() -> None:
    """The old entry is unready for a moment in the middle of a rollout: its stages stay."""
    world = await made("Surge")
    old = world.entry_revision()
    edit(world, 1, "Surge")
    await world.reconcile()
    new = world.entry_revision()
    pods = [p for p in world.pods("entry") if p["metadata"]["labels"]["serving.omni.dev/revision"] == old]
    world.kube.edit(
        world.kube.kinds["pods"],
        NS,
        pods[0]["metadata"]["name"],
        lambda b: b["status"].update(conditions=[{"type": "Ready", "status": "False"}]),
    )
    await world.reconcile()
    assert world.revisions() == {old, new}


async def test_draining_entry_keeps_its_stages() -> None:
    """T44: the entry has moved over, the old entry finishes its streams: its stages stay until it is gone."""
    world = await made("Surge")
    old = world.entry_revision()
    edit(world, 1, "Surge")
    await world.reconcile()
    new = world.entry_revision()
    pod = world.kube.kinds["pods"]
    draining = world.pods("entry")[0]["metadata"]["name"]
    world.kube.edit(pod, NS, draining, lambda b: b["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z"))
    kept = world.kube.objects[("pods", NS, draining)]
    world.settle()
    world.settle()
    world.kube.objects[("pods", NS, draining)] = kept  # the Deployment has let it go, the kubelet still drains it
    await world.reconcile()
    assert world.revisions() == {old, new}
    await world.converge()
    assert world.revisions() == {new}


async def test_removed_stage_lives_as_long_as_the_revision_that_needs_it() -> None:
    """A stage that joins another's pods: its own Deployment, Service and OmniStage serve the old revision to its end."""
    world = await made("Surge")
    old = world.entry_revision()
    grouped = [{"name": "talker", "podGroup": "voice"}, {"name": "code2wav", "podGroup": "voice"}]
    world.broken = {"talker"}
    world.apply(stages=grouped, rollout={"strategy": "Surge"})
    await world.reconcile()
    assert ("code2wav", old) in world.stage_deployments()
    world.broken = set()
    await world.converge()
    assert set(world.stage_deployments()) == {(s, world.entry_revision()) for s in ("thinker", "talker")}
    assert set(world.kube.all(STAGE)) == {f"p-{s}" for s in STAGES}, "a follower keeps its OmniStage"
    assert world.truth("Ready") == "True"
    assert "p-code2wav" not in world.kube.all(world.kube.kinds["poddisruptionbudgets"])
    assert "p-code2wav" in world.kube.all(SERVICE)


async def test_selectors_never_change() -> None:
    """T1: whatever is edited on the pipeline, selector bytes are constant per object."""
    world = await made()
    seen: dict[str, object] = {}

    def check() -> None:
        for kind, path in ((SERVICE, "selector"), (DEPLOYMENT, "selector")):
            for name, body in world.kube.all(kind).items():
                assert seen.setdefault(f"{kind.plural}/{name}", body["spec"][path]) == body["spec"][path]

    check()
    world.kube.edit(PIPELINE, NS, "p", lambda b: b["metadata"].update(labels={"a": "b"}, annotations={"queue": "x"}))
    await world.converge()
    check()
    for number in range(1, 3):
        edit(world, number)
        await world.converge()
        check()


async def test_selector_of_an_earlier_version_is_replaced_once() -> None:
    """T2: an immutable difference leads to one delete and one create, with an Event, not to a loop."""
    world = await made()
    name = "p-entry"
    world.kube.edit(DEPLOYMENT, NS, name, lambda b: b["spec"].update(selector={"matchLabels": {"old": "label"}}))
    uid = world.kube.all(DEPLOYMENT)[name]["metadata"]["uid"]
    await world.converge()
    assert world.kube.all(DEPLOYMENT)[name]["metadata"]["uid"] != uid
    assert "Deleted" in world.events()
    world.kube.calls.clear()
    await world.reconcile()
    assert world.kube.writes == []


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("edit"), st.integers(0, 3)),
        st.tuples(st.just("scale"), st.tuples(st.sampled_from(STAGES), st.integers(1, 3))),
        st.tuples(st.just("break"), st.sampled_from([*STAGES, "entry"])),
        st.tuples(st.just("heal"), st.none()),
        st.tuples(st.just("full"), st.tuples(st.sampled_from(STAGES), st.integers(1, 2))),
        st.tuples(st.just("delete"), st.sampled_from(["p-talker", "p-thinker"])),
        st.tuples(st.just("restart"), st.none()),
        st.tuples(st.just("settle"), st.none()),
        st.tuples(st.just("wait"), st.integers(1, 100)),
    ),
    max_size=14,
)


@pytest.mark.parametrize("strategy", ["Auto", "Surge", "Recreate"])
@settings(max_examples=12, deadline=None)
@given(steps=STEPS)
def test_any_sequence_converges_to_the_newest_without_orphans(strategy: str, steps: list[tuple[str, object]]) -> None:
    """T39: random edits, scalings, failures and restarts; then calm: one revision, every child once, Ready, no write."""

    async def play() -> None:
        world = await made(strategy)
        for action, value in steps:
            match action, value:
                case "edit", int(number):
                    edit(world, number, strategy)
                case "scale", (str(stage), int(count)):
                    if f"p-{stage}" in world.kube.all(STAGE):
                        world.scale(stage, count)
                case "break", str(stage):
                    world.broken.add(stage)
                case "heal", _:
                    world.broken.clear()
                case "full", (str(stage), int(count)):
                    world.room[stage] = count
                case "delete", str(name):
                    if name in world.kube.all(STAGE):
                        world.kube.remove(STAGE, NS, name)
                case "restart", _:
                    world.restart_operator()
                case "settle", _:
                    world.settle()
                case "wait", int(seconds):
                    world.wait(seconds)
            await world.reconcile()
            assert len(world.revisions()) <= 2
        world.broken.clear()
        world.room.clear()
        await world.converge()
        assert world.truth("Ready") == "True", world.status()
        assert set(world.stage_deployments()) == {(s, world.entry_revision()) for s in STAGES}
        assert len(world.kube.all(CONFIG_MAP)) == 1
        world.kube.calls.clear()
        await world.reconcile()
        assert world.kube.writes == []

    asyncio.run(play())
