"""Who is served: keys, revisions, contracts, hostile peers."""

from __future__ import annotations

import asyncio
import socket

import pytest
import zmq
import zmq.asyncio

from omni_runtime.connectors import wire
from omni_runtime.connectors.client import SidecarEdgeClient
from omni_runtime.connectors.ipc import SOCKET_NAME
from omni_runtime.connectors.wire import FRAME_PREFIX, ChunkHeader, Put, Slab
from omni_runtime.errors import ContractMismatch, DeadlineExceeded
from omni_runtime.protocol.channels import Channels, generate_keys
from tests.unit.connectors.kit import EDGE, Host, Site, a_chunk, a_failure, a_plan, producer, rows, some_bytes, until


@pytest.mark.parametrize(
    ("plan", "says"),
    [(a_plan(revision="r2"), "revision 'r2'"), (a_plan(contract_version=9), "contract version 9")],
    ids=["revision", "contract"],
)
async def test_an_engine_of_another_plan_is_refused_with_the_reason(site: Site, plan: object, says: str) -> None:
    async with site.sidecar() as host:
        client = SidecarEdgeClient(host.options.ipc_dir, plan, "talker", "t", None)  # type: ignore[arg-type]
        with pytest.raises(ContractMismatch, match=says):
            await client.connect(5)
        await client.close()


@pytest.mark.parametrize(
    ("plan", "says"),
    [(a_plan(revision="r2"), "revision 'r2'"), (a_plan(contract_version=9), "contract version 9")],
    ids=["revision", "contract"],
)
async def test_revisions_do_not_mix_between_pods(site: Site, plan: object, says: str) -> None:
    async with site.sidecar("old") as old, site.sidecar("new", plan=plan) as new:  # type: ignore[arg-type]
        async with old.engine("thinker-0") as up, new.engine("talker-0") as down:
            await down.open("r", producer(up))
            failed = await a_failure(down)
            assert failed.code == "ContractMismatch"
            assert says in failed.message


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
    monkeypatch.setattr("omni_runtime.connectors.links.CONNECT_SECONDS", 1.0)
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


async def test_a_client_without_any_key_gets_nothing(site: Site) -> None:
    async with site.sidecar() as host:
        context = zmq.asyncio.Context()
        peer = context.socket(zmq.DEALER)
        peer.linger = 0
        peer.connect(f"tcp://127.0.0.1:{host.sidecar.data_port}")
        await peer.send_multipart([wire.encode(wire.Ping())])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(peer.recv_multipart(), 0.5)
        assert not host.sidecar.listener._peers
        context.destroy(linger=0)


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
        pytest.param(FRAME_PREFIX.pack(4, 0) + b"\xc1\xc1\xc1\xc1", id="no msgpack"),
        pytest.param(b"".join(wire.frame(wire.Ping(), b"x")), id="body where none belongs"),
        pytest.param(b"".join(wire.frame(Put(1, 0, 0, True, 64, None, CHUNK), b"short")), id="body too short"),
        pytest.param(wire.frame(Put(1, 0, 0, True, 64, Slab(64, 64, 1), CHUNK))[0], id="slab of nobody"),
        pytest.param(wire.frame(Put(1, 0, 0, True, 64, Slab(1 << 60, 64, 1), CHUNK))[0], id="slab outside the arena"),
        pytest.param(wire.frame(wire.Return(4096))[0], id="extent of somebody else"),
        pytest.param(wire.frame(wire.Attach("s", "r", "r1", 1))[0], id="attached twice"),
        pytest.param(wire.frame(wire.Attached(1, 1, "", ""))[0], id="a message of the other direction"),
    ],
)
async def test_an_engine_that_breaks_the_rules_loses_its_connection_only(site: Site, frame: bytes) -> None:
    async with site.sidecar() as host:
        reader, writer = await asyncio.open_unix_connection(str(host.options.ipc_dir / SOCKET_NAME))
        writer.write(wire.frame(wire.Attach("talker", "bad", "r1", 1))[0])
        await asyncio.wait_for(reader.read(1), 30)
        writer.write(frame)
        await asyncio.wait_for(reader.read(), 30)  # until the sidecar hangs up
        writer.close()
        await until(lambda: not host.sidecar.hub.engines)
        await healthy(host)


async def test_a_peer_that_breaks_the_rules_loses_its_streams_only(site: Site) -> None:
    async with site.sidecar() as host, Channels(site.keys) as channels:
        peer = channels.dial(zmq.DEALER, f"tcp://127.0.0.1:{host.sidecar.data_port}")
        for frames in ([b"\xc1"], [b"x" * 100_000], [wire.encode(wire.Ping())] * 3, [wire.encode(wire.Pong())]):
            await peer.send_multipart(frames)
        await peer.send_multipart([wire.encode(wire.Ping())])
        header = (await asyncio.wait_for(peer.recv_multipart(), 30))[0]
        assert isinstance(wire.decode_from_producer(header), wire.Pong)
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
