"""What the rules may know of the cluster: copies of resources, fed by list and watch, that know how old they are.

A watch is asked to end every `WATCH_SECONDS`; a clean end proves that nothing was missed until then, so the age of a quiet
resource in good health stays below that. A watch that breaks is taken up where it stood; one that is too old (410) is
listed anew. While a list runs, the former copy stays in use.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from omni_operator.errors import Expired, KubeError
from omni_operator.kinds import JsonObject, Kind
from omni_operator.kube import Kube
from omni_webhooks import logs, metrics

T = TypeVar("T")
Key = tuple[str, str]  # namespace ("" for what has none), name

WATCH_SECONDS = 20
BACKOFF_START, BACKOFF_MAX = 0.5, 15.0
ABSENT_SECONDS = 20.0  # between two looks whether the API server serves an optional kind by now


class Mirror(Generic[T]):
    """A copy of all objects of one kind, each reduced to what the rules need.

    project: from the object as the API server sends it; None leaves it out. changed: called with the key after each change.
    keep_revisions: for `news`. optional: an API server that never served the kind has no objects of it.
    """

    def __init__(
        self,
        kind: Kind,
        project: Callable[[JsonObject], T | None],
        *,
        changed: Callable[[Key, T | None], None] = lambda _key, _value: None,
        monotonic: Callable[[], float] = time.monotonic,
        keep_revisions: bool = False,
        optional: bool = False,
    ) -> None:
        self.kind = kind
        self.items: dict[Key, T] = {}
        self._project = project
        self._changed = changed
        self._monotonic = monotonic
        self.listed: Callable[[], None] = lambda: None  # called at the end of each list
        self._complete_at: float | None = None
        self._optional, self._served = optional, False
        self._revisions: dict[Key, str] | None = {} if keep_revisions else None
        self._seen = ""  # resourceVersion up to which events were taken in; "": a list is needed

    @property
    def age(self) -> float | None:
        """Seconds since the copy was surely complete; None before the first list has ended."""
        return None if self._complete_at is None else self._monotonic() - self._complete_at

    async def run(self, kube: Kube) -> None:
        """List and watch for ever."""
        pause = BACKOFF_START
        while True:
            try:
                if not self._seen:
                    self._seen = await self._list(kube)
                await self._watch(kube)
                pause = BACKOFF_START
            except Expired:
                self._seen = ""
            except KubeError as error:
                if self._optional and error.status == 404 and not self._served:
                    await self._absent()
                    continue
                logs.warning("cache.interrupted", resource=self.kind.plural, error=str(error), age=self.age)
                await asyncio.sleep(pause * random.uniform(0.7, 1.0))
                pause = min(pause * 2, BACKOFF_MAX)

    async def _list(self, kube: Kube) -> str:
        metrics.CACHE_RELISTS.labels(self.kind.plural).inc()
        started, version = self._monotonic(), ""
        found: dict[Key, T] = {}
        revisions: dict[Key, str] = {}
        async with aclosing(kube.pages(self.kind, None)) as pages:
            async for page in pages:
                version = page.resource_version
                for item in page.items:
                    if self._revisions is not None:
                        revisions[key_of(item)] = _revision(item)
                    value = self._read(item)
                    if value is not None:
                        found[key_of(item)] = value
                await asyncio.sleep(0)  # reviews are answered meanwhile
        gone = self.items.keys() - found.keys()
        self.items = found
        if self._revisions is not None:
            self._revisions = revisions
        for key in gone:
            self._changed(key, None)
        for number, (key, value) in enumerate(found.items()):
            self._changed(key, value)
            if number % 20 == 0:
                await asyncio.sleep(0)
        self._complete_at, self._served = started, True
        self.listed()
        return version

    async def _absent(self) -> None:
        """The kind is not served: that is an answer too, and it is asked for again now and then."""
        first, self._complete_at = self._complete_at is None, self._monotonic()
        if first:
            logs.info("cache.absent", resource=self.kind.plural)
            self.listed()
        await asyncio.sleep(ABSENT_SECONDS)

    async def _watch(self, kube: Kube) -> None:
        """Follow until the server ends the watch. A break in the middle raises; the next watch goes on from there."""
        seconds = WATCH_SECONDS + random.randrange(5)
        async with aclosing(kube.watch(self.kind, resource_version=self._seen, seconds=seconds)) as events:
            async for event in events:
                self._take(str(event["type"]), event["object"])
                self._seen = str(event["object"]["metadata"].get("resourceVersion") or self._seen)
                self._complete_at = self._monotonic()
        self._complete_at = self._monotonic()

    def _take(self, event: str, item: JsonObject) -> None:
        if event not in ("ADDED", "MODIFIED", "DELETED"):
            return  # a bookmark
        key = key_of(item)
        if self._revisions is not None:
            self._revisions.pop(key, None)
            if event != "DELETED":
                self._revisions[key] = _revision(item)
        value = None if event == "DELETED" else self._read(item)
        if value is None:
            self.items.pop(key, None)
        else:
            self.items[key] = value
        self._changed(key, value)

    def news(self, items: Sequence[JsonObject]) -> dict[str, T] | None:
        """What a list of all objects says, by name, in place of the copy; None where the copy says the same."""
        if {key_of(item): _revision(item) for item in items} == self._revisions:
            return None
        read = ((key_of(item)[1], self._read(item)) for item in items)
        return {name: value for name, value in read if value is not None}

    def _read(self, item: JsonObject) -> T | None:
        try:
            return self._project(item)
        except Exception as error:  # noqa: BLE001 - one odd object of somebody's must not stop all admission
            logs.warning("cache.unreadable", resource=self.kind.plural, name=key_of(item), error=str(error))
            return None


def _revision(item: JsonObject) -> str:
    return str((item.get("metadata") or {}).get("resourceVersion") or "")


def key_of(item: JsonObject) -> Key:
    metadata = item.get("metadata") or {}
    return str(metadata.get("namespace") or ""), str(metadata.get("name") or "")


def measure(mirrors: Iterable[Mirror[Any]]) -> None:
    """Bring the gauges up to date; called before /metrics is answered."""
    for mirror in mirrors:
        age = mirror.age
        metrics.CACHE_AGE_SECONDS.labels(mirror.kind.plural).set(float("nan") if age is None else age)
        metrics.CACHE_OBJECTS.labels(mirror.kind.plural).set(len(mirror.items))
