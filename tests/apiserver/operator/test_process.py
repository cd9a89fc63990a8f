"""The whole operator process: watches, Lease, queue, signals; deletion of pipelines and namespaces."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from omni_operator.kinds import DEPLOYMENT, DISRUPTION_BUDGET, LEASE, PIPELINE, POD, SERVICE, STAGE
from tests.apiserver.kube import Refused
from tests.apiserver.operator.harness import Site, eventually, operator_process

pytestmark = pytest.mark.timeout(900)


async def test_a_pipeline_from_apply_to_delete(site: Site, kubeconfig: Path, tmp_path: Path) -> None:
    log = tmp_path / "operator.log"
    with operator_process(kubeconfig, site.namespace, log) as process:
        site.apply()
        await eventually(lambda: site.truth("Ready") == "True", "Ready", site=site)
        revision = site.status()["revision"]

        site.scale("talker", 2)
        await eventually(lambda: site.stage_deployments()[("talker", revision)] == 2, "scaled")
        site.remove(SERVICE, "p-talker")
        await eventually(lambda: "p-talker" in site.all(SERVICE), "a deleted child is noticed by its watch")
        site.merge(DEPLOYMENT, "p-entry", {"spec": {"replicas": 0}})
        await eventually(lambda: site.get(DEPLOYMENT, "p-entry")["spec"]["replicas"] == 1, "an edited child, too")

        site.apply(stages=[{"name": "thinker", "engineArgs": [{"name": "seed", "value": "1"}]}])
        await eventually(
            lambda: (
                site.truth("Ready") == "True"
                and site.status()["revision"] != revision
                and {r for _, r in site.stage_deployments()} == {site.status()["revision"]}
            ),
            "rolled out",
            site=site,
        )
        assert site.get(STAGE, "p-talker")["spec"]["replicas"] == 2

        site.delete()
        await eventually(lambda: not site.everything() and not site.all(POD), "everything is collected")
        assert process.poll() is None
    assert process.returncode == 0, log.read_text()
    assert site.get(LEASE, "omni-operator")["spec"]["holderIdentity"] == "", "released"


async def test_restart_takes_over_and_changes_nothing(site: Site, kubeconfig: Path, tmp_path: Path) -> None:
    """T10, T12: a second operator process on a settled pipeline leaves every object as it is."""
    log = tmp_path / "operator.log"
    with operator_process(kubeconfig, site.namespace, log):
        site.apply()
        await eventually(lambda: site.truth("Ready") == "True", "Ready", site=site)
        site.scale("talker", 2)
        await _at_rest(site)
    before = site.everything()
    pipeline = site.get(PIPELINE, "p")["metadata"]["resourceVersion"]
    with operator_process(kubeconfig, site.namespace, log, "--resync-seconds", "1"):
        await eventually(lambda: _holder(site) != "", "the new process leads")
        resyncs = log.read_text().count("lease.acquired")
        assert resyncs == 2
        site.apply("other")  # when this one has children, the first one has been reconciled as well
        await eventually(lambda: bool(site.all(DEPLOYMENT, "other")), "works")
        assert site.everything() == before
        assert site.get(PIPELINE, "p")["metadata"]["resourceVersion"] == pipeline


async def test_namespace_goes_while_the_operator_is_away(site: Site, kubeconfig: Path, tmp_path: Path) -> None:
    """T50: no finalizer holds a namespace."""
    with operator_process(kubeconfig, site.namespace, tmp_path / "operator.log"):
        site.apply()
        await eventually(lambda: site.truth("Ready") == "True", "Ready", site=site)
    site.test.request("DELETE", f"/api/v1/namespaces/{site.namespace}")

    def gone() -> bool:
        try:
            site.test.request("GET", f"/api/v1/namespaces/{site.namespace}")
        except Refused as error:
            return error.status == 404
        return False

    await eventually(gone, "the namespace is gone", seconds=60)
    site.test.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": site.namespace}})


async def test_bad_pipeline_does_not_stop_the_others(site: Site, kubeconfig: Path, tmp_path: Path) -> None:
    log = tmp_path / "operator.log"
    with operator_process(kubeconfig, site.namespace, log) as process:
        site.apply("bad", topology="nonsense")
        site.apply()
        await eventually(lambda: site.truth("Ready") == "True", "Ready", site=site)
        await eventually(lambda: site.truth("Stalled", "bad") == "True", "the bad one says why")
        site.apply("bad")
        await eventually(lambda: bool(site.all(DEPLOYMENT, "bad")), "and recovers")
        assert process.poll() is None
    assert "Traceback" not in log.read_text()


async def _at_rest(site: Site) -> None:
    """Nobody has anything left to write, neither the operator nor the controllers of Kubernetes."""
    await eventually(lambda: _settled(site) and _controllers_done(site), "settled", site=site)
    seen, since = site.everything(), time.monotonic()

    def unchanged() -> bool:
        nonlocal seen, since
        if (now := site.everything()) != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > 2

    await eventually(unchanged, "nothing changes any more", site=site)


def _controllers_done(site: Site) -> bool:
    """The status of each Deployment and PodDisruptionBudget tells of its present spec and pods."""
    deployments, budgets = site.all(DEPLOYMENT).values(), site.all(DISRUPTION_BUDGET).values()
    if any(b["status"].get("observedGeneration") != b["metadata"]["generation"] for b in (*deployments, *budgets)):
        return False
    complete = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}
    return all(b["status"]["currentHealthy"] == b["status"]["expectedPods"] for b in budgets) and all(
        d["status"].get("readyReplicas") == d["spec"]["replicas"]
        and any(complete.items() <= c.items() for c in d["status"]["conditions"])
        for d in deployments
    )


def _settled(site: Site) -> bool:
    pods = [p for p in site.all(POD).values() if p["metadata"]["labels"]["serving.omni.dev/stage"] == "talker"]
    ready = site.truth("Ready") == "True"
    stages = {s["name"]: s for s in site.status()["stages"]}
    scaled = site.get(STAGE, "p-talker")["status"].get("readyReplicas") == 2
    return ready and len(pods) == 2 and stages["talker"]["readyReplicas"] == 2 and scaled


def _holder(site: Site) -> str:
    return str(site.get(LEASE, "omni-operator")["spec"].get("holderIdentity") or "")
