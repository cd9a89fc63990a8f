"""One attachment of a client to a sidecar: the channel, the arena, the slabs on both sides of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from omni_runtime.connectors import payloads, wire
from omni_runtime.connectors.arena import Arena, SlabPool
from omni_runtime.connectors.ipc import FrameChannel, dial
from omni_runtime.connectors.line import Heard, Lines
from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.connectors.wire import Slab
from omni_runtime.protocol.payload import Payload

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_RELEASES_AT_ONCE = 512
_KEPT_SHARE = 4  # a worker may keep views of a quarter of the arena
_KEEP_EXTENTS_SECONDS = 1.0  # without a new slab; a stream that goes on leases none again
# A slab that comes back within this time is there sooner than the pages of another extent, and in a cache; a producer
# that runs ahead of its consumer would otherwise walk through the whole arena.
_BEFORE_GROWING_SECONDS = 0.005
_LEASE_RETRY_SECONDS = 0.05  # extents that other engines give back are not announced


class SlabReservation:
    """api.Reservation: a slab that is not sent yet. Freed with its last array, unless a put has taken it."""

    def __init__(self, attachment: Attachment, slab: Slab, tensors: dict[str, np.ndarray]) -> None:
        self.attachment = attachment
        self.slab = slab
        self.tensors = tensors

    def holds(self, payload: Payload) -> bool:
        return list(payload.tensors) == list(self.tensors) and all(
            payload.tensors[name] is array for name, array in self.tensors.items()
        )


class _Root(weakref.ref[Bytes]):
    """The array over a whole slab, on which all others stand. `weakref.finalize` costs ten times as much."""

    __slots__ = ("slab",)

    def __new__(cls, root: Bytes, gone: Callable[[_Root], None], slab: Slab) -> _Root:
        return super().__new__(cls, root, gone)

    def __init__(self, root: Bytes, gone: Callable[[_Root], None], slab: Slab) -> None:
        self.slab = slab


class Attachment:
    """Ends with the connection. Views of its arena stay valid until they are dropped, even after that."""

    def __init__(self, attached: wire.Attached, arena_fd: int) -> None:
        self.attached = attached
        self.arena = Arena(arena_fd, attached.arena_bytes)
        self.pool = SlabPool(self.arena, attached.session)
        self.lines: Lines | None = None  # until it is open
        self.lost: str | None = None
        self.pinned_bytes = 0  # of slabs that arrays still refer to
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._channel: FrameChannel | None = None
        self._leasing = asyncio.Lock()
        self._extent: asyncio.Future[wire.Extent] | None = None
        self._pong: asyncio.Future[None] | None = None
        self._freed = asyncio.Event()
        self._kept: set[Slab] = set()  # views that the worker has taken; others wait in a queue
        self._kept_bytes = 0
        self._populated: set[tuple[int, int]] = set()
        self._idle_since = 0.0  # when the last slab was taken
        self._reserved: dict[int, Slab] = {}  # by offset; not put yet
        self._roots: dict[Slab, _Root] = {}  # what tells of an array's end has to live until then
        self._released: deque[Slab] = deque()
        self._dropped: deque[Slab] = deque()  # appended to by finalizers, in any thread
        self._flush_wanted = False

    @classmethod
    async def open(
        cls,
        path: Path,
        attach: wire.Attach,
        deadline_s: float,
        on_frame: Callable[[Attachment, bytes, bytes], None],
        heard: Callable[[Attachment], Heard],
        on_lost: Callable[[Attachment, str], None],
    ) -> Attachment:
        """Raises OSError, TimeoutError, ProtocolError or ipc.Refusal. The callbacks may come before this returns."""
        sock, attached, arena_fd, line_fd = await dial(path, attach, deadline_s)
        self = cls(attached, arena_fd)
        self.lines = Lines(path, line_fd, attached.session, heard(self))
        channel = FrameChannel(partial(on_frame, self), partial(on_lost, self))
        self._channel = channel
        try:
            await self._loop.create_unix_connection(lambda: channel, sock=sock)
        except BaseException:
            self.end("it broke while it was made")
            sock.close()
            raise
        return self

    def send(self, message: wire._Message, body: bytes | bytearray | memoryview = b"", *, hurry: bool = True) -> None:
        if self._channel is not None and self.lost is None:
            self._channel.send(message, body if isinstance(body, bytes) else memoryview(body), hurry=hurry)

    @property
    def is_writable(self) -> bool:
        return self._channel is None or self._channel.is_writable

    async def writable(self) -> None:
        if self._channel is not None:
            await self._channel.writable()

    def want_line(self, session: int) -> None:
        if self.lines is not None:
            self.lines.want(session)

    def flush_line(self) -> None:
        """What is said next by the sidecar comes after what was put on lines."""
        if self.lines is not None:
            self.lines.flush()

    def drain_line(self) -> None:
        """Hear first of what other engines had sent before the sidecar sent this."""
        if self.lines is not None:
            self.lines.drain()

    # --- slabs to send

    async def allocate(self, length: int, wait_s: float) -> Slab | None:
        """A slab, waiting for room at most `wait_s`; None if there is none, or the sidecar is gone."""
        if self.lost is None and (slab := self.take_room(length)) is not None:
            return slab
        deadline = self._loop.time() + wait_s
        if self.pool.used_bytes:
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), min(wait_s, _BEFORE_GROWING_SECONDS))
        while self.lost is None:
            slab = self.take_room(length)
            if slab is not None:
                return slab
            self._freed.clear()
            async with self._leasing:
                if (slab := self.pool.allocate(length)) is not None:  # another put has leased meanwhile
                    return slab
                extent = await self._lease(length)
                if self.has_ended:  # and with it the arena
                    return None
                if extent.length and not self.pool.add_extent(extent.offset, extent.length):
                    self.send(wire.Return(extent.offset))  # the file system is full
                    return None
            if extent.length:
                if (extent.offset, extent.length) not in self._populated:
                    self._populated.add((extent.offset, extent.length))
                    self._loop.run_in_executor(None, self.arena.populate, extent.offset, extent.length)
                continue
            left = deadline - self._loop.time()
            if left <= 0:
                return None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), min(left, _LEASE_RETRY_SECONDS))
        return None

    @property
    def has_ended(self) -> bool:
        return self.lost is not None

    def take_room(self, length: int) -> Slab | None:
        """A slab from the extents at hand."""
        slab = self.pool.allocate(length)
        if slab is not None:
            self._idle_since = self._loop.time()
        return slab

    async def _lease(self, length: int) -> wire.Extent:
        """Shielded: an answer that nobody waits for any more would be a lost extent."""
        self._extent = self._loop.create_future()
        self.send(wire.Lease(length))
        waiting = self._extent
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            waiting.add_done_callback(self._adopt_late_extent)
            raise

    def _adopt_late_extent(self, answer: asyncio.Future[wire.Extent]) -> None:
        if not answer.cancelled() and answer.result().length:
            self.send(wire.Return(answer.result().offset))

    def reserve(self, slab: Slab, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> SlabReservation:
        root: Bytes = np.frombuffer(self.arena.view[slab.offset : slab.offset + slab.length], np.uint8)
        self._reserved[slab.offset] = slab
        self._roots[slab] = _Root(root, self._on_unused, slab)
        return SlabReservation(self, slab, payloads.arrays(shapes, root))

    def take(self, reservation: SlabReservation) -> bool:
        """The slab goes into a put; False if one has taken it before, or it belongs to another sidecar."""
        if reservation.attachment is not self or self.lost is not None:
            return False
        if self._reserved.get(reservation.slab.offset) != reservation.slab:
            return False
        del self._reserved[reservation.slab.offset]
        for array in reservation.tensors.values():
            array.flags.writeable = False
        return True

    def _on_unused(self, root: _Root) -> None:
        """Runs in whichever thread dropped the last array of a reservation."""
        self._roots.pop(root.slab, None)
        if root.slab.offset in self._reserved:  # no put has taken it
            self._soon(self._free_reserved, root.slab)

    def _free_reserved(self, slab: Slab) -> None:
        if self._reserved.get(slab.offset) == slab:
            del self._reserved[slab.offset]
            self.free_unsent(slab)

    def free_unsent(self, slab: Slab) -> None:
        if self.lost is None:
            self.pool.free(slab)

    # --- slabs that came

    def view(self, slab: Slab, data: memoryview) -> Bytes:
        """uint8 [length] over the slab's bytes, valid while anything refers to it; the slab is released afterwards."""
        root: Bytes = np.frombuffer(data, np.uint8)
        self.pinned_bytes += slab.length
        self._roots[slab] = _Root(root, self._on_dropped, slab)
        return root

    def keep(self, slab: Slab) -> bool:
        """The worker takes a view. False: it keeps so many already that this one has to be copied out."""
        self._collect_dropped()
        if self._kept_bytes + slab.length > self.arena.length // _KEPT_SHARE:
            return False
        self._kept.add(slab)
        self._kept_bytes += slab.length
        return True

    def release(self, slab: Slab) -> None:
        self._released.append(slab)
        self._want_flush()

    def _on_dropped(self, root: _Root) -> None:
        """Runs in whichever thread dropped the last array."""
        self._roots.pop(root.slab, None)
        self._dropped.append(root.slab)
        self._soon(self._want_flush)

    def _soon(self, callback: Callable[..., None], *arguments: object) -> None:
        """From any thread; in the loop's own it costs no system call."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is the connection
            if threading.get_ident() == self._thread:
                self._loop.call_soon(callback, *arguments)
            else:
                self._loop.call_soon_threadsafe(callback, *arguments)

    def _want_flush(self) -> None:
        if not self._flush_wanted:
            self._flush_wanted = True
            self._loop.call_soon(self._flush)

    def _collect_dropped(self) -> None:
        while self._dropped:
            slab = self._dropped.popleft()
            self.pinned_bytes -= slab.length
            if slab in self._kept:
                self._kept.remove(slab)
                self._kept_bytes -= slab.length
            self._released.append(slab)

    def _flush(self) -> None:
        self._flush_wanted = False
        self._collect_dropped()
        while self._released:
            count = min(len(self._released), _RELEASES_AT_ONCE)
            self.send(wire.Release(tuple(self._released.popleft() for _ in range(count))))

    # --- answers

    def on_extent(self, extent: wire.Extent) -> None:
        if self._extent is None or self._extent.done():
            raise ProtocolError("an extent that was not asked for")
        self._extent.set_result(extent)

    def on_freed(self, slabs: tuple[Slab, ...]) -> None:
        for slab in slabs:
            self.pool.free(slab)
        self._freed.set()

    def squeeze(self) -> None:
        """Empty extents go back: nobody needs them here, and somebody else may."""
        for offset in self.pool.take_empty_extents(keep=1):
            self.send(wire.Return(offset))

    def tick(self, now: float) -> None:
        if now - self._idle_since > _KEEP_EXTENTS_SECONDS and self.lost is None:
            self.squeeze()

    def on_pong(self) -> None:
        if self._pong is not None and not self._pong.done():
            self._pong.set_result(None)

    async def ping(self, deadline_s: float) -> bool:
        if self.lost is not None:
            return False
        if self._pong is None or self._pong.done():
            self._pong = self._loop.create_future()
            self.send(wire.Ping())
        try:
            await asyncio.wait_for(asyncio.shield(self._pong), deadline_s)
        except TimeoutError:
            return False
        return self.lost is None

    def end(self, reason: str) -> None:
        """The connection is gone: wake whoever waits for an answer."""
        if self.lost is not None:
            return
        self.lost = reason
        self._freed.set()
        if self._extent is not None and not self._extent.done():
            self._extent.set_result(wire.Extent(0, 0))
        self.on_pong()
        if self.lines is not None:
            self.lines.close()
        self.arena.close()

    def close(self) -> None:
        self._flush()
        if self._channel is not None:
            self._channel.close("the engine closed its connector")
