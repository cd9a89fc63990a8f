"""The corpus through the installed webhooks, as server-side dry runs: nothing of it is ever stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from omni_webhooks.rules.rule import Operation
from tests.apiserver.kube import Kube, Object, Refused
from tests.apiserver.webhooks.conftest import add_node
from tests.apiserver.webhooks.corpus import Case, World, cases
from tests.apiserver.webhooks.harness import WebhookProcess, create_as_operator
from tests.apiserver.webhooks.test_process import removed, until
from tests.unit.placement.dra_objects import a_class, a_device, a_slice

pytestmark = pytest.mark.timeout(400)  # the first test waits for the world and the webhooks
CREATED = [c for c in cases() if c.operation is Operation.CREATE]
# Those whose object is not part of the world already.
UPDATED = [c for c in cases() if c.operation is Operation.UPDATE and c.name not in ("cuda", "team-a")]
(TAKEN,) = [c for c in cases() if c.name == "the-h200-is-taken"]


@pytest.mark.parametrize("case", CREATED, ids=lambda c: c.id)
def test_create(case: Case, kube: Kube, webhooks: WebhookProcess, warned: Callable[[], list[str]]) -> None:
    check(case, lambda: kube.create(case.body(), dry_run=True), warned)


@pytest.mark.parametrize("case", UPDATED, ids=lambda c: c.id)
def test_update(case: Case, kube: Kube, webhooks: WebhookProcess, warned: Callable[[], list[str]]) -> None:
    """What is stored broke the rules before there were any: the operator writes it, who is never asked."""
    assert case.old is not None
    stored = create_as_operator(kube, case.body(case.old))
    try:
        body = {**stored, "spec": case.spec}
        check(case, lambda: kube.replace(body, dry_run=True), warned)
    finally:
        kube.delete(stored)


def test_a_change_of_a_profile_in_use(
    kube: Kube, webhooks: WebhookProcess, world: World, warned: Callable[[], list[str]]
) -> None:
    (case,) = [c for c in cases() if c.name == "cuda" and c.operation is Operation.UPDATE]
    stored = kube.get(case.body())
    check(case, lambda: kube.replace({**stored, "spec": case.spec}, dry_run=True), warned)


def test_the_deletion_of_a_profile_in_use(
    kube: Kube, webhooks: WebhookProcess, world: World, warned: Callable[[], list[str]]
) -> None:
    (case,) = [c for c in cases() if c.name == "cuda" and c.operation is Operation.DELETE]
    path = kube.path(case.body(), name="cuda")
    check(case, lambda: kube.request("DELETE", path, dryRun="All"), warned)


def test_a_budget_below_what_is_used(
    kube: Kube, webhooks: WebhookProcess, world: World, warned: Callable[[], list[str]]
) -> None:
    (case,) = [c for c in cases() if c.name == "team-a" and c.operation is Operation.UPDATE]
    stored = kube.get(case.body())
    check(case, lambda: kube.replace({**stored, "spec": case.spec}, dry_run=True), warned)


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


def test_devices_that_a_dra_driver_offers_come_and_go(kube: Kube, node: str, made: Callable[[Object], Object]) -> None:
    devices: list[dict[str, Any]] = [a_device(f"gpu-{i}", memory="143771Mi") for i in range(4)]
    made(a_class(name="gpus-of-a-test"))
    assert not accepted(kube), "a class alone is no device"
    slice_ = made(a_slice(devices, node=node, name="gpus-of-a-test"))
    until(lambda: accepted(kube), "the devices are known")
    kube.delete(slice_)
    until(lambda: not accepted(kube), "they are gone")


def test_all_of_it_left_nothing_behind(kube: Kube, webhooks: WebhookProcess, world: World) -> None:
    """A dry run has no side effect: the world is what it was."""
    listed = kube.request("GET", "/apis/serving.omni.dev/v1alpha1/omnipipelines")["items"]
    assert {(p["metadata"]["namespace"], p["metadata"]["name"]) for p in listed} == {
        (p["metadata"]["namespace"], p["metadata"]["name"]) for p in world.pipelines()
    }
    assert webhooks.metric("omni_webhooks_rule_failures_total") == 0
    assert not [e for e in webhooks.events() if e["level"] == "error"]


def check(case: Case, write: Callable[[], Object], warned: Callable[[], list[str]]) -> None:
    if case.refused is None:
        write()
    else:
        with pytest.raises(Refused) as caught:
            write()
        assert caught.value.status == 422, caught.value
        causes = [c for c in caught.value.causes if c.field.startswith(case.field) and f"[{case.refused}]" in c.message]
        assert [c for c in causes if case.message in c.message], (caught.value, caught.value.causes)
        assert set(case.also) <= {c.field for c in caught.value.causes}
    texts = warned()
    for text in case.warns[1:]:
        assert [t for t in texts if text.split(": ", 1)[-1][:40] in unquoted(t)], (text, texts)


def unquoted(header: str) -> str:
    """A Warning header is 299 - "text", with its quotes escaped."""
    return header.replace('\\"', '"')
