"""Metrics of an engine process. Names follow vLLM-Omni where it has one; ours start with `omni:`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class StageMetrics:
    """One registry a process; labels are fixed per process, so that every series carries stage and replica."""

    def __init__(self, *, model_name: str, stage: str, replica: str) -> None:
        self.registry = CollectorRegistry()
        labels = ("model_name", "stage", "replica")
        values = {"model_name": model_name, "stage": stage, "replica": replica}

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, labels, registry=self.registry).labels(**values)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(name, text, labels, registry=self.registry, buckets=SECONDS).labels(**values)

        self.waiting = gauge("vllm_omni:stage_waiting_requests", "Requests that the engine has not started")
        self.running = gauge("omni:stage_running_requests", "Requests that the engine works on")
        self.capacity = gauge("omni:stage_capacity_requests", "Requests in flight that this replica takes")
        self.orchestrators = gauge("omni:stage_orchestrators", "Orchestrators that have admitted this replica")
        self.queue_seconds = seconds("vllm_omni:stage_in_queue_s", "From rows at hand to the engine's start")
        self.compute_seconds = seconds("vllm_omni:stage_gen_time_s", "From the engine's start to its last output")
        self.transfer_seconds = seconds("vllm_omni:transfer_rx_s", "Chunks of one request on their way to this stage")
        self.finished = Counter(
            "omni:stage_requests", "Requests that ended here, by result", (*labels, "result"), registry=self.registry
        )
        self.audio_frames = Counter(
            "vllm_omni:audio_frames", "Codec or acoustic frames that this stage made", labels, registry=self.registry
        ).labels(**values)
        self.tokens = Counter(
            "vllm_omni:generation_tokens", "Tokens that this stage made", labels, registry=self.registry
        ).labels(**values)
        self._values = values

    def ended(self, result: str) -> None:
        self.finished.labels(**self._values, result=result).inc()
