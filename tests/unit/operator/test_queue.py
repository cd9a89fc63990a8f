"""The work queue: nothing lost, nothing twice at once, backoff that grows and ends."""

from __future__ import annotations

import asyncio

from omni_operator.observed import Key
from omni_operator.queue import BACKOFF_MAX_SECONDS, WorkQueue, backoff_seconds, resync_forever

A, B = Key("ns", "a"), Key("ns", "b")


async def take(queue: WorkQueue) -> Key:
    return (await asyncio.wait_for(queue.get(), 20)).key


async def test_events_of_one_pipeline_are_one_reconcile() -> None:
    queue = WorkQueue()
    for _ in range(5):
        queue.add(A)
    queue.add(B)
    assert [await take(queue), await take(queue)] == [A, B]
    assert queue.depth == 0


async def test_event_during_a_reconcile_is_handled_after_it() -> None:
    queue = WorkQueue()
    queue.add(A)
    await take(queue)
    queue.add(A)
    assert queue.depth == 0, "one worker per pipeline at a time"
    queue.done(A)
    assert await take(queue) == A
    queue.done(A)
    assert queue.idle


async def test_earlier_request_wins() -> None:
    queue = WorkQueue()
    queue.add(A, 600)
    queue.add(A, 0.01)
    assert await take(queue) == A
    queue.done(A)
    queue.add(B, 0.0)
    queue.add(B, 600)
    assert await take(queue) == B


async def test_waiting_worker_is_woken() -> None:
    queue = WorkQueue()
    waiting = [asyncio.create_task(queue.get()) for _ in range(2)]
    await asyncio.sleep(0)
    queue.add(A)
    queue.add(B)
    items = await asyncio.wait_for(asyncio.gather(*waiting), 20)
    assert {i.key for i in items} == {A, B}


async def test_cancelled_worker_loses_no_key() -> None:
    queue = WorkQueue()
    doomed = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    doomed.cancel()
    await asyncio.gather(doomed, return_exceptions=True)
    queue.add(A)
    assert await take(queue) == A


async def test_failure_delays_even_with_fresh_events() -> None:
    """A pipeline that fails and gets events all the time must not be retried in a hot loop."""
    queue = WorkQueue()
    queue.add(A)
    await take(queue)
    queue.add(A)
    queue.done(A, retry=True)
    assert queue.depth == 0
    assert await take(queue) == A


async def test_requeue_after() -> None:
    queue = WorkQueue()
    queue.add(A)
    await take(queue)
    queue.done(A, requeue_after=0.01)
    assert await take(queue) == A


def test_backoff_doubles_to_a_limit_and_has_jitter() -> None:
    delays = [backoff_seconds(n, lambda: 1.0) for n in range(1, 40)]
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0]
    assert delays[-1] == BACKOFF_MAX_SECONDS
    assert backoff_seconds(3, lambda: 0.0) == 1.0


async def test_resync_also_finds_what_vanished_without_an_event() -> None:
    """A relist does not report what was deleted meanwhile; the list of known pipelines does."""
    queue = WorkQueue()

    async def listing() -> list[Key]:
        return [A]

    task = asyncio.create_task(resync_forever(queue, listing, lambda: [A, B], period=0.02, on_error=lambda e: None))
    try:
        assert {await take(queue), await take(queue)} == {A, B}
    finally:
        task.cancel()


async def test_resync_survives_a_failed_list() -> None:
    queue = WorkQueue()
    errors: list[Exception] = []
    answers = iter([RuntimeError("503"), [A]])

    async def listing() -> list[Key]:
        answer = next(answers, [A])
        if isinstance(answer, Exception):
            raise answer
        return answer

    task = asyncio.create_task(resync_forever(queue, listing, list, period=0.02, on_error=errors.append))
    try:
        assert await take(queue) == A
        assert len(errors) == 1
    finally:
        task.cancel()
