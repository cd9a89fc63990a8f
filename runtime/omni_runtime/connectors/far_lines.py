"""Lines between engines of two pods, as their sidecars make and end them. The engines' half is `sealed_line`.

The producer's sidecar says which engine a stream comes from (`wire.Bound`). The consumer's dials the data port a second
time for its own engine and that one, once for all their streams, names the connection at random (`wire.LineTo`) and gives
it to its engine (`wire.Lined`); then it says of each stream that the line may be used (`wire.Lay`), and the producer's
engine is given the other end (`wire.Paired`). Until then, and if none of this works, chunks go by way of the sidecars.

A sidecar keeps a descriptor of each line: a producer that is killed after it has finished a stream does not take with it
what the kernel was still to send.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import secrets as random_numbers
import socket
import struct
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidTag

from omni_runtime.connectors import secure, wire
from omni_runtime.connectors.handshake import LINE, TAG_BYTES, HandshakeRefused, Secrets
from omni_runtime.connectors.sealed_line import INTRODUCTION, PREFIX, open_frame, seal
from omni_runtime.connectors.tensors import ProtocolError
from omni_runtime.logs import get_logger
from omni_runtime.protocol.channels import CurveKeys

log = get_logger(__name__)

MAX_LINES: Final = 1024
LINGER_SECONDS: Final = 5.0  # for what an engine that is gone has left to be sent
RETRY_SECONDS: Final = 10.0  # after a line could not be made
_INTRODUCTION_BYTES: Final = 64
_ESTABLISHED: Final = 1  # tcp(7): the first byte of TCP_INFO
_ALIVE: Final = (  # a connection whose other node is gone ends within so many seconds, as links do
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
)

Tell = Callable[[int], None]  # the name of a line that can be used
Key = tuple[int, str, int]  # session of the consumer here, endpoint of the producer's sidecar, session of the producer


@dataclass(slots=True, eq=False)
class End:
    """This pod's end of a line."""

    session: int  # what the engine here calls it
    name: int  # what the sidecars call it
    engine: int  # session of the engine whose it is
    sock: socket.socket
    keys: bytes
    claimed: bool = False
    left_at: float | None = None  # when that engine went

    @property
    def works(self) -> bool:
        return self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED

    @property
    def unsent(self) -> bool:
        """Whether the other end has not confirmed everything."""
        (count,) = struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, b"\0" * 4))
        return bool(count)


@dataclass(slots=True)
class _Dialled:
    endpoint: str
    task: asyncio.Task[None] | None = None
    end: End | None = None
    waiting: list[Tell] = field(default_factory=list)
    failed_at: float = 0.0


