"""TTFP in the status: follows what the entry says within seconds, costs a reconcile nothing, and never flutters (T7)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from omni_operator import ttfp
from omni_operator.kinds import POD
from omni_operator.names import STAGE_LABEL
from omni_operator.observed import Key, Live
from omni_operator.ttfp import EntryStatusReader
from tests.unit.operator.served import served

KEY = Key("ns", "p")


def entry_pod(address: str, ready: str = "True") -> Live:
    return Live(
        POD,
        {
            "metadata": {"name": "p-entry-0", "uid": "u", "labels": {STAGE_LABEL: "entry"}},
            "status": {"podIP": address, "conditions": [{"type": "Ready", "status": ready}]},
        },
    )


class Entry:
    """An entry on loopback that says what it is told to."""

    def __init__(self) -> None:
        self.value: object = None
        self.asked = 0

    async def status(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response({"ttfpMillisecondsP95": self.value})


@pytest.fixture
async def entry(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Entry]:
    told = Entry()
    async with served("/omni/status", told.status) as port:
        monkeypatch.setattr(ttfp, "ENTRY_HTTP_PORT", port)
        yield told


@pytest.fixture
async def reader() -> AsyncIterator[EntryStatusReader]:
    reader = EntryStatusReader()
    yield reader
    await reader.close()


async def test_a_new_value_asks_for_one_reconcile(entry: Entry, reader: EntryStatusReader) -> None:
    pods = (entry_pod("127.0.0.1"),)
    assert await reader.ttfp(KEY, pods) is None
    assert entry.asked == 0, "a reconcile waits for nobody"
    entry.value = 812.4
    assert await reader.refresh() == (KEY,)
    assert await reader.ttfp(KEY, pods) == 812
    assert await reader.refresh() == (), "it is shown"


async def test_noise_asks_for_none(entry: Entry, reader: EntryStatusReader) -> None:
    pods = (entry_pod("127.0.0.1"),)
    await reader.ttfp(KEY, pods)
    entry.value = 800
    await reader.refresh()
    await reader.ttfp(KEY, pods)
    for entry.value in (790, 810, 805):
        assert await reader.refresh() == ()
    entry.value = 2400
    assert await reader.refresh() == (KEY,)


@pytest.mark.parametrize("said", [None, "fast", -1, 1e12, [1]])
async def test_nonsense_is_not_known(entry: Entry, reader: EntryStatusReader, said: object) -> None:
    pods = (entry_pod("127.0.0.1"),)
    await reader.ttfp(KEY, pods)
    entry.value = said
    assert await reader.refresh() == ()
    assert await reader.ttfp(KEY, pods) is None


async def test_an_entry_that_is_gone_is_not_asked(entry: Entry, reader: EntryStatusReader) -> None:
    await reader.ttfp(KEY, (entry_pod("127.0.0.1"),))
    await reader.ttfp(KEY, (entry_pod("127.0.0.1", ready="False"),))
    assert await reader.refresh() == ()
    assert entry.asked == 0
