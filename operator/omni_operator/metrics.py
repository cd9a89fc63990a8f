"""Prometheus metrics of the operator process; all of them, in one place."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

QUEUE_DEPTH = Gauge("omni_operator_queue_depth", "Pipelines waiting for a reconcile now (delayed ones not counted).")
QUEUE_OLDEST_SECONDS = Gauge(
    "omni_operator_queue_oldest_seconds", "Age of the oldest pipeline that waits for a reconcile."
)
RECONCILE_SECONDS = Histogram(
    "omni_operator_reconcile_seconds",
    "Duration of one reconcile.",
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
RECONCILES = Counter("omni_operator_reconciles", "Reconciles by outcome.", ["outcome"])
EVENT_TO_RECONCILED_SECONDS = Histogram(
    "omni_operator_event_to_reconciled_seconds",
    "From the first watch event that was not yet handled to the end of the reconcile that handled it.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
)
API_WRITES = Counter("omni_operator_api_writes", "Mutating requests sent to the API server.", ["resource", "verb"])
API_CALLS = Counter("omni_operator_api_requests", "All requests sent to the API server.", ["resource", "verb", "code"])
WATCH_EVENTS = Counter("omni_operator_watch_events", "Watch events received.", ["resource"])
LEADER = Gauge("omni_operator_leader", "1 while this process holds the Lease.")
CRD_OUTDATED = Gauge(
    "omni_operator_crd_outdated", "1 while an installed CRD is older than this operator; it then writes nothing."
)
AUTOSCALER_TARGET = Gauge("omni_autoscaler_target_replicas", "Replicas that were decided.", ["pipeline", "stage"])
AUTOSCALER_WANTED = Gauge(
    "omni_autoscaler_wanted_replicas", "Replicas that would be enough, before stabilisation.", ["pipeline", "stage"]
)
AUTOSCALER_DECISIONS = Counter("omni_autoscaler_decisions", "Decisions by reason.", ["pipeline", "reason"])
AUTOSCALER_READY = Gauge(
    "omni_autoscaler_ready", "0 while it holds because it cannot see or may not act.", ["pipeline"]
)
AUTOSCALER_WINDOW_SECONDS = Gauge(
    "omni_autoscaler_window_seconds", "Length of the last window of metrics.", ["pipeline"]
)
PIPELINES = Gauge("omni_operator_pipelines", "Pipelines seen by the last full list.")
