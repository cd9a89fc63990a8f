"""A pipeline that waits for devices is accepted as soon as a DRA driver offers them on a real API server, and no longer when
they are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.apiserver.kube import Kube, Object, Refused
from tests.apiserver.webhooks.conftest import add_node
from tests.apiserver.webhooks.corpus import World, cases
from tests.apiserver.webhooks.harness import WebhookProcess
from tests.apiserver.webhooks.test_process import removed, until
from tests.unit.placement.dra_objects import a_class, a_device, a_slice

pytestmark = pytest.mark.timeout(400)
(TAKEN,) = [c for c in cases() if c.name == "the-h200-is-taken"]


@pytest.fixture
def node(kube: Kube, webhooks: WebhookProcess, world: World) -> Iterator[str]:
    """A second node of that kind, without a device plugin."""
    (body,) = [n for n in world.nodes() if n["metadata"]["name"] == "h200-0"]
    amounts = {name: amount for name, amount in body["status"]["allocatable"].items() if "gpu" not in name}
    body["metadata"]["name"] = "h200-dra"
    body["status"] |= {"allocatable": amounts, "capacity": amounts}
    add_node(kube, body)
    yield "h200-dra"
    kube.delete(body)


@pytest.fixture
def made(kube: Kube) -> Iterator[Callable[[Object], Object]]:
    left: list[Object] = []

    def make(body: Object) -> Object:
        left.append(kube.create(body))
        return left[-1]

    yield make
    for body in left:
        with removed(kube, body):
            pass


def accepted(kube: Kube) -> bool:
    try:
        kube.create(TAKEN.body(), dry_run=True)
    except Refused as error:
        if error.status == 422 and "[Infeasible]" in str(error.causes):
            return False
        raise
    return True


def test_devices_come_and_go(kube: Kube, node: str, made: Callable[[Object], Object]) -> None:
    devices: list[dict[str, Any]] = [a_device(f"gpu-{i}", memory="143771Mi") for i in range(4)]
    made(a_class(name="gpus-of-a-test"))
    assert not accepted(kube), "a class alone is no device"
    slice_ = made(a_slice(devices, node=node, name="gpus-of-a-test"))
    until(lambda: accepted(kube), "the devices are known")
    kube.delete(slice_)
    until(lambda: not accepted(kube), "they are gone")
