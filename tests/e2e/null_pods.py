"""Pipelines on real pods whose engines compute nothing: everything of a cluster but the models, on two cores.

The pods are those of the CPU image. Their engines' folder of cached models is a folder of this machine, which also has
`benchmarks._null_stage` and a sitecustomize that puts it in the place of the worker; so namespaces of such pipelines
cannot be under the restricted standard, which allows no folder of a node.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import _null_stage
from omni_operator.resources.stage_pod import CACHE_MOUNT_PATH
from omni_runtime.cli.kubectl import SYSTEM_NAMESPACE, Kube
from omni_runtime.client import Answer, ask
from tests.e2e.conftest import fresh_namespace

STAGES = ("thinker", "talker", "code2wav")
WORKER = "omni_runtime.stages.worker"
SITE = f"""import os, sys
if "{WORKER}" in sys.orig_argv:
    os.execv(sys.executable, ["benchmarks._null_stage" if a == "{WORKER}" else a for a in sys.orig_argv])
"""
# What an autoscaler does in minutes: here in seconds, so that a test can wait for it.
PERIOD_SECONDS = 5
TUNING = "scale_down_seconds=30 reversal_seconds=30 idle_seconds=30"


def apply(kube: Kube, body: Mapping[str, Any], *arguments: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(body, file)
        file.flush()
        kube.read(*arguments, "apply", "-f", file.name)


@contextmanager
def quick_autoscaler(kube: Kube) -> Iterator[None]:
    """The installed operator, with other times; as it was before, afterwards."""
    operator = ("-n", SYSTEM_NAMESPACE, "set", "env", "deployment/omni-operator")
    kube.read(*operator, f"OMNI_SCALING_PERIOD_SECONDS={PERIOD_SECONDS}", f"OMNI_SCALING_TUNING={TUNING}")
    try:
        kube.read("-n", SYSTEM_NAMESPACE, "rollout", "status", "deployment/omni-operator", "--timeout=120s")
        yield
    finally:
        kube.read(*operator, "OMNI_SCALING_PERIOD_SECONDS-", "OMNI_SCALING_TUNING-")
        kube.read("-n", SYSTEM_NAMESPACE, "rollout", "status", "deployment/omni-operator", "--timeout=120s")


@dataclass(frozen=True, slots=True)
class NullPods:
    """A namespace and a profile for pipelines without models."""

    kube: Kube
    namespace: str
    profile: str
    folder: Path

    def slow(self, **milliseconds: float) -> None:
        """How long each stage waits before a request's first chunk, from the next request on."""
        new = self.folder / "knob.new"
        new.write_text(json.dumps(milliseconds))
        new.chmod(0o644)
        new.replace(self.folder / "knob.json")

    def make(
        self, name: str, stages: Mapping[str, Mapping[str, Any]], *, ttfp_ms: int = 1500, **spec: Any
    ) -> dict[str, Any]:
        """Apply a pipeline; stages: what each one has besides its resources."""
        body = {
            "apiVersion": "serving.omni.dev/v1alpha1",
            "kind": "OmniPipeline",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "model": {"uri": "packaged://smol-omni"},
                "topology": "smol_omni",
                "runtimeProfile": self.profile,
                "objectives": {"ttfpMilliseconds": {"p95": ttfp_ms}, "queueDepth": {"perReplica": 4}},
                "stages": [{"name": s, "resources": _resources(s), **stages.get(s, {})} for s in STAGES],
                **spec,
            },
        }
        apply(self.kube, body)
        return body

    def pipeline(self, name: str) -> dict[str, Any]:
        return self.kube.get("-n", self.namespace, "omnipipeline", name)

    def decisions(self, name: str) -> list[dict[str, Any]]:
        """Newest first."""
        return list((self.pipeline(name).get("status") or {}).get("decisions") or ())

    def replicas(self, name: str) -> dict[str, int]:
        """spec.replicas of each stage."""
        stages = self.kube.get("-n", self.namespace, "omnistages")["items"]
        mine = (s for s in stages if s["spec"]["pipelineRef"]["name"] == name)
        return {s["metadata"]["name"].removeprefix(f"{name}-"): s["spec"].get("replicas", -1) for s in mine}

    def pods(self, name: str, stage: str) -> list[dict[str, Any]]:
        """All of them, those that drain included."""
        selector = f"serving.omni.dev/pipeline={name},serving.omni.dev/stage={stage}"
        return list(self.kube.get("-n", self.namespace, "pods", "-l", selector)["items"])


