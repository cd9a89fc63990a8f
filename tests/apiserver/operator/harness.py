"""The operator against a real API server. The controller-manager makes pods; `Site.kubelet` makes them Ready.

`Site.reconcile()` runs one reconcile in this process; `OperatorProcess` is the real thing, watches and Lease included.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kopf

from omni_operator.apply import KeyRing
from omni_operator.events import EventSink
from omni_operator.kinds import CHILD_KINDS, DEPLOYMENT, PIPELINE, POD, PROFILE, SECRET, STAGE, JsonObject, Kind
from omni_operator.kube import Kube
from omni_operator.names import ENTRY_STAGE, PIPELINE_LABEL, REVISION_LABEL, STAGE_LABEL
from omni_operator.observed import Key
from omni_operator.reconcile import Cluster, Requeue, reconcile
from tests.apiserver.kube import MERGE, Refused
from tests.apiserver.kube import Kube as TestKube

WAIT_SECONDS = 240.0  # a deadline, not a pause: a busy machine may need it
PROFILE_NAME = "operator-test"
STAGES = ("thinker", "talker", "code2wav")


class CountingKube(Kube):
    """Records mutating calls; `before_write` may raise, which is how a crash is played."""

    def __init__(self, login: Callable[[], kopf.ConnectionInfo]) -> None:
        super().__init__(login)
        self.writes: list[tuple[str, str, str]] = []
        self.before_write: Callable[[], None] = lambda: None

    async def _send(self, method: str, verb: str, kind: Kind, path: str, *rest: Any) -> JsonObject:
        if method != "GET":
            self.before_write()
        answer = await super()._send(method, verb, kind, path, *rest)
        if method != "GET":
            self.writes.append((verb, kind.plural, path.rsplit("/", 1)[-1]))
        return answer


@dataclass
class Site:
    """One namespace of one test."""

    test: TestKube
    api: CountingKube
    namespace: str
    unready: set[str] = field(default_factory=set)  # stages whose pods do not become ready

    def __post_init__(self) -> None:
        self.restart_operator()

    def restart_operator(self) -> None:
        self.cluster = Cluster(kube=self.api, fence=lambda: None, events=EventSink(self.api), keys=KeyRing())

    # ------------------------------------------------------------------ pipelines
    def apply(self, name: str = "p", manager: str = "user", strict_schema: bool = True, **spec: Any) -> JsonObject:
        """As `kubectl apply --server-side`: a field that is left out is removed."""
        return self.test.apply(a_pipeline(self.namespace, name, **spec), manager=manager)

    def delete(self, name: str = "p") -> None:
        self.test.delete({"apiVersion": PIPELINE.api_version, "kind": PIPELINE.kind, "metadata": self._meta(name)})

    async def reconcile(self, name: str = "p") -> Requeue:
        return await reconcile(Key(self.namespace, name), self.cluster, lambda: datetime.now(UTC))

    async def converge(
        self, name: str = "p", until: Callable[[], bool] | None = None, seconds: float = WAIT_SECONDS
    ) -> None:
        """Reconcile and play the kubelet until Ready (or until `until`)."""
        done = until or (lambda: self.truth("Ready", name) == "True")
        deadline = time.monotonic() + seconds
        while True:
            try:
                await self.reconcile(name)
            except Exception as error:
                last: Exception | None = error
            else:
                last = None
            self.kubelet()
            if done():
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"not there after {seconds} s; last error {last}; {self.status(name)}")
            await asyncio.sleep(0.1)

    def _meta(self, name: str) -> JsonObject:
        return {"name": name, "namespace": self.namespace}

    def status(self, name: str = "p") -> JsonObject:
        status: JsonObject = self.get(PIPELINE, name).get("status", {})
        return status

    def condition(self, kind: str, name: str = "p") -> JsonObject:
        return next((c for c in self.status(name).get("conditions", []) if c["type"] == kind), {})

    def truth(self, kind: str, name: str = "p") -> str | None:
        return self.condition(kind, name).get("status")

    def events(self) -> list[JsonObject]:
        """All Events of the namespace."""
        found: list[JsonObject] = self.test.request(
            "GET", f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events"
        )["items"]
        return found

    # ------------------------------------------------------------------ objects
    def get(self, kind: Kind, name: str) -> JsonObject:
        return self.test.get({"apiVersion": kind.api_version, "kind": kind.kind, "metadata": self._meta(name)})

    def all(self, kind: Kind, pipeline: str = "p") -> dict[str, JsonObject]:
        selector = f"{PIPELINE_LABEL}={pipeline}"
        items = self.test.request("GET", kind.path(self.namespace), labelSelector=selector)["items"]
        return {item["metadata"]["name"]: item for item in items}

    def merge(self, kind: Kind, name: str, patch: JsonObject, subresource: str | None = None) -> JsonObject:
        path = kind.path(self.namespace, name, subresource)
        return self.test.request("PATCH", path, patch, content_type=MERGE)

    def remove(self, kind: Kind, name: str) -> None:
        self.test.request("DELETE", kind.path(self.namespace, name))

    def scale(self, stage: str, replicas: int, pipeline: str = "p") -> None:
        """kubectl scale, through /scale."""
        self.merge(STAGE, f"{pipeline}-{stage}", {"spec": {"replicas": replicas}}, "scale")

    def everything(self, pipeline: str = "p") -> dict[str, str]:
        """kind/name -> resourceVersion of the pipeline and all its children."""
        found = {}
        for kind in (*CHILD_KINDS, SECRET):
            for name, body in self.all(kind, pipeline).items():
                found[f"{kind.plural}/{name}"] = body["metadata"]["resourceVersion"]
        return found

    def stage_deployments(self) -> dict[tuple[str, str], int]:
        return {
            (b["metadata"]["labels"][STAGE_LABEL], b["metadata"]["labels"][REVISION_LABEL]): b["spec"]["replicas"]
            for b in self.all(DEPLOYMENT).values()
            if b["metadata"]["labels"][STAGE_LABEL] != ENTRY_STAGE
        }

    def kubelet(self) -> None:
        """Make pods Ready; an entry only with a ready pod of every stage of its own revision."""
        pods = list(self.all(POD).values())
        ready = {
            (p["metadata"]["labels"][STAGE_LABEL], p["metadata"]["labels"][REVISION_LABEL])
            for p in pods
            if p["metadata"]["labels"][STAGE_LABEL] not in {ENTRY_STAGE, *self.unready}
        }
        for pod in pods:
            stage, revision = pod["metadata"]["labels"][STAGE_LABEL], pod["metadata"]["labels"][REVISION_LABEL]
            if stage == ENTRY_STAGE:
                good = {s for s, r in ready if r == revision} >= {
                    s for s, r in self.stage_deployments() if r == revision
                }
            else:
                good = stage not in self.unready
            self._set_ready(pod, good)

    def _set_ready(self, pod: JsonObject, good: bool) -> None:
        truth = "True" if good else "False"
        if any(c["type"] == "Ready" and c["status"] == truth for c in pod["status"].get("conditions", [])):
            return
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions = [{"type": t, "status": truth, "lastTransitionTime": now} for t in ("Ready", "ContainersReady")]
        status = {"phase": "Running" if good else "Pending", "podIP": "192.0.2.1", "conditions": conditions}
        try:
            self.merge(POD, pod["metadata"]["name"], {"status": status}, "status")
        except Refused as error:
            if error.status != 404:  # it went in the meantime
                raise


def a_pipeline(namespace: str, name: str = "p", **spec: Any) -> JsonObject:
    return {
        "apiVersion": PIPELINE.api_version,
        "kind": PIPELINE.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"uri": "packaged://smol-omni"},
            "topology": "smol_omni",
            "runtimeProfile": PROFILE_NAME,
            **spec,
        },
    }


def a_profile() -> JsonObject:
    return {
        "apiVersion": PROFILE.api_version,
        "kind": PROFILE.kind,
        "metadata": {"name": PROFILE_NAME},
        "spec": {
            "vendor": "cpu",
            "images": {"runtime": "localhost/omni:test"},
            "deviceClasses": [{"name": "cpu", "memory": "64Gi"}],
        },
    }


@contextmanager
def operator_process(kubeconfig: Path, namespace: str, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m omni_operator` for one namespace; ended with SIGTERM, which must be a clean end."""
    command = [sys.executable, "-m", "omni_operator", "--namespace", namespace, "--lease-namespace", namespace]
    command += ["--http-host", "127.0.0.1", "--http-port", "0", *arguments]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=output,
            stderr=output,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise


async def eventually(
    check: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS, site: Site | None = None
) -> None:
    """Wait for a condition of the cluster, playing the kubelet meanwhile."""
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} s")
        if site is not None:
            site.kubelet()
        await asyncio.sleep(0.2)
