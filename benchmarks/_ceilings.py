"""What this machine gives without any protocol of ours, in the same run: the ceilings that transfers are held against.

memcpy and AES-256-GCM run over more memory than any cache holds, on one core; loopback is a plain TCP socket between two
processes that ends in memory; engine is as many of Mooncake's own transfer engines over TCP as our sidecars run, from
process to process; hops is a message that two processes hand on, unread, by blocking sockets: unix, TCP, unix.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from omni_runtime.connectors.mooncake import TCP_ENGINES, ends_well, parts

MIB = 1 << 20
SPAN = 256 * MIB
PIECE = MIB // 2  # as on our wire
LARGE = 64 * MIB
TIMES = 8
DEADLINE_SECONDS = 60.0
HOP_BYTES = 4 << 10
HOP_PAUSE_SECONDS = 0.004
HOP_TIMES = 300
_STAMP = struct.Struct("<Q")
_SPAWN = multiprocessing.get_context("spawn")


def ceilings() -> dict[str, float]:
    """GB/s, and microseconds of hops. A measurement that this machine cannot make is left out."""
    found: dict[str, float] = {}
    measures: dict[str, Callable[[], float]] = {
        "memcpy_gbps": memcpy,
        "aes_gcm_gbps": aes_gcm,
        "loopback_gbps": loopback,
        "mooncake_engine_gbps": mooncake_engine,
        "hops_us_p50": hops,
    }
    for name, measure in measures.items():
        try:
            found[name] = measure()
        except (ImportError, OSError, EOFError) as error:
            print(f"{name}: not measured: {error}")
    return found


def _memory(length: int) -> mmap.mmap:
    memory = mmap.mmap(-1, length)
    np.frombuffer(memory, np.uint8)[:] = 7
    return memory


def memcpy() -> float:
    half = SPAN // 2
    memory = np.frombuffer(_memory(SPAN), np.uint8)
    began = time.perf_counter()
    np.copyto(memory[half:], memory[:half])
    return half / (time.perf_counter() - began) / 1e9


def aes_gcm() -> float:
    """Sealing out of memory into a buffer that stays in the cache, as our sidecars do."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    key, view, out = AESGCM(os.urandom(32)), memoryview(_memory(SPAN)), bytearray(PIECE + 16)
    began = time.perf_counter()
    for at in range(0, SPAN, PIECE):
        key.encrypt_into(at.to_bytes(12, "big"), view[at : at + PIECE], None, out)
    return SPAN / (time.perf_counter() - began) / 1e9


def loopback() -> float:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_SECONDS)
        sender = _SPAWN.Process(target=_send, args=(listener.getsockname()[1],), daemon=True)
        sender.start()
        taken, _ = listener.accept()
        view, left, at = memoryview(_memory(SPAN)), TIMES * LARGE, 0
        began = time.perf_counter()
        with taken:
            while left:
                got = taken.recv_into(view[at : at + min(PIECE, SPAN - at)])
                if not got:
                    raise EOFError("the sender ended early")
                left, at = left - got, (at + got) % SPAN
        seconds = time.perf_counter() - began
        sender.join(10)
    return TIMES * LARGE / seconds / 1e9


def _send(port: int) -> None:
    view = memoryview(_memory(SPAN))
    with socket.create_connection(("127.0.0.1", port)) as out:
        for number in range(TIMES):
            at = number * LARGE % SPAN
            out.sendall(view[at : at + LARGE])


def hops() -> float:
    """One way through four processes, median in microseconds, of a message that comes every few milliseconds."""
    near, up = socket.socketpair()
    down, end = socket.socketpair()
    with near, up, down, end, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_SECONDS)
        end.settimeout(DEADLINE_SECONDS)
        first = _SPAWN.Process(target=_emit, args=(near,), daemon=True)
        second = _SPAWN.Process(target=_relay_up, args=(up, listener.getsockname()[1]), daemon=True)
        second.start()
        taken, _ = listener.accept()
        with taken:
            taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            third = _SPAWN.Process(target=_hand_on, args=(taken, down), daemon=True)
            third.start()
            first.start()
            ways = []
            for _ in range(HOP_TIMES):
                (sent,) = _STAMP.unpack_from(_whole(end))
                ways.append((time.monotonic_ns() - sent) / 1e3)
        for process in (first, second, third):
            process.join(10)
    return statistics.median(ways[16:])


def _emit(out: socket.socket) -> None:
    message = bytearray(HOP_BYTES)
    for _ in range(HOP_TIMES):
        time.sleep(HOP_PAUSE_SECONDS)
        _STAMP.pack_into(message, 0, time.monotonic_ns())
        out.sendall(message)


def _relay_up(source: socket.socket, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as out:
        out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _hand_on(source, out)


def _hand_on(source: socket.socket, out: socket.socket) -> None:
    for _ in range(HOP_TIMES):
        out.sendall(_whole(source))


def _whole(source: socket.socket) -> bytes:
    data = source.recv(HOP_BYTES, socket.MSG_WAITALL)
    if len(data) < HOP_BYTES:
        raise EOFError("a hop ended early")
    return data


def _started() -> tuple[list[Any], mmap.mmap, int]:
    from mooncake.engine import TransferEngine

    engines = [TransferEngine() for _ in range(TCP_ENGINES)]
    if any(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") for engine in engines):
        raise OSError("an engine does not start")
    memory = _memory(SPAN)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if any(engine.register_memory(address, SPAN) for engine in engines):
        raise OSError("an engine cannot register memory")
    return engines, memory, address


def _lend(place: Any, over: Any) -> None:
    _quiet()
    engines, _, address = _started()
    place.put(([f"127.0.0.1:{engine.get_rpc_port()}" for engine in engines], address))
    over.wait(DEADLINE_SECONDS)
    os._exit(0)  # the engine's own end takes seconds


def _quiet() -> None:
    os.environ.update(MC_LOG_LEVEL="ERROR", GLOG_minloglevel="3")


def _fetch(place: Any, over: Any, result: Any) -> None:
    _quiet()
    engines, _, address = _started()
    segments, there = place.get(timeout=DEADLINE_SECONDS)
    for engine, segment in zip(engines, segments, strict=True):
        engine.transfer_sync_read(segment, address, there, MIB)
    began = time.perf_counter()
    for number in range(TIMES):
        at = number * LARGE % SPAN
        running = [
            (engine, engine.batch_transfer_async_read(segment, [address + at + o], [there + at + o], [length]))
            for engine, segment, (o, length) in zip(engines, segments, parts(LARGE, len(engines)), strict=True)
        ]
        if not all(ends_well(*each) for each in running):
            result.put(0.0)
            break
    else:
        result.put(TIMES * LARGE / (time.perf_counter() - began) / 1e9)
    over.set()
    result.close()
    result.join_thread()
    os._exit(0)


def mooncake_engine() -> float:
    import mooncake.engine  # noqa: F401 - otherwise its absence would be found in the children

    place, result, over = _SPAWN.Queue(), _SPAWN.Queue(), _SPAWN.Event()
    pair = [
        _SPAWN.Process(target=_lend, args=(place, over), daemon=True),
        _SPAWN.Process(target=_fetch, args=(place, over, result), daemon=True),
    ]
    for process in pair:
        process.start()
    try:
        value: float = result.get(timeout=DEADLINE_SECONDS)
    except Exception as error:  # queue.Empty: whatever happened in the children
        raise OSError(f"no result: {error!r}") from error
    finally:
        for process in pair:
            process.join(10)
            if process.is_alive():
                process.terminate()
    return value
