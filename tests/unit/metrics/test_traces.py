"""Spans of a request and of its stages, from the orchestrator to an exporter in memory."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from omni_runtime.errors import ReplicaLost
from omni_runtime.metrics.traces import RequestTracer, TracesUnavailable, build_tracer, tracer_for, traces_wanted
from omni_runtime.orchestrator.admission import AdmissionRules
from omni_runtime.orchestrator.spec import build_request_spec
from omni_runtime.orchestrator.state import RequestState
from omni_runtime.orchestrator.values import RequestId
from omni_runtime.topology.types import Modality
from tests.unit.orchestrator.conftest import Rig, a_call, all_outputs, rig  # noqa: F401 - a fixture
from tests.unit.orchestrator.plans import a_plan

ENDPOINT = "http://collector:4318"
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def a_tracer() -> tuple[RequestTracer, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    return tracer_for(exporter, pipeline="p", revision="r", version="1"), exporter


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_request_has_a_span_and_each_stage_one_below_it(rig: Rig) -> None:  # noqa: F811
    tracer, exporter = a_tracer()
    await rig.start(tracer=tracer)
    await rig.replicas()
    call = replace(a_call(), label="client-7", tenant="anna", trace_parent=CLIENT)
    handle = rig.orchestrator.submit(call)
    await all_outputs(handle)
    spans = by_name(exporter)
    assert set(spans) == {"omni.request", "omni.stage thinker", "omni.stage talker", "omni.stage code2wav"}
    root = spans["omni.request"]
    assert attributes(root)["omni.request_id"] == handle.request
    assert attributes(root)["omni.client_request_id"] == "client-7"
    assert attributes(root)["omni.tenant"] == "anna"
    assert root.status.status_code is StatusCode.OK
    assert root.parent is not None
    assert f"{root.parent.trace_id:032x}" == CLIENT.split("-")[1], "part of the client's trace"
    assert root.start_time is not None
    assert root.end_time is not None
    for name in ("thinker", "talker", "code2wav"):
        span = spans[f"omni.stage {name}"]
        assert span.parent is not None
        assert root.context is not None
        assert span.parent.span_id == root.context.span_id
        assert attributes(span)["omni.request_id"] == handle.request
        assert attributes(span)["omni.replica"] == handle.replicas[name]
        assert span.start_time is not None
        assert span.end_time is not None
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time


async def test_a_lost_attempt_and_the_failure_after_it_are_told(rig: Rig) -> None:  # noqa: F811
    tracer, exporter = a_tracer()
    await rig.start(tracer=tracer, admission=AdmissionRules(8, unavailable_grace_seconds=0.3, replays=1))
    doomed = await rig.replica("thinker", hold_after=0)
    handle = rig.orchestrator.submit(a_call("text"))
    await doomed.submitted.wait()
    await doomed.kill()
    with pytest.raises(ReplicaLost):
        await all_outputs(handle)
    roots = [s for s in exporter.get_finished_spans() if s.name == "omni.request"]
    assert [attributes(r)["omni.outcome"] for r in roots] == ["replayed", "failed"]
    assert [attributes(r)["omni.attempt"] for r in roots] == [1, 2]
    assert all(r.status.status_code is StatusCode.ERROR for r in roots)
    (stage,) = (s for s in exporter.get_finished_spans() if s.name == "omni.stage thinker")
    assert attributes(stage)["omni.phase"] == "Lost"


@pytest.mark.parametrize(
    ("endpoint", "environ", "asked_by"),
    [
        pytest.param(None, {}, None, id="off by default"),
        pytest.param(ENDPOINT, {}, f"otlpEndpoint {ENDPOINT}", id="plan or command line"),
        pytest.param(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT}, "OTEL_EXPORTER_OTLP_ENDPOINT", id="environment"),
        pytest.param(ENDPOINT, {"OTEL_SDK_DISABLED": "true"}, None, id="disabled"),
        pytest.param(ENDPOINT, {"OTEL_TRACES_EXPORTER": "none"}, None, id="no traces"),
    ],
)
def test_who_asks_for_traces(endpoint: str | None, environ: dict[str, str], asked_by: str | None) -> None:
    assert traces_wanted(endpoint, environ) == asked_by


def test_without_opentelemetry_the_entry_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracesUnavailable, match=f"{ENDPOINT} asks for traces.*install opentelemetry-sdk"):
        build_tracer(ENDPOINT, pipeline="p", revision="r", version="1")


def test_a_collector_that_does_not_answer_holds_nothing_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        tracer = build_tracer(f"http://127.0.0.1:{mute.getsockname()[1]}", pipeline="p", revision="r", version="1")
        assert tracer is not None
        state = RequestState(build_request_spec(a_plan(), RequestId("r"), frozenset({Modality.TEXT})), queued_at=0.0)
        started = time.monotonic()
        tracer.request_ended(state, "success", "stop", now=1.0)
        tracer.close(seconds=0.2)
        assert time.monotonic() - started < 5.0, "an export takes ten seconds and more to give up"


def test_a_trace_that_cannot_be_made_fails_no_request() -> None:
    tracer, exporter = a_tracer()
    spec = build_request_spec(a_plan(), RequestId("r"), frozenset({Modality.TEXT}))
    broken = RequestState(structs.replace(spec, modalities=None), queued_at=0.0)  # type: ignore[arg-type]
    tracer.request_ended(broken, "success", "stop", now=1.0)
    assert not exporter.get_finished_spans()


def test_off_means_that_nothing_is_imported(tmp_path: Path) -> None:
    import subprocess

    code = (
        "import sys; import omni_runtime.entry; from omni_runtime.metrics.traces import build_tracer; "
        "assert build_tracer(None, pipeline='p', revision='r', version='1') is None; "
        "assert not any(m.startswith('opentelemetry') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": "/usr/bin"}, cwd=tmp_path)
