"""Two replicas behind a Service, and a storm of creates: one is stopped, the authority rotates, and no call is lost (T53)."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from omni_webhooks.certs.rotation import ROTATE_ANNOTATION
from omni_webhooks.certs.state import decode
from tests.apiserver.kube import Kube, Refused
from tests.apiserver.webhooks.harness import Installed, Proxy, wait_ready, webhook_process
from tests.apiserver.webhooks.test_process import FAST, pipeline, wrong

pytestmark = pytest.mark.timeout(600)
CREATES, THREADS = 300, 4


@pytest.mark.parametrize(
    "creates", [pytest.param(CREATES, id="300"), pytest.param(1000, id="1000", marks=pytest.mark.long)]
)
def test_no_call_fails_for_a_reason_other_than_a_rule(
    kube: Kube, kubeconfig: Path, tmp_path: Path, namespace: str, creates: int
) -> None:
    installed = Installed(kube)
    options = (*installed.options(), *FAST, "--ignore-nodes")
    with ExitStack() as stack:
        replicas = [stack.enter_context(webhook_process(kubeconfig, tmp_path / f"{i}.log", *options)) for i in range(2)]
        proxy = stack.enter_context(Proxy(list(replicas)))
        stack.callback(installed.remove)
        installed.apply(proxy.port)
        for replica in replicas:
            wait_ready(replica)
        before = decode(kube.get(installed.secret_body())["data"])
        assert before is not None
        clients = threading.local()
        done: list[int] = []

        def create(number: int) -> str:
            """What became of one create; every fifth is one that a rule refuses."""
            if not hasattr(clients, "kube"):
                clients.kube = Kube(kubeconfig)
            body = wrong(namespace, f"p{number}") if number % 5 == 0 else pipeline(namespace, f"p{number}")
            try:
                clients.kube.create(body)
                return "created"
            except Refused as error:
                return (
                    "refused by a rule" if error.status == 422 and "[InvalidSpec]" in str(error.causes) else str(error)
                )
            finally:
                done.append(number)

        def disturb() -> None:
            _wait(lambda: len(done) > creates // 10)
            secret = kube.get(installed.secret_body())
            secret["metadata"]["annotations"] = {ROTATE_ANNOTATION: "now"}
            kube.replace(secret)
            _wait(lambda: len(done) > creates // 3)
            replicas[0].terminate()
            assert replicas[0].process.wait(60) == 0

        disturbing = threading.Thread(target=disturb)
        disturbing.start()
        with ThreadPoolExecutor(THREADS) as pool:
            outcomes = list(pool.map(create, range(creates)))
        disturbing.join(90)
        assert {o: outcomes.count(o) for o in outcomes} == {
            "created": creates - creates // 5,
            "refused by a rule": creates // 5,
        }
        _wait(lambda: decode(kube.get(installed.secret_body())["data"]).trusted != before.trusted)  # type: ignore[union-attr]
        assert replicas[0].process.returncode == 0
        both = [sum(e["event"] == "certificate.loaded" for e in r.events()) for r in replicas]
        assert both[1] >= 2, "the storm saw the old and the new certificate"


def _wait(check: object, seconds: float = 120) -> None:
    assert callable(check)
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)
