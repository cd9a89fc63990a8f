"""A worker whose connector sidecar is gone: not ready, given nothing, and no request waits a minute to hear of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from omni_runtime.connectors.sidecar import Sidecar
from omni_runtime.protocol import control
from omni_runtime.protocol.channels import Channels, generate_keys
from omni_runtime.stages import replica
from tests.unit.stages.plans import a_plan
from tests.unit.stages.worker_rig import CountingEngine, Pipeline, a_pipeline, sidecar_options, until

pytestmark = pytest.mark.timeout(90)


class SlowEngine(CountingEngine):
    """Loads until it is let."""

    def __init__(self, stage: str) -> None:
        super().__init__(stage)
        self.loading, self.may_load = threading.Event(), threading.Event()

    def load(self) -> None:
        self.loading.set()
        assert self.may_load.wait(60)


async def test_a_sidecar_that_goes_while_the_engine_loads_keeps_the_worker_from_registering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R12, R35: otherwise the entry sends it requests that wait for a sidecar that nobody has."""
    plan, keys = a_plan(), generate_keys(tmp_path / "curve")
    sidecar = Sidecar(plan, keys, sidecar_options(tmp_path))
    await sidecar.start()
    async with Channels(keys) as channels:
        p = Pipeline(tmp_path, plan, keys, channels)
        engine = SlowEngine("thinker")
        p.start("thinker", engine)
        worker = p.workers["thinker"]
        await until(lambda: engine.loading.is_set() and worker._edges.missing is None, "attached, and loading")
        await sidecar.close()
        await until(lambda: worker._edges.missing is not None, "the link is gone")
        monkeypatch.setattr(replica, "SIDECAR_CONNECT_SECONDS", 0.3)
        engine.may_load.set()
        await until(p.runs["thinker"].done, "it gives up instead of serving")
        assert p.runs["thinker"].result() == 1
        assert "no connector sidecar" in str(worker._dead)
        assert worker._registration is None


async def test_requests_are_refused_at_once_while_the_sidecar_is_gone_and_work_when_it_is_back(tmp_path: Path) -> None:
    """R5, R12: StageUnavailable, which another replica or a retry can make good."""
    async with a_pipeline(tmp_path) as p:
        await p.sidecar.close()
        await until(lambda: all("sidecar" in str(w.missing) for w in p.workers.values()), "nobody is ready")
        await until(
            lambda: len(p.beats) == 3 and not any(b.healthy for b in p.beats.values()), "and the entry has heard so"
        )
        assert "no connector sidecar" in p.beats["talker"].detail
        await p.submit("r1")
        await until(lambda: len(p.of(control.StageFailed)) == 3, "refused")
        assert {m.code for m in p.of(control.StageFailed) if isinstance(m, control.StageFailed)} == {"StageUnavailable"}
        assert not any(e.requests for e in p.engines.values())
        await p.submit("r2", stages=("thinker",))
        await until(lambda: bool(p.of(control.StageFinished)), "what needs no edge is served")
        again = Sidecar(p.plan, p.keys, sidecar_options(tmp_path))
        await again.start()
        try:
            await until(lambda: all(w.missing is None for w in p.workers.values()), "all ready again")
            await until(lambda: all(b.healthy for b in p.beats.values()), "and said so")
            await p.submit("r3")
            await until(lambda: len(p.of(control.StageFinished)) == 4, "r3 went through all stages")
        finally:
            await again.close()


async def test_a_refusal_says_first_that_the_replica_is_unwell(tmp_path: Path) -> None:
    """R5: else the entry would try it again at once, and /ready would call it live until the next heartbeat."""
    async with a_pipeline(tmp_path, heartbeat_seconds=3600.0) as p:
        await p.sidecar.close()
        await until(lambda: all("sidecar" in str(w.missing) for w in p.workers.values()), "nobody is ready")
        p.beats.clear()
        await p.submit("r1", stages=("talker",))
        await until(lambda: len(p.of(control.StageFailed)) == 1, "refused")
        assert not p.beats["talker"].healthy
        assert "no connector sidecar" in p.beats["talker"].detail
