"""The worker over real sockets: a real sidecar, a real CURVE ROUTER as orchestrator, engines that only count."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from omni_runtime.protocol import control
from omni_runtime.stages.engine import Done, Failed, StageOutput
from tests.unit.stages.plans import TALKER_EDGE, THINKER_EDGE, a_plan
from tests.unit.stages.worker_rig import CHUNKS, DEADLINE, CountingEngine, a_pipeline, until

pytestmark = pytest.mark.timeout(90)


async def test_a_request_runs_through_all_stages(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path) as p:
        await p.submit("r1")
        await until(lambda: len(p.of(control.StageFinished)) == 3, "three stages finished")
        pcm = b"".join(m.pcm for m in p.of(control.ClientAudio) if isinstance(m, control.ClientAudio))
        expected = np.repeat(np.arange(CHUNKS), 4).astype("<f4")
        assert np.array_equal(np.frombuffer(pcm, "<f4"), expected), "every chunk once, in order"
        assert [m.text for m in p.of(control.ClientText) if isinstance(m, control.ClientText)] == [
            f"t{i}" for i in range(CHUNKS)
        ]
        (thinker,) = p.of(control.StageFinished, "thinker")
        assert isinstance(thinker, control.StageFinished)
        assert (thinker.prompt_tokens, thinker.completion_tokens) == (3, CHUNKS)
        (vocoder,) = p.of(control.StageFinished, "code2wav")
        assert isinstance(vocoder, control.StageFinished)
        assert vocoder.frames == 4 * CHUNKS
        for engine in p.engines.values():
            assert len(engine.threads) == 1, "all engine calls come from one thread"
            assert threading.get_ident() not in engine.threads


async def test_a_clients_own_text_is_fed_where_a_thinkers_would_be(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path) as p:
        await p.submit("r1", stages=("code2wav",))
        inputs = {"text": "It was a dark night. The ", "finished": False}
        submit = control.Submit("r1", params={}, inputs=inputs, text_edge=THINKER_EDGE, consumers=(TALKER_EDGE,))
        await p.send("talker", submit)
        await p.send("talker", control.Append("r1", 1, "wind blew.", finished=True))
        await until(lambda: len(p.of(control.StageFinished)) == 2, "talker and code2wav finished")
        pcm = b"".join(m.pcm for m in p.of(control.ClientAudio) if isinstance(m, control.ClientAudio))
        assert bytes(np.frombuffer(pcm, "<f4").astype(np.uint8)) == b"It was a dark night.The wind blew."


async def test_text_only_needs_no_consumer(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path) as p:
        await p.submit("r1", stages=("thinker",))
        await until(lambda: len(p.of(control.StageFinished)) == 1, "the thinker finished alone")
        assert len(p.of(control.ClientText)) == CHUNKS


async def test_abort_frees_everything_and_is_answered_r11_r16(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path, thinker=CountingEngine("thinker", hold=True)) as p:
        await p.submit("r1")
        await until(lambda: len(p.of(control.ClientAudio)) == CHUNKS - 1, "audio of all chunks but the last")
        for stage in p.plan.stages:
            await p.send(stage.name, control.Abort(request="r1", reason="client left"))
        await until(lambda: len(p.of(control.Aborted)) == 3, "three answers")
        assert p.of(control.StageFailed) == []
        assert all(not e.requests for e in p.engines.values())
        await until(lambda: p.sidecar.hub.ledger.bytes == 0, "no arena byte is held")
        await p.submit("r2", stages=("thinker",))
        await until(lambda: bool(p.of(control.StageStarted, "thinker")), "others go on")
    assert os.listdir(tmp_path / "shm") == [], "the arena went with its sidecar"


async def test_a_tail_that_nobody_comes_for_goes_with_an_abort_r11(tmp_path: Path) -> None:
    """The talker has ended; its chunks wait at the connector for a consumer that died before it opened the stream."""
    async with a_pipeline(tmp_path) as p:
        await p.submit("r1", stages=("thinker", "talker"))
        await until(lambda: len(p.of(control.StageFinished)) == 2, "both ended")
        assert len(p.sidecar.hub.table) == 1, "the tail waits for its consumer"
        await p.send("talker", control.Abort("r1", "ReplicaLost in stage code2wav"))
        await until(lambda: len(p.of(control.Aborted)) == 1, "answered")
        await until(lambda: len(p.sidecar.hub.table) == 0, "the tail is gone")


async def test_a_silent_upstream_is_an_error_that_names_the_edge_r5(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path) as p:
        await p.submit("r1", stages=("talker", "code2wav"))
        await until(lambda: bool(p.of(control.StageFailed, "code2wav")), "the vocoder gave up")
        (failed,) = p.of(control.StageFailed, "code2wav")
        assert isinstance(failed, control.StageFailed)
        assert failed.code == "DeadlineExceeded"
        assert TALKER_EDGE in failed.message


async def test_bad_input_fails_one_request_only(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path) as p:
        await p.submit("bad", stages=("thinker",), bad=True)
        await p.submit("good", stages=("thinker",))
        await until(lambda: bool(p.of(control.StageFinished)) and bool(p.of(control.StageFailed)), "both ended")
        (failed,) = p.of(control.StageFailed)
        assert isinstance(failed, control.StageFailed)
        assert (failed.request, failed.code) == ("bad", "InvalidRequest")
        assert "use 0.7" in failed.message


async def test_a_refused_replica_is_not_ready_and_comes_back(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path) as p:
        p.refuse = "revision 0 is not 1"
        await until(lambda: all(w.missing is not None for w in p.workers.values()), "nobody is ready")
        assert "no orchestrator" in str(p.workers["thinker"].missing)
        p.refuse = ""
        await until(lambda: all(w.missing is None for w in p.workers.values()), "all ready again (R35)")


async def test_drain_says_leaving_finishes_and_exits_zero(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path, thinker=CountingEngine("thinker", hold=True)) as p:
        await p.submit("r1", stages=("thinker",))
        await until(lambda: bool(p.of(control.StageStarted)), "started")
        p.workers["thinker"].stop()
        await until(lambda: bool(p.of(control.Leaving, "thinker")), "Leaving")
        await p.submit("r2", stages=("thinker",))
        await until(lambda: bool(p.of(control.StageFailed)), "a new request is refused")
        assert not p.runs["thinker"].done(), "waits for the running one"
        engine = p.engines["thinker"]
        engine.outputs.append(Done("r1", "stop"))
        engine.wake()
        assert await asyncio.wait_for(p.runs["thinker"], DEADLINE) == 0
        assert [m.request for m in p.of(control.StageFinished) if isinstance(m, control.StageFinished)] == ["r1"]


class PacedCountingEngine(CountingEngine):
    """Wants to know how its consumer keeps up."""

    def __init__(self, stage: str) -> None:
        super().__init__(stage)
        self.heard: list[tuple[str, str, int]] = []

    def taken(self, request: str, edge: str, waiting: int) -> None:
        self.heard.append((request, edge, waiting))


@pytest.mark.parametrize("sizing", ["adaptive", "fixed"])
async def test_the_producer_of_adaptive_chunks_hears_of_each_that_its_consumer_takes(
    tmp_path: Path, sizing: str
) -> None:
    plan = a_plan()
    plan = replace(plan, edges=(plan.edges[0], replace(plan.edges[1], sizing=sizing)))
    async with a_pipeline(tmp_path, plan, talker=PacedCountingEngine("talker")) as p:
        engine = p.engines["talker"]
        assert isinstance(engine, PacedCountingEngine)
        await p.submit("r1")
        await until(lambda: len(p.of(control.StageFinished)) == 3, "finished")
        await until(lambda: len(engine.heard) == (CHUNKS if sizing == "adaptive" else 0), "heard")
        assert {heard[:2] for heard in engine.heard} <= {("r1", TALKER_EDGE)}
        assert all(0 <= waiting < CHUNKS for _, _, waiting in engine.heard)


class DrowsyEngine(CountingEngine):
    """Can sleep; what it was called is in `calls`."""

    def __init__(self, stage: str, *, hold: bool = False) -> None:
        super().__init__(stage, hold=hold)
        self.calls: list[str] = []

    def sleep(self) -> None:
        assert not self.requests
        self.calls.append("sleep")

    def wake_up(self) -> None:
        self.calls.append("wake_up")

    def poll(self, timeout_s: float) -> Sequence[StageOutput]:
        assert self.calls[-1:] != ["sleep"], "an engine that sleeps is not polled"
        return super().poll(timeout_s)


async def test_sleep_and_wake(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path, thinker=DrowsyEngine("thinker", hold=True)) as p:
        engine = p.engines["thinker"]
        assert isinstance(engine, DrowsyEngine)
        await p.submit("r1", stages=("thinker",))
        await until(lambda: bool(p.of(control.StageStarted)), "started")
        await p.send("thinker", control.Sleep())
        await until(lambda: len(p.of(control.PowerChanged)) == 1, "refused")
        assert p.of(control.PowerChanged) == [
            control.PowerChanged(False, "1 requests are in flight; pause, and wait for their end")
        ]
        engine.outputs.append(Done("r1", "stop"))
        engine.requests.clear()
        engine.wake()
        await until(lambda: bool(p.of(control.StageFinished)), "finished")
        await p.send("thinker", control.Sleep())
        await p.submit("r2", stages=("thinker",))
        await until(lambda: len(p.of(control.PowerChanged)) == 2 and bool(p.of(control.StageFailed)), "asleep")
        (refused,) = p.of(control.StageFailed)
        assert isinstance(refused, control.StageFailed)
        assert (refused.request, refused.code, "wake it up" in refused.message) == ("r2", "StageUnavailable", True)
        await p.send("thinker", control.Wake())
        await until(lambda: len(p.of(control.PowerChanged)) == 3, "awake")
        assert p.of(control.PowerChanged)[1:] == [control.PowerChanged(True), control.PowerChanged(False)]
        assert engine.calls == ["sleep", "wake_up"]
        await p.submit("r3", stages=("thinker",))
        await until(lambda: len(p.of(control.StageStarted)) == 2, "serves again")


async def test_an_engine_that_cannot_sleep_says_so(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path) as p:
        await p.send("talker", control.Sleep())
        await until(lambda: bool(p.of(control.PowerChanged)), "answered")
        assert p.of(control.PowerChanged) == [
            control.PowerChanged(False, "CountingEngine has nothing that sleep would give back")
        ]
        await p.submit("r1")
        await until(lambda: len(p.of(control.StageFinished)) == 3, "and serves on")


async def test_a_broken_engine_ends_the_process_with_a_reason_r8(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path, thinker=CountingEngine("thinker", hold=True)) as p:
        await p.submit("r1", stages=("thinker",))
        await until(lambda: bool(p.of(control.StageStarted)), "started")
        p.engines["thinker"].problem = "out of memory"
        p.engines["thinker"].wake()
        await until(lambda: bool(p.of(control.StageFailed)), "the request fails")
        (failed,) = p.of(control.StageFailed)
        assert isinstance(failed, control.StageFailed)
        assert (failed.code, "out of memory" in failed.message) == ("EngineError", True)
        assert await asyncio.wait_for(p.runs["thinker"], DEADLINE) == 1


async def test_an_engines_own_failure_is_passed_on(tmp_path: Path) -> None:
    async with a_pipeline(tmp_path, thinker=CountingEngine("thinker", hold=True)) as p:
        await p.submit("r1", stages=("thinker",))
        await until(lambda: bool(p.of(control.StageStarted)), "started")
        p.engines["thinker"].outputs.append(Failed("r1", "CapacityExceeded", "too long"))
        p.engines["thinker"].wake()
        await until(lambda: bool(p.of(control.StageFailed)), "failed")
        assert not p.runs["thinker"].done()
