"""Metrics of an engine process. Families of vLLM-Omni that count requests are the entry's alone, so that a sum over all
processes counts each request once; what one replica sees of them is `omni:replica_*`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

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
        self.queue_seconds = seconds("omni:replica_queue_seconds", "From rows at hand to the engine's start")
        self.compute_seconds = seconds("omni:replica_compute_seconds", "From the engine's start to its last output")
        self.transfer_seconds = seconds(
            "omni:replica_transfer_seconds", "Chunks of one request on their way to this stage"
        )
        peak = Gauge(
            "vllm_omni:peak_memory_mb",
            "Most host memory that this process and its children have used",
            labels,
            registry=self.registry,
        )
        peak.labels(**values).set_function(peak_memory_mb)
        self.finished = Counter(
            "omni:stage_requests", "Requests that ended here, by result", (*labels, "result"), registry=self.registry
        )
        self.audio_frames = Counter(
            "omni:replica_frames", "Codec or acoustic frames that this stage made", labels, registry=self.registry
        ).labels(**values)
        self.tokens = Counter(
            "omni:replica_tokens", "Tokens that this stage made", labels, registry=self.registry
        ).labels(**values)
        self._values = values

    def ended(self, result: str) -> None:
        self.finished.labels(**self._values, result=result).inc()

    def show(self, families: Callable[[], Iterable[Metric]]) -> None:
        """An engine's own families, with this process's labels."""
        self.registry.register(_Relabelled(families, self._values))


class _Relabelled(Collector):
    """`engine`, a number that is 0 in every process, gives way to what tells the processes apart."""

    def __init__(self, families: Callable[[], Iterable[Metric]], values: dict[str, str]) -> None:
        self._families = families
        self._values = values

    def collect(self) -> Iterator[Metric]:
        for family in self._families():
            named = Metric(family.name, family.documentation, family.type, family.unit)
            for sample in family.samples:
                labels = {name: value for name, value in sample.labels.items() if name != "engine"}
                named.samples.append(sample._replace(labels=labels | self._values))
            yield named


def peak_memory_mb() -> float:
    """Sum of the peaks of this process and its descendants (an engine may compute in processes of its own), in MiB."""
    total, pending = 0.0, [os.getpid()]
    while pending:
        pid = pending.pop()
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            children = " ".join(f.read_text() for f in Path(f"/proc/{pid}/task").glob("*/children"))
        except OSError:  # it ended meanwhile
            continue
        match = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
        total += int(match[1]) / 1024 if match else 0.0
        pending.extend(int(child) for child in children.split())
    return total
