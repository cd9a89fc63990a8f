"""Settings that a bare machine needs; each cost a failure once."""

from __future__ import annotations

import datetime
import json
import tomllib
from pathlib import Path

import pytest
from cryptography import x509

from omni_cluster import cgroups, control_plane, dns, namespace, network, node, pki
from omni_cluster.build import HYPER, TOOLS, linker_flags, pinned_version, source_digest
from omni_cluster.cli import render_status
from omni_cluster.control_plane import Layout, Ports
from omni_cluster.errors import ClusterError, InvalidArgument
from omni_cluster.kubectl import deployment_problem, node_problem
from omni_cluster.network import ClusterNetwork
from omni_cluster.node import Node
from omni_cluster.paths import cache_dir, cluster_dir, source_dir
from omni_cluster.pki import Subject
from omni_cluster.prerequisites import NODE_PACKAGES, missing_packages
from omni_cluster.providers.base import ComponentStatus
from omni_cluster.providers.kind import render_config

ADDRESSES = ClusterNetwork(3)
NODE = Node(Layout("omni", Path("/c/omni"), pod_cidr=ADDRESSES.pod_cidr, advertise="10.203.0.1"), ADDRESSES, 2)
PORTS = Ports(1, 2, 3, 4, 5)


def test_containerd_settings():
    config = tomllib.loads(node.render_containerd(NODE, "localhost/omni/pause:1"))
    runtime = config["plugins"]["io.containerd.cri.v1.runtime"]
    assert runtime["restrict_oom_score_adj"] is True
    assert runtime["cni"] == {"bin_dirs": ["/usr/lib/cni"], "conf_dir": "/c/omni/nodes/n2/cni"}
    images = config["plugins"]["io.containerd.cri.v1.images"]
    assert images["pinned_images"]["sandbox"] == "localhost/omni/pause:1"
    assert config["imports"] == []
    own = [config["root"], config["state"], config["grpc"]["address"]]
    own.append(runtime["containerd"]["runtimes"]["runc"]["options"]["Root"])
    assert all(path.startswith("/c/omni/nodes/n2/") for path in own)


def test_kubelet_settings():
    config = json.loads(node.render_kubelet(NODE, pki.KeyPair(Path("/crt"), Path("/key")), Path("/ca")))
    wanted = {
        "failCgroupV1": False, "cgroupDriver": "cgroupfs", "cgroupRoot": "/omni-omni-n2", "failSwapOn": False,
        "enforceNodeAllocatable": [], "localStorageCapacityIsolation": False, "imageGCHighThresholdPercent": 100,
        "clusterDNS": ["10.99.0.10"],
    }  # fmt: skip
    assert {key: config[key] for key in wanted} == wanted
    assert config["authentication"]["anonymous"]["enabled"] is False
    assert config["authorization"]["mode"] == "Webhook"


def test_kube_proxy_leaves_the_machines_connection_tracking_alone():
    config = json.loads(node.render_proxy(NODE, Path("/k")))
    assert config["conntrack"] == {
        "maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s", "udpTimeout": "0s",
        "udpStreamTimeout": "0s",
    }  # fmt: skip
    assert config["clusterCIDR"] == ADDRESSES.pod_cidr


def test_pods_get_routed_links_from_the_nodes_own_range():
    plugins = json.loads(node.render_cni(NODE))["plugins"]
    assert [plugin["type"] for plugin in plugins] == ["ptp", "portmap"]
    assert plugins[0]["ipam"]["ranges"] == [[{"subnet": "10.247.2.0/24"}]]


def test_dns_forwards_nothing_and_needs_no_rights():
    assert "forward" not in dns.COREFILE
    objects = {item["kind"]: item for item in dns.build_dns(ADDRESSES, "image")}
    assert objects["Service"]["spec"]["clusterIP"] == "10.99.0.10"
    container = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["imagePullPolicy"] == "Never"


@pytest.mark.parametrize(("advertise", "bind"), [(None, "127.0.0.1"), ("10.203.0.1", "0.0.0.0")])
def test_without_nodes_the_api_is_on_loopback_only(tmp_path: Path, advertise, bind):
    layout = Layout("t", tmp_path, advertise=advertise)
    creds = control_plane.ensure_credentials(layout)
    argv = control_plane.build_apiserver(layout, PORTS, creds, Path("/hyper")).argv
    assert f"--bind-address={bind}" in argv
    assert "--anonymous-auth=false" in argv
    assert any(flag.startswith("--kubelet-preferred-address-types=InternalIP") for flag in argv) == bool(advertise)
    etcd = control_plane.build_etcd(layout, PORTS, creds, Path("/hyper")).argv
    assert "--client-cert-auth=true" in etcd
    assert not any("http://" in flag for flag in (*argv, *etcd))


