"""etcd, API server and controllers as plain processes: a whole cluster's, or alone for tests.

`start()` serves tests that need a real API server and no nodes; several may run at once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from omni_cluster import pki
from omni_cluster.build import HYPER, ensure_tool
from omni_cluster.errors import StepFailed
from omni_cluster.kubeconfig import write_kubeconfig
from omni_cluster.pki import KeyPair, Subject
from omni_cluster.probe import HttpProbe, free_ports, port_is_free, wait_until
from omni_cluster.processes import ProcessSpec, Supervisor, write_atomically
from omni_cluster.progress import step

ETCD, APISERVER, CONTROLLER_MANAGER, SCHEDULER = "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"
STOP_ORDER = (SCHEDULER, CONTROLLER_MANAGER, APISERVER, ETCD)
_LOOPBACK = "127.0.0.1"
_START_SECONDS = 90


@dataclass(frozen=True, slots=True)
class Ports:
    """TCP ports on this machine."""

    etcd: int
    etcd_peer: int
    apiserver: int
    controller_manager: int
    scheduler: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What sets one control plane apart from another."""

    name: str
    root: Path
    service_cidr: str = "10.96.0.0/16"
    service_ip: str = "10.96.0.1"
    pod_cidr: str = "10.244.0.0/16"
    advertise: str | None = None
    """Address at which nodes reach the API server; None when there are no nodes (loopback only)."""

    @property
    def with_nodes(self) -> bool:
        return self.advertise is not None

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the administrator."""
        return self.root / "kubeconfig"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Every certificate that the control plane uses."""

    ca: KeyPair
    etcd_ca: KeyPair
    front_ca: KeyPair
    etcd: KeyPair
    etcd_client: KeyPair
    apiserver: KeyPair
    kubelet_client: KeyPair
    front_proxy: KeyPair
    admin: KeyPair
    controller_manager: KeyPair
    scheduler: KeyPair
    tokens: KeyPair


def ensure_credentials(layout: Layout) -> Credentials:
    """Make what is missing or about to expire."""
    folder = layout.root / "pki"
    ca, etcd_ca, front_ca = (pki.ensure_authority(folder, name) for name in ("ca", "etcd-ca", "front-proxy-ca"))
    hosts = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    hosts += ["kubernetes.default.svc.cluster.local", _LOOPBACK, layout.service_ip]
    hosts += [layout.advertise] if layout.advertise else []

    def client(file_name: str, user: str, *groups: str, authority: KeyPair = ca) -> KeyPair:
        return pki.ensure_certificate(folder, file_name, authority, Subject(user, groups))

    return Credentials(
        ca=ca, etcd_ca=etcd_ca, front_ca=front_ca,
        etcd=pki.ensure_certificate(folder, "etcd", etcd_ca, Subject("etcd", hosts=("localhost", _LOOPBACK))),
        etcd_client=client("etcd-client", "kube-apiserver", authority=etcd_ca),
        apiserver=pki.ensure_certificate(folder, "apiserver", ca, Subject("kube-apiserver", hosts=tuple(hosts))),
        kubelet_client=client("kubelet-client", "kube-apiserver-kubelet-client", "system:masters"),
        front_proxy=client("front-proxy", "front-proxy-client", authority=front_ca),
        admin=client("admin", "kubernetes-admin", "system:masters"),
        controller_manager=client("controller-manager", "system:kube-controller-manager"),
        scheduler=client("scheduler", "system:kube-scheduler"),
        tokens=pki.ensure_token_key(folder),
    )  # fmt: skip


