"""How fast the operator is, and how quiet: N qwen3-omni pipelines on simulated GPU nodes.

    python -m benchmarks.control_plane [--pipelines 50] [--json FILE] [--kubeconfig FILE]

Without --kubeconfig it starts a control plane of its own with a scheduler and KWOK nodes, and removes it afterwards.
With one, that cluster must have the CRDs and nodes (real or KWOK) with nvidia.com/gpu for N x 3 devices.

Figures: ready_s (first apply to last Ready), reconciles_per_s (in that time), event_to_status_p50_s and _p99_s (a change
of a stage's replicas to the status that has seen it), rss_mb (of the operator, with all pipelines), writes_per_pipeline
(mutating requests until Ready), steady_writes (in twenty idle resyncs of all pipelines; 0 is the only good number).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import kopf
import yaml

from omni_cluster.build import HYPER, KWOK, ensure_tool
from omni_cluster.control_plane import STOP_ORDER, Layout, ensure_control_plane
from omni_cluster.kubectl import Kubectl
from omni_cluster.kwok import COMPONENT, ensure_kwok
from omni_cluster.network import ClusterNetwork
from omni_cluster.processes import Supervisor
from omni_crds.crd import build_crds
from omni_operator.kinds import PIPELINE, PROFILE, STAGE, Kind

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = "omni-bench"
PROFILE_NAME = "omni-bench"
DEADLINE_SECONDS = 900.0
DEVICES_PER_PIPELINE = 4  # three at rest, one more while the talker is scaled
IDLE_RESYNCS = 20


@dataclass(frozen=True, slots=True)
class Api:
    """A small synchronous client of the benchmark's own."""

    http: httpx.Client

    @classmethod
    def open(cls, kubeconfig: Path) -> Api:
        os.environ["KUBECONFIG"] = str(kubeconfig)
        info = kopf.login_with_kubeconfig(settings=kopf.OperatorSettings())
        if info is None:
            raise SystemExit(f"{kubeconfig} holds no credentials")
        headers = info.as_http_headers()
        return cls(httpx.Client(base_url=info.server, verify=info.as_ssl_context(), headers=headers, timeout=60))

    def call(self, method: str, path: str, body: Any = None, content: str = "application/json", **query: str) -> Any:
        data = None if body is None else json.dumps(body)
        answer = self.http.request(method, path, content=data, params=query, headers={"content-type": content})
        if answer.status_code >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        return answer.json()

    def apply(self, kind: Kind, namespace: str | None, body: dict[str, Any]) -> None:
        path = kind.path(namespace, body["metadata"]["name"])
        query = {"fieldManager": "benchmark", "force": "true"}
        self.call("PATCH", path, {"apiVersion": kind.api_version, "kind": kind.kind, **body}, _APPLY, **query)


_APPLY, _MERGE = "application/apply-patch+yaml", "application/merge-patch+json"


@contextmanager
def own_cluster(root: Path, nodes: int) -> Iterator[Path]:
    """etcd, API server, controllers, scheduler and `nodes` KWOK nodes of 8 GPUs; yields the kubeconfig."""
    layout = Layout("bench", root, advertise=_own_address())
    supervisor = Supervisor(root, die_with_parent=True)
    hyper = ensure_tool(HYPER)
    try:
        ports = ensure_control_plane(layout, supervisor, hyper)
        kubectl = Kubectl(hyper, layout.kubeconfig)
        texts = (f"nvidia.com/gpu={nodes}x8",)
        ensure_kwok(texts, layout, ports, ClusterNetwork(9), supervisor, kubectl, ensure_tool(KWOK))
        yield layout.kubeconfig
    finally:
        supervisor.stop_all((COMPONENT, *STOP_ORDER), grace=3)


