"""The scraper against real HTTP: what answers, what does not, and what answers nonsense."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web

from omni_operator.autoscale import scrape as module
from omni_operator.autoscale.scrape import Scraper, Target

ENTRY_TEXT = 'vllm_omni:stage_gen_time_s_count{model_name="m",stage="talker",stage_type="x"} 7\n'
POD_TEXT = 'omni:replica_tokens_total{model_name="m",stage="talker",replica="r"} 42\n'
STATUS = {"stages": [{"name": "talker", "replicas": [{"replica": "r", "bound": 3}]}]}
LOCAL = "127.0.0.1"


class Pods:
    """An entry and an engine on ports of this machine; what each says can be changed."""

    def __init__(self) -> None:
        self.entry, self.engine, self.status = ENTRY_TEXT, POD_TEXT, 200

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.entry, status=self.status)

    async def state(self, request: web.Request) -> web.Response:
        return web.json_response(STATUS)

    async def work(self, request: web.Request) -> web.Response:
        return web.Response(text=self.engine)


async def _serve(routes: list[web.RouteDef]) -> tuple[web.AppRunner, int]:
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, LOCAL, 0).start()
    return runner, int(runner.addresses[0][1])


@pytest_asyncio.fixture
async def pods(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pods]:
    said = Pods()
    entry, entry_port = await _serve([web.get("/metrics", said.metrics), web.get("/omni/status", said.state)])
    engine, port = await _serve([web.get("/metrics", said.work)])
    monkeypatch.setattr(module, "ENTRY_HTTP_PORT", entry_port)
    monkeypatch.setattr(module, "engine_port", lambda i: port)
    yield said
    await entry.cleanup()
    await engine.cleanup()


@pytest_asyncio.fixture
async def scraper() -> AsyncIterator[Scraper]:
    made = Scraper()
    yield made
    await made.close()


ENTRY, TALKER = Target("entry-0", "uid", LOCAL), Target("k-0", "uid-k", LOCAL, ("talker",))


async def test_entry_status_and_work_of_the_pods_come_together(pods: Pods, scraper: Scraper) -> None:
    got = await scraper.scrape(ENTRY, [TALKER], 5.0)
    assert sum(got.entry["stage_gen_time_s_count"].values()) == 7
    assert got.held == {"talker": {"r": 3}} and got.work == {"talker": {"k-0": 42.0}}
    assert (got.at, got.entry_pod, got.missing) == (5.0, "uid", ())


async def test_a_pod_that_says_nonsense_is_missing_and_the_rest_counts(pods: Pods, scraper: Scraper) -> None:
    pods.engine = "<html>not metrics"
    got = await scraper.scrape(ENTRY, [TALKER], 5.0)
    assert got.missing == ("k-0",) and not got.blank


@pytest.mark.parametrize("status", [404, 500])
async def test_an_entry_that_fails_gives_a_blank_scrape(pods: Pods, scraper: Scraper, status: int) -> None:
    pods.status = status
    assert (await scraper.scrape(ENTRY, [TALKER], 5.0)).blank


async def test_no_entry_or_nobody_at_its_address_gives_a_blank_scrape(
    scraper: Scraper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ENTRY_HTTP_PORT", 1)
    assert (await scraper.scrape(None, [], 5.0)).blank
    assert (await scraper.scrape(ENTRY, [], 5.0)).blank


async def test_a_long_answer_is_read_whole(pods: Pods, scraper: Scraper) -> None:
    """It comes in many pieces."""
    lines = (f'omni:x{{stage="s{i}"}} 1\n' for i in range(20_000))
    pods.entry = ENTRY_TEXT + "".join(lines)
    assert len((await scraper.scrape(ENTRY, [], 5.0)).entry["x"]) == 20_000


async def test_an_answer_without_end_is_not_read_to_its_end(
    pods: Pods, scraper: Scraper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 1000)
    pods.entry = ENTRY_TEXT * 1000
    assert (await scraper.scrape(ENTRY, [], 5.0)).blank
