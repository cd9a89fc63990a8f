"""Prometheus as the source: a real HTTP server that answers as Prometheus does, and the windows that come of it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from omni_operator.autoscale.prometheus import PrometheusReader, query_of
from omni_operator.autoscale.scrape import Target
from omni_operator.autoscale.snapshot import PodTimes, window_of
from omni_operator.autoscale.source import is_prometheus_url
from omni_operator.autoscale.types import Freshness
from tests.unit.autoscale.builders import a_spec
from tests.unit.autoscale.test_scrape import LOCAL, _serve

ENTRY = Target("p-entry-0", "uid-entry", "192.0.2.1")
TALKER = Target("p-talker-0", "uid-talker", "192.0.2.2", ("talker",))


class Prometheus:
    """Keeps samples, and answers one kind of query: a selector by namespace and pods over the last seconds."""

    def __init__(self) -> None:
        self.series: list[dict[str, Any]] = []
        self.queries: list[str] = []
        self.status, self.body = 200, None

    def scraped(self, pod: str, at: float, **values: float) -> None:
        """values: name__stage__le -> value."""
        for key, value in values.items():
            name, *labels = key.split("__")
            more = dict(zip(("stage", "le"), labels, strict=False))
            if "le" in more:
                more["le"] = more["le"].replace("_", ".").replace("inf", "+Inf")
            metric = {"__name__": f"vllm_omni:{name}", "namespace": "ns", "pod": pod, "job": "omni", **more}
            known = next((s for s in self.series if s["metric"] == metric), None)
            if known is None:
                self.series.append(known := {"metric": metric, "values": []})
            known["values"].append([at, str(value)])

    async def query(self, request: web.Request) -> web.Response:
        asked = str((await request.post())["query"])
        self.queries.append(asked)
        if self.body is not None:
            return web.Response(text=self.body, status=self.status)
        pods = re.search(r'pod=~"([^"]*)"', asked)
        assert pods is not None and 'namespace="ns"' in asked and asked.endswith("[60s]")
        wanted = pods[1].replace("\\\\", "\\")
        result = [s for s in self.series if re.fullmatch(wanted, s["metric"]["pod"]) and s["values"]]
        return web.json_response({"status": "success", "data": {"resultType": "matrix", "result": result}})


@pytest_asyncio.fixture
async def server() -> AsyncIterator[tuple[Prometheus, str]]:
    kept = Prometheus()
    runner, port = await _serve([web.post("/prom/api/v1/query", kept.query)])
    yield kept, f"http://{LOCAL}:{port}/prom/"
    await runner.cleanup()


@pytest_asyncio.fixture
async def reader() -> AsyncIterator[PrometheusReader]:
    made = PrometheusReader()
    yield made
    await made.close()


def entry_at(kept: Prometheus, at: float, ended: float) -> None:
    kept.scraped(
        ENTRY.pod,
        at,
        stage_gen_time_s_count__talker=ended,
        stage_gen_time_s_sum__talker=2 * ended,
        stage_waiting_requests__talker=3,
        audio_ttfp_s_bucket__code2wav__1_0=ended / 2,
        audio_ttfp_s_bucket__code2wav__inf=ended,
        audio_ttfp_s_sum__code2wav=ended,
    )


async def test_two_readings_make_a_window(server: tuple[Prometheus, str], reader: PrometheusReader) -> None:
    kept, url = server
    spec, pods = a_spec(), [PodTimes("talker", TALKER.pod, 30.0)]
    entry_at(kept, 100.0, 10)
    kept.scraped(TALKER.pod, 101.0, replica_tokens_total__talker=500, stage_running_requests__talker=4)
    before = await reader.scrape(url, "ns", ENTRY, [TALKER], 105.0)
    entry_at(kept, 130.0, 40)
    kept.scraped(TALKER.pod, 131.0, replica_tokens_total__talker=2000, stage_running_requests__talker=6)
    after = await reader.scrape(url, "ns", ENTRY, [TALKER], 135.0)
    window = window_of(spec, before, after, pods, 135.0)
    assert window.freshness is Freshness.FRESH
    assert (window.start, window.end) == (100.0, 130.0), "the times of the samples, not of the questions"
    talker = window.stage("talker")
    assert (talker.completions, talker.busy_seconds, talker.work) == (30, 60, 1500)
    assert talker.in_flight == 5 and talker.waiting == 3
    assert window.ttfp.count == 30 and window.ttfp.share_above(1.0) == 0.5
    assert after.held == {"talker": {TALKER.uid: 6}}


async def test_a_prometheus_that_scrapes_no_more_gives_stale_data(
    server: tuple[Prometheus, str], reader: PrometheusReader
) -> None:
    """T27: the answer is the same one every time, and says when it was true."""
    kept, url = server
    entry_at(kept, 100.0, 10)
    entry_at(kept, 115.0, 20)
    got = await reader.scrape(url, "ns", ENTRY, [], 200.0)
    assert window_of(a_spec(), got, got, [], 200.0).freshness is Freshness.STALE


async def test_a_pod_without_series_is_missing(server: tuple[Prometheus, str], reader: PrometheusReader) -> None:
    kept, url = server
    entry_at(kept, 100.0, 10)
    kept.scraped("somebody-else", 100.0, replica_tokens_total__talker=7)
    assert (await reader.scrape(url, "ns", ENTRY, [TALKER], 101.0)).missing == (TALKER.pod,)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, "{}"),
        (200, "<html>"),
        (200, '{"status": "error", "error": "too many samples"}'),
        (200, '{"status": "success", "data": {"resultType": "vector", "result": []}}'),
        (200, '{"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {}, "values": []}]}}'),
        (200, '{"status": "success", "data": {"resultType": "matrix", "result": []}}'),
    ],
)
async def test_what_is_no_answer_is_a_blank_scrape(
    server: tuple[Prometheus, str], reader: PrometheusReader, status: int, body: str
) -> None:
    kept, url = server
    kept.status, kept.body = status, body  # type: ignore[assignment]
    assert (await reader.scrape(url, "ns", ENTRY, [TALKER], 1.0)).blank


async def test_nobody_there(reader: PrometheusReader) -> None:
    assert (await reader.scrape(f"http://{LOCAL}:1", "ns", ENTRY, [], 1.0)).blank
    assert (await reader.scrape(f"http://{LOCAL}:1", "ns", None, [], 1.0)).blank


def test_the_query_takes_the_pods_and_nothing_else() -> None:
    query = query_of("ns", ["a.b-0", "c"])
    assert 'pod=~"a\\\\.b\\\\-0|c"' in query and 'namespace="ns"' in query and query.endswith("[60s]")


@pytest.mark.parametrize(
    ("url", "fine"),
    [
        ("http://prometheus.monitoring:9090", True),
        ("https://metrics.example.com/select/0/prometheus", True),
        ("prometheus.monitoring:9090", False),
        ("http://", False),
        ("http://[half", False),
        ("http://prometheus:port", False),
        ("http://prometheus:9090/api/v1/query?query=up", False),
        ("", False),
    ],
)
def test_urls_that_can_be_asked(url: str, fine: bool) -> None:
    assert is_prometheus_url(url) is fine
