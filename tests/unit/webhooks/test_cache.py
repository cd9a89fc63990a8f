"""Mirrors: list, watch, breaks in the middle, 410, and how old a copy is. A scripted API server in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from omni_operator.errors import Expired, Transient
from omni_operator.kinds import TENANT, Kind
from omni_operator.kube import Kube, Listing
from omni_webhooks import cache
from omni_webhooks.cache import Key, Mirror

Step = Any  # a Listing, a list of events, or an exception


def obj(name: str, version: int, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "spec": spec}


def event(kind: str, name: str, version: int, **spec: Any) -> dict[str, Any]:
    return {"type": kind, "object": obj(name, version, **spec)}


@dataclass
class Script(Kube):
    """Answers list and watch from a script; when it ends, it waits for ever."""

    steps: list[Step] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def _next(self) -> Step:
        if not self.steps:
            self.done.set()
            await asyncio.Event().wait()
        return self.steps.pop(0)

    async def pages(self, kind: Kind, namespace: str | None, selector: str = "") -> AsyncGenerator[Listing, None]:
        self.asked.append("list")
        step = await self._next()
        if isinstance(step, Exception):
            raise step
        for page in step:
            if isinstance(page, Exception):
                raise page
            yield page

    async def watch(self, kind: Kind, *, resource_version: str, seconds: int) -> AsyncGenerator[dict[str, Any], None]:
        self.asked.append(f"watch {resource_version}")
        step = await self._next()
        for entry in step if isinstance(step, list) else [step]:
            if isinstance(entry, Exception):
                raise entry
            yield entry


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def follow(
    *steps: Step,
    monkeypatch: pytest.MonkeyPatch,
    changed: Callable[[Key, str | None], None] = lambda _key, _value: None,
    clock: Clock | None = None,
    optional: bool = False,
) -> tuple[Mirror[str], Script]:
    """Run a mirror through the script; what it keeps of an object is its `v`."""
    monkeypatch.setattr(cache, "BACKOFF_START", 0.0)
    script = Script(steps=list(steps))
    mirror = Mirror(
        TENANT, lambda o: o["spec"].get("v"), changed=changed, monotonic=clock or Clock(), optional=optional
    )
    task = asyncio.create_task(mirror.run(script))
    async with asyncio.timeout(10):
        await script.done.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return mirror, script


def page(version: int, *items: dict[str, Any]) -> Listing:
    return Listing(items, str(version))


def names(mirror: Mirror[str]) -> dict[str, str]:
    return {name: value for (_, name), value in mirror.items.items()}


async def test_list_then_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, script = await follow(
        [page(3, obj("a", 1, v="1")), page(3, obj("b", 2, v="1"))],
        [event("MODIFIED", "a", 4, v="2"), event("DELETED", "b", 5), event("ADDED", "c", 6, v="1")],
        monkeypatch=monkeypatch,
    )
    assert names(mirror) == {"a": "2", "c": "1"}
    assert script.asked == ["list", "watch 3", "watch 6"], "goes on from the last event"


async def test_a_break_in_the_middle_goes_on_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, script = await follow(
        [page(3, obj("a", 1, v="1"))],
        [event("MODIFIED", "a", 4, v="2"), Transient("reset")],
        [],
        monkeypatch=monkeypatch,
    )
    assert script.asked == ["list", "watch 3", "watch 4", "watch 4"]
    assert names(mirror) == {"a": "2"}


async def test_a_version_that_is_too_old_is_listed_anew_and_what_went_meanwhile_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[str, str | None]] = []
    mirror, script = await follow(
        [page(3, obj("a", 1, v="1"), obj("b", 2, v="1"))],
        Expired("410"),
        [page(9, obj("b", 8, v="2"))],
        monkeypatch=monkeypatch,
        changed=lambda key, value: told.append((key[1], value)),
    )
    assert script.asked == ["list", "watch 3", "list", "watch 9"]
    assert names(mirror) == {"b": "2"}
    assert told == [("a", "1"), ("b", "1"), ("a", None), ("b", "2")]


async def test_a_list_that_breaks_leaves_the_former_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, script = await follow(
        [page(3, obj("a", 1, v="1"))], Expired("410"), [page(9), Transient("gone")], [page(9, obj("a", 8, v="3"))],
        monkeypatch=monkeypatch,
    )  # fmt: skip
    assert script.asked == ["list", "watch 3", "list", "list", "watch 9"]
    assert names(mirror) == {"a": "3"}


async def test_bookmarks_move_the_version_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "50"}}}
    mirror, script = await follow([page(3, obj("a", 1, v="1"))], [bookmark], [], monkeypatch=monkeypatch)
    assert script.asked[-1] == "watch 50"
    assert names(mirror) == {"a": "1"}


async def test_an_object_that_cannot_be_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {"metadata": {"name": "odd"}}
    mirror, _ = await follow([page(3, odd, obj("a", 1, v="1"))], [], monkeypatch=monkeypatch)
    assert names(mirror) == {"a": "1"}


async def test_age(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    assert Mirror(TENANT, lambda o: o, monotonic=clock).age is None
    mirror, _ = await follow([page(3)], [], monkeypatch=monkeypatch, clock=clock)
    clock.now += 40
    assert mirror.age == 40


async def test_a_failing_watch_does_not_make_a_copy_young(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    mirror, _ = await follow(
        [page(3)], Transient("refused"), Transient("refused"), monkeypatch=monkeypatch, clock=clock
    )
    clock.now += 100
    assert mirror.age == 100


async def test_a_kind_that_is_not_served_has_no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a cluster without DRA would never be ready; it is asked for again, since it may come with an upgrade."""
    monkeypatch.setattr(cache, "ABSENT_SECONDS", 0.0)
    steps = [Transient("HTTP 404 without a Status object", 404), [page(3, obj("a", 1, v="1"))]]
    mirror, script = await follow(*steps, monkeypatch=monkeypatch, optional=True)
    assert (names(mirror), script.asked) == ({"a": "1"}, ["list", "list", "watch 3"])


@pytest.mark.parametrize(("status", "optional"), [(404, False), (503, True), (None, True)])
async def test_what_else_goes_wrong_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, status: int | None, optional: bool
) -> None:
    """T60."""
    mirror, _ = await follow(Transient("no", status), monkeypatch=monkeypatch, optional=optional)
    assert mirror.age is None


async def test_a_kind_that_was_served_is_not_gone_for_a_404(monkeypatch: pytest.MonkeyPatch) -> None:
    """T60: it is a proxy's, or a moment of the API server."""
    lost = [Expired("too old", 410), Transient("HTTP 404 without a Status object", 404)]
    mirror, _ = await follow([page(3, obj("a", 1, v="1"))], *lost, monkeypatch=monkeypatch, optional=True)
    assert names(mirror) == {"a": "1"}