def test_certificates_are_kept_until_they_are_wrong_or_old(tmp_path: Path):
    ca = pki.ensure_authority(tmp_path, "ca")
    subject = Subject("system:node:n1", ("system:nodes",), ("n1", "10.200.0.11"))
    first = pki.ensure_certificate(tmp_path, "node", ca, subject).cert.read_bytes()
    assert pki.ensure_certificate(tmp_path, "node", ca, subject).cert.read_bytes() == first
    parsed, authority = x509.load_pem_x509_certificate(first), x509.load_pem_x509_certificate(ca.cert.read_bytes())
    now = datetime.datetime.now(datetime.UTC)
    assert pki.is_usable(parsed, authority, subject, now)
    assert not pki.is_usable(parsed, authority, subject, now + datetime.timedelta(days=340))
    assert not pki.is_usable(parsed, authority, Subject("system:node:n1", ("system:nodes",), ("n1",)), now)
    other = x509.load_pem_x509_certificate(pki.ensure_authority(tmp_path, "other").cert.read_bytes())
    assert not pki.is_usable(parsed, other, subject, now)
    assert (tmp_path / "ca.key").stat().st_mode & 0o077 == 0


def test_clusters_of_different_index_share_no_address():
    import ipaddress

    ranges = [
        ipaddress.ip_network(text) for index in range(network.MAX_CLUSTERS) for text in ClusterNetwork(index).ranges
    ]
    assert not any(a.overlaps(b) for i, a in enumerate(ranges) for b in ranges[i + 1 :])


def test_index_avoids_other_clusters_and_foreign_routes():
    assert network.choose_index([], []) == 0
    assert network.choose_index([0, 2], []) == 1
    assert network.choose_index([0], ["10.97.3.0/24", "192.168.0.0/16", "10.246.0.1", "0.0.0.0/0"]) == 3
    with pytest.raises(ClusterError, match="routed elsewhere"):
        network.choose_index([], ["10.0.0.0/8"])


def test_interface_names_fit_the_kernel():
    assert all(len(name) <= 15 for name in (ADDRESSES.bridge, ADDRESSES.veth(16)))


def test_every_node_reaches_the_pods_of_every_other():
    routes = {command[2]: command[4] for command in network.plan_peer_routes(ADDRESSES, 2, 3)}
    assert routes == {"10.247.1.0/24": "10.203.0.11", "10.247.3.0/24": "10.203.0.13"}


def test_namespace_hides_the_folders_that_programs_share_by_default():
    script = namespace.render_setup(Path("/c/om ni/nodes/n1"))
    assert script.startswith("mount --make-rshared /\n")
    assert "mount --bind '/c/om ni/nodes/n1/private/run-containerd' /run/containerd" in script
    assert script.endswith('exec "$@"')


def test_control_groups_of_both_versions():
    mounts = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
    assert cgroups.parse_hierarchies(mounts) == (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup/unified"))


def test_versions_are_read_from_the_pins():
    go_mod = (source_dir() / "kubernetes" / "go.mod").read_text()
    assert pinned_version(go_mod, "k8s.io/kubernetes").startswith("v1.37.")
    assert "version.gitMinor=37" in linker_flags(HYPER, go_mod)
    assert pinned_version(go_mod, "example.org/none") == ""


def test_every_versioned_tool_finds_its_pin():
    for tool in TOOLS.values():
        if tool.versioned_by:
            assert pinned_version((source_dir() / tool.module / "go.mod").read_text(), tool.versioned_by), tool.name


def test_a_build_is_named_by_everything_that_goes_into_it():
    files = {"go.mod": b"require k8s.io/kubernetes v1.37.2", "main.go": b"package main"}
    first = source_digest(HYPER, files)
    assert source_digest(HYPER, dict(reversed(files.items()))) == first
    assert source_digest(HYPER, {**files, "main.go": b"package main //"}) != first
    assert source_digest(HYPER, {**files, "go.mod": b"require k8s.io/kubernetes v1.37.3"}) != first


def test_cache_folder(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("OMNI_CACHE", str(tmp_path / "o"))
    assert cache_dir() == tmp_path / "o"
    monkeypatch.delenv("OMNI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "omni-operator"


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "-a", "a" * 25, "a\n"])
def test_names_that_are_no_names(name):
    with pytest.raises(InvalidArgument, match="--name"):
        cluster_dir(name)


def test_missing_packages_are_named():
    assert missing_packages(NODE_PACKAGES, lambda witness: witness != "runc") == ("runc",)
    assert missing_packages(NODE_PACKAGES, lambda _: True) == ()


def test_kind_config():
    assert [item["role"] for item in json.loads(render_config(3))["nodes"]] == ["control-plane", "worker", "worker"]


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        ({}, "has not reported its state yet"),
        ({"conditions": [{"type": "Ready", "status": "False", "message": "cni"}]}, "cni"),
        ({"conditions": [{"type": "Ready", "status": "True"}]}, None),
    ],
)
def test_node_problem(status, problem):
    assert node_problem({"status": status}) == problem


@pytest.mark.parametrize(
    ("status", "ok"),
    [
        ({"observedGeneration": 1, "updatedReplicas": 2, "availableReplicas": 2}, False),
        ({"observedGeneration": 2, "updatedReplicas": 1, "availableReplicas": 2}, False),
        ({"observedGeneration": 2, "updatedReplicas": 2, "availableReplicas": 2}, True),
    ],
)
def test_deployment_problem(status, ok):
    deployment = {"metadata": {"generation": 2}, "spec": {"replicas": 2}, "status": status}
    assert (deployment_problem(deployment) is None) == ok


def test_status_table_is_aligned():
    lines = render_status(
        (ComponentStatus("etcd", None, 7, "/l"), ComponentStatus("n1/kubelet", "not running"))
    ).splitlines()
    assert lines[1].index("yes") == lines[2].index("no: not running") == lines[0].index("HEALTHY")
