"""OpenTelemetry spans of a request and of each of its stages. Off unless a collector is named.

Spans are made when a request has ended, from the times that its state holds: nothing of this is on the way of a chunk.
OpenTelemetry is imported when traces are asked for, and not before.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omni_runtime.errors import OmniError
from omni_runtime.logs import get_logger
from omni_runtime.orchestrator.state import RequestState, StagePhase, StageRecord
from omni_runtime.orchestrator.values import Instant

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

log = get_logger(__name__)

CLOSE_SECONDS = 3.0
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_BAD = frozenset({StagePhase.FAILED, StagePhase.LOST})


class TracesUnavailable(OmniError):
    code = "TracesUnavailable"


def traces_wanted(endpoint: str | None, environ: Mapping[str, str] | None = None) -> str | None:
    """Who asks for traces, in words; None: nobody. endpoint: of the command line or of the plan."""
    environ = os.environ if environ is None else environ
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    if endpoint:
        return f"otlpEndpoint {endpoint}"
    return next((name for name in ENDPOINT_VARIABLES if environ.get(name)), None)


def build_tracer(endpoint: str | None, *, pipeline: str, revision: str, version: str) -> RequestTracer | None:
    """None: traces are off. endpoint: base URL of an OTLP/HTTP collector; None: as the OTEL_* variables say.

    Raises TracesUnavailable if they are asked for and OpenTelemetry is not installed.
    """
    asked_by = traces_wanted(endpoint)
    if asked_by is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracesUnavailable(
            f"{asked_by} asks for traces, but {error.name or error} is not installed here; install "
            "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http, or leave the endpoint out"
        ) from error
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)
    return RequestTracer(BatchSpanProcessor(exporter), pipeline=pipeline, revision=revision, version=version)


def tracer_for(exporter: SpanExporter, *, pipeline: str, revision: str, version: str) -> RequestTracer:
    """A tracer that exports each span at once."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    return RequestTracer(SimpleSpanProcessor(exporter), pipeline=pipeline, revision=revision, version=version)


class RequestTracer:
    """One span `omni.request` per attempt at a request, with one child `omni.stage NAME` per stage."""

    def __init__(self, processor: Any, *, pipeline: str, revision: str, version: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create(
            {"service.name": f"omni-{pipeline}", "service.version": version, "omni.revision": revision}
        )
        # Not at interpreter exit: a collector that does not answer must not hold up the end of the process.
        self._provider: TracerProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("omni_runtime", version)

    def request_ended(self, state: RequestState, outcome: str, reason: str, now: Instant) -> None:
        """outcome: success | failed | replayed. Never raises: a request must not fail because of its trace."""
        try:
            self._record(state, outcome, reason, now)
        except Exception:
            log.exception("trace.failed", request=state.spec.request)

    def _record(self, state: RequestState, outcome: str, reason: str, now: Instant) -> None:
        from opentelemetry import trace
        from opentelemetry.trace import SpanKind, Status, StatusCode

        clock = _WallClock(now)
        root = self._tracer.start_span(
            "omni.request",
            context=_parent(state.spec.trace_parent),
            kind=SpanKind.SERVER,
            start_time=clock.at(state.queued_at if state.bound_at is None or state.attempt == 1 else state.bound_at),
            attributes={
                "omni.request_id": state.spec.request,
                "omni.client_request_id": state.spec.label,
                "omni.tenant": state.spec.tenant,
                "omni.modalities": sorted(m.value for m in state.spec.modalities),
                "omni.attempt": state.attempt,
                "omni.outcome": outcome,
                "omni.reason": reason,
            },
        )
        if state.bound_at is not None:
            root.add_event("bound", timestamp=clock.at(state.bound_at))
        context = trace.set_span_in_context(root)
        for stage, record in state.stages.items():
            self._stage_span(stage, record, state, context, clock, now)
        root.set_status(Status(StatusCode.OK) if outcome == "success" else Status(StatusCode.ERROR, reason))
        root.end(clock.at(now))

    def _stage_span(
        self,
        stage: str,
        record: StageRecord,
        state: RequestState,
        context: Context,
        clock: _WallClock,
        now: Instant,
    ) -> None:
        from opentelemetry.trace import Status, StatusCode

        span: Span = self._tracer.start_span(
            f"omni.stage {stage}",
            context=context,
            start_time=clock.at(record.submitted_at),
            attributes={
                "omni.request_id": state.spec.request,
                "omni.stage": stage,
                "omni.replica": record.replica,
                "omni.phase": record.phase.value,  # a stage may still run when its request has ended for the client
                "omni.queue_seconds": record.queue_seconds,
                "omni.transfer_seconds": record.transfer_seconds,
            },
        )
        if record.started_at is not None:
            span.add_event("started", timestamp=clock.at(record.started_at))
        if record.phase in _BAD:
            span.set_status(Status(StatusCode.ERROR, record.phase.value))
        span.end(clock.at(record.ended_at if record.ended_at is not None else now))

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Export what is left, for at most `seconds`."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(seconds)
        if closing.is_alive():
            log.warning("traces.lost", reason=f"the collector did not take them within {seconds:g} s")


class _WallClock:
    """Instants of the monotonic clock -> nanoseconds since the epoch."""

    def __init__(self, now: Instant) -> None:
        self._now, self._wall = now, time.time_ns()

    def at(self, instant: Instant) -> int:
        return self._wall - round((self._now - instant) * 1e9)


def _parent(trace_parent: str) -> Context | None:
    """The client's own span (W3C traceparent), if it sent one."""
    if not trace_parent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": trace_parent})
