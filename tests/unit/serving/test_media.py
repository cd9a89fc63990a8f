"""Media behind URLs: only of hosts that the operator named, only at public addresses, bounded (R59, R60)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from omni_runtime.errors import InvalidRequest
from omni_runtime.serving import media
from omni_runtime.serving.fetch import FetchFailed, MediaFetcher, MediaUrl, check_domains, is_public
from tests.unit.serving.conftest import Server, a_server, submit_of

PNG = b"\x89PNG and the rest"


class MediaHost:
    """A web server of the loopback that answers by path, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []  # path, Host
        self.resolved: list[str] = []
        self.never = asyncio.Event()
        self.port = 0

    tls: ssl.SSLContext | None = None

    async def __aenter__(self) -> MediaHost:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.never.set()
        self._server.close()
        await self._server.wait_closed()

    async def resolve(self, host: str, port: int) -> tuple[str, ...]:
        self.resolved.append(host)
        return ("127.0.0.1",)

    def fetcher(self, **options: Any) -> MediaFetcher:
        settings: dict[str, Any] = {
            "allowed": frozenset({"media.test"}),
            "resolve": self.resolve,
            "public": lambda address: True,
            "ports": {"http": self.port, "https": 443},
            "deadline_seconds": 5.0,
            "authorities": lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            **options,
        }
        return MediaFetcher(**settings)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                path = lines[0].split()[1]
                host = next(line[6:] for line in lines if line.lower().startswith("host:"))
                self.asked.append((path, host))
                await self._answer(path, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        def reply(status: str, body: bytes, **headers: str) -> None:
            fields = {"content-length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}}
            lines = "".join(f"{k}: {v}\r\n" for k, v in fields.items())
            writer.write(f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body)

        match path.partition("?")[0]:
            case "/ok.png":
                reply("200 OK", PNG, content_type="image/png; charset=binary")
            case "/moved":
                reply("302 Found", b"", location="/ok.png")
            case "/elsewhere":
                reply("302 Found", b"", location="http://169.254.169.254/latest/meta-data/")
            case "/other-allowed":
                reply("302 Found", b"", location="http://other.test/ok.png")
            case "/downgrade":
                reply("302 Found", b"", location="http://media.test/ok.png")
            case "/round":
                reply("302 Found", b"", location="/round")
            case "/page":
                reply("200 OK", b"<html>", content_type="text/html")
            case "/liar":
                reply("200 OK", b"", content_type="image/png", content_length=str(1 << 40))
            case "/silent":
                await self.never.wait()
            case "/endless":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ntransfer-encoding: chunked\r\n\r\n")
                while not writer.is_closing():
                    writer.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
                    await writer.drain()
            case _:
                reply("404 Not Found", b"")
        await writer.drain()


@pytest.fixture
async def host() -> AsyncIterator[MediaHost]:
    async with MediaHost() as host:
        yield host


@pytest.fixture
async def fetching(host: MediaHost, tmp_path: Path) -> AsyncIterator[Server]:
    async with AsyncExitStack() as stack:
        fetcher = host.fetcher(allowed=frozenset({"media.test", "other.test"}))
        yield await stack.enter_async_context(a_server(tmp_path / "curve", fetcher=fetcher))


def picture(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


async def ask(server: Server, url: str) -> httpx.Response:
    return await server.http.post("/v1/chat/completions", json=picture(url))


@pytest.mark.parametrize("path", ["/ok.png", "/ok.png?size=2", "/moved"])
async def test_media_of_an_allowed_host(fetching: Server, host: MediaHost, path: str) -> None:
    thinker = await fetching.replica("thinker")
    assert (await ask(fetching, f"http://MEDIA.test.{path}")).status_code == 200
    (part,) = (await submit_of(thinker)).inputs["messages"][0]["content"]
    assert part == {"type": "image", "data": PNG, "media_type": "image/png"}
    assert host.resolved == ["media.test"]  # once, also when it redirects
    assert {h for _, h in host.asked} == {"media.test"}
    assert host.asked[0][0] == path


@pytest.mark.parametrize(
    ("url", "words"),
    [
        pytest.param("http://evil.test/x.png", ["evil.test", "not fetched", "media.test"], id="a host not allowed"),
        pytest.param("http://media.test.evil.test/x.png", ["not fetched"], id="an allowed name in front"),
        pytest.param("http://sub.media.test/x.png", ["not fetched"], id="a name below an allowed one"),
        pytest.param("http://evil.test@media.test/x.png", ["user name"], id="a user name that looks like a host"),
        pytest.param("http://media.test@evil.test/x.png", ["not fetched"], id="an allowed name as user name"),
        pytest.param("http://127.0.0.1/x.png", ["not fetched"], id="loopback"),
        pytest.param("http://[::1]/x.png", ["not fetched"], id="loopback in six"),
        pytest.param("http://0x7f000001/x.png", ["not fetched"], id="loopback in hexadecimal"),
        pytest.param("http://169.254.169.254/latest", ["not fetched"], id="metadata service"),
        pytest.param("http://media.test:22/x.png", ["port"], id="another port"),
        pytest.param("http://media.test:99999/x.png", ["not a URL"], id="no port at all"),
        pytest.param("ftp://media.test/x.png", ["only data:, http: and https:"], id="another scheme"),
        pytest.param("file:///etc/passwd", ["only data:, http: and https:"], id="a file"),
        pytest.param("//media.test/x.png", ["only data:, http: and https:"], id="no scheme"),
    ],
)
async def test_urls_that_are_not_followed(fetching: Server, host: MediaHost, url: str, words: list[str]) -> None:
    """Nothing leaves the process: neither a name nor a connection."""
    response = await ask(fetching, url)
    assert response.status_code == 400
    assert "messages[0].content[0].image_url.url" in response.json()["error"]["message"]
    for word in words:
        assert word in response.json()["error"]["message"]
    assert (host.resolved, host.asked) == ([], [])


@pytest.mark.parametrize(
    ("path", "words"),
    [
        pytest.param("/elsewhere", ["not fetched"], id="a redirect into the network"),
        pytest.param("/other-allowed", ["leads to other.test"], id="a redirect to another host, allowed or not"),
        pytest.param("/round", ["redirects more than 3 times"], id="a redirect to itself"),
        pytest.param("/missing", ["HTTP 404"], id="nothing there"),
        pytest.param("/page", ["text/html", "image/png"], id="not an image"),
        pytest.param("/liar", ["too large"], id="a length that is too large"),
        pytest.param("/endless", ["too large"], id="more bytes than it may have"),
    ],
)
async def test_answers_that_are_not_taken(
    fetching: Server, path: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "MAX_MEDIA_BYTES", 1 << 20)
    response = await ask(fetching, f"http://media.test{path}")
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    for word in words:
        assert word in response.json()["error"]["message"]


async def test_a_host_that_never_answers(host: MediaHost) -> None:
    fetcher = host.fetcher(deadline_seconds=0.1)
    with pytest.raises(Exception, match=r"media\.test did not answer within 0\.1 s"):
        await fetcher.fetch_all([MediaUrl("http://media.test/silent", "messages[0]", "image")], 1 << 20)


async def test_the_parts_of_one_request_share_its_bytes(host: MediaHost) -> None:
    urls = [MediaUrl("http://media.test/ok.png", f"part {i}", "image") for i in range(3)]
    assert len(await host.fetcher().fetch_all(urls, 3 * len(PNG))) == 3
    with pytest.raises(InvalidRequest, match="too large together"):
        await host.fetcher().fetch_all(urls, 3 * len(PNG) - 1)


@pytest.mark.parametrize("addresses", [("10.0.0.1",), ("93.184.216.34", "127.0.0.1"), ()])
async def test_one_private_address_makes_a_name_suspect(host: MediaHost, addresses: tuple[str, ...]) -> None:
    """A name that resolves to several addresses may change which one comes first."""

    async def resolve(name: str, port: int) -> tuple[str, ...]:
        return addresses

    fetcher = host.fetcher(resolve=resolve, public=is_public)
    with pytest.raises(InvalidRequest, match="not public"):
        await fetcher.fetch_all([MediaUrl("http://media.test/ok.png", "messages[0]", "image")], 1 << 20)
    assert host.asked == []


async def test_an_unknown_name(host: MediaHost) -> None:
    async def resolve(name: str, port: int) -> tuple[str, ...]:
        raise OSError(-2, "Name or service not known")

    with pytest.raises(Exception, match="cannot be resolved: Name or service not known"):
        await host.fetcher(resolve=resolve).fetch_all([MediaUrl("http://media.test/x", "part", "image")], 1)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "192.0.2.1",
        "::1",
        "::",
        "fe80::1%eth0",
        "fd00::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "not an address",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:8.8.8.8"]
)
def test_addresses_that_are(address: str) -> None:
    assert is_public(address)


def test_domains_are_names() -> None:
    assert check_domains(["Media.Example.com", "cdn.example.com."]) == {"media.example.com", "cdn.example.com"}
    for wrong in ("", "https://x.com", "x.com:80", "*.x.com", "x.com/path", "a b.com", "user@x.com"):
        with pytest.raises(ValueError, match="is not a host name"):
            check_domains([wrong])


def a_certificate(folder: Path, name: str) -> ssl.SSLContext:
    """A server's context with a certificate of its own for `name`; the certificate lies in `folder`/NAME.pem."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public, private = folder / f"{name}.pem", folder / f"{name}.key"
    public.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, private)
    return context


@pytest.mark.parametrize(("name", "trusted"), [("media.test", True), ("evil.test", False)])
async def test_the_certificate_is_the_hosts(tmp_path: Path, name: str, trusted: bool) -> None:
    """The connection goes to an address, but who answers there must prove to be the host."""
    host = MediaHost()
    host.tls = a_certificate(tmp_path, name)
    async with host:
        fetcher = host.fetcher(
            ports={"http": 80, "https": host.port},
            authorities=lambda: ssl.create_default_context(cafile=str(tmp_path / f"{name}.pem")),
        )
        part = MediaUrl("https://media.test/ok.png", "messages[0]", "image")
        if trusted:
            assert await fetcher.fetch_all([part], 1 << 20) == [("image/png", PNG)]
        else:
            with pytest.raises(FetchFailed, match=r"media\.test: .*certificate"):
                await fetcher.fetch_all([part], 1 << 20)
            assert host.asked == []


async def test_https_does_not_become_http(tmp_path: Path) -> None:
    host = MediaHost()
    host.tls = a_certificate(tmp_path, "media.test")
    async with host:
        fetcher = host.fetcher(
            ports={"http": 80, "https": host.port},
            authorities=lambda: ssl.create_default_context(cafile=str(tmp_path / "media.test.pem")),
        )
        with pytest.raises(InvalidRequest, match="from https to http"):
            await fetcher.fetch_all([MediaUrl("https://media.test/downgrade", "messages[0]", "image")], 1 << 20)
