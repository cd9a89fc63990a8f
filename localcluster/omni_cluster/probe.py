"""Asks a component whether it is well, and waits for that with a deadline."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_cluster.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class HttpProbe:
    """A GET that must answer 200. With `ca` it speaks TLS; `cert` and `key` identify the caller."""

    host: str
    port: int
    path: str
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def fetch(self, timeout: float = 2.0) -> tuple[int, bytes]:
        """Status and body. Raises OSError when nobody answers."""
        connection: http.client.HTTPConnection
        if self.tls:
            context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
            if self.ca is None:
                # A self-signed health port on loopback: what is asked is public and what is learnt is "200".
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            if self.cert and self.key:
                context.load_cert_chain(self.cert, self.key)
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=timeout, context=context)
        else:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            connection.request("GET", self.path)
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def json(self, timeout: float = 5.0) -> Any:
        """Body of a 200 answer as JSON. Raises OSError otherwise."""
        status, body = self.fetch(timeout)
        if status != 200:
            raise OSError(f"HTTP {status}: {body[:200].decode(errors='replace')}")
        return json.loads(body)

    def problem(self) -> str | None:
        """None when well, else what is wrong in one line."""
        try:
            status, body = self.fetch()
        except OSError as error:
            return str(error)
        return None if status == 200 else f"HTTP {status} {body[-160:].decode(errors='replace').strip()}"


def wait_until(
    what: str,
    problem: Callable[[], str | None],
    *,
    seconds: float,
    log: Path | None = None,
    show: Callable[[str], None] | None = None,
) -> None:
    """Poll until `problem()` is None. Raises DeadlineExceeded with the last problem; its own errors pass through."""
    deadline = time.monotonic() + seconds
    pause = 0.03
    while True:
        found = problem()
        if found is None:
            return
        if time.monotonic() > deadline:
            raise DeadlineExceeded(what, seconds, found, log)
        if show:
            show(found)
        time.sleep(pause)
        pause = min(pause * 1.3, 0.5)


def free_ports(count: int) -> tuple[int, ...]:
    """TCP ports of 127.0.0.1 that nobody uses now; all are held at once, so they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return tuple(int(item.getsockname()[1]) for item in sockets)
    finally:
        for item in sockets:
            item.close()


def port_is_free(port: int) -> bool:
    """Whether a server could bind this port of 127.0.0.1 now."""
    with socket.socket() as item:
        item.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            item.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
