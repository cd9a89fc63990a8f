"""Two replicas behind a Service, and a storm of creates: one is stopped, the authority rotates, and no call is lost (T53)."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from omni_webhooks.certs.rotation import ROTATE_ANNOTATION
from omni_webhooks.certs.state import Certificates, decode
from tests.apiserver.kube import Kube, Refused
from tests.apiserver.webhooks.harness import Installed, Proxy, WebhookProcess, wait_ready, webhook_process
from tests.apiserver.webhooks.test_process import ROTATION, pipeline, wrong

pytestmark = pytest.mark.timeout(900)
THREADS = 4
CALL_SECONDS = 30  # a loaded machine is no reason to fail here
RETIRE = ("--retire-seconds", "8")  # a replica that stands still on a loaded machine has not taken up the new one yet
CREATED, REFUSED = "created", "refused by a rule"


@pytest.mark.parametrize(
    "creates", [pytest.param(100, id="100"), pytest.param(1000, id="1000", marks=pytest.mark.long)]
)
def test_no_call_fails_for_a_reason_other_than_a_rule(
    kube: Kube, kubeconfig: Path, tmp_path: Path, namespace: str, creates: int
) -> None:
    """So many creates at least, and as long as the rotation takes."""
    installed = Installed(kube, timeout_seconds=CALL_SECONDS)
    options = (*installed.options(), *ROTATION, *RETIRE, "--drain-seconds", "4", "--ignore-nodes")
    with two_replicas(installed, kubeconfig, namespace, tmp_path, *options) as (replicas, proxy):
        before = tls(kube, installed)
        numbers, outcomes, over = itertools.count(), [], threading.Event()

        def client() -> None:
            own = Kube(kubeconfig)
            while not over.is_set() or len(outcomes) < creates:
                outcomes.append(_create(own, namespace, next(numbers)))

        def disturb() -> None:
            try:
                _wait(lambda: len(outcomes) > creates // 10)
                secret = kube.get(installed.secret_body())
                secret["metadata"]["annotations"] = {ROTATE_ANNOTATION: "now"}
                kube.replace(secret)
                _wait(lambda: len(tls(kube, installed).trusted) == 2)  # in the middle of the rotation
                _wait(lambda: len(outcomes) > creates // 3)
                replicas[0].terminate()
                assert replicas[0].process.wait(60) == 0
                _wait(lambda: not set(tls(kube, installed).trusted) & set(before.trusted))
            finally:
                over.set()

        storm(client, disturb)
        counted = Counter(outcomes)
        assert set(counted) == {CREATED, REFUSED}, (counted, proxy.notes, [_tail(each.log) for each in replicas])
        assert len(outcomes) >= creates
        assert counted[REFUSED] == sum(number % 5 == 0 for number in range(len(outcomes)))
        loaded = [e for e in replicas[1].events() if e["event"] == "certificate.loaded"]
        assert len(loaded) == 2, "the storm saw the old and the new certificate"


@pytest.mark.parametrize(
    "creates", [pytest.param(100, id="100"), pytest.param(1000, id="1000", marks=pytest.mark.long)]
)
def test_a_killed_replica_costs_the_calls_that_it_had(
    kube: Kube, kubeconfig: Path, tmp_path: Path, namespace: str, creates: int
) -> None:
    """SIGKILL says nothing to anybody, and the API server asks nobody twice: lost are the calls that the replica was
    answering, and those that are still led to it. From the moment at which it is no endpoint any more, none (T53)."""
    installed = Installed(kube, timeout_seconds=CALL_SECONDS)
    options = (*installed.options(), *ROTATION, "--ignore-nodes")
    with two_replicas(installed, kubeconfig, namespace, tmp_path, *options) as (replicas, proxy):
        numbers, over = itertools.count(), threading.Event()
        outcomes: list[tuple[float, float, str]] = []  # when it began and ended, what became of it
        killed: list[float] = []  # when, and when no connection was led there any more

        def client() -> None:
            own = Kube(kubeconfig)
            while not over.is_set() or len(outcomes) < creates:
                began, number = time.monotonic(), next(numbers)
                outcome = _create(own, namespace, number)
                outcomes.append((began, time.monotonic(), outcome))

        def disturb() -> None:
            try:
                _wait(lambda: len(outcomes) > creates // 3)
                killed.append(time.monotonic())
                replicas[0].kill()
                _wait(lambda: not proxy.leads_to(replicas[0]))
                killed.append(time.monotonic())
                _wait(lambda: sum(began > killed[1] for began, *_ in outcomes) > creates // 3)
            finally:
                over.set()

        storm(client, disturb)
        lost = [each for each in outcomes if each[2] not in (CREATED, REFUSED)]
        print(
            f"{len(outcomes)} creates, {len(lost)} lost; {proxy.turned_away} turned away in {killed[1] - killed[0]:.2f} s"
        )
        assert all("failed calling webhook" in outcome for *_, outcome in lost), (lost, proxy.notes)
        assert len(lost) <= THREADS + proxy.turned_away, "what it was answering, and what was led to it afterwards"
        assert [ended for _, ended, _ in lost if ended < killed[0]] == [], ("none before", lost, proxy.notes)
        assert [began for began, _, _ in lost if began > killed[1]] == [], "the next calls are answered"


@contextmanager
def two_replicas(
    installed: Installed, kubeconfig: Path, namespace: str, folder: Path, *options: str
) -> Iterator[tuple[list[WebhookProcess], Proxy]]:
    """Ready, endpoints, and asked by the API server: each of the three hears of the one before a moment later."""
    with ExitStack() as stack:
        replicas = [stack.enter_context(webhook_process(kubeconfig, folder / f"{i}.log", *options)) for i in range(2)]
        proxy = stack.enter_context(Proxy(list(replicas)))
        stack.callback(installed.remove)
        installed.apply(proxy.port)
        for replica in replicas:
            wait_ready(replica)
        _wait(lambda: all(proxy.leads_to(replica) for replica in replicas))
        tries = itertools.count(-5, -5)  # no name of the storm
        _wait(lambda: _create(installed.kube, namespace, next(tries)) == REFUSED)
        yield replicas, proxy


def storm(client: Callable[[], None], disturb: Callable[[], None]) -> None:
    """Clients at once, and what happens meanwhile; all are through, or the first error is raised."""
    with ThreadPoolExecutor(THREADS + 1) as pool:
        disturbing = pool.submit(disturb)
        for each in [pool.submit(client) for _ in range(THREADS)]:
            each.result()
        disturbing.result()


def _create(kube: Kube, namespace: str, number: int) -> str:
    """What became of one create; every fifth is one that a rule refuses."""
    body = wrong(namespace, f"p{number}") if number % 5 == 0 else pipeline(namespace, f"p{number}")
    try:
        kube.create(body)
        return CREATED
    except Refused as error:
        return REFUSED if error.status == 422 and "[InvalidSpec]" in str(error.causes) else str(error)


def _tail(log: Path) -> str:
    return log.read_text()[-4000:]


def tls(kube: Kube, installed: Installed) -> Certificates:
    found = decode(kube.get(installed.secret_body())["data"])
    assert found is not None
    return found


def _wait(check: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)