def build_etcd(layout: Layout, ports: Ports, creds: Credentials, hyper: Path) -> ProcessSpec:
    """etcd, reachable with a certificate only: whoever reads etcd reads every Secret."""
    client, peer = f"https://{_LOOPBACK}:{ports.etcd}", f"https://{_LOOPBACK}:{ports.etcd_peer}"
    tls = [
        flag
        for prefix in ("", "peer-")
        for flag in (
            f"--{prefix}cert-file={creds.etcd.cert}", f"--{prefix}key-file={creds.etcd.key}",
            f"--{prefix}trusted-ca-file={creds.etcd_ca.cert}", f"--{prefix}client-cert-auth=true",
        )
    ]  # fmt: skip
    argv = (
        str(hyper), "etcd", f"--data-dir={layout.root / 'etcd'}", "--name=local",
        f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=local={peer}",
        "--unsafe-no-fsync", "--logger=zap", "--log-level=warn", *tls,
    )  # fmt: skip
    return ProcessSpec(ETCD, argv, layout.root / "logs" / "etcd.log")


def build_apiserver(layout: Layout, ports: Ports, creds: Credentials, hyper: Path) -> ProcessSpec:
    """The API server. Without nodes it listens on loopback only."""
    argv = [
        str(hyper), "kube-apiserver",
        f"--etcd-servers=https://{_LOOPBACK}:{ports.etcd}", f"--etcd-cafile={creds.etcd_ca.cert}",
        f"--etcd-certfile={creds.etcd_client.cert}", f"--etcd-keyfile={creds.etcd_client.key}",
        f"--service-cluster-ip-range={layout.service_cidr}",
        f"--tls-cert-file={creds.apiserver.cert}", f"--tls-private-key-file={creds.apiserver.key}",
        f"--client-ca-file={creds.ca.cert}", "--anonymous-auth=false",
        f"--service-account-key-file={creds.tokens.cert}", f"--service-account-signing-key-file={creds.tokens.key}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        "--authorization-mode=Node,RBAC", f"--secure-port={ports.apiserver}", "--allow-privileged=true",
        f"--requestheader-client-ca-file={creds.front_ca.cert}", "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-", "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={creds.front_proxy.cert}", f"--proxy-client-key-file={creds.front_proxy.key}",
        f"--cert-dir={layout.root / 'pki' / 'generated'}", "--profiling=false",
    ]  # fmt: skip
    if layout.advertise is None:
        argv += [f"--bind-address={_LOOPBACK}", f"--advertise-address={_LOOPBACK}", "--endpoint-reconciler-type=none"]
    else:
        argv += [
            "--bind-address=0.0.0.0", f"--advertise-address={layout.advertise}",
            # exec and logs go to the address of the node, which has no DNS name.
            "--kubelet-preferred-address-types=InternalIP", f"--kubelet-certificate-authority={creds.ca.cert}",
            f"--kubelet-client-certificate={creds.kubelet_client.cert}",
            f"--kubelet-client-key={creds.kubelet_client.key}",
            # Pods that ask for nvidia.com/gpu tolerate the taint of that name, as on managed GPU node pools.
            "--enable-admission-plugins=NodeRestriction,ExtendedResourceToleration",
        ]  # fmt: skip
    return ProcessSpec(APISERVER, tuple(argv), layout.root / "logs" / "kube-apiserver.log", inputs=_contents(creds))


def build_controller_manager(layout: Layout, ports: Ports, creds: Credentials, hyper: Path) -> ProcessSpec:
    """All default controllers: garbage collection, namespaces, service accounts, workloads, endpoints."""
    kubeconfig, text = _component_kubeconfig(layout, ports, creds, CONTROLLER_MANAGER, creds.controller_manager)
    argv = (
        str(hyper), "kube-controller-manager", f"--kubeconfig={kubeconfig}",
        f"--service-account-private-key-file={creds.tokens.key}", f"--root-ca-file={creds.ca.cert}",
        f"--cluster-signing-cert-file={creds.ca.cert}", f"--cluster-signing-key-file={creds.ca.key}",
        "--use-service-account-credentials=true", "--leader-elect=false", "--allocate-node-cidrs=false",
        f"--cluster-cidr={layout.pod_cidr}", f"--bind-address={_LOOPBACK}",
        f"--secure-port={ports.controller_manager}", f"--cert-dir={layout.root / 'pki' / 'generated'}",
        "--profiling=false",
        # The default of 20 requests a second makes the start of all controllers take five seconds longer.
        "--kube-api-qps=500", "--kube-api-burst=1000",
    )  # fmt: skip
    log = layout.root / "logs" / f"{CONTROLLER_MANAGER}.log"
    return ProcessSpec(CONTROLLER_MANAGER, argv, log, inputs=(text,))


