"""A profile asks for RDMA on a node that has none: edges go over sealed TCP, and the pipeline says so."""

from __future__ import annotations

from typing import Any

import pytest

from omni_runtime.cli.kubectl import Kube, port_forward, wait_ready
from omni_runtime.client import ask
from tests.e2e.conftest import conditions, eventually
from tests.e2e.null_pods import null_pods, script

pytestmark = pytest.mark.timeout(600)

NAME = "without-rdma"
READY_SECONDS = 300
TOLD_SECONDS = 90  # the operator asks sidecars each 15 s
NEITHER = "Mooncake's engine does not run in pods of {}: TCP instead"


def test_mooncake_that_cannot_start_is_told_and_speech_comes_over_tcp(kube: Kube) -> None:
    with null_pods(kube, connectors=["SharedMemory", "TCP", "Mooncake"], mooncake={"protocol": "RDMA"}) as site:
        edges = [
            {"from": source, "to": to, "mode": "asyncChunk", "connector": {"type": "Mooncake"}}
            for source, to in (("thinker", "talker"), ("talker", "code2wav"))
        ]
        site.make(NAME, {}, edges=edges)
        wait_ready(lambda: site.pipeline(NAME), READY_SECONDS)
        with port_forward(kube, site.namespace, NAME) as url:
            answer = ask(url, script(20, 20), modalities=("text", "audio"), timeout_s=60)
        assert answer.audio_s > 0

        def told() -> list[tuple[Any, ...]]:
            found = site.pipeline(NAME)["status"]["edges"]
            return [(e["connector"], e.get("inUse"), e["ready"], e["reason"]) for e in found]

        wanted = [
            ("Mooncake", ["TCP"], "True", f"Degraded: {NEITHER.format('talker, thinker')}"),
            ("Mooncake", ["TCP"], "True", f"Degraded: {NEITHER.format('code2wav, talker')}"),
        ]
        eventually(lambda: told() == wanted or None, TOLD_SECONDS, lambda: f"edges are {told()}")
        condition = conditions(site.pipeline(NAME))["ConnectorsReady"]
        assert (condition["status"], condition["reason"]) == ("True", "Degraded")
        assert "thinker->talker: Mooncake's engine does not run" in condition["message"]
        assert conditions(site.pipeline(NAME))["Ready"]["status"] == "True", "it works"
        events = kube.get("-n", site.namespace, "events")["items"]
        (event,) = [e for e in events if e["reason"] == "Degraded"]
        assert event["type"] == "Warning"