def _own_address() -> str:
    """An address of this machine that is not loopback: the API server refuses to advertise that one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


def prepare(api: Api) -> None:
    for crd in build_crds():
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}"
        api.call("PATCH", path, crd, _APPLY, fieldManager="benchmark", force="true")
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    api.call("PATCH", f"/api/v1/namespaces/{NAMESPACE}", namespace, _APPLY, fieldManager="benchmark", force="true")
    _wait(lambda: _served(api), "the CRDs are served", 60)
    gpu = {
        "name": "nvidia-h100-80gb",
        "resourceName": "nvidia.com/gpu",
        "memory": "80Gi",
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    }
    profile = {
        "vendor": "nvidia",
        "images": {"runtime": "localhost/omni-cuda:benchmark"},
        "deviceClasses": [gpu],
        "scheduling": {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]},
    }
    api.apply(PROFILE, None, {"metadata": {"name": PROFILE_NAME}, "spec": profile})


def pipeline(number: int) -> dict[str, Any]:
    """The 30B example, as many times as asked for."""
    body: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "qwen3-omni.pipeline.yaml").read_text())
    spec = body["spec"] | {"runtimeProfile": PROFILE_NAME}
    return {"metadata": {"name": f"qwen3-omni-{number}", "namespace": NAMESPACE}, "spec": spec}


@contextmanager
def operator(log: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The operator as a process of its own; yields it and the address of its metrics."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "omni_operator", "--namespace", NAMESPACE, "--lease-namespace", NAMESPACE]
    command += ["--http-host", "127.0.0.1", "--http-port", str(port), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            yield process, f"http://127.0.0.1:{port}/metrics"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


@dataclass(frozen=True, slots=True)
class Counters:
    reconciles: float
    writes: float  # the Lease is not counted: it is renewed whether or not there is work

    @classmethod
    def read(cls, address: str) -> Counters:
        reconciles = writes = 0.0
        for line in httpx.get(address, timeout=10).text.splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("omni_operator_reconciles_total"):
                reconciles += float(value)
            elif name.startswith("omni_operator_api_writes_total") and 'resource="leases"' not in name:
                writes += float(value)
        return cls(reconciles, writes)


def measure(api: Api, count: int, log: Path) -> dict[str, float]:
    figures: dict[str, float] = {"pipelines": count}
    with operator(log, "--workers", "16") as (process, address):
        _wait(lambda: _leads(address), "the operator leads", 300)
        started = time.monotonic()
        for number in range(count):
            api.apply(PIPELINE, NAMESPACE, pipeline(number))
        _wait(lambda: _ready(api) == count, lambda: f"{count} pipelines Ready, {_ready(api)} are", DEADLINE_SECONDS)
        figures["ready_s"] = time.monotonic() - started
        at_ready = Counters.read(address)
        figures["reconciles_per_s"] = at_ready.reconciles / figures["ready_s"]
        figures["writes_per_pipeline"] = at_ready.writes / count
        _quiet(address)
        delays = sorted(_event_to_status(api, number, replicas) for replicas in (2, 1) for number in range(count))
        figures["event_to_status_p50_s"] = statistics.median(delays)
        figures["event_to_status_p99_s"] = delays[min(len(delays) - 1, int(0.99 * len(delays)))]
        figures["rss_mb"] = _rss_mb(process.pid)
        _wait(lambda: _ready(api) == count, "all Ready again", DEADLINE_SECONDS)
        _quiet(address)
    with operator(log, "--workers", "16", "--resync-seconds", "3") as (_, address):
        _wait(lambda: _leads(address), "the operator leads again", 300)
        # The first pass after a start tries every CURVE Secret once; what follows must be silent.
        _wait(lambda: Counters.read(address).reconciles >= 2 * count, "the first pass", DEADLINE_SECONDS)
        _quiet(address)
        before = Counters.read(address)
        _wait(
            lambda: Counters.read(address).reconciles >= before.reconciles + IDLE_RESYNCS * count,
            "twenty resyncs",
            DEADLINE_SECONDS,
        )
        figures["steady_writes"] = Counters.read(address).writes - before.writes
    return figures


def _event_to_status(api: Api, number: int, replicas: int) -> float:
    """Seconds from a write of spec.replicas to the status whose observedGeneration has seen it."""
    path = STAGE.path(NAMESPACE, f"qwen3-omni-{number}-talker")
    started = time.monotonic()
    generation = api.call("PATCH", path, {"spec": {"replicas": replicas}}, _MERGE)["metadata"]["generation"]
    _wait(
        lambda: api.call("GET", path).get("status", {}).get("observedGeneration", 0) >= generation,
        f"{path} seen",
        120,
        0.005,
    )
    return time.monotonic() - started


def _ready(api: Api) -> int:
    items = api.call("GET", PIPELINE.path(NAMESPACE))["items"]
    conditions = [{c["type"]: c["status"] for c in i.get("status", {}).get("conditions", [])} for i in items]
    return sum(1 for c in conditions if c.get("Ready") == "True")


def _served(api: Api) -> bool:
    try:
        api.call("GET", PIPELINE.path(NAMESPACE))
        api.call("GET", PROFILE.path(None))
    except RuntimeError:
        return False
    return True


def _leads(address: str) -> bool:
    try:
        return "omni_operator_leader 1.0" in httpx.get(address, timeout=5).text
    except httpx.HTTPError:
        return False


def _quiet(address: str) -> None:
    """Wait until two looks, two seconds apart, see no further write."""
    seen = -1.0

    def still() -> bool:
        nonlocal seen
        now = Counters.read(address).writes
        same, seen = now == seen, now
        return same

    _wait(still, "the operator rests", DEADLINE_SECONDS, 2.0)


def _rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def _wait(check: Any, what: Any, seconds: float, pause: float = 0.5) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what() if callable(what) else what}: not within {seconds:.0f} s")
        time.sleep(pause)


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return {
        "cpus": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_before": round(load, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane", description=__doc__.split("\n")[0])
    parser.add_argument("--pipelines", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--kubeconfig", type=Path, help="use this cluster instead of one of our own")
    options = parser.parse_args()
    described = machine()
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as folder:
        log = Path(folder) / "operator.log"
        nodes = -(-options.pipelines * DEVICES_PER_PIPELINE // 8) + 2
        try:
            if options.kubeconfig:
                figures = _run(options.kubeconfig, options.pipelines, log)
            else:
                with own_cluster(Path(folder) / "cluster", nodes) as kubeconfig:
                    figures = _run(kubeconfig, options.pipelines, log)
        except BaseException:
            if log.exists():
                print("\n".join(log.read_text(errors="replace").splitlines()[-20:]), file=sys.stderr)
            raise
    print(f"\n{'figure':<24}{'value':>12}")
    for name, value in figures.items():
        print(f"{name:<24}{value:>12.3f}")
    if options.json:
        result = {"benchmark": "control_plane", "machine": described, "figures": figures}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _run(kubeconfig: Path, count: int, log: Path) -> dict[str, float]:
    api = Api.open(kubeconfig)
    prepare(api)
    try:
        return measure(api, count, log)
    finally:
        api.call("DELETE", f"/api/v1/namespaces/{NAMESPACE}")
        api.call("DELETE", PROFILE.path(None, PROFILE_NAME))


if __name__ == "__main__":
    sys.exit(main())
