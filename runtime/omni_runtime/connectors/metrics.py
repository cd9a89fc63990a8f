"""Every metric of the sidecar process. Names under `vllm_omni:` are those of vLLM-Omni, so that its dashboards work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from omni_runtime.connectors.streams import Key

_EDGE = ("model_name", "from_stage", "from_replica", "to_stage", "to_replica")
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0)
_BYTES = tuple(float(1 << power) for power in range(10, 29, 2))  # 1 KiB .. 256 MiB


@dataclass(frozen=True, slots=True)
class EdgeMetrics:
    """The children of one edge between two replicas, over one connector."""

    bytes: Counter
    chunks: Counter
    size: Histogram
    tx: Histogram
    rx: Histogram
    in_flight: Histogram

    def sent(self, nbytes: int) -> None:
        self.bytes.inc(nbytes)
        self.chunks.inc()
        self.size.observe(nbytes)


class _Waiting(Collector):
    def __init__(self, metrics: SidecarMetrics, read: Callable[[], Iterable[tuple[Key, str, int]]]) -> None:
        self._metrics = metrics
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        streams: dict[tuple[str, ...], list[int]] = {}
        for key, to, pieces in self._read():
            counts = streams.setdefault(self._metrics.edge(key.edge, key.producer, to), [0, 0])
            counts[0] += 1
            counts[1] += pieces
        texts = ("Streams that wait for their consumer", "Pieces that wait for their consumer")
        for position, name in enumerate(("omni:connector_edge_stalled_streams", "omni:connector_edge_waiting_pieces")):
            family = GaugeMetricFamily(name, texts[position], labels=_EDGE)
            for labels, counts in streams.items():
                family.add_metric(labels, counts[position])
            yield family


class SidecarMetrics:
    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._model = model_name
        self.size = Histogram("vllm_omni:transfer_size_bytes", "Bytes of a chunk", _EDGE, buckets=_BYTES, registry=r)
        self.tx = Histogram(
            "vllm_omni:transfer_tx_s",
            "Put until the producer's sidecar has sent it",
            _EDGE,
            buckets=_SECONDS,
            registry=r,
        )
        self.rx = Histogram(
            "vllm_omni:transfer_rx_s",
            "First to last byte at the consumer's sidecar",
            _EDGE,
            buckets=_SECONDS,
            registry=r,
        )
        self.in_flight = Histogram(
            "vllm_omni:transfer_in_flight_s", "Put until handed to the consumer", _EDGE, buckets=_SECONDS, registry=r
        )
        self.bytes = Counter("omni:connector_bytes", "Bytes of chunks sent", (*_EDGE, "connector"), registry=r)
        self.chunks = Counter("omni:connector_chunks", "Chunks sent", (*_EDGE, "connector"), registry=r)
        self.failures = Counter("omni:connector_stream_failures", "Streams that failed", ("code",), registry=r)
        self.refused = Counter("omni:connector_refused", "Opens and attaches refused", ("reason",), registry=r)
        self.spilled = Counter(
            "omni:connector_spilled_pieces", "Pieces that went inline because the arena was full", registry=r
        )
        self.fallbacks = Counter(
            "omni:connector_fallbacks", "Streams of a Mooncake edge that went over TCP", ("reason",), registry=r
        )
        self.late = Counter("omni:connector_late_pieces", "Pieces of ended streams, dropped", registry=r)
        self._gauges: list[Gauge] = []

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A value that is read when somebody scrapes."""
        gauge = Gauge(name, text, registry=self.registry)
        gauge.set_function(read)
        self._gauges.append(gauge)

    def waiting(self, read: Callable[[], Iterable[tuple[Key, str, int]]]) -> None:
        """Streams that stand still for want of credit or of a consumer, and their pieces, by edge and replica."""
        self.registry.register(_Waiting(self, read))

    @lru_cache(maxsize=4096)  # noqa: B019 - one instance a process
    def edge(self, edge: str, producer: str, consumer: str) -> tuple[str, str, str, str, str]:
        """Label values of one edge between two replicas."""
        source, _, to = edge.partition("->")
        return (self._model, source, producer, to, consumer)

    @lru_cache(maxsize=4096)  # noqa: B019 - one instance a process; labels() costs more than the observation
    def of(self, labels: tuple[str, str, str, str, str], connector: str) -> EdgeMetrics:
        return EdgeMetrics(
            self.bytes.labels(*labels, connector),
            self.chunks.labels(*labels, connector),
            self.size.labels(*labels),
            self.tx.labels(*labels),
            self.rx.labels(*labels),
            self.in_flight.labels(*labels),
        )

    def render(self) -> bytes:
        return generate_latest(self.registry)