def build_scheduler(layout: Layout, ports: Ports, creds: Credentials, hyper: Path) -> ProcessSpec:
    """The default scheduler."""
    kubeconfig, text = _component_kubeconfig(layout, ports, creds, SCHEDULER, creds.scheduler)
    argv = (
        str(hyper), "kube-scheduler", f"--kubeconfig={kubeconfig}", "--leader-elect=false",
        f"--bind-address={_LOOPBACK}", f"--secure-port={ports.scheduler}",
        f"--cert-dir={layout.root / 'pki' / 'generated'}", "--profiling=false",
    )  # fmt: skip
    return ProcessSpec(SCHEDULER, argv, layout.root / "logs" / f"{SCHEDULER}.log", inputs=(text,))


def probes(layout: Layout, ports: Ports) -> dict[str, HttpProbe]:
    """How to ask each component whether it is well."""
    folder = layout.root / "pki"
    found = {
        ETCD: HttpProbe(_LOOPBACK, ports.etcd, "/health", True, folder / "etcd-ca.crt", folder / "etcd-client.crt",
                        folder / "etcd-client.key"),
        APISERVER: api_probe(layout, ports, "/readyz"),
        CONTROLLER_MANAGER: HttpProbe(_LOOPBACK, ports.controller_manager, "/healthz", True),
    }  # fmt: skip
    if layout.with_nodes:
        found[SCHEDULER] = HttpProbe(_LOOPBACK, ports.scheduler, "/healthz", True)
    return found


def api_probe(layout: Layout, ports: Ports, path: str) -> HttpProbe:
    """A GET on the API as administrator."""
    folder = layout.root / "pki"
    return HttpProbe(
        _LOOPBACK, ports.apiserver, path, True, folder / "ca.crt", folder / "admin.crt", folder / "admin.key"
    )


