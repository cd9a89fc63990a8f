"""A profile that allows a folder of the node: pods of one node share memory through it, and nothing of it stays."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_runtime.cli.kubectl import Kube, port_forward, wait_ready
from omni_runtime.client import ask
from omni_runtime.deploy.plan import SIDECAR_HTTP_PORT
from tests.e2e.conftest import eventually
from tests.e2e.null_pods import STAGES, NullPods, null_pods, script

pytestmark = pytest.mark.timeout(600)

NAME = "near"
READY_SECONDS = 300


@pytest.fixture
def folder() -> Iterator[Path]:
    """As `install -d -m 1733` makes it."""
    with tempfile.TemporaryDirectory(prefix="omni-node-") as path:
        os.chmod(path, 0o1733)
        yield Path(path)


def connectors(site: NullPods, stage: str) -> set[str]:
    """By which chunks have left the stage, by its sidecar's own numbers."""
    (pod,) = site.pods(NAME, stage)
    address = f"/api/v1/namespaces/{site.namespace}/pods/{pod['metadata']['name']}:{SIDECAR_HTTP_PORT}/proxy/metrics"
    text = site.kube.read("get", "--raw", address)
    counted = re.findall(r'^omni:connector_chunks_total\{.*?connector="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return {connector for connector, count in counted if float(count)}


def test_pods_of_one_node_share_memory(kube: Kube, folder: Path) -> None:
    with null_pods(kube, nodeLocalVolume={"hostPath": str(folder)}) as site:
        site.make(NAME, {})
        wait_ready(lambda: site.pipeline(NAME), READY_SECONDS)
        with port_forward(kube, site.namespace, NAME) as url:
            answer = ask(url, script(20, 20), modalities=("text", "audio"), timeout_s=60)
        assert answer.audio_s > 0
        for stage in ("thinker", "talker"):
            eventually(lambda stage=stage: connectors(site, stage) or None, 30, f"numbers of {stage}")
            assert connectors(site, stage) == {"SharedMemory"}
        eventually(
            lambda: [e.get("inUse") for e in site.pipeline(NAME)["status"]["edges"]] == [["SharedMemory"]] * 2 or None,
            90,
            lambda: f"the status says over what: {site.pipeline(NAME)['status']['edges']}",
        )
        assert len(os.listdir(folder)) == len(STAGES), "a folder for each sidecar, with a name that says nothing"
        assert not any(NAME in name or site.namespace in name for name in os.listdir(folder))
        kube.read("-n", site.namespace, "delete", "omnipipeline", NAME, "--timeout=120s")
        eventually(lambda: os.listdir(folder) == [] or None, 120, "nothing is left on the node")
