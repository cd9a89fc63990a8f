"""Sealed frames over TCP between two sidecars. One AES-GCM pass is also the copy, out of the arena and into it.

A frame is: length of the header and of the body as they are on the wire, header, body; header and body are sealed
separately, so that a body can be opened straight into its place once the header has said which. Everything that waits
here has a bound: one frame that comes in, one buffer of frames that go out, and the control messages behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from omni_runtime.connectors import wire
from omni_runtime.connectors.handshake import (
    ANSWER_BYTES,
    CONFIRM_BYTES,
    HELLO_BYTES,
    LINK,
    REFUSAL,
    TAG_BYTES,
    Dialler,
    HandshakeRefused,
    Listener,
    Secrets,
    nonce,
)
from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.protocol.channels import CurveKeys

HANDSHAKE_SECONDS: Final = 5.0
MAX_FRAME_BODY: Final = wire.FRAGMENT_BYTES
_PREFIX: Final = struct.Struct("<II")
_FRAME: Final = _PREFIX.size + wire.MAX_HEADER_BYTES + MAX_FRAME_BODY + 2 * TAG_BYTES
_SMALL: Final = 64 << 10
_OUT: Final = 2 * (MAX_FRAME_BODY + (8 << 10))  # sealed bytes that wait for the kernel
_MAX_BEHIND: Final = 64 << 20  # of control messages to a peer that reads nothing
_IDLE_SECONDS: Final = 5.0


class Sealed:
    """A body that is not opened yet; valid until the callback that got it returns."""

    __slots__ = ("_counter", "_data", "_key", "length")

    def __init__(self, key: AESGCM, counter: int, data: memoryview) -> None:
        self._key = key
        self._counter = counter
        self._data = data
        self.length = len(data) - TAG_BYTES if len(data) else 0

    def __len__(self) -> int:
        return self.length

    def open(self) -> bytes:
        if not self.length:
            return b""
        try:
            return self._key.decrypt(nonce(self._counter), self._data, None)
        except InvalidTag:
            raise ProtocolError("a body is not what was sealed") from None

    def open_into(self, target: memoryview) -> None:
        """Raises ProtocolError if the bytes are forged; the target then holds nothing of use."""
        if self.length:
            try:
                self._key.decrypt_into(nonce(self._counter), self._data, None, target)
            except InvalidTag:
                raise ProtocolError("a body is not what was sealed") from None


def as_bytes(body: Sealed | bytes) -> bytes:
    return body.open() if isinstance(body, Sealed) else body


def copy_into(body: Sealed | bytes, target: memoryview) -> None:
    if isinstance(body, Sealed):
        body.open_into(target)
    else:
        target[:] = body


def _grown(buffer: bytearray, size: int, used: int) -> bytearray:
    """A new one: views of the old may still be held."""
    grown = bytearray(size)
    grown[:used] = memoryview(buffer)[:used]
    return grown


OnSealed = Callable[[bytes, Sealed], None]
OnLost = Callable[[str], None]


class SecureChannel:
    """Owns a connected, non-blocking socket. `on_frame` may raise ProtocolError: the channel then closes."""

    def __init__(self, sock: socket.socket, secrets: Secrets, on_frame: OnSealed, on_lost: OnLost) -> None:
        self.on_room: Callable[[], None] = lambda: None
        self.heard = time.monotonic()
        self._sock = sock
        self._secrets = secrets
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._received = self._sent = 1
        self._in = bytearray(_SMALL)
        self._filled = 0
        self._frame = 0  # length of the frame that is coming in, once that is known: no byte behind it is read then
        self._out = bytearray(_SMALL)
        self._start = self._end = 0
        self._behind: deque[bytearray] = deque()
        self._behind_bytes = 0
        self._writing = False
        self._closed = False

    def start(self) -> None:
        self._loop.add_reader(self._sock, self._on_readable)

    @property
    def room(self) -> bool:
        """Whether a whole fragment can be sealed now; otherwise `on_room` tells when."""
        return not self._closed and not self._behind and _OUT - self._end >= MAX_FRAME_BODY + (8 << 10)

    # --- out

    def send(self, message: wire._Message, body: memoryview | bytes = b"") -> None:
        """Never blocks. Bodies are sent while there is `room`; messages without one are small and always taken."""
        if self._closed:
            return
        header = wire.encode(message)
        head = len(header) + TAG_BYTES
        tail = len(body) + TAG_BYTES if len(body) else 0
        length = _PREFIX.size + head + tail
        if self._behind or self._end + length > _OUT:
            self._behind_bytes += length
            if self._behind_bytes > _MAX_BEHIND:
                self.close("the other side reads nothing")
                return
            frame = bytearray(length)
            self._behind.append(frame)
            self._seal(memoryview(frame), header, body, head, tail)
            return
        if self._end + length > len(self._out):
            self._out = _grown(self._out, _OUT, self._end)
        view = memoryview(self._out)
        self._seal(view[self._end : self._end + length], header, body, head, tail)
        view.release()
        self._end += length
        if not self._writing:
            self._flush()

    def _seal(self, target: memoryview, header: bytes, body: memoryview | bytes, head: int, tail: int) -> None:
        key, at = self._secrets.send, _PREFIX.size
        _PREFIX.pack_into(target, 0, head, tail)
        key.encrypt_into(nonce(self._sent), header, bytes(target[:at]), target[at : at + head])
        if tail:
            key.encrypt_into(nonce(self._sent + 1), body, None, target[at + head : at + head + tail])
        self._sent += 2

    def _flush(self) -> None:
        had_room = self.room
        try:
            while True:
                if self._start == self._end:
                    self._start = self._end = 0
                    if not self._behind:
                        break
                    frame = self._behind.popleft()
                    self._behind_bytes -= len(frame)
                    if len(frame) > len(self._out):
                        self._out = bytearray(_OUT)
                    self._out[: len(frame)] = frame
                    self._end = len(frame)
                with memoryview(self._out) as view:
                    self._start += self._sock.send(view[self._start : self._end])
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock, self._flush)
        except OSError as error:
            self.close(f"connection lost: {error}")
            return
        else:
            if self._writing:
                self._writing = False
                self._loop.remove_writer(self._sock)
        if not had_room and self.room:
            self.on_room()

    # --- in

    def _on_readable(self) -> None:
        try:
            with memoryview(self._in) as view:
                count = self._sock.recv_into(view[self._filled : max(_SMALL, self._frame)])
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(f"connection lost: {error}")
            return
        if not count:
            self.close("connection closed")
            return
        self.heard = time.monotonic()
        self._filled += count
        try:
            self._parse()
        except ProtocolError as error:
            self.close(str(error), broke=True)

    def _parse(self) -> None:
        at = 0
        with memoryview(self._in) as view:
            while self._filled - at >= _PREFIX.size and not self._closed:
                head, tail = _PREFIX.unpack_from(view, at)
                if not TAG_BYTES < head <= wire.MAX_HEADER_BYTES + TAG_BYTES or not (
                    tail == 0 or TAG_BYTES < tail <= MAX_FRAME_BODY + TAG_BYTES
                ):
                    raise ProtocolError(f"frame of {head} + {tail} bytes; at most {_FRAME}")
                start = at + _PREFIX.size
                end = start + head + tail
                if end > self._filled:
                    break
                try:
                    header = self._secrets.receive.decrypt(
                        nonce(self._received), view[start : start + head], bytes(view[at:start])
                    )
                except InvalidTag:
                    raise ProtocolError("a frame is not what was sealed: cut, repeated, reordered or forged") from None
                body = Sealed(self._secrets.receive, self._received + 1, view[start + head : end])
                self._received += 2
                at = end
                self._on_frame(header, body)
        if at and not self._closed:
            rest = self._filled - at
            if rest:
                self._in[:rest] = self._in[at : self._filled]
            self._filled = rest
        self._frame = 0
        if self._filled >= _PREFIX.size and not self._closed:
            self._frame = _PREFIX.size + sum(_PREFIX.unpack_from(self._in, 0))
            if self._frame > len(self._in):
                self._in = _grown(self._in, _FRAME, self._filled)

    # --- ends

    def tick(self, now: float) -> None:
        """An idle link keeps no large buffers."""
        if now - self.heard > _IDLE_SECONDS:
            if len(self._in) > _SMALL and not self._filled:
                self._in = bytearray(_SMALL)
            if not self._end and len(self._out) > _SMALL:
                self._out = bytearray(_SMALL)

    def close(self, reason: str, *, broke: bool = False) -> None:
        """`on_lost` hears the reason, once and not from within this call."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._behind.clear()
        self._loop.call_soon(self._on_lost, f"broke the protocol: {reason}" if broke else reason)


