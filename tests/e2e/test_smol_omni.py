"""The main job with real pods: apply, Ready, speech; scale; lose each stage in turn; delete."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

from omni_runtime.cli.kubectl import REPOSITORY, SYSTEM_NAMESPACE, Kube, port_forward, wait_ready
from omni_runtime.client import Answer, ask
from omni_runtime.transcribe import Transcriber, word_errors
from tests.e2e.conftest import conditions, eventually, fresh_namespace, objects_of, pods

pytestmark = pytest.mark.timeout(900)

PIPELINE = "smol-omni"
STAGES = ("thinker", "talker", "code2wav")
QUESTION = "Why is the sky blue? Answer in two short sentences."
READY_SECONDS = 600


@pytest.fixture(scope="module")
def deployed(kube: Kube) -> Iterator[str]:
    """The example pipeline, Ready, in a namespace of its own."""
    with fresh_namespace(kube) as namespace:
        kube.read("-n", namespace, "apply", "-f", "examples/smol-omni.pipeline.yaml")
        wait_ready(lambda: read(kube, namespace), READY_SECONDS)
        yield namespace


@pytest.fixture
def url(kube: Kube, deployed: str) -> Iterator[str]:
    wait_ready(lambda: read(kube, deployed), READY_SECONDS)
    with port_forward(kube, deployed, PIPELINE) as address:
        yield address


def read(kube: Kube, namespace: str) -> dict[str, Any]:
    return kube.get("-n", namespace, "omnipipeline", PIPELINE)


def stage_selector(stage: str) -> str:
    return f"serving.omni.dev/pipeline={PIPELINE},serving.omni.dev/stage={stage}"


def served(kube: Kube, namespace: str, stage: str) -> dict[str, float]:
    """Finished requests per pod of a stage, from the engines' own metrics."""
    counts = {}
    for pod in pods(kube, namespace, stage_selector(stage)):
        name = pod["metadata"]["name"]
        text = kube.read("get", "--raw", f"/api/v1/namespaces/{namespace}/pods/{name}:8081/proxy/metrics")
        counts[name] = sum(
            float(line.split()[-1]) for line in text.splitlines() if line.startswith("omni:stage_requests_total{")
        )
    return counts


def test_spoken_answer_is_understood(url: str) -> None:
    """Text and speech of one answer agree: a listener that only hears the speech writes down the same words."""
    answer = ask(url, QUESTION)
    assert answer.text.strip()
    assert answer.audio_s > 1.0
    heard = Transcriber()(answer.pcm, answer.sample_rate)
    errors = word_errors(answer.text, heard)
    assert errors.rate <= 0.15, f"said {answer.text!r}, heard {heard!r}"
    assert answer.ttfp_s < answer.e2e_s, "speech did not stream: the first packet came with the last (R51)"


def test_text_only_request_leaves_the_speech_stages_alone(kube: Kube, deployed: str, url: str) -> None:
    before = {stage: served(kube, deployed, stage) for stage in ("talker", "code2wav")}
    answer = ask(url, QUESTION, modalities=("text",))
    assert answer.text.strip()
    assert answer.pcm.size == 0
    assert {stage: served(kube, deployed, stage) for stage in ("talker", "code2wav")} == before


def test_a_scaled_stage_serves_on_both_replicas_and_keeps_its_count(kube: Kube, deployed: str, url: str) -> None:
    """T12, T70: kubectl scale holds through reconciles and an operator restart; both replicas get requests."""
    kube.read("-n", deployed, "scale", f"omnistage/{PIPELINE}-talker", "--replicas=2")
    eventually(lambda: two_ready(kube, deployed), 120, "two ready talker replicas")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(url, QUESTION), range(8)))
    assert all(a.audio_s > 1.0 for a in answers)
    counts = served(kube, deployed, "talker")
    assert len(counts) == 2 and all(n > 0 for n in counts.values()), counts

    for i in range(10):
        kube.read("-n", deployed, "annotate", "--overwrite", f"omnipipeline/{PIPELINE}", f"e2e.omni.dev/touch={i}")
    kube.read("-n", SYSTEM_NAMESPACE, "rollout", "restart", "deployment/omni-operator")
    kube.read("-n", SYSTEM_NAMESPACE, "rollout", "status", "deployment/omni-operator", "--timeout=120s")
    kube.read("-n", deployed, "annotate", "--overwrite", f"omnipipeline/{PIPELINE}", "e2e.omni.dev/touch=after-restart")
    leader_acts(kube, deployed)
    stage = kube.get("-n", deployed, "omnistage", f"{PIPELINE}-talker")
    assert stage["spec"]["replicas"] == 2
    assert len(pods(kube, deployed, stage_selector("talker"))) == 2

    kube.read("-n", deployed, "scale", f"omnistage/{PIPELINE}-talker", "--replicas=1")
    eventually(
        lambda: True if len(pods(kube, deployed, stage_selector("talker"))) == 1 else None, 120, "one talker replica"
    )


