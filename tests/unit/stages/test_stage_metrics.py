"""What a stage's /metrics shows."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Metric, generate_latest

from omni_runtime.stages.metrics import StageMetrics


def test_an_engines_own_families_carry_the_labels_of_this_process() -> None:
    """Two replicas both call their engine 0: only stage and replica tell their series apart."""
    library = CollectorRegistry()
    counter = Counter("vllm:num_preemptions", "Preemptions.", ["model_name", "engine"], registry=library)
    counter.labels(model_name="/models/x", engine="0").inc(3)
    shown: list[Metric] = []

    def families() -> Iterable[Metric]:
        return shown

    metrics = StageMetrics(model_name="m", stage="thinker", replica="r1")
    metrics.show(families)
    assert b"vllm:" not in generate_latest(metrics.registry), "before the engine is loaded"
    shown.extend(library.collect())
    text = generate_latest(metrics.registry).decode()
    assert 'vllm:num_preemptions_total{model_name="m",replica="r1",stage="thinker"} 3.0' in text
