"""A real API server with our CRDs for every test below this folder, and a fresh namespace per test.

It is started once a session, takes about ten seconds, and ends with the last of these tests: it would cost those in pods
a part of a core. Set OMNI_TEST_KUBECONFIG to use one that runs already.
"""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from omni_cluster.paths import current_bin_dir
from omni_crds.crd import build_crds
from tests.apiserver.kube import Kube, Object

if TYPE_CHECKING:
    from kubernetes.dynamic import DynamicClient

_ESTABLISHED_SECONDS = 30
_KUBECTL_SECONDS = 30
HERE = Path(__file__).parent
STARTED = pytest.StashKey[ExitStack]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.apiserver)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or not nextitem.path.is_relative_to(HERE):
        item.session.stash.get(STARTED, ExitStack()).close()


@pytest.fixture(scope="session")
def kubeconfig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Kubeconfig of an administrator."""
    if given := os.environ.get("OMNI_TEST_KUBECONFIG"):
        yield Path(given)
        return
    from omni_cluster import control_plane

    with ExitStack() as started:
        plane = started.enter_context(control_plane.start("test", tmp_path_factory.mktemp("control-plane")))
        request.session.stash[STARTED] = started
        yield plane.kubeconfig_path


@pytest.fixture(scope="session")
def installer(kubeconfig: Path) -> Kube:
    """Installs our CRDs and does nothing else, so that its warnings are about them."""
    return Kube(kubeconfig)


@pytest.fixture(scope="session")
def installed_crds(installer: Kube) -> tuple[Object, ...]:
    """What the API server stored. Installed by server-side apply, which needs no annotation of the whole object (T57)."""
    crds = [installer.apply(crd, manager="omni-crds") for crd in build_crds()]
    return tuple(_established(installer, crd) for crd in crds)


@pytest.fixture(scope="session")
def kube(kubeconfig: Path, installed_crds: tuple[Object, ...]) -> Kube:
    """The small client, with the CRDs in place."""
    return Kube(kubeconfig)


@pytest.fixture(scope="session")
def dynamic(kubeconfig: Path, installed_crds: tuple[Object, ...]) -> DynamicClient:
    """The official dynamic client, with the CRDs in place."""
    from kubernetes.dynamic import DynamicClient

    from kubernetes import config

    return DynamicClient(config.new_client_from_config(config_file=str(kubeconfig)))


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    """A namespace of this test alone."""
    name = f"t-{uuid.uuid4().hex[:10]}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    kube.create(body)
    yield name
    kube.delete(body)


@pytest.fixture(scope="session")
def kubectl(
    kubeconfig: Path, installed_crds: tuple[Object, ...], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """`kubectl("get", "omp")` gives what a person sees; a failure raises with what kubectl said."""
    program = current_bin_dir() / "kubectl"
    home = tmp_path_factory.mktemp("kubectl-home")  # discovery is cached there

    def run(*arguments: str, stdin: str | None = None) -> str:
        done = subprocess.run(
            [program, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_KUBECTL_SECONDS,
            env={**os.environ, "KUBECONFIG": str(kubeconfig), "HOME": str(home)},
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"kubectl {' '.join(arguments)} failed: {done.stderr}")
        return done.stdout

    return run


def _established(kube: Kube, crd: Object) -> Object:
    deadline = time.monotonic() + _ESTABLISHED_SECONDS
    conditions: list[Any] = []
    while time.monotonic() < deadline:
        current = kube.get(crd)
        conditions = current.get("status", {}).get("conditions") or []
        if any(c["type"] == "Established" and c["status"] == "True" for c in conditions):
            return current
        time.sleep(0.05)
    raise AssertionError(f"{crd['metadata']['name']} was not established in {_ESTABLISHED_SECONDS} s: {conditions}")
