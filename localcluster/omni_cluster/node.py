"""One real node: containerd, kubelet and kube-proxy inside the node's namespace.

The render functions are pure; `ensure_node` applies them. The settings that a bare machine needs (control
groups of version 1, no CAP_SYS_RESOURCE, no registry) are explained where they stand.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from omni_cluster import cgroups, namespace, pki
from omni_cluster.control_plane import Layout, Ports
from omni_cluster.kubeconfig import write_kubeconfig
from omni_cluster.network import ClusterNetwork
from omni_cluster.pki import KeyPair, Subject
from omni_cluster.probe import HttpProbe, wait_until
from omni_cluster.proc import command_line, owned_by
from omni_cluster.processes import ProcessSpec, Supervisor, end_processes, write_atomically

CNI_BIN_DIR = "/usr/lib/cni"
_KUBELET_HEALTH, _PROXY_HEALTH = 10248, 10256


@dataclass(frozen=True, slots=True)
class Programs:
    """Paths of the built programs."""

    hyper: Path
    containerd: Path
    shim: Path
    ctr: Path
    pause: Path


@dataclass(frozen=True, slots=True)
class Node:
    """Node n<number> of a cluster."""

    layout: Layout
    addresses: ClusterNetwork
    number: int

    @property
    def name(self) -> str:
        return f"n{self.number}"

    @property
    def root(self) -> Path:
        return self.layout.root / "nodes" / self.name

    @property
    def address(self) -> str:
        return self.addresses.node_address(self.number)

    @property
    def socket(self) -> Path:
        """containerd's socket; `ctr` wants an absolute path."""
        return self.root / "containerd.sock"

    @property
    def group(self) -> str:
        return cgroups.group_name(self.layout.name, self.name)

    def component(self, program: str) -> str:
        return f"{self.name}/{program}"

    def log(self, program: str) -> Path:
        return self.layout.root / "logs" / f"{self.name}-{program}.log"


def render_containerd(node: Node, pause_image: str) -> str:
    """containerd's configuration. Reads nothing from /etc and keeps everything in the node's folder."""
    return f"""\
version = 3
imports = []
root = "{node.root}/containerd/root"
state = "{node.root}/containerd/state"
# Another containerd on this machine owns the default paths of these, and no pod here needs them.
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt", "io.containerd.internal.v1.tracing"]

[grpc]
  address = "{node.socket}"

[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  # There may be no registry at hand: the image is imported, and pinned so that it is never collected.
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{pause_image}"

[plugins.'io.containerd.cri.v1.runtime']
  # Without CAP_SYS_RESOURCE runc dies when kubelet asks for a lower oom_score_adj than its own.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{CNI_BIN_DIR}"]
    conf_dir = "{node.root}/cni"
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        Root = "{node.root}/containerd/runc"
"""


