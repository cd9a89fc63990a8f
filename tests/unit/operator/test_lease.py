"""Leadership with a clock of our own: never two leaders, a dead link deposes in time, a clean end hands over at once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from omni_operator.errors import LeadershipLost, Transient
from omni_operator.kinds import LEASE
from omni_operator.lease import LeaseLoop, LeaseTiming, Sighting, may_take, next_spec
from tests.unit.operator.fake_kube import FakeKube

TIMING = LeaseTiming()


class Process:
    """One operator process: its Lease loop runs one step each time its clock is advanced."""

    def __init__(self, kube: FakeKube, identity: str) -> None:
        self.now = 1000.0
        self.kube = kube
        self._step = asyncio.Event()
        self._slept = asyncio.Event()
        self.lease = LeaseLoop(
            kube,
            "ns",
            "omni-operator",
            identity,
            timing=TIMING,
            monotonic=lambda: self.now,
            wall=lambda: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.now),
            sleep=self._sleep,
        )
        self.task = asyncio.create_task(self.lease.run())

    async def _sleep(self, seconds: float) -> None:
        self._slept.set()
        await self._step.wait()
        self._step.clear()

    async def tick(self, seconds: float = 3.0) -> None:
        await self._settle()
        self.now += seconds
        self._slept.clear()
        self._step.set()
        await self._settle()

    async def _settle(self) -> None:
        slept = asyncio.create_task(self._slept.wait())
        await asyncio.wait({slept, self.task}, return_when=asyncio.FIRST_COMPLETED, timeout=2)
        slept.cancel()

    @property
    def leads(self) -> bool:
        try:
            self.lease.check()
        except LeadershipLost:
            return False
        return True

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_first_leads_second_waits_and_takes_over_after_a_release() -> None:
    kube = FakeKube()
    first, second = Process(kube, "one"), Process(kube, "two")
    await first.tick(0)
    await second.tick(0)
    assert (first.leads, second.leads) == (True, False)
    for _ in range(10):
        await first.tick()
        await second.tick()
        assert (first.leads, second.leads) == (True, False)
    await first.stop()
    await first.lease.release()
    assert not first.leads
    await second.tick()
    assert second.leads
    assert kube.all(LEASE)["omni-operator"]["spec"]["leaseTransitions"] == 1
    await second.stop()


async def test_cut_off_leader_steps_down_before_another_may_lead() -> None:
    """The link dies: the old leader's fence closes before the new one can take the Lease. Walked second by second."""
    kube = FakeKube()
    first, second = Process(kube, "one"), Process(kube, "two")
    await first.tick(0)
    await second.tick(0)
    cut = {"one": False}

    real_get = kube.get

    async def get(kind, namespace, name):  # type: ignore[no-untyped-def]
        if cut["one"] and asyncio.current_task() is first.task:
            raise Transient("connection refused")
        return await real_get(kind, namespace, name)

    kube.get = get  # type: ignore[method-assign]
    cut["one"] = True
    led: list[tuple[bool, bool]] = []
    for _ in range(60):
        if not first.task.done():
            await first.tick(1)
        else:
            first.now += 1
        await second.tick(1)
        led.append((first.leads, second.leads))
    assert (True, True) not in led
    assert led[-1] == (False, True)
    assert isinstance(first.task.exception(), LeadershipLost), "the process must end"
    await second.stop()


async def test_a_hanging_request_closes_the_fence() -> None:
    """No answer at all: the fence depends on our clock only, not on the request coming back."""
    kube = FakeKube()
    first = Process(kube, "one")
    await first.tick(0)
    assert first.leads
    first.now += TIMING.renew_deadline + 0.1
    assert not first.leads
    await first.stop()


async def test_somebody_took_the_lease() -> None:
    kube = FakeKube()
    first = Process(kube, "one")
    await first.tick(0)
    kube.edit(LEASE, "ns", "omni-operator", lambda b: b["spec"].update(holderIdentity="two", renewTime="x"))
    await first.tick()
    assert isinstance(first.task.exception(), LeadershipLost)
    assert not first.leads


@pytest.mark.parametrize(
    ("holder", "sighting", "now", "expected"),
    [
        pytest.param("", None, 0, True, id="released"),
        pytest.param("me", None, 0, True, id="mine, after a restart of the loop"),
        pytest.param(
            "other", None, 1e9, False, id="never seen before: wait a whole duration, whatever the wall clock says"
        ),
        pytest.param("other", Sighting("other", "t1", 100), 114.9, False, id="not yet"),
        pytest.param("other", Sighting("other", "t1", 100), 115.0, True, id="unchanged for the whole duration"),
        pytest.param("other", Sighting("other", "t0", 0), 1000.0, False, id="renewed since"),
    ],
)
def test_may_take(holder: str, sighting: Sighting | None, now: float, expected: bool) -> None:
    lease = {"spec": {"holderIdentity": holder, "renewTime": "t1", "leaseDurationSeconds": 15}}
    assert may_take(lease, sighting, "me", now) is expected


def test_times_are_utc() -> None:
    local = datetime(2026, 1, 1, 12, tzinfo=UTC).astimezone()
    assert next_spec(None, "me", TIMING, local)["renewTime"] == "2026-01-01T12:00:00.000000Z"


def test_timing_that_allows_two_leaders_is_refused() -> None:
    with pytest.raises(ValueError, match="renew_deadline"):
        LeaseTiming(duration=10, renew_deadline=10)
