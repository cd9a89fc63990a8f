"""How a process of the runtime runs its loop: uvloop where it is installed, asyncio's own elsewhere."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from importlib.util import find_spec
from typing import Any, TypeVar

T = TypeVar("T")

YOUNG_OBJECTS = 10_000  # before the collector looks at them: some twenty requests' worth; most are gone by then


def settle() -> None:
    """Call once when a process has loaded what it serves with: it lives as long as the process, so that the collector
    need not walk it, libraries' hundreds of thousands of objects included, in the middle of an answer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


def new_loop() -> asyncio.AbstractEventLoop:
    if find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)