def two_ready(kube: Kube, namespace: str) -> bool | None:
    stage = kube.get("-n", namespace, "omnistage", f"{PIPELINE}-talker")
    return True if (stage.get("status") or {}).get("readyReplicas") == 2 else None


def leader_acts(kube: Kube, namespace: str) -> None:
    """The restarted operator has reconciled: it repairs a Service that we delete."""
    kube.read("-n", namespace, "delete", "service", f"{PIPELINE}-talker")
    eventually(
        lambda: kube.get("-n", namespace, "services", "-l", stage_selector("talker"))["items"] or None,
        60,
        "the restarted operator brings back a deleted Service",
    )


class Background:
    """Text-only requests, one after another, until stopped; they must all succeed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.answers: list[Answer] = []
        self.errors: list[Exception] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append(ask(self._url, "Name one colour.", modalities=("text",)))
            except Exception as error:  # the test reports whatever went wrong
                self.errors.append(error)
                return

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=120)


@pytest.mark.parametrize("stage", ["talker", "code2wav", "thinker"])
def test_a_killed_stage_is_named_and_comes_back(kube: Kube, deployed: str, url: str, stage: str) -> None:
    """T69, R34: Serving names the lost stage, the rest goes on, and the stage returns without help."""
    (pod,) = pods(kube, deployed, stage_selector(stage))
    background = Background(url)
    # Every request needs the thinker: where it is the one that dies, there is no other request to keep unharmed.
    with background if stage != "thinker" else nullcontext():
        kube.read(
            "-n", deployed, "delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force", "--wait=false"
        )
        serving = eventually(lambda: not_serving(kube, deployed), 60, f"Serving=False after {stage} was killed")
        assert stage in serving["message"]
        wait_ready(lambda: read(kube, deployed), READY_SECONDS)
    assert not background.errors, background.errors
    assert background.answers or stage == "thinker"
    assert conditions(read(kube, deployed))["Serving"]["status"] == "True"
    with port_forward(kube, deployed, PIPELINE) as fresh:
        assert ask(fresh, QUESTION).audio_s > 1.0


def not_serving(kube: Kube, namespace: str) -> dict[str, Any] | None:
    serving = conditions(read(kube, namespace)).get("Serving")
    return serving if serving and serving["status"] == "False" else None


def test_a_closed_connection_frees_every_stage(url: str) -> None:
    """R11, R16: a client that leaves mid-stream leaves nothing running."""
    body = {
        "model": PIPELINE,
        "messages": [{"role": "user", "content": "Tell me a long story about a river."}],
        "modalities": ["text", "audio"],
        "stream": True,
        "max_tokens": 400,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        heard = any('"modality":"audio"' in line.replace(" ", "") for line in response.iter_lines())
        assert heard, "the answer ended without speech"
        assert bound(url) >= 1, "the answer had ended before the client left"
    eventually(lambda: True if bound(url) == 0 else None, 30, "no stage holds a request after the client left")


def bound(url: str) -> int:
    """Requests that replicas hold, over all stages."""
    stages = httpx.get(f"{url}/omni/status", timeout=10).json()["stages"]
    return sum(replica["bound"] for stage in stages for replica in stage["replicas"])


def test_a_deleted_pipeline_leaves_nothing(kube: Kube, deployed: str) -> None:
    """Owner references do the deleting; no finalizer, no leftover."""
    kube.read("-n", deployed, "delete", "omnipipeline", PIPELINE, "--wait=true", "--timeout=60s")
    eventually(lambda: None if objects_of(kube, deployed) else True, 120, "the namespace is empty")


def test_a_namespace_can_be_deleted_while_the_operator_is_stopped(kube: Kube, tmp_path: Path) -> None:
    """T50: no finalizer of ours holds a namespace.

    A short drain, because Kubernetes looks at a namespace that had pods again only after half of their grace period.
    """
    space = fresh_namespace(kube)
    namespace = space.__enter__()
    manifest = tmp_path / "pipeline.yaml"
    example = REPOSITORY / "examples" / "smol-omni.pipeline.yaml"
    manifest.write_text(example.read_text() + "  drain: {timeoutSeconds: 5}\n")
    kube.read("-n", namespace, "apply", "-f", str(manifest))
    eventually(lambda: pods(kube, namespace) or None, 60, "pods of the pipeline")
    kube.read("-n", SYSTEM_NAMESPACE, "scale", "deployment/omni-operator", "--replicas=0")
    try:
        eventually(
            lambda: None if pods(kube, SYSTEM_NAMESPACE, "app.kubernetes.io/name=omni-operator") else True,
            60,
            "no operator pod",
        )
        started = time.monotonic()
        kube.read("delete", "namespace", namespace, "--timeout=120s")
        assert time.monotonic() - started < 120
    finally:
        kube.read("-n", SYSTEM_NAMESPACE, "scale", "deployment/omni-operator", "--replicas=1")
        kube.read("-n", SYSTEM_NAMESPACE, "rollout", "status", "deployment/omni-operator", "--timeout=120s")