def render_cni(node: Node) -> str:
    """CNI configuration: `ptp` gives every pod a routed link.

    With a bridge, an answer between two pods of one node would bypass the packet filter that must translate a
    Service's address back, unless br_netfilter is loaded. Network policies are not enforced by either.
    """
    ipam = {
        "type": "host-local",
        "dataDir": f"{node.root}/ipam",
        "ranges": [[{"subnet": node.addresses.node_pod_cidr(node.number)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    plugins = [
        {"type": "ptp", "ipMasq": False, "ipam": ipam},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    return json.dumps({"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}, indent=2)


def render_kubelet(node: Node, serving: KeyPair, ca: Path) -> str:
    """kubelet's configuration (JSON is YAML)."""
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,  # version 1 is refused by default since 1.35, and many machines still have it
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.group}",
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{node.socket}",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(ca)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(serving.cert),
        "tlsPrivateKeyFile": str(serving.key),
        "clusterDNS": [node.addresses.dns_service_ip],
        "clusterDomain": "cluster.local",
        "resolvConf": f"{node.root}/resolv.conf",
        "healthzBindAddress": node.address,
        "healthzPort": _KUBELET_HEALTH,
        "podLogsDir": f"{node.root}/pod-logs",
        "volumePluginDir": f"{node.root}/volume-plugins",
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "enforceNodeAllocatable": [],
        "localStorageCapacityIsolation": False,  # asks cAdvisor for the root device, which virtual machines hide
        # Images were imported and cannot be pulled again: never collect them.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "maxPods": 200,
        "nodeStatusUpdateFrequency": "5s",
    }
    return json.dumps(config, indent=2)


def render_proxy(node: Node, kubeconfig: Path) -> str:
    """kube-proxy's configuration. Connection tracking limits belong to the machine and are left alone."""
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "hostnameOverride": node.name,
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": node.layout.pod_cidr,
        "detectLocalMode": "ClusterCIDR",
        "healthzBindAddress": f"{node.address}:{_PROXY_HEALTH}",
        "metricsBindAddress": f"{node.address}:10249",
        "conntrack": {
            "maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s",
            "udpTimeout": "0s", "udpStreamTimeout": "0s",
        },
        "iptables": {"minSyncPeriod": "0.2s", "syncPeriod": "30s"},
    }  # fmt: skip
    return json.dumps(config, indent=2)


def probes(node: Node) -> dict[str, HttpProbe]:
    """Health of the programs that answer HTTP; containerd is asked with `ctr`."""
    return {
        node.component("kubelet"): HttpProbe(node.address, _KUBELET_HEALTH, "/healthz"),
        node.component("kube-proxy"): HttpProbe(node.address, _PROXY_HEALTH, "/healthz"),
    }


def containerd_problem(node: Node, ctr: Path) -> str | None:
    """None when containerd answers on its socket."""
    argv = [str(ctr), "--address", str(node.socket), "--timeout", "3s", "--connect-timeout", "2s", "version"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return "no answer in 10 s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no answer"])[-1][:160]


def ensure_runtime(node: Node, nodes: int, supervisor: Supervisor, programs: Programs, pause_image: str) -> None:
    """Namespace and containerd, so that images can be imported before kubelet starts pods from them."""
    node.root.mkdir(parents=True, exist_ok=True)
    holder = namespace.build_holder(node.name, node.root, node.log("namespace"), programs.pause)
    if not supervisor.is_current(holder):
        # A namespace of an earlier run may live on in its other processes; they cannot move to a new one.
        stop_node(node, supervisor)
    namespace.ensure_namespace(supervisor, holder, node.addresses, node.number, nodes)
    config = node.root / "containerd.toml"
    text = _write(config, render_containerd(node, pause_image))
    _write(node.root / "cni" / "10-pods.conflist", render_cni(node))
    cgroups.ensure_group(node.group)
    path = f"{programs.shim.parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    spec = ProcessSpec(
        node.component("containerd"), (str(programs.containerd), "--config", str(config)), node.log("containerd"),
        namespace.enter(supervisor, node.name), {"PATH": path}, (text,),
    )  # fmt: skip
    supervisor.ensure(spec)

    def problem() -> str | None:
        supervisor.require_alive(spec.component)
        return containerd_problem(node, programs.ctr)

    wait_until(f"containerd of {node.name} answers", problem, seconds=60, log=spec.log)


def ensure_kubelet(node: Node, ports: Ports, supervisor: Supervisor, programs: Programs) -> None:
    """kubelet and kube-proxy; returns as soon as they are started."""
    folder = node.layout.root / "pki"
    authority = KeyPair(folder / "ca.crt", folder / "ca.key")
    own = pki.ensure_certificate(
        folder, f"kubelet-{node.name}", authority,
        Subject(f"system:node:{node.name}", ("system:nodes",), (node.name, node.address)),
    )  # fmt: skip
    proxy = pki.ensure_certificate(folder, "kube-proxy", authority, Subject("system:kube-proxy"))
    server = f"https://{node.addresses.host_address}:{ports.apiserver}"
    inside = namespace.enter(supervisor, node.name)
    _write(node.root / "resolv.conf", "# pods with dnsPolicy Default ask nobody outside\n")
    kubelet_access, proxy_access = node.root / "kubelet.kubeconfig", node.root / "kube-proxy.kubeconfig"
    kubelet_text = write_kubeconfig(kubelet_access, node.name, server, authority.cert, own)
    proxy_text = write_kubeconfig(proxy_access, "kube-proxy", server, authority.cert, proxy)
    kubelet_config, proxy_config = node.root / "kubelet.json", node.root / "kube-proxy.json"
    kubelet_settings = _write(kubelet_config, render_kubelet(node, own, authority.cert))
    proxy_settings = _write(proxy_config, render_proxy(node, proxy_access))
    supervisor.ensure(
        ProcessSpec(
            node.component("kubelet"),
            (str(programs.hyper), "kubelet", f"--config={kubelet_config}", f"--kubeconfig={kubelet_access}",
             f"--hostname-override={node.name}", f"--node-ip={node.address}", f"--root-dir={node.root}/kubelet",
             f"--cert-dir={node.root}/kubelet-pki"),
            node.log("kubelet"), inside, {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            (kubelet_text, kubelet_settings),
        )
    )  # fmt: skip
    supervisor.ensure(
        ProcessSpec(
            node.component("kube-proxy"), (str(programs.hyper), "kube-proxy", f"--config={proxy_config}"),
            node.log("kube-proxy"), inside, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, (proxy_text, proxy_settings),
        )
    )  # fmt: skip


def stop_node(node: Node, supervisor: Supervisor) -> None:
    """End everything of a node: kubelet first so that it restarts nothing, then pods, runtime and namespace."""
    for program in ("kubelet", "kube-proxy"):
        supervisor.stop(node.component(program))
    cgroups.remove_group(node.group)
    supervisor.stop(node.component("containerd"))
    end_processes([p for p in owned_by(supervisor.root) if f"{node.root}/" in " ".join(command_line(p.pid))], grace=2)
    supervisor.stop(namespace.component(node.name), grace=2)
    cgroups.remove_group(node.group)


def _write(path: Path, text: str) -> str:
    if not path.exists() or path.read_text() != text:
        write_atomically(path, text, 0o644)
    return text
