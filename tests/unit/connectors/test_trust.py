"""Who is served: keys, revisions, contracts, hostile peers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest

from omni_runtime.connectors import ipc, wire
from omni_runtime.connectors.client import SidecarEdgeClient
from omni_runtime.connectors.handshake import LINK, REFUSAL, Dialler, Listener, Secrets, nonce
from omni_runtime.connectors.ipc import SOCKET_NAME
from omni_runtime.connectors.secure import dial
from omni_runtime.connectors.tensors import ChunkHeader
from omni_runtime.connectors.wire import Put, Slab
from omni_runtime.deploy.plan import CONTRACT_VERSION
from omni_runtime.errors import ContractMismatch, DeadlineExceeded
from omni_runtime.protocol.channels import generate_keys
from omni_runtime.protocol.control import Producer
from tests.unit.connectors.kit import EDGE, Host, Site, a_chunk, a_failure, a_plan, producer, rows, some_bytes, until

OTHER = 9  # contract of another release's image


async def test_an_engine_of_another_revision_is_refused_with_the_reason(site: Site) -> None:
    async with site.sidecar() as host:
        client = SidecarEdgeClient(host.options.ipc_dir, a_plan(revision="r2"), "talker", "t")
        with pytest.raises(ContractMismatch, match="revision 'r2'"):
            await client.connect(5)
        await client.close()


async def test_an_engine_of_another_image_is_refused_with_the_reason(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though both read the same plan: the contract is the image's."""
    monkeypatch.setattr("omni_runtime.connectors.client.CONTRACT_VERSION", OTHER)
    async with site.sidecar() as host:
        client = SidecarEdgeClient(host.options.ipc_dir, site.plan, "talker", "t")
        with pytest.raises(ContractMismatch, match=f"contract version {OTHER}.*images of one release"):
            await client.connect(5)
        await client.close()


async def test_revisions_do_not_mix_between_pods(site: Site) -> None:
    async with site.sidecar("old") as old, site.sidecar("new", plan=a_plan(revision="r2")) as new:
        async with old.engine("thinker-0") as up, new.engine("talker-0") as down:
            await down.open("r", producer(up))
            failed = await a_failure(down)
            assert failed.code == "ContractMismatch"
            assert "revision 'r2'" in failed.message


async def test_images_of_two_releases_do_not_mix_between_pods(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site.sidecar("old") as old, site.sidecar("new") as new, old.engine("thinker-0") as up:
        new.sidecar.hub.contract_version = OTHER
        monkeypatch.setattr("omni_runtime.connectors.client.CONTRACT_VERSION", OTHER)
        async with new.engine("talker-0") as down:
            await down.open("r", producer(up))
            failed = await a_failure(down)
            assert failed.code == "ContractMismatch"
            assert f"contract version {OTHER}" in failed.message


async def test_no_sidecar_is_a_deadline_with_a_reason(site: Site) -> None:
    client = SidecarEdgeClient(site.root / "nowhere", site.plan, "talker", "t")
    with pytest.raises(DeadlineExceeded, match=r"nowhere/sidecar.sock within 0.3 s: .*No such file"):
        await client.connect(0.3)
    await client.close()


async def test_the_engine_may_start_before_the_sidecar(site: Site) -> None:
    """T73: start order never matters."""
    client = SidecarEdgeClient(site.root / "pod-a", site.plan, "talker", "t")
    waiting = asyncio.create_task(client.connect(10))
    await asyncio.sleep(0.1)
    async with site.sidecar("pod-a"):
        await waiting
        assert (await client.health()).healthy
        await client.close()


async def test_a_peer_with_other_keys_gets_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_runtime.connectors.peer_link.CONNECT_SECONDS", 1.0)
    strangers = generate_keys(site.root / "strangers")
    async with site.sidecar("ours") as ours, site.sidecar("theirs", keys=strangers) as theirs:
        async with ours.engine("thinker-0") as up, theirs.engine("talker-0") as down:
            await up.put("r", EDGE, rows(some_bytes(100), finished=True))
            await down.open("r", producer(up))
            failed = await a_failure(down, 20)
            assert failed.code == "UpstreamLost"
            assert "CURVE keys" in failed.message
            assert not ours.sidecar.listener._peers
            assert len(ours.sidecar.hub.table) == 1, "still there for the right consumer"


async def hung_up(sock: socket.socket, deadline_s: float = 30) -> bytes:
    """What the other side said before it hung up."""
    loop = asyncio.get_running_loop()
    said = b""
    async with asyncio.timeout(deadline_s):
        while True:
            try:
                part = await loop.sock_recv(sock, 65536)
            except ConnectionError:
                break
            if not part:
                break
            said += part
    sock.close()
    return said


async def dialled(host: Host) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", host.sidecar.data_port))
    return sock


@pytest.mark.parametrize(
    "hello",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 80, id="another protocol"),
        pytest.param(LINK + b"e" * 32 + b"s" * 32, id="another key"),
        pytest.param(LINK + b"\0" * 64, id="a point of small order"),
        pytest.param(b"\xff" * 1_000_000, id="very many bytes"),
    ],
)
async def test_a_stranger_is_refused_after_eighty_bytes(site: Site, hello: bytes) -> None:
    async with site.sidecar() as host:
        sock = await dialled(host)
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(sock, hello)
        assert await hung_up(sock) in (REFUSAL, b"")
        assert not host.sidecar.listener._peers


