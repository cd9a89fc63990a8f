"""Reconciles in which something goes wrong: the spec, a read, a write, the operator itself."""

from __future__ import annotations

import contextlib

import pytest

from omni_operator.errors import Rejected, Transient
from omni_operator.kinds import DEPLOYMENT, PIPELINE
from tests.unit.operator.world import NS, World, a_pipeline, made

BAD = [
    pytest.param({"topology": "no_such_topology"}, "no_such_topology", id="unknown topology"),
    pytest.param({"stages": [{"name": "singer"}]}, "singer", id="unknown stage"),
    pytest.param({"edges": [{"from": "thinker", "to": "singer"}]}, "singer", id="edge to an unknown stage"),
    pytest.param({"edges": [{"from": "code2wav", "to": "thinker"}]}, "code2wav", id="cycle"),
    pytest.param({"stages": [{"name": "talker"}, {"name": "talker"}]}, "talker", id="two stages of one name"),
    pytest.param(
        {"stages": [{"name": "talker", "replicas": 2, "scaling": {"minReplicas": 1, "maxReplicas": 2}}]},
        "scaling",
        id="replicas with scaling",
    ),
    pytest.param({"runtimeProfile": "nowhere"}, "nowhere", id="unknown profile"),
    pytest.param({"model": None}, "model", id="does not parse"),
    pytest.param({"stages": "nonsense"}, "stages", id="nonsense"),
]


@pytest.mark.parametrize(("spec", "named"), BAD)
async def test_bad_spec_is_a_condition_and_recovers(spec: dict[str, object], named: str) -> None:
    """Good -> bad -> good equals good: Stalled names the violation, what runs keeps running, recovery by itself."""
    world = await made()
    running = world.stage_deployments()
    world.kube.put(PIPELINE, NS, {**a_pipeline(), "spec": {**a_pipeline()["spec"], **spec}})
    await world.converge()
    stalled = world.condition("Stalled")
    assert stalled is not None
    assert stalled["reason"] in ("InvalidSpec", "ProfileNotFound")
    assert named in stalled["message"]
    assert world.truth("Ready") == "False"
    assert world.truth("Serving") == "True", "the last good revision answers"
    assert world.stage_deployments() == running
    world.apply()
    await world.converge()
    assert world.truth("Stalled") is None
    assert world.truth("Ready") == "True"
    assert world.stage_deployments() == running


async def test_what_answers_keeps_running_when_the_newest_plan_is_gone() -> None:
    """Edited twice, then spoiled, in one breath: the first edit's plan is removed, and the status still names it."""
    world = await made()
    running = world.stage_deployments()
    world.kube.objects[(PIPELINE.plural, NS, "p")]["status"]["revision"] = "0123456789"
    world.apply(runtimeProfile="renamed")
    await world.converge()
    assert world.truth("Stalled") == "True"
    assert world.truth("Serving") == "True", "the revision that answers goes on"
    assert world.stage_deployments() == running
    assert world.status()["stages"], "and is shown"


@pytest.mark.parametrize(("spec", "named"), BAD)
async def test_bad_from_the_start(spec: dict[str, object], named: str) -> None:
    world = World()
    world.kube.put(PIPELINE, NS, {**a_pipeline(), "spec": {**a_pipeline()["spec"], **spec}})
    await world.converge()
    stalled = world.condition("Stalled")
    assert stalled is not None
    assert named in stalled["message"]
    assert world.stage_deployments() == {}
    world.apply()
    await world.converge()
    assert world.truth("Ready") == "True"


async def test_scale_works_while_the_spec_is_invalid() -> None:
    world = await made()
    world.apply(topology="nonsense")
    await world.converge()
    world.scale("talker", 3)
    await world.converge()
    assert world.stage_deployments()[("talker", world.entry_revision())] == 3


async def test_all_violations_are_listed() -> None:
    world = World()
    world.apply(stages=[{"name": "singer"}, {"name": "dancer"}])
    await world.reconcile()
    stalled = world.condition("Stalled")
    assert stalled is not None
    assert "singer" in stalled["message"]
    assert "dancer" in stalled["message"]


@pytest.mark.parametrize("verb", ["get", "list"])
async def test_failed_read_writes_nothing(verb: str) -> None:
    """T60: a transient error is never "gone": no write, no delete, no status."""
    world = await made()
    failed: set[tuple[str, str]] = set()
    for plural in (
        "omnipipelines",
        "omnistages",
        "deployments",
        "pods",
        "configmaps",
        "omniruntimeprofiles",
        "services",
    ):
        world.kube.calls.clear()

        def fail(v: str, p: str, name: str, plural: str = plural) -> None:
            if (v, p) == (verb, plural):
                failed.add((v, p))
                raise Transient("HTTP 503", 503)

        world.kube.before = fail
        if (verb == "get") == (plural == "omnipipelines"):
            with pytest.raises(Transient):
                await world.reconcile()
            assert world.kube.writes == []
    assert failed
    world.kube.before = lambda *_: None
    await world.converge()
    assert world.truth("Ready") == "True"


async def test_refused_child_is_named_and_the_others_are_made() -> None:
    """A quota or an admission plugin refuses one child: Stalled says which and why; recovery when it is accepted."""
    world = World()
    world.apply()

    def refuse(verb: str, plural: str, name: str) -> None:
        if verb == "apply" and name == "p-talker" and plural == "services":
            raise Rejected("services is forbidden by policy no-headless", 403, "Forbidden")

    world.kube.before = refuse
    requeue = await world.reconcile()
    stalled = world.condition("Stalled")
    assert stalled is not None
    assert (stalled["reason"], "no-headless" in stalled["message"]) == ("ChildRejected", True)
    assert "p-entry" in world.kube.all(DEPLOYMENT)
    assert requeue.after is not None, "nothing else would wake us when the policy changes"
    world.kube.before = lambda *_: None
    await world.converge()
    assert world.truth("Ready") == "True"


async def test_crash_after_every_write_converges_to_the_same_end() -> None:
    """Killed after write k of a create, for every k: a fresh operator reaches the same end state, without orphans."""
    reference = await made()
    total = len(reference.kube.writes)
    assert total > 20

    class Killed(BaseException):
        pass

    for k in range(total + 1):
        world = World()
        world.apply()

        def die(verb: str, plural: str, name: str, world: World = world, k: int = k) -> None:
            if verb in ("create", "apply", "delete", "patch_status") and len(world.kube.writes) >= k:
                raise Killed

        world.kube.before = die
        with contextlib.suppress(Killed):
            await world.reconcile()
        world.kube.before = lambda *_: None
        world.restart_operator()
        await world.converge()
        assert masked(world) == masked(reference), f"after write {k}"


def masked(world: World) -> dict[object, object]:
    """The end state without what differs from run to run: names of pods, versions, uids, times, Events."""
    hidden = {"uid", "resourceVersion", "generation", "ownerReferences", "lastTransitionTime", "observedGeneration"}

    def clean(value: object) -> object:
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items() if k not in hidden}
        if isinstance(value, list):
            return [clean(v) for v in value]
        return value

    return {k: clean(b) for k, b in world.kube.objects.items() if k[0] not in ("pods", "events", "secrets")}