class FarLines:
    """All lines of a sidecar to other pods. `line_for` tells an engine here of one; False if it is gone."""

    def __init__(
        self,
        keys: CurveKeys,
        new_session: Callable[[], int],
        has_engine: Callable[[int], bool],
        line_for: Callable[[int, int], None],
    ) -> None:
        self._keys = keys
        self._new_session = new_session
        self._has_engine = has_engine
        self._line_for = line_for
        self._ends: dict[int, End] = {}
        self._named: dict[int, End] = {}
        self._dialled: dict[Key, _Dialled] = {}
        self._leaving: set[End] = set()

    def __len__(self) -> int:
        return len(self._ends) + len(self._leaving)

    @property
    def idle(self) -> bool:
        """Nothing of an engine that is gone is still to be sent."""
        return not self._leaving

    # --- for engines

    def claim(self, session: int) -> tuple[int, wire.Granted] | None:
        """Descriptor and keys, once."""
        end = self._ends.get(session)
        if end is None or end.claimed:
            return None
        end.claimed = True
        return end.sock.fileno(), wire.Granted(end.keys)

    # --- the consumer's side

    def to(self, key: Key, address: tuple[str, int], tell: Tell) -> None:
        """Tell the name of the line of these two engines, when and if there is one."""
        dialled = self._dialled.get(key)
        if dialled is not None and dialled.end is not None:
            tell(dialled.end.name)
            return
        if dialled is not None and dialled.task is not None:
            dialled.waiting.append(tell)
            return
        if dialled is not None and time.monotonic() - dialled.failed_at < RETRY_SECONDS:
            return
        if len(self) >= MAX_LINES or len(self._dialled) >= MAX_LINES:
            return
        dialled = self._dialled[key] = _Dialled(key[1], waiting=[tell])
        dialled.task = asyncio.get_running_loop().create_task(self._dial(key, dialled, *address))

    async def _dial(self, key: Key, dialled: _Dialled, host: str, port: int) -> None:
        engine, endpoint, producer = key
        name = random_numbers.randbits(62) + 1
        try:
            sock, secrets = await secure.dial(host, port, self._keys, LINE)
            try:
                await _introduce(sock, secrets, wire.LineTo(producer, name))
            except BaseException:
                sock.close()
                raise
        except (OSError, TimeoutError, HandshakeRefused, ProtocolError) as error:
            dialled.task, dialled.failed_at = None, time.monotonic()
            dialled.waiting.clear()
            log.warning("line.unavailable", endpoint=endpoint, reason=str(error) or type(error).__name__)
            return
        dialled.task = None
        dialled.end = self._enter(engine, name, sock, secrets)
        self._line_for(engine, dialled.end.session)
        waiting, dialled.waiting = dialled.waiting, []
        for tell in waiting:
            tell(name)

    def link_lost(self, endpoint: str) -> None:
        for key in [k for k in self._dialled if k[1] == endpoint]:
            self._drop_dialled(key)

    def _drop_dialled(self, key: Key) -> None:
        dialled = self._dialled.pop(key)
        if dialled.task is not None:
            dialled.task.cancel()
        if dialled.end is not None:
            self._end(dialled.end)

    # --- the producer's side

    async def accept(self, sock: socket.socket, secrets: Secrets) -> None:
        """Raises OSError, TimeoutError or ProtocolError; the socket is then of no use."""
        async with asyncio.timeout(secure.HANDSHAKE_SECONDS):
            asked = wire.decode_line_to(await _hear(sock, secrets))
            if not self._has_engine(asked.session):
                raise ProtocolError(f"a line to engine {asked.session}, which is not here")
            if asked.name in self._named or len(self) >= MAX_LINES:
                raise ProtocolError(f"more than {MAX_LINES} lines, or two of one name")
            end = self._enter(asked.session, asked.name, sock, secrets)
            try:
                await _say(sock, secrets, b"")
            except BaseException:
                self._end(end)
                raise

    def named(self, name: int) -> End | None:
        """A line that other sidecars may ask for."""
        return self._named.get(name)

    # --- ends

    def _enter(self, engine: int, name: int, sock: socket.socket, secrets: Secrets) -> End:
        for level, option, value in _ALIVE:
            sock.setsockopt(level, option, value)
        end = End(self._new_session(), name, engine, sock, secrets.send_key + secrets.receive_key)
        self._ends[end.session] = self._named[name] = end
        return end

    def _forget(self, end: End) -> None:
        self._ends.pop(end.session, None)
        self._named.pop(end.name, None)
        for key in [k for k, d in self._dialled.items() if d.end is end]:
            del self._dialled[key]

    def _end(self, end: End) -> None:
        self._forget(end)
        with contextlib.suppress(OSError):
            end.sock.shutdown(socket.SHUT_RDWR)
        end.sock.close()

    def engine_lost(self, session: int) -> None:
        """What it has written is still sent."""
        for key in [k for k in self._dialled if k[0] == session and self._dialled[k].end is None]:
            self._drop_dialled(key)
        for end in [e for e in self._ends.values() if e.engine == session]:
            self._forget(end)
            with contextlib.suppress(OSError):
                end.sock.shutdown(socket.SHUT_WR)
            end.left_at = time.monotonic()
            self._leaving.add(end)

    def tick(self, now: float) -> None:
        for end in [e for e in self._ends.values() if not e.works]:
            self._forget(end)  # the engine still reads what came before the end
            end.sock.close()
        for end in list(self._leaving):
            assert end.left_at is not None
            if now - end.left_at > LINGER_SECONDS or not end.unsent:
                self._leaving.discard(end)
                end.sock.close()

    async def close(self) -> None:
        tasks = [d.task for d in self._dialled.values() if d.task is not None]
        for key in list(self._dialled):
            self._drop_dialled(key)
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for end in (*self._ends.values(), *self._leaving):
            end.sock.close()
        self._ends.clear()
        self._named.clear()
        self._leaving.clear()


async def _introduce(sock: socket.socket, secrets: Secrets, line: wire.LineTo) -> None:
    """Until the other side has entered the line. Raises OSError, TimeoutError or ProtocolError."""
    async with asyncio.timeout(secure.HANDSHAKE_SECONDS):
        await _say(sock, secrets, wire.encode(line))
        await _hear(sock, secrets)


async def _say(sock: socket.socket, secrets: Secrets, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, seal(secrets.send, INTRODUCTION, data))


async def _hear(sock: socket.socket, secrets: Secrets) -> bytes:
    """One frame, and no byte behind it."""
    prefix = await secure.exactly(sock, PREFIX.size)
    (length,) = PREFIX.unpack(prefix)
    if not TAG_BYTES <= length <= _INTRODUCTION_BYTES:
        raise ProtocolError(f"an introduction of {length} bytes")
    try:
        return open_frame(secrets.receive, INTRODUCTION, prefix, await secure.exactly(sock, length))
    except InvalidTag:
        raise ProtocolError("an introduction that was not sealed with this connection's keys") from None