def ensure_ports(layout: Layout, supervisor: Supervisor) -> Ports:
    """The ports of the last start while they can be had, so that kubeconfigs stay valid; else new ones."""
    path = layout.root / "ports.json"
    try:
        ports = Ports(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        ports = None
    if ports is not None:
        pairs = ((ETCD, ports.etcd), (APISERVER, ports.apiserver), (CONTROLLER_MANAGER, ports.controller_manager))
        if all(supervisor.alive(component) or port_is_free(port) for component, port in pairs):
            return ports
    ports = Ports(*free_ports(5))
    write_atomically(path, json.dumps(asdict(ports)))
    return ports


def read_ports(layout: Layout) -> Ports | None:
    """The recorded ports, or None before the first start."""
    try:
        return Ports(**json.loads((layout.root / "ports.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def ensure_control_plane(layout: Layout, supervisor: Supervisor, hyper: Path) -> Ports:
    """Bring the control plane up, or leave it alone where it already runs as wanted."""
    layout.root.mkdir(parents=True, exist_ok=True)
    creds = ensure_credentials(layout)
    ports = ensure_ports(layout, supervisor)
    checks = probes(layout, ports)
    with step("control plane ready") as waiting_for:
        supervisor.ensure(build_etcd(layout, ports, creds, hyper))
        supervisor.ensure(build_apiserver(layout, ports, creds, hyper))
        _wait(supervisor, APISERVER, checks[APISERVER], waiting_for)
        supervisor.ensure(build_controller_manager(layout, ports, creds, hyper))
        if layout.with_nodes:
            supervisor.ensure(build_scheduler(layout, ports, creds, hyper))
        for component in checks:
            _wait(supervisor, component, checks[component], waiting_for)
        # Pods are refused until the controllers have made this account, so "up" means that it exists.
        _wait(
            supervisor,
            CONTROLLER_MANAGER,
            api_probe(layout, ports, "/api/v1/namespaces/default/serviceaccounts/default"),
            waiting_for,
        )
    server = f"https://{_LOOPBACK}:{ports.apiserver}"
    write_kubeconfig(layout.kubeconfig, f"omni-{layout.name}", server, creds.ca.cert, creds.admin)
    return ports


@dataclass(slots=True)
class ControlPlane:
    """A running control plane of a test. `stop()` ends its processes and removes its folder's contents."""

    layout: Layout
    ports: Ports
    supervisor: Supervisor

    @property
    def kubeconfig_path(self) -> Path:
        """Kubeconfig of an administrator."""
        return self.layout.kubeconfig

    @property
    def server(self) -> str:
        """Base URL of the API."""
        return f"https://{_LOOPBACK}:{self.ports.apiserver}"

    def log(self, component: str) -> Path:
        """Log of etcd, kube-apiserver or kube-controller-manager."""
        return self.layout.root / "logs" / f"{component}.log"

    def stop(self) -> None:
        """End every process and delete the data; logs stay for whoever looks at a failed test."""
        self.supervisor.stop_all(STOP_ORDER, grace=3)
        for name in ("etcd", "pki", "run", "conf"):
            shutil.rmtree(self.layout.root / name, ignore_errors=True)
        for file in ("ports.json", "kubeconfig"):
            (self.layout.root / file).unlink(missing_ok=True)

    def __enter__(self) -> ControlPlane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start(name: str, root: Path) -> ControlPlane:
    """Start a control plane in `root` (made if missing) on free ports; about 5 s. Ends with the calling process.

    Raises StepFailed or DeadlineExceeded with the end of the log that explains it.
    """
    layout = Layout(name, root.absolute())
    supervisor = Supervisor(layout.root, die_with_parent=True)
    hyper = ensure_tool(HYPER)
    for last in (False, False, True):
        try:
            return ControlPlane(layout, ensure_control_plane(layout, supervisor, hyper), supervisor)
        except StepFailed as error:
            # Between choosing a port and binding it somebody else may take it; anything else is final.
            supervisor.stop_all(STOP_ORDER, grace=1)
            if last or "address already in use" not in str(error):
                raise
            (layout.root / "ports.json").unlink(missing_ok=True)
        except BaseException:
            supervisor.stop_all(STOP_ORDER, grace=1)
            raise
    raise AssertionError("unreachable")


@contextmanager
def running(name: str, root: Path) -> Iterator[ControlPlane]:
    """`with running("t", tmp_path) as plane:`"""
    with start(name, root) as plane:
        yield plane


def _wait(supervisor: Supervisor, component: str, probe: HttpProbe, show: object) -> None:
    record = supervisor.record(component)
    log = record.log if record else None

    def problem() -> str | None:
        for needed in dict.fromkeys((ETCD, component)):
            supervisor.require_alive(needed)
        found = probe.problem()
        return None if found is None else f"{component}: {found}"

    wait_until(f"{component} answers", problem, seconds=_START_SECONDS, log=log, show=show if callable(show) else None)


def _component_kubeconfig(
    layout: Layout, ports: Ports, creds: Credentials, component: str, client: KeyPair
) -> tuple[Path, str]:
    path = layout.root / "conf" / f"{component}.kubeconfig"
    server = f"https://{_LOOPBACK}:{ports.apiserver}"
    return path, write_kubeconfig(path, component, server, creds.ca.cert, client)


def _contents(creds: Credentials) -> tuple[str, ...]:
    return (creds.apiserver.cert.read_text(), creds.ca.cert.read_text())