async def test_the_public_key_alone_opens_nothing(site: Site) -> None:
    """Whoever has seen the client's public key cannot confirm the handshake without the secret one."""
    async with site.sidecar() as host:
        sock = await dialled(host)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, Dialler(site.keys).hello)
        assert len(await loop.sock_recv(sock, 1000)) == 48
        await loop.sock_sendall(sock, b"\0" * 16)
        await hung_up(sock)
        assert not host.sidecar.listener._peers


async def test_a_stranger_that_answers_is_not_believed(site: Site) -> None:
    """A process that took the producer's address, but has not its keys, gets no Open."""
    heard: list[bytes] = []

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(Listener(others).answer(await reader.readexactly(80)))
        heard.append(await reader.read())
        writer.close()

    others = replace(generate_keys(site.root / "others"), client_public=site.keys.client_public)
    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with site.sidecar() as host, host.engine("talker-0") as down:
        await down.open("r", Producer(EDGE, "thinker", "thinker-0", f"tcp://127.0.0.1:{port}", "elsewhere"))
        failed = await a_failure(down)
        assert failed.code == "UpstreamLost"
        assert "CURVE keys" in failed.message
    server.close()
    assert heard == [b""]


async def healthy(host: Host) -> None:
    """Other streams go on."""
    async with host.engine("thinker-9") as up, host.engine("talker-9") as down:
        await down.open("ok", producer(up, "thinker-9"))
        await up.put("ok", EDGE, rows(some_bytes(100_000), finished=True))
        await a_chunk(down)


CHUNK = ChunkHeader(0, 1, True, 64, 0.0)


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"\xff" * 64, id="oversize frame"),
        pytest.param(ipc.FRAME_PREFIX.pack(4, 0) + b"\xc1\xc1\xc1\xc1", id="no msgpack"),
        pytest.param(b"".join(ipc.frame(wire.Ping(), b"x")), id="body where none belongs"),
        pytest.param(b"".join(ipc.frame(Put(1, 0, 0, True, 64, None, CHUNK), b"short")), id="body too short"),
        pytest.param(ipc.frame(Put(1, 0, 0, True, 64, Slab(64, 64, 1), CHUNK))[0], id="slab of nobody"),
        pytest.param(ipc.frame(Put(1, 0, 0, True, 64, Slab(1 << 60, 64, 1), CHUNK))[0], id="slab outside the arena"),
        pytest.param(ipc.frame(wire.Return(4096))[0], id="extent of somebody else"),
        pytest.param(ipc.frame(wire.Attach("s", "r", "r1", CONTRACT_VERSION))[0], id="attached twice"),
        pytest.param(ipc.frame(wire.Attached(1, 1, "", ""))[0], id="a message of the other direction"),
    ],
)
async def test_an_engine_that_breaks_the_rules_loses_its_connection_only(site: Site, frame: bytes) -> None:
    async with site.sidecar() as host:
        reader, writer = await asyncio.open_unix_connection(str(host.options.ipc_dir / SOCKET_NAME))
        writer.write(ipc.frame(wire.Attach("talker", "bad", "r1", CONTRACT_VERSION))[0])
        await asyncio.wait_for(reader.read(1), 30)
        writer.write(frame)
        await asyncio.wait_for(reader.read(), 30)  # until the sidecar hangs up
        writer.close()
        await until(lambda: not host.sidecar.hub.engines)
        await healthy(host)


