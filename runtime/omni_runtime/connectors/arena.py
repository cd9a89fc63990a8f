"""The shared-memory arena of a sidecar: one nameless file, extents for engines, slabs with generations.

The file never has a name (O_TMPFILE), its descriptor goes to engines over the unix socket, and the kernel frees it
with its last holder: no crash can leave a file behind, and no client's id can become a path (R11, R58, R62).
Two levels of allocation: the sidecar hands out extents, whoever holds an extent cuts slabs from it without asking.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import mmap
import os
import struct
import tempfile
from typing import Final

from omni_runtime.connectors.tensors import ALIGNMENT, ProtocolError
from omni_runtime.connectors.wire import Slab

PAGE: Final = 4096
_HEADER: Final = struct.Struct("<QQ")  # generation, length; in the ALIGNMENT bytes before the slab's data
_MADV_POPULATE_WRITE: Final = 23
_POPULATE_BYTES: Final = 2 << 20
_madvise = ctypes.CDLL(None).madvise


def aligned(length: int, to: int = ALIGNMENT) -> int:
    return -(-length // to) * to


class Allocator:
    """First fit over [offset, offset + length) with coalescing; the same for extents and for slabs."""

    __slots__ = ("_free", "_sizes", "length", "offset", "used")

    def __init__(self, offset: int, length: int) -> None:
        self.offset = offset
        self.length = length
        self.used = 0
        self._free: list[tuple[int, int]] = [(offset, length)]  # (offset, length), by offset, never adjacent
        self._sizes: dict[int, int] = {}

    def allocate(self, length: int) -> int | None:
        """Offset of `length` bytes, or None if no gap is large enough."""
        for index, (at, gap) in enumerate(self._free):
            if gap >= length:
                if gap == length:
                    del self._free[index]
                else:
                    self._free[index] = (at + length, gap - length)
                self._sizes[at] = length
                self.used += length
                return at
        return None

    def free(self, at: int) -> int:
        """Returns the length. Raises KeyError for what is not allocated: freeing twice is a bug, never ignored."""
        length = self._sizes.pop(at)
        self.used -= length
        index = bisect.bisect_left(self._free, (at, 0))
        start, end = at, at + length
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end - start))
        return length

    @property
    def empty(self) -> bool:
        return not self._sizes


def create_file(directory: str, length: int) -> int:
    """Descriptor of a nameless file of `length` bytes in `directory` (a tmpfs).

    Raises OSError with a reason if the volume can never hold it. Room that is missing only now (engines still map the
    arena of a sidecar that crashed) is met by `Arena.commit`: nobody touches a page that does not exist, which would
    be a SIGBUS.
    """
    volume = os.statvfs(directory)
    size = volume.f_blocks * volume.f_frsize
    if size < length:
        raise OSError(
            errno.ENOSPC,
            f"arena of {length} bytes does not fit into {directory}, a volume of {size} bytes; enlarge the volume"
            " (spec.stages[].sharedMemory) or lower --arena-bytes",
        )
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
        fd, path = tempfile.mkstemp(dir=directory)  # a file system without O_TMPFILE: named for an instant
        os.unlink(path)
    os.ftruncate(fd, length)
    return fd


class Arena:
    """A mapping of the arena's file, in the sidecar and in every engine."""

    def __init__(self, fd: int, length: int) -> None:
        self.fd = fd
        self.length = length
        self._map = mmap.mmap(fd, length)
        with contextlib.suppress(OSError):  # kernels that give no huge pages to shared memory
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)

    def commit(self, offset: int, length: int) -> bool:
        """Make the pages exist; False if the file system is full (then nobody may touch them)."""
        try:
            os.posix_fallocate(self.fd, offset, length)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                return False
            raise
        return True

    def populate(self, offset: int, length: int) -> None:
        """Map committed pages now, so that nobody faults on each of them later: four to ten times faster first writes.

        Meant for a thread of its own: the GIL is free meanwhile. Does nothing where the kernel (before 5.14) cannot.
        """
        try:
            anchor = ctypes.c_char.from_buffer(self._map)
        except ValueError:
            return  # closed meanwhile
        base = ctypes.addressof(anchor)
        for at in range(offset, offset + length, _POPULATE_BYTES):
            size = min(_POPULATE_BYTES, offset + length - at)
            if _madvise(ctypes.c_void_p(base + at), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                return

    def data(self, slab: Slab) -> memoryview:
        """The slab's bytes. Raises ProtocolError if the handle is stale or does not lie in the arena."""
        end = slab.offset + slab.length
        if slab.offset < ALIGNMENT or slab.offset % ALIGNMENT or end > self.length:
            raise ProtocolError(f"slab [{slab.offset}, {end}) is not in the arena of {self.length} bytes")
        if _HEADER.unpack_from(self.view, slab.offset - ALIGNMENT) != (slab.generation, slab.length):
            raise ProtocolError(f"slab at {slab.offset} has another generation than {slab.generation}: stale handle")
        return self.view[slab.offset : end]

    def stamp(self, offset: int, length: int, generation: int) -> Slab:
        _HEADER.pack_into(self.view, offset - ALIGNMENT, generation, length)
        return Slab(offset=offset, length=length, generation=generation)

    def wipe(self, offset: int) -> None:
        _HEADER.pack_into(self.view, offset - ALIGNMENT, 0, 0)

    def close(self) -> None:
        """Drop our mapping; views that others still hold keep theirs until they go."""
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass  # arrays still refer to it: freed with the last of them
        os.close(self.fd)


class SlabPool:
    """Slabs cut from the extents that one owner holds. Generations are the owner's session and a counter."""

    def __init__(self, arena: Arena, session: int) -> None:
        self._arena = arena
        self._extents: list[Allocator] = []
        self._slabs: dict[int, tuple[int, Allocator]] = {}  # offset -> (generation, extent)
        self._committed: set[tuple[int, int]] = set()
        self._next = session << 32

    @property
    def used_bytes(self) -> int:
        return sum(extent.used for extent in self._extents)

    @property
    def extent_bytes(self) -> int:
        return sum(extent.length for extent in self._extents)

    def add_extent(self, offset: int, length: int) -> bool:
        """False if the file system is full. Pages never go away again, so an extent that comes back costs nothing."""
        if (offset, length) not in self._committed:
            if not self._arena.commit(offset, length):
                return False
            self._committed.add((offset, length))
        self._extents.append(Allocator(offset, length))
        return True

    def allocate(self, length: int) -> Slab | None:
        for extent in self._extents:
            at = extent.allocate(ALIGNMENT + aligned(length))
            if at is not None:
                self._next += 1
                slab = self._arena.stamp(at + ALIGNMENT, length, self._next)
                self._slabs[slab.offset] = (slab.generation, extent)
                return slab
        return None

    def free(self, slab: Slab) -> None:
        """A handle that is not ours any more is ignored: its place may be another request's by now."""
        found = self._slabs.get(slab.offset)
        if found is None or found[0] != slab.generation:
            return
        del self._slabs[slab.offset]
        self._arena.wipe(slab.offset)
        found[1].free(slab.offset - ALIGNMENT)

    def take_empty_extents(self, keep: int) -> list[int]:
        """Remove and return the offsets of empty extents, leaving at least `keep` extents."""
        gone: list[int] = []
        for extent in list(self._extents):
            if len(self._extents) <= keep:
                break
            if extent.empty:
                self._extents.remove(extent)
                gone.append(extent.offset)
        return gone


def extent_length(arena_bytes: int, payload: int) -> int:
    """How much an owner leases at once: a sixteenth of the arena, or what the payload needs."""
    return aligned(max(payload + 2 * ALIGNMENT, arena_bytes // 16), PAGE)


def largest_slab(arena_bytes: int) -> int:
    """A larger chunk goes in pieces, so that one request cannot fill the arena."""
    return aligned(max(PAGE, arena_bytes // 4), PAGE) - 2 * ALIGNMENT
