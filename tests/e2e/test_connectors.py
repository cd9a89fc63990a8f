"""Edges between two real nodes: speech through TCP and through Mooncake, and sidecars that are killed in mid-answer."""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from omni_cluster.state import load_state
from omni_runtime.cli.kubectl import Kube, StepFailed, omni, port_forward, wait_ready
from omni_runtime.client import ask
from omni_runtime.deploy.plan import SIDECAR_HTTP_PORT
from omni_runtime.errors import ReplicaLost, StageUnavailable, UpstreamLost
from tests.e2e.conftest import eventually, fresh_namespace, pods

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

CLUSTER = "omni"
PIPELINE = "smol-omni"
PLACES = {"thinker": "n1", "talker": "n2", "code2wav": "n1"}  # both edges go from node to node
QUESTION = "Why is the sky blue? Answer in two short sentences."
LONG = "Tell me a long story about a river and the people who live beside it."
READY_SECONDS = 600
TOLD_SECONDS = 60  # a client whose answer lost a sidecar hears of it, or has the whole answer
TOLD = (UpstreamLost, ReplicaLost, StageUnavailable)

# A signal from within does not kill the first process of a container; a limit of CPU time does, once it is used up.
KILL = f"""
import resource, urllib.request
resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))
while True:
    urllib.request.urlopen("http://127.0.0.1:{SIDECAR_HTTP_PORT}/metrics", timeout=5).read()
"""


@pytest.fixture(scope="module")
def two_nodes(kube: Kube) -> Iterator[Kube]:
    """The cluster with a second node, which goes again afterwards."""
    state = load_state(CLUSTER)
    if state.provider != "local":
        pytest.skip(f"a second node of our own needs the provider local; cluster {CLUSTER!r} is {state.provider}")
    omni("cluster", "up", "--nodes", str(max(2, state.nodes)))
    try:
        omni("image", "build", "all", "--load")
        yield kube
    finally:
        omni("cluster", "up", "--nodes", str(state.nodes))


@pytest.fixture(scope="module")
def mooncake_profile(two_nodes: Kube) -> Iterator[str]:
    """The cpu profile, with Mooncake besides."""
    profile = two_nodes.get("omniruntimeprofile", "cpu")
    spec = profile["spec"] | {"connectors": ["SharedMemory", "TCP", "Mooncake"]}
    name = "e2e-cpu-mooncake"
    made = {"apiVersion": profile["apiVersion"], "kind": profile["kind"], "metadata": {"name": name}, "spec": spec}
    apply(two_nodes, made)
    yield name
    two_nodes.read("delete", "omniruntimeprofile", name, "--ignore-not-found")


def apply(kube: Kube, *objects: dict[str, Any], namespace: str = "default") -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as manifest:
        json.dump({"apiVersion": "v1", "kind": "List", "items": list(objects)}, manifest)
        manifest.flush()
        kube.read("-n", namespace, "apply", "-f", manifest.name)


@contextmanager
def spread_over_nodes(kube: Kube, connector: str, profile: str = "cpu") -> Iterator[str]:
    """The pipeline with every edge of that connector, Ready, in a namespace of its own."""
    stages = [
        {"name": stage, "scheduling": {"nodeSelector": {"kubernetes.io/hostname": node}}}
        for stage, node in PLACES.items()
    ]
    edges = [
        {"from": source, "to": to, "mode": "asyncChunk", "connector": {"type": connector}}
        for source, to in (("thinker", "talker"), ("talker", "code2wav"))
    ]
    model = {"uri": "packaged://smol-omni"}
    spec = {"model": model, "topology": "smol_omni", "runtimeProfile": profile, "stages": stages, "edges": edges}
    pipeline = {"apiVersion": "serving.omni.dev/v1alpha1", "kind": "OmniPipeline", "metadata": {"name": PIPELINE}}
    with fresh_namespace(kube) as namespace:
        apply(kube, pipeline | {"spec": spec}, namespace=namespace)
        wait_ready(lambda: read(kube, namespace), READY_SECONDS)
        assert {stage: pod(kube, namespace, stage)["spec"]["nodeName"] for stage in PLACES} == PLACES
        yield namespace


def read(kube: Kube, namespace: str) -> dict[str, Any]:
    return kube.get("-n", namespace, "omnipipeline", PIPELINE)


def pod(kube: Kube, namespace: str, stage: str) -> dict[str, Any]:
    (found,) = pods(kube, namespace, f"serving.omni.dev/pipeline={PIPELINE},serving.omni.dev/stage={stage}")
    return found


def metric(kube: Kube, namespace: str, stage: str, name: str, **labels: str) -> float:
    """Sum over the series of a sidecar's metric that have these labels."""
    address = f"/api/v1/namespaces/{namespace}/pods/{pod(kube, namespace, stage)['metadata']['name']}"
    text = kube.read("get", "--raw", f"{address}:{SIDECAR_HTTP_PORT}/proxy/metrics")
    lines = [line for line in text.splitlines() if re.match(re.escape(name) + r"[{ ]", line)]
    return sum(
        float(line.split()[-1])
        for line in lines
        if all(f'{label}="{value}"' in line for label, value in labels.items())
    )


