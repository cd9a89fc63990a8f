"""Probes, models, status, metrics; and what the entry must not import."""

from __future__ import annotations

import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.orchestrator.conftest import eventually
from tests.unit.serving.conftest import Server


async def test_health_names_the_missing_stage(server: Server) -> None:
    """T69: alive, but not ready, until every stage that the outputs need has a live replica."""
    assert (await server.http.get("/livez")).status_code == 200
    await server.replica("thinker")
    talker = await server.replica("talker")
    for path in ("/health", "/ready"):
        response = await server.http.get(path)
        assert response.status_code == 503
        assert response.json()["missing"] == ["code2wav"]
        assert "code2wav" in response.json()["reason"]
    await server.replica("code2wav")
    assert (await server.http.get("/health")).status_code == 200
    await talker.kill()
    await eventually(lambda: server.orchestrator.status().missing == ("talker",))
    assert (await server.http.get("/ready")).json()["missing"] == ["talker"]
    assert (await server.http.get("/livez")).status_code == 200


async def test_models_and_version(server: Server) -> None:
    models = (await server.http.get("/v1/models")).json()
    assert [m["id"] for m in models["data"]] == ["test-omni"]
    assert [m.id async for m in server.openai.models.list()] == ["test-omni"]
    assert (await server.http.get("/v1/models/test-omni")).json()["output_modalities"] == ["audio", "text"]
    assert (await server.http.get("/v1/models/other")).status_code == 404
    assert (await server.http.get("/version")).json()["revision"] == server.plan.revision
    assert (await server.http.get("/nowhere")).json()["error"]["message"]


async def test_status_shows_replicas_and_ttfp(server: Server) -> None:
    await server.replicas()
    await server.chat(modalities=["text", "audio"])
    status = (await server.http.get("/omni/status")).json()
    assert status["ready"] is True
    assert [(s["name"], s["liveReplicas"]) for s in status["stages"]] == [
        ("thinker", 1),
        ("talker", 1),
        ("code2wav", 1),
    ]
    assert status["stages"][0]["replicas"][0]["served"] == 1
    assert status["ttfpMillisecondsP95"] > 0


async def test_metrics_count_what_happened(server: Server) -> None:
    """R54, T32, T33: names and labels of the field; TTFP at the first chunk."""
    _, _, code2wav = await server.replicas()
    await server.chat(modalities=["text", "audio"], stream=True)
    await server.chat(model="other")
    text = (await server.http.get("/metrics")).text
    samples = {
        (s.name, s.labels.get("stage"), s.labels.get("component")): s
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    ttfp = samples["vllm_omni:audio_ttfp_s_count", "code2wav", None]
    assert ttfp.value == 1
    assert ttfp.labels == {"model_name": "test-omni", "stage": "code2wav", "replica": code2wav.replica}
    assert samples["vllm_omni:audio_duration_s_sum", "code2wav", None].value > 0.29
    assert samples["vllm_omni:audio_rtf_count", "code2wav", None].value == 1
    assert samples["vllm_omni:audio_underrun_s_count", "code2wav", None].value == 1
    assert samples["vllm_omni:requests_success_total", None, None].value == 1
    assert samples["vllm_omni:num_requests_running", None, None].value == 0
    assert samples["vllm_omni:stage_waiting_requests", "talker", None].value == 0
    assert samples["omni:ttfp_component_seconds_count", "entry", "queue"].value == 1
    assert samples["omni:stage_live_replicas", "thinker", None].value == 1


async def test_series_exist_before_any_traffic(server: Server) -> None:
    text = (await server.http.get("/metrics")).text
    for name in ("requests_success_total", "requests_failed_total", "stage_waiting_requests", "e2e_request_latency_s"):
        assert f"vllm_omni:{name}" in text


async def test_a_bug_is_told_by_request_id_only(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(server.orchestrator, "submit", broken)
    response = await server.chat()
    assert response.status_code == 500
    assert response.headers["x-request-id"] in response.json()["error"]["message"]
    assert "secret" not in response.text


def test_entry_imports_no_tensor_library() -> None:
    code = "import sys, omni_runtime.entry; print(sorted({'torch','vllm','transformers'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert result.stdout.strip() == "[]"
