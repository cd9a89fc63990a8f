"""Families of the entry. Names, labels and buckets follow vLLM-Omni (`vllm_omni:*`), so that its dashboards and its
benchmark client read them; `omni:*` are ours. All are there from the first scrape, with and without traffic (R54).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.metrics.shares import ttfp_shares
from omni_runtime.orchestrator.state import RequestState, StageRecord
from omni_runtime.orchestrator.values import AudioPiece, ReplicaId, RequestId, StageName, StageUsage
from omni_runtime.topology.graph import ancestors
from omni_runtime.topology.types import Modality

SECONDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
AUDIBLE_UNDERRUN_SECONDS = 0.1

SERIES_SECONDS = 600.0  # that series of a replica outlive it: longer than any scrape interval
SKIP_REASONS = ("no_audio", "client_disconnect", "client_abort", "failed")
SPEECH_ABORTS = ("cancelled", "closed", "engine_dead", "error")

_FAILURES = {
    "client_disconnect": "client_disconnect",
    "client_abort": "client_abort",
    "slow_client": "client_disconnect",
}


@dataclass(slots=True)
class _Playback:
    """A player that starts with the first chunk: how long it ran dry, and how much it has."""

    stage: StageName
    replica: str
    first_at: float
    seconds: float = 0.0
    frames: int = 0
    underrun: float = 0.0

    def add(self, piece: AudioPiece, now: float) -> None:
        dry = (now - self.first_at) - (self.seconds + self.underrun)
        self.underrun += max(0.0, dry)
        self.seconds += piece.seconds
        self.frames += piece.frames


class EntryMetrics:
    """The orchestrator's observer."""

    def __init__(self, plan: ResolvedPlan) -> None:
        self.registry = CollectorRegistry()
        self._model = plan.model.served_name
        self._engines = {s.name: s.engine.value for s in plan.stages}
        self._stages = tuple(s.name for s in plan.stages)
        edges = [(e.source, e.to) for e in plan.edges]
        self._paths = {
            name: tuple(s for s in self._stages if s in ancestors((name,), self._stages, edges))
            for name in self._stages
        }
        self._gone: dict[tuple[StageName, ReplicaId], float] = {}  # replica -> when it went
        self._playing: dict[RequestId, _Playback] = {}

        model, stage, replica = ["model_name"], ["model_name", "stage"], ["model_name", "stage", "replica"]
        self._running = self._gauge("vllm_omni:num_requests_running", "Requests bound to stage replicas.", model)
        self._waiting = self._gauge("vllm_omni:num_requests_waiting", "Requests in the entry's queue.", model)
        self._success = self._counter(
            "vllm_omni:requests_success", "Requests that ended well.", [*model, "finished_reason"]
        )
        self._failed = self._counter("vllm_omni:requests_failed", "Requests that did not.", [*model, "reason"])
        self._e2e = self._histogram("vllm_omni:e2e_request_latency_s", "Queue to last output.", model, SECONDS)
        self._queue_wait = self._histogram("vllm_omni:request_queue_wait_s", "Wait in the entry's queue.", model, FAST)
        self._prompt_tokens = self._counter("vllm_omni:prompt_tokens", "Prompt tokens.", model)
        self._generation_tokens = self._counter("vllm_omni:generation_tokens", "Generated tokens.", model)
        self._ttfp = self._histogram("vllm_omni:audio_ttfp_s", "Queue to first audio chunk.", replica, SECONDS)
        self._rtf = self._histogram("vllm_omni:audio_rtf", "Request seconds per audio second.", replica, RATIOS)
        self._duration = self._histogram("vllm_omni:audio_duration_s", "Audio seconds per request.", replica, SECONDS)
        self._frames = self._counter("vllm_omni:audio_frames", "Codec or acoustic frames that became audio.", replica)
        self._underrun = self._histogram(
            "vllm_omni:audio_underrun_s",
            "Seconds that a player which starts at the first chunk runs dry.",
            replica,
            FAST,
        )
        self._continuity = self._counter(
            "vllm_omni:audio_continuity_ok", "Requests without an audible gap.", [*replica, "threshold_ms"]
        )
        self._skipped = self._counter(
            "vllm_omni:audio_skipped_requests", "Requests for audio that got none.", [*replica, "reason"]
        )
        plain = (self._ttfp, self._rtf, self._duration, self._frames, self._underrun)
        self._per_replica: tuple[tuple[Counter | Histogram, tuple[str, ...]], ...] = (
            *((family, ()) for family in plain),
            (self._continuity, ("100",)),
            *((self._skipped, (reason,)) for reason in SKIP_REASONS),
        )
        self._speech_completed = self._counter(
            "vllm_omni:speech_stream_completed", "Streams of /v1/audio/speech that ended well.", model
        )
        self._speech_aborted = self._counter(
            "vllm_omni:speech_stream_aborted", "Streams of /v1/audio/speech that did not.", [*model, "reason"]
        )
        self._stage_waiting = self._gauge(
            "vllm_omni:stage_waiting_requests", "Requests of the entry's queue that need this stage.", stage
        )
        self._stage_queue = self._histogram("vllm_omni:stage_in_queue_s", "Wait in a replica's queue.", stage, FAST)
        self._stage_time = self._histogram(
            "vllm_omni:stage_gen_time_s", "Computing seconds of a stage per request.", [*stage, "stage_type"], SECONDS
        )
        self._share = self._histogram(
            "omni:ttfp_component_seconds",
            "Shares of the time to the first audio chunk.",
            ["model_name", "component", "stage"],
            FAST,
        )
        self._live = self._gauge("omni:stage_live_replicas", "Replicas that may get work.", stage)
        self._members = self._gauge("omni:stage_registered_replicas", "Replicas that have registered.", stage)
        self._lost = self._counter("omni:replicas_lost", "Replicas that fell silent or closed.", stage)
        self._overloaded = self._counter(
            "omni:requests_refused", "Requests answered with 429, by the limit that was reached.", [*model, "limit"]
        )
        self._replayed = self._counter(
            "omni:requests_replayed", "Requests that started anew after the loss of a replica.", [*model, "reason"]
        )
        self._refused = self._counter("omni:replicas_refused", "Hellos refused: revision, contract, stage.", stage)
        self._messages = self._counter("omni:control_messages", "Messages from stage replicas.", ["kind"])
        # Children of series that every message or request touches: looking a label up costs more than counting.
        self._by_kind: dict[str, Counter] = {}
        self._queue_gauges = (
            self._running.labels(self._model),
            self._waiting.labels(self._model),
            {name: self._stage_waiting.labels(self._model, name) for name in self._stages},
        )
        self._queue_seen: tuple[int, int, Mapping[StageName, int]] | None = None
        self._touch()

    def _touch(self) -> None:
        """Series without events read 0, not "absent": a query over them works from the start."""
        m = self._model
        for series in (self._running, self._waiting, self._e2e, self._queue_wait, self._speech_completed):
            series.labels(m)
        for limit in ("queue", "tenant", "share"):
            self._overloaded.labels(m, limit)
        for reason in SPEECH_ABORTS:
            self._speech_aborted.labels(m, reason)
        self._success.labels(m, "stop")
        for reason in ("client_disconnect", "client_abort", "stage_error", "unknown"):
            self._failed.labels(m, reason)
        for name in self._stages:
            for per_stage in (self._stage_waiting, self._stage_queue, self._live, self._members, self._lost):
                per_stage.labels(m, name)
            self._stage_time.labels(m, name, self._engines[name])

    def render(self) -> tuple[bytes, str]:
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    # --- the orchestrator's observer

    def queue_changed(self, running: int, waiting: int, per_stage: Mapping[StageName, int]) -> None:
        seen = (running, waiting, per_stage)
        if seen == self._queue_seen:  # most steps of a request change nothing here
            return
        self._queue_seen = seen
        running_now, waiting_now, stages_now = self._queue_gauges
        running_now.set(running)
        waiting_now.set(waiting)
        for name, gauge in stages_now.items():
            gauge.set(per_stage.get(name, 0))

    def replicas_changed(self, stage: StageName, live: int, total: int) -> None:
        self._live.labels(self._model, stage).set(live)
        self._members.labels(self._model, stage).set(total)

    def audio_piece(self, state: RequestState, stage: StageName, piece: AudioPiece, now: float) -> None:
        if not piece.pcm:
            return
        playback = self._playing.get(state.spec.request)
        if playback is None:
            replica = state.stages[stage].replica
            playback = self._playing[state.spec.request] = _Playback(stage, replica, first_at=now)
            self._ttfp.labels(self._model, stage, replica).observe(now - state.queued_at)
            for share in ttfp_shares(state, self._paths[stage], now):
                self._share.labels(self._model, share.component.value, share.stage).observe(share.seconds)
        playback.add(piece, now)

    def _skip_audio(self, state: RequestState, reason: str) -> None:
        """Each stage that should have sent audio. reason: no_audio (it had nothing to say), or why the request ended."""
        kind = reason if reason in SKIP_REASONS else "failed"
        for stage, modalities in state.spec.emits.items():
            record = state.stages.get(stage)
            if Modality.AUDIO in modalities:
                replica = record.replica if record is not None else ""
                self._skipped.labels(self._model, stage, replica, kind).inc()

    def stage_ended(self, stage: StageName, record: StageRecord, usage: StageUsage) -> None:
        self._stage_time.labels(self._model, stage, self._engines[stage]).observe(usage.compute_seconds)
        self._stage_queue.labels(self._model, stage).observe(usage.queue_seconds)
        self._prompt_tokens.labels(self._model).inc(usage.prompt_tokens)
        self._generation_tokens.labels(self._model).inc(usage.completion_tokens)

    def request_ended(self, state: RequestState, outcome: str, reason: str, now: float) -> None:
        playback = self._playing.pop(state.spec.request, None)
        if playback is None and Modality.AUDIO in state.spec.modalities:
            self._skip_audio(state, "no_audio" if outcome == "success" else reason)
        if outcome != "success":
            kind = _FAILURES.get(reason, "stage_error" if reason[:1].isupper() else "unknown")
            self._failed.labels(self._model, kind).inc()
            return
        seconds = now - state.queued_at
        self._success.labels(self._model, reason).inc()
        self._e2e.labels(self._model).observe(seconds)
        if state.bound_at is not None:
            self._queue_wait.labels(self._model).observe(state.bound_at - state.queued_at)
        if playback is not None and Modality.AUDIO in state.spec.modalities:
            labels = (self._model, playback.stage, playback.replica)
            self._duration.labels(*labels).observe(playback.seconds)
            self._rtf.labels(*labels).observe(seconds / max(playback.seconds, 1e-9))
            self._underrun.labels(*labels).observe(playback.underrun)
            self._frames.labels(*labels).inc(playback.frames)
            if playback.underrun <= AUDIBLE_UNDERRUN_SECONDS:
                self._continuity.labels(*labels, "100").inc()

    def message_received(self, kind: str) -> None:
        counter = self._by_kind.get(kind)
        if counter is None:
            counter = self._by_kind[kind] = self._messages.labels(kind)
        counter.inc()

    def replica_refused(self, stage: StageName) -> None:
        self._refused.labels(self._model, stage).inc()

    def request_replayed(self, state: RequestState, reason: str) -> None:
        self._replayed.labels(self._model, reason).inc()

    def request_refused(self, limit: str) -> None:
        self._overloaded.labels(self._model, limit).inc()

    def replica_joined(self, stage: StageName, replica: ReplicaId) -> None:
        self._gone.pop((stage, replica), None)

    def replica_gone(self, stage: StageName, replica: ReplicaId, now: float) -> None:
        self._lost.labels(self._model, stage).inc()
        self._gone[stage, replica] = now

    def ticked(self, now: float) -> None:
        """Series of replicas that went are scraped for a while yet, and then are no more: pods come and go."""
        for (stage, replica), since in tuple(self._gone.items()):
            if now - since >= SERIES_SECONDS:
                del self._gone[stage, replica]
                for family, extra in self._per_replica:
                    with contextlib.suppress(KeyError):  # no request of it had audio
                        family.remove(self._model, stage, replica, *extra)

    # --- the speech stream

    def speech_stream_completed(self) -> None:
        self._speech_completed.labels(self._model).inc()

    def speech_stream_aborted(self, reason: str) -> None:
        """reason: one of SPEECH_ABORTS."""
        self._speech_aborted.labels(self._model, reason if reason in SPEECH_ABORTS else "error").inc()

    # --- builders

    def _gauge(self, name: str, help_text: str, labels: list[str]) -> Gauge:
        return Gauge(name, help_text, labels, registry=self.registry)

    def _counter(self, name: str, help_text: str, labels: list[str]) -> Counter:
        return Counter(name, help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str, labels: list[str], buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help_text, labels, buckets=buckets, registry=self.registry)
