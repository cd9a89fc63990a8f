"""Families of the entry: names and labels of vLLM-Omni, and no series of replicas that are long gone."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from omni_runtime.metrics.entry import SERIES_SECONDS, EntryMetrics
from omni_runtime.orchestrator.spec import build_request_spec
from omni_runtime.orchestrator.state import Phase, RequestState, StagePhase, StageRecord
from omni_runtime.orchestrator.values import AudioPiece, RequestId
from omni_runtime.topology.types import Modality
from tests.unit.orchestrator.plans import a_plan

PLAN = a_plan()
SECOND_OF_SILENCE = AudioPiece(b"\0" * 4 * 24_000, 24_000, 50)


def a_request(request: str = "r", replica: str = "pod-1") -> RequestState:
    spec = build_request_spec(PLAN, RequestId(request), frozenset({Modality.TEXT, Modality.AUDIO}))
    state = RequestState(spec, queued_at=0.0, phase=Phase.RUNNING, bound_at=0.5)
    for stage in spec.stages:
        state = state.with_stage(stage, StageRecord(replica, StagePhase.STARTED, submitted_at=0.5, started_at=0.6))
    return state


def series(metrics: EntryMetrics, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Labels without the model's name -> value."""
    return {
        tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name")): sample.value
        for family in text_string_to_metric_families(metrics.render()[0].decode())
        for sample in family.samples
        if sample.name == name
    }


def test_the_families_of_vllm_omni_are_there_from_the_first_scrape() -> None:
    """R54"""
    names = {f.name for f in text_string_to_metric_families(EntryMetrics(PLAN).render()[0].decode())}
    assert names >= {
        f"vllm_omni:{name}"
        for name in (
            "num_requests_running num_requests_waiting e2e_request_latency_s prompt_tokens generation_tokens "
            "request_queue_wait_s requests_success requests_failed audio_ttfp_s audio_duration_s audio_rtf audio_frames "
            "audio_underrun_s audio_continuity_ok audio_skipped_requests stage_waiting_requests stage_in_queue_s "
            "stage_gen_time_s speech_stream_completed speech_stream_aborted"
        ).split()
    }


def test_audio_that_did_not_come_is_counted_with_a_reason() -> None:
    metrics = EntryMetrics(PLAN)
    for request, outcome, reason in (
        ("a", "success", "stop"),
        ("b", "failed", "client_disconnect"),
        ("c", "failed", "EngineError"),
    ):
        metrics.request_ended(a_request(request), outcome, reason, now=2.0)
    spoken = a_request("d")
    metrics.audio_piece(spoken, "code2wav", SECOND_OF_SILENCE, now=1.0)
    metrics.request_ended(spoken, "success", "stop", now=2.0)
    assert {
        dict(labels)["reason"]: n for labels, n in series(metrics, "vllm_omni:audio_skipped_requests_total").items()
    } == {
        "no_audio": 1,
        "client_disconnect": 1,
        "failed": 1,
    }


def test_series_of_a_replica_that_is_gone_end_after_a_while() -> None:
    metrics = EntryMetrics(PLAN)
    for replica in ("pod-1", "pod-2", "pod-3"):
        state = a_request(replica, replica)
        metrics.audio_piece(state, "code2wav", SECOND_OF_SILENCE, now=1.0)
        metrics.request_ended(state, "success", "stop", now=2.0)
        metrics.request_ended(a_request("x", replica), "success", "stop", now=2.0)

    def replicas(name: str) -> set[str]:
        return {dict(labels)["replica"] for labels in series(metrics, name)}

    families = [
        "vllm_omni:audio_ttfp_s_count",
        "vllm_omni:audio_rtf_sum",
        "vllm_omni:audio_duration_s_bucket",
        "vllm_omni:audio_frames_total",
        "vllm_omni:audio_underrun_s_count",
        "vllm_omni:audio_continuity_ok_total",
        "vllm_omni:audio_skipped_requests_total",
    ]
    metrics.replica_gone("code2wav", "pod-1", now=10.0)
    metrics.replica_gone("code2wav", "pod-2", now=10.0)
    metrics.replica_gone("code2wav", "pod-without-requests", now=10.0)
    metrics.ticked(10.0 + SERIES_SECONDS - 1)
    assert all(replicas(f) == {"pod-1", "pod-2", "pod-3"} for f in families), "scraped for a while yet"
    metrics.replica_joined("code2wav", "pod-2")
    metrics.ticked(10.0 + SERIES_SECONDS)
    assert {f: replicas(f) for f in families} == {f: {"pod-2", "pod-3"} for f in families}


def test_shares_of_the_ttfp_add_up_in_the_families() -> None:
    metrics = EntryMetrics(PLAN)
    metrics.audio_piece(a_request(), "code2wav", SECOND_OF_SILENCE, now=3.0)
    assert sum(series(metrics, "omni:ttfp_component_seconds_sum").values()) == 3.0
    assert sum(series(metrics, "vllm_omni:audio_ttfp_s_sum").values()) == 3.0


def test_the_speech_stream() -> None:
    metrics = EntryMetrics(PLAN)
    metrics.speech_stream_completed()
    metrics.speech_stream_aborted("closed")
    metrics.speech_stream_aborted("whatever")
    assert series(metrics, "vllm_omni:speech_stream_completed_total") == {(): 1}
    aborted = series(metrics, "vllm_omni:speech_stream_aborted_total")
    assert {dict(k)["reason"]: v for k, v in aborted.items()} == {
        "cancelled": 0,
        "closed": 1,
        "engine_dead": 0,
        "error": 1,
    }
