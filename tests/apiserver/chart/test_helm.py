"""`helm install` and `helm upgrade` on an API server that has never seen our types. No nodes, so no hook Job can run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omni_cluster import control_plane
from tests.apiserver.kube import Kube, Refused
from tests.unit.chart.render import CHART, helm, rendered

pytestmark = pytest.mark.timeout(400)  # starts a control plane, and asks it hundreds of questions

Helm = Callable[..., str]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Kubeconfig of an empty cluster."""
    with control_plane.start("test-helm", tmp_path_factory.mktemp("helm-control-plane")) as plane:
        yield plane.kubeconfig_path


@pytest.fixture(scope="module")
def run_helm(fresh: Path, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    home = tmp_path_factory.mktemp("helm-home")

    def run(*arguments: str) -> str:
        environment = {**os.environ, "KUBECONFIG": str(fresh), "HOME": str(home)}
        done = subprocess.run(
            [helm(), *arguments, "--namespace", "omni-system"],
            env=environment, capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_install_upgrade_uninstall(fresh: Path, run_helm: Helm) -> None:
    kube = Kube(fresh)
    profile = next(o for o in rendered() if o["kind"] == "OmniRuntimeProfile" and o["metadata"]["name"] == "cpu")

    # CRDs and objects of their kinds in one release: the CRDs have to be there first.
    out = run_helm("upgrade", "--install", "omni-operator", str(CHART), "--create-namespace")
    assert "kubectl apply -f examples/smol-omni.pipeline.yaml" in out, "the notes say what to do next"
    assert kube.get(profile)["spec"]["images"]["runtime"] == "omni-operator/cpu:0.1.0"

    # Nodes are missing, so the Job of the CRD upgrade would wait for ever; its work is tested in test_install.py.
    run_helm(
        "upgrade",
        "omni-operator",
        str(CHART),
        "--no-hooks",
        "--set",
        "images.tag=v2",
        "--set",
        "profiles.npu.enabled=false",
    )
    assert kube.get(profile)["spec"]["images"]["runtime"] == "omni-operator/cpu:v2"
    npu = {**profile, "metadata": {"name": "npu"}}
    with pytest.raises(Refused) as gone:
        kube.get(npu)
    assert gone.value.status == 404

    pipeline = {
        "apiVersion": "serving.omni.dev/v1alpha1",
        "kind": "OmniPipeline",
        "metadata": {"name": "kept", "namespace": "default"},
        "spec": {"model": {"uri": "packaged://smol-omni"}, "topology": "smol_omni"},
    }
    with pytest.raises(Refused, match="failed calling webhook"):  # no pod runs here: nobody can judge it
        kube.create(pipeline)
    run_helm("upgrade", "omni-operator", str(CHART), "--no-hooks", "--set", "webhooks.enabled=false")
    kube.create(pipeline)
    run_helm("uninstall", "omni-operator", "--no-hooks")
    assert kube.get(pipeline)["metadata"]["name"] == "kept", "uninstalling the operator deletes nobody's pipelines"