# --- connections


async def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not part:
            raise ConnectionError("closed during the handshake")
        data += part
    return data


async def dial(host: str, port: int, keys: CurveKeys, purpose: bytes = LINK) -> tuple[socket.socket, Secrets]:
    """Raises OSError, TimeoutError or HandshakeRefused."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, address)
            dialler = Dialler(keys, purpose)
            await loop.sock_sendall(sock, dialler.hello)
            confirm, secrets = dialler.confirm(await exactly(sock, ANSWER_BYTES))
            await loop.sock_sendall(sock, confirm)
        except BaseException:
            sock.close()
            raise
    return sock, secrets


async def accept(sock: socket.socket, keys: CurveKeys) -> tuple[Secrets, bytes]:
    """The listener's half: the keys, and what the connection is for. Raises OSError, TimeoutError or HandshakeRefused; the socket is then of no use."""
    loop = asyncio.get_running_loop()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        listener = Listener(keys)
        try:
            answer = listener.answer(await exactly(sock, HELLO_BYTES))
        except HandshakeRefused:
            with contextlib.suppress(OSError):
                await loop.sock_sendall(sock, REFUSAL)
            raise
        await loop.sock_sendall(sock, answer)
        return listener.accept(await exactly(sock, CONFIRM_BYTES)), listener.purpose
