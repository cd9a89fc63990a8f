"""Create, edit, scale, repair, break and delete on a real API server, one reconcile at a time."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest

from omni_operator.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    PIPELINE,
    POD,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    STAGE,
)
from omni_operator.names import pipeline_label
from tests.apiserver.operator.harness import STAGES, Site

pytestmark = pytest.mark.timeout(900)
_OTHERS = (DISRUPTION_BUDGET, NETWORK_POLICY, SERVICE_ACCOUNT)


async def test_create_gives_every_child_owned_and_ready(site: Site) -> None:
    site.apply()
    await site.converge()
    uid = site.get(PIPELINE, "p")["metadata"]["uid"]
    stage_uids = {n: s["metadata"]["uid"] for n, s in site.all(STAGE).items()}
    assert set(stage_uids) == {f"p-{s}" for s in STAGES}
    for key in site.everything():
        plural, _, name = key.partition("/")
        kind = next(k for k in (CONFIG_MAP, DEPLOYMENT, SERVICE, STAGE, SECRET, *_OTHERS) if k.plural == plural)
        (ref,) = site.get(kind, name)["metadata"]["ownerReferences"]
        assert ref["controller"] is True
        assert ref["uid"] in {uid, *stage_uids.values()}
    revision = site.status()["revision"]
    for stage in STAGES:
        owner = site.get(DEPLOYMENT, f"p-{stage}-{revision}")["metadata"]["ownerReferences"][0]
        assert (owner["kind"], owner["uid"]) == ("OmniStage", stage_uids[f"p-{stage}"])
    assert site.status()["stagesReady"] == "3/3"
    assert [site.truth(k) for k in ("Ready", "Serving", "Updated", "Reconciling", "Stalled")] == ["True"] * 3 + [
        None
    ] * 2
    metadata = site.get(PIPELINE, "p")["metadata"]
    assert "finalizers" not in metadata, "T50"
    assert not [a for a in metadata.get("annotations", {}) if "kopf" in a]


async def test_idle_is_silent(site: Site) -> None:
    """T7: defaulting, pruning and canonical quantities of the real server included: no write, no version moves."""
    site.apply(stages=[{"name": "talker", "resources": {"cpu": "0.5", "memory": "1024Mi"}}])
    await site.converge()
    await site.reconcile()
    before = site.everything()
    pipeline = site.get(PIPELINE, "p")["metadata"]["resourceVersion"]
    site.api.writes.clear()
    for _ in range(20):
        await site.reconcile()
    assert site.api.writes == []
    assert site.everything() == before
    assert site.get(PIPELINE, "p")["metadata"]["resourceVersion"] == pipeline


async def test_scale_holds(site: Site) -> None:
    """T12, T16: /scale has a selector that matches the pods; the count holds through reconciles and a restart."""
    site.apply()
    await site.converge()
    site.scale("talker", 3)
    revision = site.status()["revision"]
    await site.converge(until=lambda: site.stage_deployments()[("talker", revision)] == 3)
    for _ in range(10):
        await site.reconcile()
    site.restart_operator()
    await site.converge(until=lambda: site.truth("Ready") == "True" and len(_pods(site, "talker")) == 3)
    assert site.get(STAGE, "p-talker")["spec"]["replicas"] == 3
    await site.reconcile()
    scale = site.test.request("GET", STAGE.path(site.namespace, "p-talker", "scale"))
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (3, 3)
    selected = site.test.request("GET", POD.path(site.namespace), labelSelector=scale["status"]["selector"])["items"]
    assert {p["metadata"]["name"] for p in selected} == set(_pods(site, "talker"))


async def test_request_of_the_pipeline(site: Site) -> None:
    """T13: applied when it changes; left out again, the count that runs stays."""
    site.apply(stages=[{"name": "talker", "replicas": 2}])
    await site.converge()
    assert site.get(STAGE, "p-talker")["spec"]["replicas"] == 2
    site.scale("talker", 4)
    await site.converge()
    site.apply(stages=[{"name": "talker"}])
    await site.converge()
    assert site.get(STAGE, "p-talker")["spec"]["replicas"] == 4
    site.apply(stages=[{"name": "talker", "replicas": 1}])
    await site.converge()
    assert site.get(STAGE, "p-talker")["spec"]["replicas"] == 1


async def test_edit_rolls_out_and_leaves_nothing_old(site: Site) -> None:
    site.apply()
    await site.converge()
    old = site.status()["revision"]
    site.unready = {"talker"}
    site.apply(stages=[thinker_seed(1)])
    await site.converge(until=lambda: len({r for _, r in site.stage_deployments()}) == 2)
    assert site.status()["revision"] != old
    site.apply()  # back, in the middle
    site.unready = set()
    await site.converge(
        until=lambda: {r for _, r in site.stage_deployments()} == {old} and site.truth("Ready") == "True"
    )
    site.apply(stages=[thinker_seed(2)])
    await site.reconcile()
    site.apply(stages=[thinker_seed(3)])
    await site.converge(
        until=lambda: site.truth("Ready") == "True" and len({r for _, r in site.stage_deployments()}) == 1
    )
    assert {r for _, r in site.stage_deployments()} == {site.status()["revision"]}
    await site.reconcile()
    assert len(site.all(CONFIG_MAP)) == 1


async def test_unset_of_optional_fields(site: Site) -> None:
    """T6: set and unset: children equal those of a pipeline that never had the fields."""
    site.apply()
    await site.converge()
    plain = _masked(site)
    site.apply(
        stages=[
            {
                "name": "talker",
                "scaling": {"minReplicas": 1, "maxReplicas": 3},
                "resources": {"cpu": "2", "memory": "3Gi", "sharedMemory": "512Mi"},
                "scheduling": {
                    "nodeSelector": {"disk": "fast"},
                    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
                    "priorityClassName": "system-node-critical",
                },
                "maxConcurrency": 3,
            }
        ],
        entry={"port": 8080, "resources": {"cpu": "1", "memory": "1Gi"}},
        drain={"timeoutSeconds": 42},
    )
    await site.converge(until=lambda: site.truth("Ready") == "True" and _one_revision(site))
    assert _masked(site) != plain
    site.apply()
    await site.converge(until=lambda: site.truth("Ready") == "True" and _one_revision(site))
    await site.reconcile()
    assert _masked(site) == plain


async def test_meddling_is_repaired(site: Site) -> None:
    """T8: our fields come back, deleted children come back, other people's fields stay."""
    site.apply()
    await site.converge()
    revision = site.status()["revision"]
    site.merge(SERVICE, "p", {"spec": {"selector": {"app": "other"}}})
    site.merge(
        DEPLOYMENT,
        f"p-thinker-{revision}",
        {"metadata": {"labels": {"team": "speech"}}, "spec": {"replicas": 9, "revisionHistoryLimit": 7}},
    )
    for kind, name in [
        (SERVICE, "p-talker"),
        (DEPLOYMENT, f"p-code2wav-{revision}"),
        (SECRET, "p-curve"),
        (STAGE, "p-talker"),
    ]:
        site.remove(kind, name)
    site.restart_operator()  # the Secret is tried at the first reconcile after a start

    def whole() -> bool:
        return site.truth("Ready") == "True" and {"p-talker"} <= set(site.all(STAGE)) and len(site.all(DEPLOYMENT)) == 4

    await site.converge(until=whole)
    deployment = site.get(DEPLOYMENT, f"p-thinker-{revision}")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["revisionHistoryLimit"] == 1
    assert deployment["metadata"]["labels"]["team"] == "speech"
    assert site.get(SERVICE, "p")["spec"]["selector"]["serving.omni.dev/stage"] == "entry"
    assert set(site.all(SECRET)) == {"p-curve"}
    assert "p-talker" in site.all(SERVICE)
    told = [e["note"] for e in site.events() if e["reason"] == "KeysReplaced"]
    assert len(told) == 1
    assert "-l serving.omni.dev/pipeline=p" in told[0]


