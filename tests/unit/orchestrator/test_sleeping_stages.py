"""Stages that an autoscaler lets sleep: the entry is ready without them, holds what needs them, and says so (T34)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from omni_operator.resources.child import Scope
from omni_operator.resources.config import PLAN_KEY, build_plan_config_map
from omni_runtime.deploy.plan import ReplicaBounds, ResolvedPlan, load_plan
from omni_runtime.errors import StageUnavailable
from tests.unit.deploy.builders import SMOL, resolved
from tests.unit.orchestrator.conftest import Rig, a_call, all_outputs, eventually
from tests.unit.orchestrator.plans import a_plan


def asleep(plan: ResolvedPlan, *stages: str) -> ResolvedPlan:
    return msgspec.structs.replace(plan, entry=msgspec.structs.replace(plan.entry, sleepers=stages))


@pytest.fixture
async def sleepy(tmp_path: Path) -> AsyncIterator[Rig]:
    """talker and code2wav may sleep, the thinker may not. Elsewhere a request would be refused after 0.3 s."""
    async with AsyncExitStack() as stack:
        rig = Rig(asleep(a_plan(), "code2wav", "talker"), tmp_path / "curve", stack)
        await rig.start()
        yield rig


async def test_a_request_waits_for_the_stages_that_it_wakes(sleepy: Rig) -> None:
    await sleepy.replica("thinker")
    await eventually(lambda: sleepy.orchestrator.status().ready)
    handle = sleepy.orchestrator.submit(a_call())
    await asyncio.sleep(0.8)  # well beyond the time after which a missing stage is a fault
    waiting = {s.name: s.waiting for s in sleepy.orchestrator.status().stages}
    assert waiting == {"thinker": 0, "talker": 1, "code2wav": 1}, "this is what the autoscaler looks at"
    assert await all_outputs(sleepy.orchestrator.submit(a_call("text"))), "text needs none of them"
    await sleepy.replica("talker")
    await sleepy.replica("code2wav")
    assert await all_outputs(handle)


async def test_a_stage_that_may_not_sleep_is_missing(sleepy: Rig) -> None:
    """T69: next to stages that sleep, too."""
    status = sleepy.orchestrator.status()
    assert not status.ready and status.missing == ("thinker",)
    with pytest.raises(StageUnavailable, match="no live replica of stage thinker"):
        await all_outputs(sleepy.orchestrator.submit(a_call()))


@pytest.mark.parametrize(
    ("bounds", "sleeps"),
    [
        pytest.param(ReplicaBounds(requested=None, minimum=0, maximum=4), True, id="from nothing"),
        pytest.param(ReplicaBounds(None, 1, 4), False, id="at least one"),
        pytest.param(ReplicaBounds(0, 0, None), False, id="somebody wants none, and nobody will wake it"),
        pytest.param(ReplicaBounds(None, 0, None), False, id="whoever scales it by hand"),
    ],
)
def test_who_may_sleep(bounds: ReplicaBounds, sleeps: bool) -> None:
    assert bounds.sleeps is sleeps


def test_the_entry_finds_it_in_the_plan_that_its_pod_has() -> None:
    """Replica bounds are not in the ConfigMap, which is immutable; who may sleep is."""
    plan = resolved(SMOL + "stages: [{name: talker, scaling: {minReplicas: 0, maxReplicas: 2}}]")
    stored = load_plan(build_plan_config_map(Scope("p", "ns"), plan).body["data"][PLAN_KEY].encode())
    assert [s.name for s in stored.stages if stored.may_sleep(s.name)] == ["talker"]