def _resources(stage: str) -> dict[str, str]:
    """Requests alone: nothing of it is used. The memory is what admission wants for the models that are not loaded."""
    return {"cpu": "30m", "memory": "1536Mi" if stage == "thinker" else "1Gi", "sharedMemory": "16Mi"}


@contextmanager
def null_pods(kube: Kube, **profile_spec: Any) -> Iterator[NullPods]:
    """profile_spec: what their profile has besides."""
    folder = Path(tempfile.mkdtemp(prefix="omni-null-pods-"))
    package = folder / "benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(str(_null_stage.__file__), package / "_null_stage.py")
    (folder / "sitecustomize.py").write_text(SITE)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    name = f"null-{uuid.uuid4().hex[:6]}"
    spec = kube.get("omniruntimeprofile", "cpu")["spec"] | profile_spec
    spec["modelCache"] = {"hostPath": str(folder)}
    spec["env"] = [
        *(e for e in spec.get("env", ()) if e["name"] != "PYTHONPATH"),
        {"name": "PYTHONPATH", "value": CACHE_MOUNT_PATH},
        {"name": _null_stage.KNOB, "value": f"{CACHE_MOUNT_PATH}/knob.json"},
    ]
    profile = {"apiVersion": "serving.omni.dev/v1alpha1", "kind": "OmniRuntimeProfile", "metadata": {"name": name}}
    apply(kube, {**profile, "spec": spec})
    try:
        with fresh_namespace(kube) as namespace:
            kube.read("label", "namespace", namespace, "pod-security.kubernetes.io/enforce-")
            yield NullPods(kube, namespace, name, folder)
    finally:
        kube.read("delete", "omniruntimeprofile", name, "--ignore-not-found")
        shutil.rmtree(folder, ignore_errors=True)


def script(chunks: int, interval_ms: float) -> str:
    """What a client asks a null pipeline: so many chunks, one each interval."""
    return json.dumps({"chunks": chunks, "interval_ms": interval_ms})


@dataclass
class Clients:
    """Streams that begin at a fixed rate, whatever becomes of the earlier ones, until the block ends."""

    url: str
    rate: float
    question: str
    modalities: tuple[str, ...] = ("text", "audio")
    answers: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _open: int = 0

    def __enter__(self) -> Clients:
        self._pool = ThreadPoolExecutor(64)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        self._pool.shutdown(wait=True)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            self._pool.submit(self._one)
            due += 1 / self.rate

    def _one(self) -> None:
        try:
            self.answers.append(ask(self.url, self.question, modalities=self.modalities, timeout_s=120))
        except Exception as error:  # a test reports whatever went wrong
            self.errors.append(f"{type(error).__name__}: {error}")

    def latest_ttfp(self, count: int) -> list[float]:
        """Seconds, of the answers that ended last."""
        return [a.ttfp_s for a in self.answers[-count:]] if len(self.answers) >= count else []


def kubectl_scale(kube: Kube, namespace: str, stage: str, replicas: int) -> None:
    kube.read("-n", namespace, "scale", f"omnistage/{stage}", f"--replicas={replicas}")


@contextmanager
def deleted_afterwards(kube: Kube, *arguments: str) -> Iterator[None]:
    try:
        yield
    finally:
        with suppress(Exception):
            kube.read("delete", *arguments, "--ignore-not-found", "--wait=false")