async def test_foreign_service_of_the_same_name(site: Site) -> None:
    mine = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "p", "namespace": site.namespace},
        "spec": {"selector": {"app": "shop"}, "ports": [{"port": 80}]},
    }
    site.test.create(mine)
    site.apply()
    await site.converge(until=lambda: site.truth("Stalled") == "True")
    assert site.condition("Stalled")["reason"] == "NameConflict"
    assert site.get(SERVICE, "p")["spec"]["selector"] == {"app": "shop"}
    site.delete()
    assert site.get(SERVICE, "p")["spec"]["selector"] == {"app": "shop"}


BAD: list[Any] = [
    pytest.param({"topology": "no_such_topology"}, "no_such_topology", id="unknown topology"),
    pytest.param({"edges": [{"from": "thinker", "to": "singer"}]}, "singer", id="edge to an unknown stage"),
    pytest.param({"edges": [{"from": "code2wav", "to": "thinker"}]}, "code2wav", id="cycle"),
    pytest.param({"runtimeProfile": "nowhere"}, "nowhere", id="unknown profile"),
    pytest.param({"stages": [{"name": "singer", "engine": "no_such_engine"}]}, "singer", id="unknown stage"),
]


async def test_bad_specs_become_conditions_and_recover(site: Site) -> None:
    """What the schema lets through: Stalled with the violation; what runs keeps running; recovery by itself."""
    site.apply()
    await site.converge()
    before = site.stage_deployments()
    for parameter in BAD:
        spec, named = parameter.values
        site.apply(**spec)
        await site.converge(until=lambda: site.truth("Stalled") == "True")
        assert named in site.condition("Stalled")["message"]
        assert site.stage_deployments() == before
        site.apply()
        await site.converge()
        assert site.truth("Stalled") is None
        assert site.stage_deployments() == before


