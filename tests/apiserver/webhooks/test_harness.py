"""The stand-in for a Service leads where a Service would, or a storm blames replicas for what no cluster does."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Any, cast

from tests.apiserver.webhooks.harness import ENDPOINT_SECONDS, FAILURE_THRESHOLD, Proxy, WebhookProcess

DEADLINE_SECONDS = 60
WELL, SILENT = (200, "ok"), (0, "timed out")


class Probed(WebhookProcess):
    """Answers one probe for each answer that it is given."""

    def __init__(self) -> None:
        super().__init__(cast("Any", None), Path("0.log"))
        self._answers: queue.Queue[tuple[int, str]] = queue.Queue()
        self._asked: queue.Queue[None] = queue.Queue()

    def get(self, path: str) -> tuple[int, str]:
        self._asked.put(None)
        try:
            return self._answers.get(timeout=DEADLINE_SECONDS)
        except queue.Empty:
            return SILENT

    def answer(self, *answers: tuple[int, str]) -> None:
        """Until the next probe asks: these are taken in by then."""
        for each in answers:
            self._asked.get(timeout=DEADLINE_SECONDS)
            self._answers.put(each)
        self._asked.get(timeout=DEADLINE_SECONDS)
        self._asked.put(None)


def test_an_endpoint_is_who_was_not_deleted_and_whose_probe_did_not_fail_three_times() -> None:
    """A replica, or its machine, that stands still for one probe stays an endpoint: if it is the only one, and were none,
    the calls that waited for it would find nobody when it goes on."""
    replica = Probed()
    with Proxy([replica]) as proxy:
        replica.answer(WELL, *[SILENT] * (FAILURE_THRESHOLD - 1))
        assert proxy.leads_to(replica)
        replica.answer(WELL, *[SILENT] * (FAILURE_THRESHOLD - 1))
        assert proxy.leads_to(replica), "in a row"
        replica.answer(SILENT)
        assert not proxy.leads_to(replica)
        replica.answer(WELL)
        assert proxy.leads_to(replica)
        replica.told_to_end = time.monotonic() - 2 * ENDPOINT_SECONDS
        assert not proxy.leads_to(replica), "deleted, though its probe is answered"
        replica.answer(WELL)
        replica._answers.put(WELL)
