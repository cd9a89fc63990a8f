"""A small world for reconcile tests: the fake API server, a controllable clock, and whoever runs pods.

`settle()` plays the Deployment controller, the scheduler and the kubelet: it makes the pods that Deployments ask for,
places them where there is room, and makes them ready unless a stage is told not to become ready.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from omni_operator.events import EventSink
from omni_operator.kinds import CONFIG_MAP, DEPLOYMENT, EVENT, PIPELINE, POD, PROFILE, STAGE, JsonObject
from omni_operator.names import ENTRY_STAGE, REVISION_LABEL, STAGE_LABEL
from omni_operator.observe import observe
from omni_operator.observed import Key, Observed
from omni_operator.reconcile import Cluster, Requeue, reconcile
from omni_runtime.deploy.plan import load_plan
from tests.unit.operator.fake_kube import FakeKube

NS = "ns"
STAGES = ("thinker", "talker", "code2wav")


def a_profile(name: str = "cpu", image: str = "localhost/omni:1", resource: str | None = None) -> JsonObject:
    device: JsonObject = {"name": name, "memory": "80Gi"}
    if resource:
        device["resourceName"] = resource
    return {
        "metadata": {"name": name},
        "spec": {
            "vendor": "nvidia" if resource else "cpu",
            "images": {"runtime": image},
            "deviceClasses": [device],
        },
    }


def a_pipeline(name: str = "p", **spec: Any) -> JsonObject:
    return {
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "packaged://smol-omni"},
            "topology": "smol_omni",
            "runtimeProfile": "cpu",
            **spec,
        },
    }


@dataclass
class World:
    kube: FakeKube = field(default_factory=FakeKube)
    now: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    room: dict[str, int] = field(default_factory=dict)  # stage -> pods of it that fit; absent: all
    broken: set[str] = field(default_factory=set)  # stages (or stage@revision) whose pods never become ready
    keys: set[str] = field(default_factory=set)
    _pod_numbers: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.kube.put(PROFILE, "", a_profile())
        self.restart_operator()

    def restart_operator(self) -> None:
        self.cluster = Cluster(kube=self.kube, fence=lambda: None, events=EventSink(self.kube))

    def apply(self, name: str = "p", **spec: Any) -> None:
        self.kube.put(PIPELINE, NS, a_pipeline(name, **spec))

    async def reconcile(self, name: str = "p") -> Requeue:
        return await reconcile(Key(NS, name), self.cluster, lambda: self.now)

    async def observe(self, name: str = "p") -> Observed:
        return await observe(Key(NS, name), self.kube)

    async def converge(self, name: str = "p", rounds: int = 25) -> None:
        """Reconcile and let pods follow, until neither changes anything."""
        for _ in range(rounds):
            before = self.fingerprint()
            await self.reconcile(name)
            self.settle()
            if self.fingerprint() == before:
                return
        raise AssertionError(f"no rest after {rounds} rounds")

    def fingerprint(self) -> dict[Any, str]:
        return {k: b["metadata"]["resourceVersion"] for k, b in self.kube.objects.items()}

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    # ------------------------------------------------------------------ reading
    def status(self, name: str = "p") -> JsonObject:
        status: JsonObject = self.kube.all(PIPELINE, NS)[name].get("status", {})
        return status

    def condition(self, kind: str, name: str = "p") -> JsonObject | None:
        return next((c for c in self.status(name).get("conditions", []) if c["type"] == kind), None)

    def truth(self, kind: str, name: str = "p") -> str | None:
        found = self.condition(kind, name)
        return None if found is None else str(found["status"])

    def stage_deployments(self) -> dict[tuple[str, str], int]:
        """(stage, revision) -> spec.replicas"""
        return {
            (b["metadata"]["labels"][STAGE_LABEL], b["metadata"]["labels"][REVISION_LABEL]): b["spec"]["replicas"]
            for b in self.kube.all(DEPLOYMENT).values()
            if b["metadata"]["labels"][STAGE_LABEL] != ENTRY_STAGE
        }

    def revisions(self) -> set[str]:
        return {revision for _, revision in self.stage_deployments()}

    def entry_revision(self) -> str:
        entry = next(
            b for b in self.kube.all(DEPLOYMENT).values() if b["metadata"]["labels"][STAGE_LABEL] == ENTRY_STAGE
        )
        return str(entry["metadata"]["labels"][REVISION_LABEL])

    def replicas(self, stage: str, name: str = "p") -> Any:
        return self.kube.all(STAGE)[f"{name}-{stage}"]["spec"].get("replicas")

    def events(self) -> list[str]:
        return [b["reason"] for b in self.kube.all(EVENT).values()]

    def pods(self, stage: str) -> list[JsonObject]:
        return [p for p in self.kube.all(POD).values() if p["metadata"]["labels"][STAGE_LABEL] == stage]

    # ------------------------------------------------------------------ acting
    def scale(self, stage: str, replicas: int, name: str = "p") -> None:
        """kubectl scale."""
        self.kube.edit(STAGE, NS, f"{name}-{stage}", lambda b: b["spec"].update(replicas=replicas))

    def settle(self) -> None:
        for name, deployment in sorted(self.kube.all(DEPLOYMENT).items()):
            labels = deployment["spec"]["template"]["metadata"]["labels"]
            if labels[STAGE_LABEL] == ENTRY_STAGE:
                self._settle_entry(name, deployment)
            else:
                self._settle_stage(name, deployment)
        owners = {d["metadata"]["uid"] for d in self.kube.all(DEPLOYMENT).values()}
        for pod_name, pod in list(self.kube.all(POD).items()):
            if pod["metadata"]["annotations"]["deployment"] not in owners:
                self.kube.remove(POD, NS, pod_name)
        self._place()

    def _mine(self, deployment: JsonObject) -> list[tuple[str, JsonObject]]:
        uid = deployment["metadata"]["uid"]
        return [(n, p) for n, p in self.kube.all(POD).items() if p["metadata"]["annotations"]["deployment"] == uid]

    def _settle_stage(self, name: str, deployment: JsonObject) -> None:
        pods = self._mine(deployment)
        want = deployment["spec"]["replicas"]
        for _ in range(want - len(pods)):
            self._make_pod(name, deployment)
        for pod_name, _ in sorted(pods, key=lambda item: _is_ready(item[1]))[: max(0, len(pods) - want)]:
            self.kube.remove(POD, NS, pod_name)

    def _settle_entry(self, name: str, deployment: JsonObject) -> None:
        """RollingUpdate with maxSurge 1 and maxUnavailable 0: old pods go when a new one is ready, unready ones at once."""
        newest = deployment["spec"]["template"]["metadata"]["labels"][REVISION_LABEL]
        pods = self._mine(deployment)
        fresh = [p for _, p in pods if p["metadata"]["labels"][REVISION_LABEL] == newest]
        if not fresh:
            self._make_pod(name, deployment)
        for pod_name, pod in pods:
            old = pod["metadata"]["labels"][REVISION_LABEL] != newest
            if old and (any(map(_is_ready, fresh)) or not _is_ready(pod)):
                self.kube.remove(POD, NS, pod_name)

    def _make_pod(self, deployment_name: str, deployment: JsonObject) -> None:
        template = deployment["spec"]["template"]
        name = f"{deployment_name}-{next(self._pod_numbers)}"
        self.kube.put(
            POD,
            NS,
            {
                "metadata": {
                    "name": name,
                    "labels": copy.deepcopy(template["metadata"]["labels"]),
                    "annotations": {"deployment": deployment["metadata"]["uid"]},
                },
                "spec": {},
                "status": {"phase": "Pending"},
            },
        )

    def _place(self) -> None:
        """Schedule, then make ready: stages first, so that an entry is ready only with all of its revision's stages."""
        for stage in {p["metadata"]["labels"][STAGE_LABEL] for p in self.kube.all(POD).values()}:
            placed = sum(1 for p in self.pods(stage) if p["spec"].get("nodeName"))
            for pod in sorted(self.pods(stage), key=lambda p: p["metadata"]["name"]):
                if pod["spec"].get("nodeName"):
                    continue
                if placed >= self.room.get(stage, 1000):
                    self._set_pod(pod, None, scheduled=False, ready=False)
                else:
                    placed += 1
                    self._set_pod(pod, "node", scheduled=True, ready=False)
        for stage in STAGES:
            for pod in self.pods(stage):
                if pod["spec"].get("nodeName"):
                    revision = pod["metadata"]["labels"][REVISION_LABEL]
                    good = not self.broken & {stage, f"{stage}@{revision}", f"*@{revision}"}
                    self._set_pod(pod, "node", scheduled=True, ready=good)
        for pod in self.pods(ENTRY_STAGE):
            revision = pod["metadata"]["labels"][REVISION_LABEL]
            needed = self._leaders(revision)
            live = all(any(_is_ready(p) and _revision(p) == revision for p in self.pods(s)) for s in needed)
            self._set_pod(pod, "node", scheduled=True, ready=live and ENTRY_STAGE not in self.broken)

    def _leaders(self, revision: str) -> set[str]:
        """What an entry reads from its plan: the pod groups that must be live."""
        for body in self.kube.all(CONFIG_MAP).values():
            if body["metadata"]["labels"][REVISION_LABEL] == revision:
                return set(load_plan(body["data"]["plan.json"].encode()).pod_groups())
        return set(STAGES)

    def _set_pod(self, pod: JsonObject, node: str | None, *, scheduled: bool, ready: bool) -> None:
        stamp = self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        old = {c["type"]: c for c in pod["status"].get("conditions", [])}

        def condition(kind: str, good: bool, **more: str) -> JsonObject:
            status = "True" if good else "False"
            since = old[kind]["lastTransitionTime"] if old.get(kind, {}).get("status") == status else stamp
            return {"type": kind, "status": status, "lastTransitionTime": since, **more}

        reason = (
            {} if scheduled else {"reason": "Unschedulable", "message": "0/1 nodes are available: no device is free"}
        )
        status = {
            "phase": "Running" if scheduled else "Pending",
            "conditions": [condition("PodScheduled", scheduled, **reason), condition("Ready", ready)],
        }
        spec = {"nodeName": node} if node else {}
        if pod["status"] != status or pod["spec"] != spec:
            self.kube.edit(POD, NS, pod["metadata"]["name"], lambda b: b.update(spec=spec, status=status))


def _is_ready(pod: JsonObject) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def _revision(pod: JsonObject) -> str:
    return str(pod["metadata"]["labels"][REVISION_LABEL])


async def made(**spec: object) -> World:
    """A pipeline that is Ready."""
    world = World()
    world.apply(**spec)
    await world.converge()
    return world
