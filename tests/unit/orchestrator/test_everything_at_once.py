"""Hundreds of requests of several tenants while clients leave, replicas die and return, and the pipeline is paused.

Every request ends, exactly once and for a reason; afterwards nothing is held anywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from omni_runtime.errors import OmniError
from omni_runtime.orchestrator.actions import Emit, EmitStageEnd
from omni_runtime.orchestrator.admission import AdmissionRules
from omni_runtime.orchestrator.values import AudioPiece, TextPiece
from omni_runtime.topology.types import Modality, PayloadContract
from tests.unit.orchestrator.conftest import Rig, eventually
from tests.unit.orchestrator.fake_stage import FakeStage
from tests.unit.orchestrator.plans import a_plan
from tests.unit.orchestrator.test_input import a_speech_call

REQUESTS = 240
TENANTS = ("", "anna", "bob")
STAGES = ("thinker", "talker", "code2wav")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        rig = Rig(a_plan(first_edge=PayloadContract.TEXT_SEGMENTS), tmp_path / "curve", stack)
        await rig.start(
            admission=AdmissionRules(24, max_per_tenant=20, unavailable_grace_seconds=2.0, replays=2),
        )
        yield rig


async def one_request(rig: Rig, n: int, chance: random.Random) -> str:
    """How it ended. A request that ends well has all of its outputs, each once, in order."""
    kind = chance.choice(("text", "both", "speech", "pieces"))
    modalities = {"text": {Modality.TEXT}, "both": {Modality.TEXT, Modality.AUDIO}}.get(kind, {Modality.AUDIO})
    inputs = {"text": "One. ", "finished": kind != "pieces"}
    call = a_speech_call(
        modalities=frozenset(modalities),
        start_stage="talker" if kind in ("speech", "pieces") else None,
        inputs=inputs,
        tenant=chance.choice(TENANTS),
        session=str(n % 5),
        deadline_seconds=chance.choice((0.05, 20.0, 20.0, 20.0)),
        input_deadline_seconds=5.0,
    )
    try:
        handle = rig.orchestrator.submit(call)
        if kind == "pieces":
            handle.append("Two. ")
            await asyncio.sleep(chance.random() * 0.02)
            handle.append("Three.", finished=True)
        leave_after = chance.choice((None, None, None, 0, 1, 3))
        text, levels, ends = "", list[bytes](), list[str]()
        seen = 0
        async for output in handle.outputs():
            match output:
                case Emit(_, TextPiece(text=piece)):
                    text += piece
                case Emit(_, AudioPiece(pcm=pcm)):
                    levels.append(pcm[:4])
                case EmitStageEnd(stage):
                    ends.append(stage)
            seen += 1
            if leave_after is not None and seen > leave_after:
                return "left"
    except OmniError as error:
        return error.code
    assert text == ("Hello world." if Modality.TEXT in modalities else "") or kind == "speech"
    assert levels == sorted(levels, key=levels.index)
    assert len(set(levels)) == len(levels) == (3 if Modality.AUDIO in modalities else 0), "every chunk once"
    assert len(ends) == len(set(ends))
    return "complete"


async def unrest(rig: Rig, fleet: dict[str, list[FakeStage]], chance: random.Random, over: asyncio.Event) -> None:
    """One replica of a stage dies and another comes, again and again; now and then a pause."""
    while not over.is_set():
        await asyncio.sleep(0.05)
        stage = chance.choice(STAGES)
        fleet[stage].append(await rig.replica(stage))
        await fleet[stage].pop(0).kill()
        if chance.random() < 0.2:
            rig.orchestrator.administration.pause()
            await asyncio.sleep(0.02)
            rig.orchestrator.administration.resume()


@pytest.mark.parametrize("seed", range(3))
async def test_every_request_ends_and_nothing_is_held(rig: Rig, seed: int) -> None:
    """R4, R11, R16, R34, R35, R39, T44, T69, T70"""
    chance = random.Random(seed)
    fleet = {stage: [await rig.replica(stage) for _ in range(3)] for stage in STAGES}
    over = asyncio.Event()
    trouble = asyncio.create_task(unrest(rig, fleet, chance, over))
    try:
        async with asyncio.timeout(60):
            ends: list[asyncio.Task[str]] = []
            for n in range(REQUESTS):
                ends.append(asyncio.create_task(one_request(rig, n, chance)))
                if n % 8 == 7:
                    await asyncio.sleep(0.02)
            counts = Counter(await asyncio.gather(*ends))
    finally:
        over.set()
        await trouble
    assert counts.total() == REQUESTS
    assert counts.keys() <= {"complete", "left", "QueueFull", "ReplicaLost", "DeadlineExceeded", "StageUnavailable"}
    assert counts["complete"] > REQUESTS // 4, counts
    await eventually(lambda: rig.orchestrator.unfinished == 0, seconds=10)
    assert rig.bound == 0
    status = rig.orchestrator.status()
    assert (status.running, status.waiting) == (0, 0)
    assert not rig.orchestrator._attempts
    assert not rig.orchestrator._queue._running
    await eventually(lambda: not [f for fakes in fleet.values() for f in fakes if f._running])
