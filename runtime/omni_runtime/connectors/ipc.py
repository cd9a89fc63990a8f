"""Frames over the pod's unix socket, and the hand-over of the arena's descriptor.

A plain stream socket and not ZeroMQ: the kernel reports the death of a process at once (a crashed engine frees its
streams in microseconds, not after missed heartbeats), it can carry the arena's descriptor, and it needs no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Protocol, cast

from omni_runtime.connectors import wire
from omni_runtime.connectors.tensors import ProtocolError

SOCKET_NAME: Final = "sidecar.sock"
HANDSHAKE_SECONDS: Final = 5.0
_WRITE_HIGH_WATER: Final = 4 << 20
_MAX_DESCRIPTORS: Final = 2
_JOIN_BYTES: Final = 32 << 10  # a copy of so much costs less than a second write

FRAME_PREFIX: Final = struct.Struct("<II")  # lengths of header and body, which follow
Buffer = bytes | bytearray | memoryview
OnFrame = Callable[[bytes, bytes], None]
OnLost = Callable[[str], None]


def frame(message: wire._Message, body: Buffer = b"") -> tuple[bytes, Buffer]:
    """(prefix and header, body) ready to write."""
    header = wire.encode(message)
    return FRAME_PREFIX.pack(len(header), len(body)) + header, body


def parse_prefix(buffer: bytes | bytearray | memoryview, at: int = 0) -> tuple[int, int]:
    """(header length, body length). Raises ProtocolError before anything of that size is read."""
    header, body = FRAME_PREFIX.unpack_from(buffer, at)
    if header > wire.MAX_HEADER_BYTES or body > wire.MAX_BODY_BYTES:
        raise ProtocolError(
            f"frame of {header} + {body} bytes; at most {wire.MAX_HEADER_BYTES} + {wire.MAX_BODY_BYTES}"
        )
    return header, body


class FrameChannel(asyncio.Protocol):
    """Whole frames in, whole frames out. `on_frame` may raise ProtocolError: the channel then closes."""

    def __init__(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._reason = "connection closed"
        self._fd = -1
        self._hurried = False  # a frame of this turn of the loop has been written already
        self.is_writable = True
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by what it does, not by its class
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER)
        self._fd = transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        if buffer:
            buffer += data
            data = bytes(buffer)
        at, length, prefix = 0, len(data), FRAME_PREFIX.size
        try:
            while length - at >= prefix:
                header_length, body_length = parse_prefix(data, at)
                start = at + prefix
                body_at = start + header_length
                end = body_at + body_length
                if length < end:
                    break
                self._on_frame(data[start:body_at], data[body_at:end])
                at = end
        except ProtocolError as error:
            self.close(str(error))
            return
        if buffer:
            del buffer[:at]
        elif at < length:
            buffer += data[at:]

    def send(self, message: wire._Message, body: bytes | memoryview = b"", *, hurry: bool = True) -> None:
        """Queue a frame; never blocks. A closed channel swallows it: its owner has been told through `on_lost`."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        head, tail = frame(message, body)
        if len(tail) > _JOIN_BYTES:
            transport.write(head)
            transport.write(tail)
            return
        data = b"".join((head, tail)) if len(tail) else head
        if hurry and not self._hurried and transport.get_write_buffer_size() == 0:
            data = self._write_now(data)
            if not data:
                return
        transport.write(data)

    def _write_now(self, data: bytes) -> bytes:
        """The first frame of a turn of the loop leaves at once, and its reader wakes up while this process goes on; the
        transport writes at the end of a turn, all that came together. Returns what the socket did not take.
        """
        self._hurried = True
        asyncio.get_running_loop().call_soon(self._next_turn)
        try:
            return data[os.write(self._fd, data) :]
        except OSError:  # full, or broken: the transport finds out which
            return data

    def _next_turn(self) -> None:
        self._hurried = False

    async def writable(self) -> None:
        """Wait until the peer has read enough of what was sent."""
        await self._writable.wait()

    def pause_writing(self) -> None:
        self.is_writable = False
        self._writable.clear()

    def resume_writing(self) -> None:
        self.is_writable = True
        self._writable.set()

    def close(self, reason: str) -> None:
        """Close once what was sent is written."""
        self._reason = reason
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._buffer.clear()
        self.resume_writing()
        self._on_lost(f"{self._reason}: {exc}" if exc is not None else self._reason)


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _receive_frame(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One body-less frame and the descriptors that came with it; no byte behind it is read."""
    loop = asyncio.get_running_loop()
    data = b""
    descriptors: list[int] = []
    while True:
        whole = FRAME_PREFIX.size
        if len(data) >= whole:
            header_length, body_length = parse_prefix(data)
            whole += header_length
            if body_length:
                raise ProtocolError("handshake frame carries more than its header")
            if len(data) == whole:
                return data[FRAME_PREFIX.size :], descriptors
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(sock, _set_once, readable)
        try:
            await readable
        finally:
            loop.remove_reader(sock)
        part, fds, _, _ = socket.recv_fds(sock, whole - len(data), _MAX_DESCRIPTORS)
        descriptors += fds
        if not part:
            raise ConnectionError("closed during the handshake")
        data += part


async def dial(path: Path, attach: wire.Attach, deadline_s: float) -> tuple[socket.socket, wire.Attached, int, int]:
    """Connect and attach: (socket, answer, descriptors of the arena and of the line's reading end).

    Raises OSError or TimeoutError while no sidecar answers, and Refusal if it will not have us.
    """
    sock, answer, fds = await _ask(path, attach, deadline_s)
    if isinstance(answer, wire.Attached) and len(fds) == 2:
        arena, line = fds
        return sock, answer, arena, line
    _drop(sock, fds)
    raise ProtocolError("the sidecar answered Attach with something else")


async def claim(path: Path, session: int, deadline_s: float) -> tuple[int, bytes]:
    """Descriptor of the writing end of an engine's line, or of a line to another pod and its keys. Raises as `dial` does."""
    sock, answer, fds = await _ask(path, wire.Claim(session), deadline_s)
    sock.close()
    if isinstance(answer, wire.Granted) and len(fds) == 1 and len(answer.keys) in (0, wire.LINE_KEYS_BYTES):
        return fds[0], answer.keys
    _drop(sock, fds)
    raise ProtocolError("the sidecar answered Claim with something else")


async def _ask(path: Path, message: wire._Message, deadline_s: float) -> tuple[socket.socket, wire.ToEngine, list[int]]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    fds: list[int] = []
    try:
        async with asyncio.timeout(deadline_s):
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, str(path))
            await loop.sock_sendall(sock, frame(message)[0])
            header, fds = await _receive_frame(sock)
        answer = wire.decode_to_engine(header)
        if isinstance(answer, wire.Rejected):
            raise Refusal(answer.code, answer.message)
    except BaseException:
        _drop(sock, fds)
        raise
    return sock, answer, fds


def _drop(sock: socket.socket, descriptors: list[int]) -> None:
    sock.close()
    for fd in descriptors:
        os.close(fd)


class Refusal(Exception):
    """The sidecar will not serve this engine; trying again is useless."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class Session(Protocol):
    """What the server needs of an attached engine."""

    attached: wire.Attached
    channel: FrameChannel | None
    line: Line

    def on_frame(self, header: bytes, body: bytes) -> None: ...
    def on_lost(self, reason: str) -> None: ...


class Line:
    """Both ends of an engine's line (see `line`), as long as they are the sidecar's."""

    def __init__(self) -> None:
        self.reading, self.writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def close(self) -> None:
        self.reading.close()
        self.writing.close()


Accept = Callable[[wire.Attach], Session | wire.Rejected]
Claimed = Callable[[int], tuple[int, wire.Granted] | None]  # the line of this session


class IpcServer:
    """Listens at <ipc-dir>/sidecar.sock. One sidecar a folder: the lock is on the folder itself, so it leaves nothing."""

    def __init__(self, directory: Path, arena_fd: int, accept: Accept, claimed: Claimed) -> None:
        self._path = directory / SOCKET_NAME
        self._arena_fd = arena_fd
        self._accept = accept
        self._claimed = claimed
        self._lock = -1
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Raises OSError with a reason if another sidecar serves the folder or the path is too long."""
        directory = self._path.parent
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise OSError(error.errno, f"another sidecar already serves {directory}; use another --ipc-dir") from error
        self._path.unlink(missing_ok=True)  # of a sidecar that was killed
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        listener.bind(str(self._path))
        os.chmod(self._path, 0o700)
        listener.listen(128)
        self._listener = listener
        self._spawn(self._serve(listener))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listener)
            self._spawn(self._handshake(sock))

    async def _handshake(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                header, fds = await _receive_frame(sock)
            for fd in fds:
                os.close(fd)
            attach = wire.decode_from_engine(header)
            if isinstance(attach, wire.Claim):
                if (claimed := self._claimed(attach.session)) is not None:
                    fd, granted = claimed
                    socket.send_fds(sock, [frame(granted)[0]], [fd])
                sock.close()
                return
            if not isinstance(attach, wire.Attach):
                raise ProtocolError("the first message must be Attach")
            session = self._accept(attach)
            if isinstance(session, wire.Rejected):
                await asyncio.get_running_loop().sock_sendall(sock, frame(session)[0])
                sock.close()
                return
            channel = session.channel = FrameChannel(session.on_frame, session.on_lost)
            try:
                fds = [self._arena_fd, session.line.reading.fileno()]
                socket.send_fds(sock, [frame(session.attached)[0]], fds)
                session.line.reading.close()
                await asyncio.get_running_loop().connect_accepted_socket(lambda: channel, sock)
            except OSError as error:
                session.on_lost(str(error))
                raise
        except (OSError, TimeoutError, ProtocolError):
            sock.close()

    def stop_listening(self) -> None:
        """No new engines; the socket file goes."""
        if self._listener is not None:
            self._path.unlink(missing_ok=True)
            self._listener.close()
            self._listener = None

    async def close(self) -> None:
        self.stop_listening()
        for task in list(self._tasks):
            task.cancel()
        for task in list(self._tasks):
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
