"""A replica that dies before the client has had anything: another one does the work, and the client notices nothing."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.local_run import wait_for
from tests.e2e.null_pipeline import NullPipeline, null_pipeline
from tests.e2e.test_never_hanging import CHUNKS, body, events

pytestmark = pytest.mark.timeout(300)


def bound_replica(pipeline: NullPipeline, stage: str) -> str | None:
    stages = httpx.get(f"{pipeline.url}/omni/status", timeout=5).json()["stages"]
    (found,) = (s for s in stages if s["name"] == stage)
    return next((r["replica"] for r in found["replicas"] if r["bound"]), None)


def test_another_replica_does_the_work() -> None:
    """R34, T69: with real processes, sockets and edge streams; nothing of the first attempt is left anywhere."""
    with null_pipeline(code2wav=2) as pipeline:
        children = {n: c for n, c in pipeline.running.items() if n.startswith("code2wav")}
        for child in children.values():  # alive, and unable to send the first chunk
            os.killpg(child.pid, signal.SIGSTOP)
        seen: list[dict[str, Any]] = []

        def ask() -> None:
            request = body(modalities=("audio",))
            with httpx.stream("POST", f"{pipeline.url}/v1/chat/completions", json=request, timeout=60) as response:
                seen.extend(events(response))

        client = threading.Thread(target=ask)
        client.start()
        wait_for(lambda: bound_replica(pipeline, "code2wav") is not None, 20, "the request is bound")
        doomed = str(bound_replica(pipeline, "code2wav"))
        for name, child in children.items():
            mine = doomed in Path(f"/proc/{child.pid}/cmdline").read_text()
            os.killpg(child.pid, signal.SIGKILL if mine else signal.SIGCONT)
            if mine:
                child.wait(10)
                pipeline.start(name)
        client.join(60)
        assert not client.is_alive()
        assert not any("error" in event for event in seen), seen[-1]
        chunks = [c for e in seen for c in e["choices"] if e.get("modality") == "audio" and c["delta"].get("content")]
        assert len(chunks) == CHUNKS, "every chunk once"
        assert pipeline.metric("entry", "omni:requests_replayed_total") == 1
        pipeline.wait_ready()
        pipeline.wait_free()
