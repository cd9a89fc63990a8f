"""An orchestrator on a free port, with keys of its own, and replicas that can be started and killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from omni_runtime.deploy.plan import ResolvedPlan
from omni_runtime.orchestrator.admission import AdmissionRules
from omni_runtime.orchestrator.calls import Call, RequestHandle
from omni_runtime.orchestrator.loop import Orchestrator
from omni_runtime.orchestrator.pool import LivenessRules
from omni_runtime.protocol.channels import Channels, generate_keys
from omni_runtime.serving.params import StageParams
from omni_runtime.topology.types import Modality
from tests.unit.orchestrator.fake_stage import PATIENCE_SECONDS, FakeStage
from tests.unit.orchestrator.plans import a_plan

RULES = LivenessRules(heartbeat_seconds=0.05, suspect_seconds=0.4, lost_seconds=0.8, unreachable_seconds=0.2)


async def eventually(check: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    """The first truthy value of `check`; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not (value := check()):  # noqa: ASYNC110 - any condition, not one event
            await asyncio.sleep(0.005)
        return value


def a_call(*modalities: str, codes: bool = False, deadline: float = 10.0) -> Call:
    return Call(
        modalities=frozenset(Modality(m) for m in modalities or ("text", "audio")),
        params=StageParams(),
        inputs={"messages": [{"role": "user", "content": "hi"}]},
        emit_codes=codes,
        deadline_seconds=deadline,
    )


async def all_outputs(handle: RequestHandle) -> list[Any]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return [output async for output in handle.outputs()]


class Rig:
    """One orchestrator and its replicas."""

    def __init__(self, plan: ResolvedPlan, keys: Path, stack: AsyncExitStack) -> None:
        self.plan = plan
        self.keys = keys
        self._stack = stack
        self.channels: Channels
        self.orchestrator: Orchestrator

    async def start(self, **options: Any) -> None:
        self.channels = await self._stack.enter_async_context(Channels(generate_keys(self.keys)))
        settings: dict[str, Any] = {
            "liveness": RULES,
            "admission": AdmissionRules(self.plan.entry.max_queue, unavailable_grace_seconds=0.3, replays=0),
            "settle_seconds": 0.3,
            **options,
        }
        self.orchestrator = await self._stack.enter_async_context(
            Orchestrator(self.plan, self.channels, endpoint="tcp://127.0.0.1:0", **settings)
        )

    async def replica(self, stage: str, **options: Any) -> FakeStage:
        fake = FakeStage(self.plan, stage, self.channels, self.orchestrator.port, **options)
        return await self._stack.enter_async_context(fake)

    async def replicas(self, **options: dict[str, Any]) -> tuple[FakeStage, FakeStage, FakeStage]:
        fakes = [await self.replica(s, **options.get(s, {})) for s in ("thinker", "talker", "code2wav")]
        return fakes[0], fakes[1], fakes[2]

    @property
    def bound(self) -> int:
        return sum(r.bound for s in self.orchestrator.status().stages for r in s.replicas)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        rig = Rig(a_plan(), tmp_path / "curve", stack)
        await rig.start()
        yield rig
