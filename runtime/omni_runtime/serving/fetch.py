"""Media behind http(s) URLs, for hosts that the operator allowed; none by default.

A server that follows a client's URL can be led into its own network (R59, R60). So: exact host names from a list, the
default ports, names resolved once and every address public, the connection made to that very address, no redirect to
another host, no proxy, a limit of bytes that holds while they arrive, and one deadline for everything.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urljoin, urlsplit

import httpx

from omni_runtime.errors import InvalidRequest, OmniError
from omni_runtime.serving.media import MEDIA_TYPES, check_size, invalid_part

DEADLINE_SECONDS = 15.0
MAX_REDIRECTS = 3
MAX_PARALLEL = 16  # of this process
PORTS = {"http": 80, "https": 443}

Resolve = Callable[[str, int], Awaitable[tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """One part that waits for its bytes. path: the field of the request; kind: image, audio or video."""

    url: str
    path: str
    kind: str


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that may be fetched: where to connect, and what to ask there."""

    scheme: str
    host: str
    port: int
    request_path: str

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}{self.request_path}"


class FetchFailed(OmniError):
    """The host was allowed, but did not give the media."""

    code = "MediaUnavailable"
    http_status = 400


async def resolve_host(host: str, port: int) -> tuple[str, ...]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return tuple(dict.fromkeys(str(item[4][0]) for item in found))


