"""Who may register, and who is refused with which reason."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
import zmq

from omni_runtime.deploy.plan import CONTRACT_VERSION
from omni_runtime.orchestrator.registration import refusal_of
from omni_runtime.protocol import control
from omni_runtime.protocol.channels import Channels, CurveKeys, KeysMissing, generate_keys, load_keys
from tests.unit.orchestrator.conftest import Rig, eventually
from tests.unit.orchestrator.plans import a_plan


def a_hello(**changes: object) -> control.Hello:
    fields: dict[str, object] = {
        "stage": "talker",
        "replica": "uid",
        "revision": a_plan().revision,
        "contract_version": CONTRACT_VERSION,
        "data_endpoint": "tcp://10.0.0.1:5600",
        "shared_memory_domain": "d",
        "capacity": 4,
        **changes,
    }
    return control.Hello(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"revision": "0000000000"}, "revision 0000000000 of the replica is not", id="old revision"),
        pytest.param({"contract_version": 99}, "use images of one release", id="other wire contract"),
        pytest.param({"stage": "vae"}, "its stages are thinker, talker, code2wav", id="unknown stage"),
        pytest.param({"replica": ""}, "identity of its own", id="no identity (R37)"),
        pytest.param({"capacity": 0}, "capacity 0", id="no capacity"),
        pytest.param({"data_endpoint": "nowhere"}, "data endpoint", id="no endpoint"),
    ],
)
def test_refusals(changes: dict[str, object], reason: str) -> None:
    refusal = refusal_of(a_hello(**changes), a_plan())
    assert refusal is not None
    assert reason in refusal


def test_a_right_hello_is_welcome() -> None:
    assert refusal_of(a_hello(), a_plan()) is None


async def test_wrong_revision_is_refused_on_the_wire(rig: Rig) -> None:
    fake = await rig.replica("thinker", revision="ffffffffff")
    assert "revision ffffffffff" in await asyncio.wait_for(fake.refused.get(), 5)
    assert rig.orchestrator.status().missing == ("thinker", "talker", "code2wav")


async def test_a_client_with_other_keys_is_not_heard(rig: Rig, tmp_path: Path) -> None:
    """A holder of the server's public key, but not of the pipeline's client key, ends in the handshake."""
    ours, theirs = load_keys(rig.keys), generate_keys(tmp_path / "theirs")
    mixed = CurveKeys(ours.server_secret, ours.server_public, theirs.client_secret, theirs.client_public)
    async with Channels(mixed) as channels:
        socket = channels.dial(zmq.DEALER, f"tcp://127.0.0.1:{rig.orchestrator.port}")
        await socket.send(control.encode(a_hello(stage="thinker", revision=rig.plan.revision)))
        assert not await socket.poll(400)
    assert rig.orchestrator.status().stages[0].replicas == ()


async def test_a_plain_client_is_not_heard(rig: Rig) -> None:
    socket = rig.channels.plain(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{rig.orchestrator.port}")
    with contextlib.suppress(zmq.Again):  # the door may be shut already
        await socket.send(control.encode(a_hello(stage="thinker", revision=rig.plan.revision)), zmq.DONTWAIT)
    assert not await socket.poll(400)
    assert rig.orchestrator.status().stages[0].replicas == ()


async def test_garbage_is_answered_and_survived(rig: Rig) -> None:
    socket = rig.channels.dial(zmq.DEALER, f"tcp://127.0.0.1:{rig.orchestrator.port}")
    for raw in (b"", b"\xc1", b"\x81\xa1t\xa5hello", b"\x00" * 1000):
        await socket.send(raw)
        answer = control.decode_orchestrator_message(await asyncio.wait_for(socket.recv(), 5))
        assert isinstance(answer, control.Refused)
    await rig.replica("thinker")
    await eventually(lambda: rig.orchestrator.status().stages[0].live_replicas == 1)


def test_missing_keys_name_the_file(tmp_path: Path) -> None:
    generate_keys(tmp_path)
    (tmp_path / "client.pub").unlink()
    with pytest.raises(KeysMissing, match=r"client\.pub"):
        load_keys(tmp_path)
    (tmp_path / "client.pub").write_text("short")
    with pytest.raises(KeysMissing, match="40 characters"):
        load_keys(tmp_path)


def test_keys_are_private(tmp_path: Path) -> None:
    generate_keys(tmp_path / "curve")
    assert (tmp_path / "curve").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "curve" / "server.key").stat().st_mode & 0o777 == 0o600
    assert "server_secret" not in repr(load_keys(tmp_path / "curve"))