def sealed(secrets: Secrets, header: bytes, counter: int = 1) -> bytes:
    prefix = struct.pack("<II", len(header) + 16, 0)
    return prefix + secrets.send.encrypt(nonce(counter), header, prefix)


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(lambda s: sealed(s, b"\xc1"), id="no msgpack"),
        pytest.param(lambda s: sealed(s, b"x" * 60_000), id="a large header of nothing"),
        pytest.param(lambda s: struct.pack("<II", 1 << 31, 0), id="oversize header"),
        pytest.param(lambda s: struct.pack("<II", 20, 1 << 31), id="oversize body"),
        pytest.param(lambda s: struct.pack("<II", 3, 0), id="header shorter than its tag"),
        pytest.param(lambda s: struct.pack("<II", 40, 7), id="body shorter than its tag"),
        pytest.param(lambda s: sealed(s, wire.encode(wire.Pong())), id="a message of the other direction"),
        pytest.param(lambda s: sealed(s, wire.encode(wire.Ping()), 7), id="out of turn"),
        pytest.param(lambda s: sealed(s, wire.encode(wire.Ping())) * 2, id="the same frame twice"),
        pytest.param(lambda s: sealed(s, wire.encode(wire.Ping()))[:-1] + b"\0", id="a flipped byte"),
    ],
)
async def test_a_peer_that_breaks_the_rules_is_cut_off(site: Site, attack: Callable[[Secrets], bytes]) -> None:
    async with site.sidecar() as host:
        sock, secrets = await dial("127.0.0.1", host.sidecar.data_port, site.keys)
        await asyncio.get_running_loop().sock_sendall(sock, attack(secrets))
        await hung_up(sock)
        await until(lambda: not host.sidecar.listener._peers)
        await healthy(host)


async def test_slow_strangers_cost_a_socket_for_a_few_seconds(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow loris: a byte now and then keeps nothing open; whoever has the keys gets in meanwhile."""
    monkeypatch.setattr("omni_runtime.connectors.secure.HANDSHAKE_SECONDS", 0.3)
    monkeypatch.setattr("omni_runtime.connectors.outbound.MAX_HANDSHAKES", 20)
    async with site.sidecar() as host:
        slow = [await dialled(host) for _ in range(60)]
        loop = asyncio.get_running_loop()
        for sock in slow:
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(sock, LINK[:1])
        assert len(host.sidecar.listener._tasks) <= 22
        for sock in slow:
            await hung_up(sock)
        sock, _ = await dial("127.0.0.1", host.sidecar.data_port, site.keys)
        await until(lambda: len(host.sidecar.listener._peers) == 1)
        sock.close()
        await until(lambda: not host.sidecar.listener._peers)
        await healthy(host)


async def test_connections_that_say_nothing_are_dropped(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_runtime.connectors.ipc.HANDSHAKE_SECONDS", 0.2)
    async with site.sidecar() as host:
        silent = [socket.socket(socket.AF_UNIX) for _ in range(50)]
        for sock in silent:
            sock.connect(str(host.options.ipc_dir / SOCKET_NAME))
        await healthy(host)
        loop = asyncio.get_running_loop()
        for sock in silent:
            sock.setblocking(False)
            assert await asyncio.wait_for(loop.sock_recv(sock, 1), 30) == b""
            sock.close()


async def test_ids_never_become_paths(site: Site) -> None:
    """R58, R62: a request id may be anything; it is only ever compared."""
    before = sorted(p.name for p in site.root.rglob("*"))
    async with site.sidecar() as host, host.engine("thinker-0") as up, host.engine("talker-0") as down:
        for request in ("../../etc/passwd", "a/b", ".", "\x00", "ünï"):
            await down.open(request, producer(up))
            await up.put(request, EDGE, rows(some_bytes(100_000), finished=True))
            assert (await a_chunk(down)).request == request
        assert sorted(p.name for p in site.root.rglob("*")) == sorted([*before, "pod-a", SOCKET_NAME])


async def test_two_sidecars_cannot_serve_one_folder(site: Site) -> None:
    async with site.sidecar("pod-a"):
        with pytest.raises(OSError, match="another sidecar already serves"):
            async with site.sidecar("pod-a"):
                pass
