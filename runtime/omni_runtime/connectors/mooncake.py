"""Mooncake Transfer Engine between two sidecars: the consumer's reads from the producer's arena into its own.

Descriptors, credits and ends still travel over the sealed link; only the bytes of large pieces go this way. RDMA by
configuration; over TCP the engine neither authenticates nor encrypts, so it is for networks that the pipeline owns,
behind the edge's NetworkPolicy. Where it cannot start, or a fetch fails, the bytes go over the sealed link.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any, Final

import msgspec

from omni_runtime.connectors.arena import Arena
from omni_runtime.connectors.wire import Slab
from omni_runtime.deploy.plan import MOONCAKE_PORTS

START_SECONDS: Final = 10.0
FETCH_BYTES: Final = 256 << 10  # smaller pieces are on their way before a fetch could be arranged
PART_BYTES: Final = 256 << 10  # of a piece that several engines fetch, at least
TCP_ENGINES: Final = 2  # the lender's one thread for sockets fills its core at 1.4 GB/s, the reader's half of one
_SEGMENT = re.compile(r"[A-Za-z0-9.:\[\]%-]{1,253}:[0-9]{1,5}")
_THREADS: Final = 2
_NO_TRANSFER: Final = (0, -1, (1 << 64) - 1)  # the engine's own sign of failure, and what becomes of it as unsigned
_LOOK_SECONDS: Final = (0.0001, 0.001)  # between two looks at a transfer: at first, at most


class MooncakeUnavailable(Exception):
    """The engine cannot start here; the reason is for people."""


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    protocol: str = "tcp"  # tcp | rdma
    device: str = ""  # names of RDMA devices, separated by commas; empty: the engine chooses by topology


class Mooncake:
    """Started engines whose registered memory is the arena: one by RDMA, `TCP_ENGINES` by TCP. `fetch` blocks."""

    def __init__(self, engines: Sequence[Any], arena: Arena, host: str) -> None:
        self.segments = tuple(f"{host}:{engine.get_rpc_port()}" for engine in engines)
        self._engines = tuple(engines)
        self._turn = 0
        self._anchor: Any = ctypes.c_char.from_buffer(arena.view)
        self.address = ctypes.addressof(self._anchor)
        self._threads = ThreadPoolExecutor(_THREADS, "mooncake")
        self._length = arena.length
        self._closed = threading.Event()

    @classmethod
    def start(cls, arena: Arena, host: str, options: MooncakeOptions) -> Mooncake:
        """Blocks for a moment. Raises MooncakeUnavailable."""
        if options.protocol == "rdma" and not arena.commit(0, arena.length):
            raise MooncakeUnavailable("registering for RDMA needs the whole arena in memory, and its volume is full")
        count = TCP_ENGINES if options.protocol == "tcp" else 1
        self = cls([start_engine(host, options) for _ in range(count)], arena, host)
        if any(engine.register_memory(self.address, arena.length) for engine in self._engines):
            self.close()
            raise MooncakeUnavailable(f"the transfer engine cannot register the arena of {arena.length} bytes")
        return self

    def fetch(self, segments: Sequence[str], address: int, slab: Slab) -> bool:
        """Read `slab.length` bytes at `address` of the other arena into the slab. False if that failed.

        Each engine reads a part, from one of the other side's `segments`, and every part has ended when this returns.

        Not by the engine's own waiting call: it spins, on the core that the engine's one thread for sockets needs, and
        it gives up after a while though that thread may still write to the slab.
        """
        if self._closed.is_set() or slab.offset + slab.length > self._length or not all(map(is_segment, segments)):
            return False
        self._turn += 1  # which engine takes the first part; two threads that read the same number do no harm
        here, running = self.address + slab.offset, []
        for index, (at, length) in enumerate(parts(slab.length, len(self._engines)), self._turn):
            engine, segment = self._engines[index % len(self._engines)], segments[index % len(segments)]
            running.append((engine, engine.batch_transfer_async_read(segment, [here + at], [address + at], [length])))
        ended = [ends_well(engine, transfer) for engine, transfer in running]  # each one: they write to the slab
        return all(ended)

    @property
    def threads(self) -> ThreadPoolExecutor:
        return self._threads

    def close(self) -> None:
        """Waits for fetches that run: they write to the arena."""
        self._closed.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for engine in self._engines:
            engine.unregister_memory(self.address)
        self._anchor = None


def parts(length: int, most: int) -> list[tuple[int, int]]:
    """(offset, length) of up to `most` parts of a piece, none of a split piece smaller than PART_BYTES."""
    count = max(1, min(most, length // PART_BYTES))
    bounds = [length * n // count for n in range(count + 1)]
    return [(begin, end - begin) for begin, end in pairwise(bounds)]


def is_segment(name: str) -> bool:
    """host:port, as peers tell it."""
    return _SEGMENT.fullmatch(name) is not None


def start_engine(host: str, options: MooncakeOptions) -> Any:
    """An engine without memory. Blocks for a moment. Raises MooncakeUnavailable."""
    os.environ.setdefault("MC_MIN_RPC_PORT", str(MOONCAKE_PORTS[0]))
    os.environ.setdefault("MC_MAX_RPC_PORT", str(MOONCAKE_PORTS[1]))
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOG_minloglevel", "2")
    try:
        engine = _engine_class()()
    except (ImportError, OSError) as error:
        raise MooncakeUnavailable(f"package mooncake-transfer-engine cannot be loaded: {error}") from error
    if engine.initialize(host, "P2PHANDSHAKE", options.protocol, options.device):
        where = f" on {options.device}" if options.device else ""
        raise MooncakeUnavailable(f"the transfer engine does not start with {options.protocol}{where}")
    if options.protocol == "rdma":
        _require_rdma(rdma_devices(engine.get_local_topology()), options.device)
    return engine


def _require_rdma(found: frozenset[str], wanted: str) -> None:
    """The engine itself takes TCP in silence where there is no such device. Raises MooncakeUnavailable."""
    if not found:
        raise MooncakeUnavailable(
            "no RDMA device is visible to this container: does its profile's mooncake.resource name what the device"
            " plugin offers, and has the node one?"
        )
    missing = sorted({name.strip() for name in wanted.split(",") if name.strip()} - found)
    if missing:
        raise MooncakeUnavailable(f"no RDMA device {', '.join(missing)} here; there are {', '.join(sorted(found))}")


def rdma_devices(topology: str) -> frozenset[str]:
    """Names of network devices in the engine's own view of the machine: location -> [[preferred], [others]]."""
    try:
        places = msgspec.json.decode(topology, type=dict[str, list[list[str]]])
    except msgspec.MsgspecError:
        return frozenset()
    return frozenset(name for lists in places.values() for names in lists for name in names)


def ends_well(engine: Any, transfer: int) -> bool:
    """Wait for a transfer that was submitted, looking now and then. False if it failed, or was not even accepted."""
    if transfer in _NO_TRANSFER:
        return False
    pause, longest = _LOOK_SECONDS
    while not (status := engine.transfer_check_status(transfer)):
        time.sleep(pause)
        pause = min(1.25 * pause, longest)
    return bool(status == 1)


def _engine_class() -> Any:
    """Without the package's own start, which loads its object store too: 13 MB that nothing here uses."""
    found = None if "mooncake" in sys.modules else importlib.util.find_spec("mooncake")
    if found is not None:
        package = sys.modules["mooncake"] = ModuleType("mooncake")
        package.__path__ = list(found.submodule_search_locations or ())
    try:
        from mooncake.engine import TransferEngine
    finally:
        if found is not None:
            del sys.modules["mooncake"]
    return TransferEngine
