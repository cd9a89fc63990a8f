"""Our own nodes for real: pods, Services, a second node, crashes at any step, and nothing left behind.

These tests make clusters of their own (names `e2e-*`); address ranges derive from a free index, so they run
beside the cluster that other tests use.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_cluster import cgroups, namespace, network, proc
from omni_cluster.build import HYPER, ensure_tool
from omni_cluster.images import write_static_image
from omni_cluster.kubectl import Kubectl, deployment_problem
from omni_cluster.network import ClusterNetwork
from omni_cluster.paths import cluster_dir
from omni_cluster.probe import HttpProbe, wait_until
from omni_cluster.processes import Supervisor
from omni_cluster.state import find_state, load_state

BUSYBOX = shutil.which("busybox") or "/bin/busybox"
IMAGE = "localhost/e2e/busybox:1"
NAME, CRASH = "e2e-cluster", "e2e-crash"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="nodes of our own need root"),
    pytest.mark.skipif(not Path(BUSYBOX).exists(), reason="needs busybox-static"),
]

WEB: list[dict[str, Any]] = [
    {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web", "namespace": "default"},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {
                    "terminationGracePeriodSeconds": 1,
                    "topologySpreadConstraints": [
                        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule",
                         "labelSelector": {"matchLabels": {"app": "web"}}, "matchLabelKeys": ["pod-template-hash"]},
                    ],
                    "containers": [
                        {
                            "name": "web", "image": IMAGE, "imagePullPolicy": "Never",
                            "command": ["/busybox", "sh", "-c",
                                        "echo I am $HOSTNAME; echo $HOSTNAME > /tmp/index.html; exec /busybox httpd -f -p 8080 -h /tmp"],
                            "readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
                            "resources": {"limits": {"memory": "32Mi"}},
                        }
                    ],
                },
            },
        },
    },
    {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": "default"},
        "spec": {"type": "NodePort", "selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
    },
]  # fmt: skip


def omni_cluster(*argv: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "omni_cluster", *argv], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done


def up(name: str, *argv: str) -> None:
    omni_cluster("up", "--name", name, "--provider", "local", *argv)


def pids(name: str) -> dict[str, int]:
    return {record.component: record.process.pid for record in Supervisor(cluster_dir(name)).records()}


def leftovers(name: str, index: int) -> list[str]:
    """Everything of a cluster that can still be found on this machine."""
    root, addresses = cluster_dir(name), ClusterNetwork(index)
    found = [f"process {' '.join(proc.command_line(p.pid))}" for p in proc.owned_by(root)]
    found += [f"control group {group}" for group in cgroups.groups_of(name)]
    found += [f"interface {i}" for i in network.interfaces() if i == addresses.bridge or i.startswith(f"omni{index}n")]
    taken = network.host_routes()
    found += [
        f"route {route}" for route in taken if route.split(".")[:2] in [r.split(".")[:2] for r in addresses.ranges]
    ]
    found += [f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"{root}/" in line]
    found += [f"folder {root}"] if root.exists() else []
    return found


def host_packet_filter() -> str:
    done = subprocess.run(["iptables-save"], capture_output=True, text=True)
    return "\n".join(line for line in done.stdout.splitlines() if "KUBE-" in line or "CNI-" in line)


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    """One cluster for this module, and the proof that its removal is complete."""
    before = host_packet_filter()
    archive = tmp_path_factory.mktemp("image") / "busybox.tar"
    write_static_image(archive, IMAGE, Path(BUSYBOX), ("/busybox",), "0:0")
    try:
        up(NAME, "--nodes", "1")
        omni_cluster("load", "--name", NAME, str(archive))
        up(NAME, "--nodes", "2")
        omni_cluster("load", "--name", NAME, str(archive))
        yield Kubectl(ensure_tool(HYPER), Path(load_state(NAME).kubeconfig))
    finally:
        state = find_state(NAME)
        omni_cluster("down", "--name", NAME)
    assert state is not None
    assert leftovers(NAME, state.index) == []
    assert host_packet_filter() == before


@pytest.fixture(scope="module")
def web(kubectl: Kubectl) -> Callable[[], None]:
    """Two pods, one on each node; the returned function waits until both are available."""

    def available() -> None:
        wait_until(
            "web is available",
            lambda: deployment_problem(kubectl.get("-n", "default", "deployment", "web")),
            seconds=60,
        )

    kubectl.apply(WEB)
    available()
    return available


def answers(url: str, count: int) -> set[str]:
    """Who answers; every request must be answered."""
    return {urllib.request.urlopen(url, timeout=5).read().decode().strip() for _ in range(count)}


def service(kubectl: Kubectl) -> tuple[str, int]:
    spec = kubectl.get("-n", "default", "service", "web")["spec"]
    return str(spec["clusterIP"]), int(spec["ports"][0]["nodePort"])


def test_pods_on_both_nodes_answer_behind_one_service(kubectl: Kubectl, web: Callable[[], None]) -> None:
    pods = kubectl.get("-n", "default", "pods", "-l", "app=web")["items"]
    assert {pod["spec"]["nodeName"] for pod in pods} == {"n1", "n2"}
    names = {pod["metadata"]["name"] for pod in pods}
    address, node_port = service(kubectl)
    node = ClusterNetwork(load_state(NAME).index).node_address(2)
    assert answers(f"http://{address}/", 20) == names
    assert answers(f"http://{node}:{node_port}/", 20) == names


def test_exec_logs_and_names_inside_the_cluster(kubectl: Kubectl, web: Callable[[], None]) -> None:
    pods = [pod["metadata"]["name"] for pod in kubectl.get("-n", "default", "pods", "-l", "app=web")["items"]]
    for pod in pods:
        assert f"I am {pod}" in kubectl.run("-n", "default", "logs", pod)
        seen = {kubectl.run("-n", "default", "exec", pod, "--", "/busybox", "wget", "-qO-", url).strip()
                for url in ("http://web/", "http://web.default.svc.cluster.local/") for _ in range(4)}  # fmt: skip
        assert seen <= set(pods)


def test_port_forward_to_loopback(kubectl: Kubectl, web: Callable[[], None]) -> None:
    argv = [str(kubectl.hyper), "kubectl", "--kubeconfig", str(kubectl.kubeconfig)]
    child = subprocess.Popen(
        [*argv, "port-forward", "-n", "default", "service/web", ":80"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline().split("->")[0].rsplit(":", 1)[1])
        wait_until("the forwarded port answers", HttpProbe("127.0.0.1", port, "/").problem, seconds=20)
    finally:
        child.kill()
        child.wait()


def test_packets_for_nobody_stay_on_the_machine(kubectl: Kubectl, web: Callable[[], None]) -> None:
    """No node has a route to an address outside the cluster, and a pod that tries one gets an error in time.

    Which error is the kernel's choice: it says "unreachable" at once, or nothing where its limit of such answers
    is used up or the first one meets a socket that is still being connected.
    """
    outside = "198.51.100.77"
    for node in ("n1", "n2"):
        inside = namespace.enter(Supervisor(cluster_dir(NAME)), node)
        route = subprocess.run([*inside, "ip", "route", "get", outside], capture_output=True, text=True, timeout=30)
        assert route.returncode != 0, route.stdout
        assert "unreachable" in route.stderr
    for pod in kubectl.get("-n", "default", "pods", "-l", "app=web")["items"]:
        name = pod["metadata"]["name"]
        argv = [str(kubectl.hyper), "kubectl", "--kubeconfig", str(kubectl.kubeconfig), "-n", "default", "exec", name]
        connect = [*argv, "--", "/busybox", "nc", "-w", "5", outside, "80"]
        done = subprocess.run(connect, capture_output=True, text=True, timeout=30)
        assert done.returncode != 0
        assert "unreachable" in done.stderr or "timed out" in done.stderr


def test_second_up_changes_nothing(kubectl: Kubectl) -> None:
    before = pids(NAME)
    up(NAME)
    assert pids(NAME) == before


@pytest.mark.parametrize("victim", ["etcd", "kube-apiserver", "n2/kubelet", "n2/containerd", "n2/namespace"])
def test_a_killed_component_is_repaired(kubectl: Kubectl, web: Callable[[], None], victim: str) -> None:
    process = Supervisor(cluster_dir(NAME)).alive(victim)
    assert process is not None
    proc.send(process, signal.SIGKILL)
    up(NAME)
    web()
    wait_until(
        "all components are healthy",
        lambda: None if _status(NAME) == 0 else "status is not 0",
        seconds=30,
    )
    wait_until("the Service answers", HttpProbe(service(kubectl)[0], 80, "/").problem, seconds=30)


@pytest.mark.parametrize("how", ["stop", "cut"])
def test_a_failed_node_is_seen_as_such_and_comes_back(kubectl: Kubectl, web: Callable[[], None], how: str) -> None:
    omni_cluster("fail", "--name", NAME, "n2", "--how", how)
    node = ClusterNetwork(load_state(NAME).index).node_address(2)
    assert HttpProbe(node, 10248, "/healthz").problem() is not None
    up(NAME)
    web()
    assert _status(NAME) == 0


def test_simulated_gpu_nodes_run_pods_that_ask_for_gpus(kubectl: Kubectl) -> None:
    up(NAME, "--kwok-nodes", "nvidia.com/gpu=2x8")
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "gpu", "namespace": "default"},
        "spec": {"containers": [{"name": "a", "image": "any", "resources": {"limits": {"nvidia.com/gpu": 8}}}]},
    }  # fmt: skip
    kubectl.apply([pod])
    wait_until(
        "the pod runs on a simulated node",
        lambda: None if kubectl.get("-n", "default", "pod", "gpu")["status"].get("phase") == "Running" else "not yet",
        seconds=30,
    )
    assert kubectl.get("-n", "default", "pod", "gpu")["spec"]["nodeName"].startswith("kwok-nvidia-gpu-")
    kubectl.run("-n", "default", "delete", "pod", "gpu", "--wait=false")


def test_up_and_down_killed_at_any_step_are_repaired_by_the_next() -> None:
    """kill -9 of `up` when a step has just begun, step after step, then of `down`; then all must be well."""
    index = 0
    try:
        for step in ("etcd", "kube-controller-manager", "n1/namespace", "n1/containerd", "n1/kubelet"):
            _kill_when("up", lambda step=step: Supervisor(cluster_dir(CRASH)).alive(step) is not None)
        up(CRASH)
        assert _status(CRASH) == 0
        index = load_state(CRASH).index
        _kill_when("down", lambda: Supervisor(cluster_dir(CRASH)).alive("n1/kubelet") is None)
        up(CRASH)
        assert _status(CRASH) == 0
        _kill_when("down", lambda: not cgroups.groups_of(CRASH))
    finally:
        omni_cluster("down", "--name", CRASH)
    assert leftovers(CRASH, index) == []


def test_down_without_a_state_file_removes_everything() -> None:
    """The folder is there, but the file that says which addresses the cluster has is lost."""
    try:
        up(CRASH)
        index = load_state(CRASH).index
        (cluster_dir(CRASH) / "cluster.json").unlink()
    finally:
        omni_cluster("down", "--name", CRASH)
    assert leftovers(CRASH, index) == []


def _status(name: str) -> int:
    argv = [sys.executable, "-m", "omni_cluster", "status", "--name", name]
    return subprocess.run(argv, capture_output=True, timeout=60).returncode


def _kill_when(command: str, reached: Callable[[], bool]) -> None:
    """Start a command and kill it, children and all but what it has set free, as soon as a step is reached."""
    argv = [sys.executable, "-m", "omni_cluster", command, "--name", CRASH]
    argv += ["--provider", "local"] if command == "up" else []
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while not reached() and child.poll() is None:
        assert time.monotonic() < deadline, f"{command} never reached the step; state: {json.dumps(pids(CRASH))}"
        time.sleep(0.01)
    child.kill()
    child.wait()