def is_public(address: str) -> bool:
    """False for whatever belongs to a machine, a cluster or a cloud's metadata service, in any spelling."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


_HOST = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


def check_domains(names: Iterable[str]) -> frozenset[str]:
    """Host names as the operator gives them, lower case. Raises ValueError for anything that is not one."""
    domains = set()
    for name in names:
        host = name.strip().rstrip(".").lower()
        if not _HOST.fullmatch(host):
            raise ValueError(
                f"{name!r} is not a host name; give a name such as media.example.com, without scheme or port"
            )
        domains.add(host)
    return frozenset(domains)


@functools.cache
def public_authorities() -> ssl.SSLContext:
    """Reads the bundle of certificates, for which the loop has no time: call it in a thread."""
    return httpx.create_ssl_context(trust_env=False)


@dataclass(slots=True, eq=False)
class MediaFetcher:
    """Fetches for all requests of the process. `resolve`, `public`, `ports` and `authorities` are given by tests alone."""

    allowed: frozenset[str] = frozenset()
    deadline_seconds: float = DEADLINE_SECONDS
    resolve: Resolve = resolve_host
    public: Callable[[str], bool] = is_public
    ports: dict[str, int] = field(default_factory=lambda: dict(PORTS))
    authorities: Callable[[], ssl.SSLContext] = public_authorities
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_PARALLEL))

    def check(self, part: MediaUrl) -> Target:
        """Raises InvalidRequest for a URL that this server does not follow; nothing has left the process then."""
        try:
            parts = urlsplit(part.url)
            port = parts.port
        except ValueError:
            raise invalid_part(part.path, part.url, "not a URL", f"send data:{part.kind}/...;base64,...") from None
        host = (parts.hostname or "").rstrip(".").lower()
        if parts.scheme not in PORTS:
            fix = f"send the {part.kind} itself: data:{part.kind}/...;base64,..."
            raise invalid_part(part.path, part.url, "only data:, http: and https: URLs are read", fix)
        if host not in self.allowed:
            fix = f"send the {part.kind} itself: data:{part.kind}/...;base64,..."
            known = f"only of {', '.join(sorted(self.allowed))}" if self.allowed else "no host is allowed here"
            raise invalid_part(part.path, part.url, f"URLs of this host are not fetched ({known})", fix)
        if parts.username is not None or parts.password is not None:
            raise invalid_part(part.path, part.url, "has a user name or a password", "leave them out")
        if port not in (None, self.ports[parts.scheme]):
            raise invalid_part(part.path, part.url, "names a port of its own", "use the default port")
        path = parts.path or "/"
        return Target(parts.scheme, host, self.ports[parts.scheme], f"{path}?{parts.query}" if parts.query else path)

    async def fetch_all(self, parts: Sequence[MediaUrl], max_bytes: int) -> list[tuple[str, bytes]]:
        """Media type and bytes of each part, within one deadline and `max_bytes` in all.

        Raises InvalidRequest or FetchFailed, which name the part; the other fetches end then.
        """
        budget = _Budget(max_bytes)
        fetches = [asyncio.ensure_future(self._fetch(part, budget)) for part in parts]
        try:
            return await asyncio.gather(*fetches)
        finally:
            for fetch in fetches:
                fetch.cancel()

    async def _fetch(self, part: MediaUrl, budget: _Budget) -> tuple[str, bytes]:
        target = self.check(part)
        try:
            async with asyncio.timeout(self.deadline_seconds), self._slots:
                return await self._follow(part, target, await self._address(part, target), budget)
        except TimeoutError:
            raise FetchFailed(f"{part.path}: {target.host} did not answer within {self.deadline_seconds:g} s") from None
        except httpx.HTTPError as error:
            raise FetchFailed(f"{part.path}: {target.host}: {error or type(error).__name__}") from error

    async def _address(self, part: MediaUrl, target: Target) -> str:
        """Resolved once; one address that is not public makes the whole name suspect."""
        try:
            addresses = await self.resolve(target.host, target.port)
        except OSError as error:
            raise FetchFailed(f"{part.path}: {target.host} cannot be resolved: {error.strerror or error}") from error
        if not addresses or not all(self.public(a) for a in addresses):
            fix = f"send the {part.kind} itself"
            raise invalid_part(part.path, part.url, "its host has an address that is not public", fix)
        return addresses[0]

    async def _follow(self, part: MediaUrl, target: Target, address: str, budget: _Budget) -> tuple[str, bytes]:
        async with httpx.AsyncClient(
            verify=await asyncio.to_thread(self.authorities),
            trust_env=False,
            follow_redirects=False,
            timeout=self.deadline_seconds,
            limits=_ONE_CONNECTION,
        ) as client:
            for _ in range(MAX_REDIRECTS + 1):
                answer = await self._get(client, part, target, address, budget)
                if isinstance(answer, tuple):
                    return answer
                following = self.check(MediaUrl(urljoin(target.url, answer), part.path, part.kind))
                if following.host != target.host:
                    raise invalid_part(part.path, part.url, f"leads to {following.host}", "send the final URL")
                if target.scheme == "https" and following.scheme == "http":
                    raise invalid_part(part.path, part.url, "leads from https to http", "send the final URL")
                target = following
        raise FetchFailed(f"{part.path}: {target.host} redirects more than {MAX_REDIRECTS} times")

    async def _get(
        self, client: httpx.AsyncClient, part: MediaUrl, target: Target, address: str, budget: _Budget
    ) -> tuple[str, bytes] | str:
        """The media, or where the host redirects to. The URL has the address, so that nothing is resolved again; Host
        and the certificate's name are the host's."""
        literal = f"[{address}]" if ":" in address else address
        async with client.stream(
            "GET",
            f"{target.scheme}://{literal}:{target.port}{target.request_path}",
            headers={"host": target.host, "accept-encoding": "identity", "accept": f"{part.kind}/*"},
            extensions={"sni_hostname": target.host},
        ) as response:
            if response.has_redirect_location:
                return str(response.headers["location"])
            if response.status_code != 200:
                raise FetchFailed(f"{part.path}: {target.host} answers HTTP {response.status_code}")
            media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
            if media_type not in MEDIA_TYPES[part.kind]:
                raise FetchFailed(
                    f"{part.path}: {target.host} sends {media_type or 'no content type'}, not one of "
                    f"{', '.join(MEDIA_TYPES[part.kind])}"
                )
            return media_type, await _read(response, part.path, budget)


_ONE_CONNECTION = httpx.Limits(max_connections=1, max_keepalive_connections=1)


@dataclass(slots=True)
class _Budget:
    """Bytes that all parts of one request may still bring."""

    left: int

    def take(self, size: int, path: str) -> None:
        self.left -= size
        if self.left < 0:
            raise InvalidRequest(f"{path}: the media of this request are too large together; send less of them")


async def _read(response: httpx.Response, path: str, budget: _Budget) -> bytes:
    """The raw bytes: a body that unpacks to more than it weighs stays packed. Raises InvalidRequest when too large."""
    declared = response.headers.get("content-length", "")
    if declared.isdigit():
        check_size(int(declared), path)
    pieces, size = [], 0
    async for piece in response.aiter_raw():
        size += len(piece)
        check_size(size, path)
        budget.take(len(piece), path)
        pieces.append(piece)
    return b"".join(pieces)