def told_in_the_status(kube: Kube, namespace: str, connector: str) -> None:
    """That both edges go over it, and do well."""

    def edges() -> list[tuple[object, object]]:
        return [(e.get("inUse"), e["reason"]) for e in read(kube, namespace)["status"]["edges"]]

    eventually(lambda: edges() == [([connector], "Reachable")] * 2 or None, 90, lambda: f"edges are {edges()}")


def test_speech_from_node_to_node_over_tcp(two_nodes: Kube) -> None:
    with spread_over_nodes(two_nodes, "TCP") as namespace:
        with port_forward(two_nodes, namespace, PIPELINE) as url:
            answer = ask(url, QUESTION)
        assert answer.text.strip() and answer.audio_s > 1.0
        for stage in ("thinker", "talker"):
            assert metric(two_nodes, namespace, stage, "omni:connector_chunks_total", connector="TCP") > 0
        told_in_the_status(two_nodes, namespace, "TCP")
        for stage in ("talker", "code2wav", "thinker"):
            kill_in_mid_answer(two_nodes, namespace, stage)


def test_speech_from_node_to_node_over_mooncake(two_nodes: Kube, mooncake_profile: str) -> None:
    with spread_over_nodes(two_nodes, "Mooncake", mooncake_profile) as namespace:
        for stage in PLACES:
            assert metric(two_nodes, namespace, stage, "omni:connector_mooncake_up") == 1, f"no engine beside {stage}"
        with port_forward(two_nodes, namespace, PIPELINE) as url:
            answer = ask(url, QUESTION)
        assert answer.text.strip() and answer.audio_s > 1.0
        for stage in ("thinker", "talker"):
            assert metric(two_nodes, namespace, stage, "omni:connector_chunks_total", connector="Mooncake") > 0
        told_in_the_status(two_nodes, namespace, "Mooncake")
        assert metric(two_nodes, namespace, "code2wav", "omni:connector_fetched_bytes_total") > 0
        for stage in PLACES:
            assert metric(two_nodes, namespace, stage, "omni:connector_fallbacks_total") == 0
        kill_in_mid_answer(two_nodes, namespace, "talker")


# --- sidecars that are killed


@dataclass(slots=True)
class Listening:
    """A client in a thread: whether it hears something, and how its answer ends."""

    url: str
    heard: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    audio_s: float = 0.0

    def start(self) -> Listening:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def _run(self) -> None:
        try:
            self.audio_s = ask(self.url, LONG, max_tokens=300, on_audio=lambda *_: self.heard.set()).audio_s
        except Exception as error:  # the test says which are allowed
            self.error = error
        self.ended.set()
        self.heard.set()


def restarts(kube: Kube, namespace: str, stage: str) -> tuple[int, int]:
    """(of the sidecar, of everything else in the pod)."""
    status = pod(kube, namespace, stage)["status"]
    counts = {
        c["name"]: c["restartCount"]
        for c in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
    }
    return counts.pop("connector"), sum(counts.values())


def kill_in_mid_answer(kube: Kube, namespace: str, stage: str) -> None:
    """The sidecar restarts, its engine attaches again without a restart of its own, the client hears how its answer
    ended, and the next answers are whole (R12, R34, R35).
    """
    before = restarts(kube, namespace, stage)
    with port_forward(kube, namespace, PIPELINE) as url:
        client = Listening(url).start()
        assert client.heard.wait(TOLD_SECONDS) and not client.ended.is_set(), client.error
        with suppress(StepFailed):  # ends with the container
            name = pod(kube, namespace, stage)["metadata"]["name"]
            kube.read("-n", namespace, "exec", name, "-c", "connector", "--", "python", "-c", KILL)
        assert client.ended.wait(TOLD_SECONDS), "the client was never told"
        if client.error is not None:
            assert isinstance(client.error, TOLD), repr(client.error)
        else:
            assert client.audio_s > 1.0
        eventually(
            lambda: True if restarts(kube, namespace, stage)[0] > before[0] else None, 120, "the sidecar's restart"
        )
        wait_ready(lambda: read(kube, namespace), READY_SECONDS)
        eventually(lambda: spoken(url), 120, "a whole answer after the restart")
        assert ask(url, QUESTION).audio_s > 1.0, "and the next one"
    assert restarts(kube, namespace, stage)[1] == before[1], "the engine did not have to restart"


def spoken(url: str) -> bool | None:
    """A refusal with a reason is right while the replica is not back; anything else is not."""
    with suppress(*TOLD):
        return True if ask(url, QUESTION).audio_s > 1.0 else None
    return None
