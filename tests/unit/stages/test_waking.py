"""A reader of vLLM's queues that sleeps at once, and a wake-up that never comes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from omni_runtime.stages.ar_vllm.waking import sleep_at_once

VLLM_LOOKS_AGAIN_MS = 5000  # its own bound, and what a client waited in the middle of an answer


@pytest.fixture
def condition() -> Iterator[Any]:
    """As vLLM's SpinCondition: a poller of the socket on which wake-ups come."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as reader, context.socket(zmq.PAIR) as writer:
        writer.bind("inproc://wake-ups")
        reader.connect("inproc://wake-ups")
        poller = zmq.Poller()
        poller.register(reader, zmq.POLLIN)
        yield SimpleNamespace(busy_loop_s=1.0, poller=poller, reader=reader, writer=writer)


@pytest.mark.parametrize("timeout", [VLLM_LOOKS_AGAIN_MS, None])
def test_a_lost_wake_up_does_not_keep_the_reader_asleep(condition: Any, timeout: int | None) -> None:
    """With vLLM's own bound, one request in twenty stood still for five seconds."""
    sleep_at_once(condition)
    started = time.monotonic()
    assert condition.poller.poll(timeout=timeout) == []
    assert time.monotonic() - started < VLLM_LOOKS_AGAIN_MS / 1000 / 2


def test_the_reader_does_not_spin_and_hears_a_wake_up(condition: Any) -> None:
    sleep_at_once(condition)
    assert condition.busy_loop_s == 0.0
    condition.writer.send(b"\0")
    assert dict(condition.poller.poll(timeout=VLLM_LOOKS_AGAIN_MS)) == {condition.reader: zmq.POLLIN}
    assert condition.poller.poll(timeout=0) != [], "a shorter wait than ours stays as short"