async def test_names_of_253_characters_and_dots(site: Site) -> None:
    """T4, T5."""
    for name in ("a" * 253, "v1.5.model", "0day", "a-b.c"):
        site.apply(name)
        label = pipeline_label(name)
        await site.converge(name, until=lambda name=name, label=label: len(site.all(DEPLOYMENT, label)) == 4)
        assert site.truth("Stalled", name) is None, site.status(name)
        assert site.status(name)["planConfigMap"]


async def test_crash_after_every_write(site: Site) -> None:
    """Killed after write k of a create; a fresh operator converges to the same children each time."""
    site.apply()
    await site.reconcile()
    total = len(site.api.writes)
    reference = set(site.everything())
    assert total >= 25

    class Killed(BaseException):
        pass

    for k in range(0, total, 3):
        name = f"p{k}"
        site.restart_operator()
        site.apply(name)
        site.api.writes.clear()

        def die(k: int = k) -> None:
            if len(site.api.writes) >= k:
                raise Killed

        site.api.before_write = die
        with contextlib.suppress(Killed):
            await site.reconcile(name)
        site.api.before_write = lambda: None
        site.restart_operator()

        def same(name: str = name) -> bool:
            found = {key.replace(f"/{name}", "/p", 1) for key in site.everything(name)}
            return _without_revision(found) == _without_revision(reference)

        await site.converge(name, until=same)


async def test_pod_security_restricted_accepts_the_pods(site: Site) -> None:
    """T74: in a namespace that enforces it, pods are created and no warning is given."""
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    site.test.request(
        "PATCH", f"/api/v1/namespaces/{site.namespace}", label, content_type="application/merge-patch+json"
    )
    site.apply()
    await site.converge()
    assert len(site.all(POD)) == 4


async def test_quota_is_named(site: Site) -> None:
    """T65: quota 2, four pods asked for: the condition says so."""
    site.test.create(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "few", "namespace": site.namespace},
            "spec": {"hard": {"pods": "2"}},
        }
    )
    site.apply()
    await site.converge(until=lambda: site.condition("PlacementFeasible").get("reason") == "QuotaExceeded")
    assert "exceeded quota" in site.condition("PlacementFeasible")["message"]


def thinker_seed(number: int) -> dict[str, Any]:
    return {"name": "thinker", "engineArgs": [{"name": "seed", "value": str(number)}]}


def _pods(site: Site, stage: str) -> list[str]:
    return [
        n
        for n, p in site.all(POD).items()
        if p["metadata"]["labels"]["serving.omni.dev/stage"] == stage and "deletionTimestamp" not in p["metadata"]
    ]


def _one_revision(site: Site) -> bool:
    return {r for _, r in site.stage_deployments()} == {site.status()["revision"]}


def _without_revision(keys: set[str]) -> set[str]:
    """The revision of a plan contains the pipeline's name."""
    return {re.sub(r"-[0-9a-f]{10}$", "-REV", k) for k in keys}


def _masked(site: Site) -> dict[str, Any]:
    hidden = {"resourceVersion", "uid", "managedFields", "generation", "creationTimestamp", "status"}

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: clean(v)
                for k, v in value.items()
                if k not in hidden and not k.startswith("deployment.kubernetes.io")
            }
        if isinstance(value, list):
            return [clean(v) for v in value]
        return value

    found = {}
    for kind in (CONFIG_MAP, DEPLOYMENT, SERVICE, STAGE, *_OTHERS):
        for name, body in site.all(kind).items():
            found[f"{kind.plural}/{name}"] = clean(body)
    return found
