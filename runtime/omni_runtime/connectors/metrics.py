"""Every metric of the sidecar process. Names under `vllm_omni:` are those of vLLM-Omni, so that its dashboards work."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from omni_runtime.connectors.streams import Key

_EDGE = ("model_name", "from_stage", "from_replica", "to_stage", "to_replica")
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0)
_BYTES = tuple(float(1 << power) for power in range(10, 29, 2))  # 1 KiB .. 256 MiB
_TALLIES: Final = {
    "size": ("vllm_omni:transfer_size_bytes", "Bytes of a chunk"),
    "tx": ("vllm_omni:transfer_tx_s", "Put until the producer's sidecar has sent it"),
    "rx": ("vllm_omni:transfer_rx_s", "First to last byte at the consumer's sidecar"),
    "in_flight": ("vllm_omni:transfer_in_flight_s", "Put until handed to the consumer"),
}

EdgeLabels = tuple[str, str, str, str, str]  # values of _EDGE


class Tally:
    """A histogram as plain numbers. prometheus_client's takes a lock for each, which was a tenth of what a chunk costs."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[float]) -> None:
        counts, bounds = self.counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.total += sum(values)

    def buckets(self) -> list[tuple[str, float]]:
        bounds = (*map(floatToGoString, self._bounds), "+Inf")
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


class EdgeTallies:
    """Times and sizes of one edge between two replicas."""

    __slots__ = ("in_flight", "rx", "size", "tx")

    def __init__(self) -> None:
        self.size, self.tx, self.rx, self.in_flight = Tally(_BYTES), Tally(_SECONDS), Tally(_SECONDS), Tally(_SECONDS)


class EdgeMetrics:
    """The numbers of one edge between two replicas, over one connector. For the sidecar's one thread."""

    __slots__ = ("bytes", "chunks", "in_flight", "rx", "size", "tx")

    def __init__(self, tallies: EdgeTallies) -> None:
        self.bytes = self.chunks = 0
        self.size, self.tx, self.rx, self.in_flight = tallies.size, tallies.tx, tallies.rx, tallies.in_flight

    def sent(self, nbytes: int) -> None:
        self.bytes += nbytes
        self.chunks += 1
        self.size.observe(nbytes)

    def sent_all(self, nbytes: Sequence[int]) -> None:
        self.bytes += sum(nbytes)
        self.chunks += len(nbytes)
        self.size.observe_all(nbytes)


class _Edges(Collector):
    def __init__(self, metrics: SidecarMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        nbytes = CounterMetricFamily("omni:connector_bytes", "Bytes of chunks sent", labels=(*_EDGE, "connector"))
        chunks = CounterMetricFamily("omni:connector_chunks", "Chunks sent", labels=(*_EDGE, "connector"))
        for (labels, connector), edge in self._metrics.edges.items():
            nbytes.add_metric((*labels, connector), edge.bytes)
            chunks.add_metric((*labels, connector), edge.chunks)
        yield from (nbytes, chunks)
        for field, (name, text) in _TALLIES.items():
            family = HistogramMetricFamily(name, text, labels=_EDGE)
            for labels, tallies in self._metrics.tallies.items():
                tally: Tally = getattr(tallies, field)
                family.add_metric(labels, tally.buckets(), tally.total)
            yield family


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
        self.tallies: dict[EdgeLabels, EdgeTallies] = {}
        self.edges: dict[tuple[EdgeLabels, str], EdgeMetrics] = {}
        r.register(_Edges(self))
        self.failures = Counter("omni:connector_stream_failures", "Streams that failed", ("code",), registry=r)
        self.refused = Counter("omni:connector_refused", "Opens and attaches refused", ("reason",), registry=r)
        self.spilled = Counter(
            "omni:connector_spilled_pieces", "Pieces that went inline because the arena was full", registry=r
        )
        self.fallbacks = Counter(
            "omni:connector_fallbacks", "Streams of a Mooncake edge that went over TCP", ("reason",), registry=r
        )
        self.fetched = Counter(
            "omni:connector_fetched_bytes", "Bytes that Mooncake's engine read from other pods", registry=r
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
    def edge(self, edge: str, producer: str, consumer: str) -> EdgeLabels:
        """Label values of one edge between two replicas."""
        source, _, to = edge.partition("->")
        return (self._model, source, producer, to, consumer)

    def of(self, labels: EdgeLabels, connector: str) -> EdgeMetrics:
        found = self.edges.get((labels, connector))
        if found is None:
            tallies = self.tallies.setdefault(labels, EdgeTallies())
            found = self.edges[labels, connector] = EdgeMetrics(tallies)
        return found

    def render(self) -> bytes:
        return generate_latest(self.registry)
