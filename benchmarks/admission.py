"""How long `kubectl apply` waits for the webhooks: creates of pipelines in a full, large cluster.

    python -m benchmarks.admission [--admissions 500] [--pipelines 2000] [--nodes 1000] [--json FILE]

Starts a control plane of its own and fills it: nodes of eight H100 each with a pod that holds some of them, stored
pipelines in twenty namespaces, tenants with budgets. Then one webhook process, behind the
validating and the mutating configuration, is asked by server-side dry runs, one after the other: four of five pipelines
fit, the others are refused for a mistake, a budget, a device or the nodes.

Figures: p50_ms and p99_ms of the whole write as a client sees it, baseline_* of the same writes while nobody asks the
webhooks, fits_*/refused_* of the two kinds, cpu_ms (of the webhook process for one admission), rss_mb, rss_grown_mb
(after at least 2,000 creates more), ready_s (start to ready, with everything listed), cache_objects.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks._report import machine, report
from benchmarks.control_plane import Api, prepare
from benchmarks.control_plane import pipeline as example
from omni_cluster.control_plane import CONTROLLER_MANAGER, start
from omni_operator.kinds import NODE, PIPELINE, POD, TENANT

CONFIGURATION = "omni-bench"
NAMESPACES = [f"bench-{i}" for i in range(20)]
FULL = NAMESPACES[-1]  # of a tenant whose budget is used up
LABEL = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
_APPLY, _MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
NO_PROFILE = "!has(object.spec) || !has(object.spec.runtimeProfile)"  # pipelines that name one are not sent to /mutate
_KINDS = ("validatingwebhookconfigurations", "mutatingwebhookconfigurations")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--admissions", type=int, default=500)
    parser.add_argument("--pipelines", type=int, default=2000)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    described = machine()
    with tempfile.TemporaryDirectory() as folder, start("bench-admission", Path(folder) / "plane") as plane:
        # Nodes without kubelets would soon be called lost.
        plane.supervisor.stop(CONTROLLER_MANAGER, grace=3)
        api = Api.open(plane.kubeconfig_path)
        fill(api, given.nodes, given.pipelines)
        figures = measure(api, plane.kubeconfig_path, given.admissions, Path(folder) / "webhooks.log")
    report("admission", described, figures, given.json)
    return 0


def fill(api: Api, nodes: int, pipelines: int) -> None:
    prepare(api)
    for name in NAMESPACES:
        put(api, f"/api/v1/namespaces/{name}", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": name}}
        put(api, f"/api/v1/namespaces/{name}/serviceaccounts/default", account)
    for name, namespaces, count in (("large", NAMESPACES[:5], pipelines * 3), ("full", [FULL], 1)):
        budget = [{"class": "nvidia-h100-80gb", "count": count}]
        api.apply(
            TENANT, None, {"metadata": {"name": name}, "spec": {"namespaces": namespaces, "acceleratorBudget": budget}}
        )
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: add_node(api, i), range(nodes)))
        list(pool.map(lambda i: api.apply(PIPELINE, NAMESPACES[i % 20], stored(i)), range(pipelines)))


def put(api: Api, path: str, body: dict[str, Any]) -> None:
    api.call("PATCH", path, body, _APPLY, fieldManager="benchmark", force="true")


def add_node(api: Api, number: int) -> None:
    """Eight devices, of which a pod holds none to seven; no two neighbours are loaded alike."""
    name = f"gpu-{number:04}"
    amounts = {"cpu": "128", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": "8"}
    metadata = {"name": name, "labels": {**LABEL, "kubernetes.io/hostname": name}}
    api.apply(NODE, None, {"metadata": metadata})
    ready = {"type": "Ready", "status": "True", "reason": "Benchmark", "message": ""}
    status = {"status": {"allocatable": amounts, "capacity": amounts, "conditions": [ready]}}
    api.call("PATCH", f"/api/v1/nodes/{name}/status", status, _MERGE)
    # The API server taints every new node as not ready, and the controller that takes that away is stopped.
    api.call("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": []}}, _MERGE)
    used = {"nvidia.com/gpu": str(number % 8), "cpu": str(1 + number % 7), "memory": f"{1 + number % 5}Gi"}
    spec = {
        "nodeName": name,
        "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "c", "image": "localhost/busy:1", "resources": {"limits": used, "requests": used}}],
    }
    api.apply(POD, NAMESPACES[0], {"metadata": {"name": f"busy-{number}", "namespace": NAMESPACES[0]}, "spec": spec})


def stored(number: int) -> dict[str, Any]:
    body = example(number)
    return {"metadata": {"name": body["metadata"]["name"], "namespace": NAMESPACES[number % 20]}, "spec": body["spec"]}


@dataclass(frozen=True, slots=True)
class Asked:
    fits: bool
    body: dict[str, Any]


def questions(count: int) -> list[Asked]:
    """Four that fit, then one that does not, for another reason each time."""
    bad: Iterator[Callable[[dict[str, Any]], str]] = itertools.cycle(
        (_wrong_topology, _too_small_a_device, _larger_than_a_node, _too_many_replicas, _over_the_budget)
    )
    asked = []
    for number in range(count):
        body = example(number)
        namespace = NAMESPACES[number % 19]
        fits = number % 5 != 4
        if not fits:
            namespace = next(bad)(body["spec"]) or namespace
        asked.append(Asked(fits, {"metadata": {"name": f"new-{number}", "namespace": namespace}, "spec": body["spec"]}))
    return asked


def _wrong_topology(spec: dict[str, Any]) -> str:
    spec["topology"] = "qwen3_omni"
    return ""


def _too_small_a_device(spec: dict[str, Any]) -> str:
    spec["stages"][0]["accelerator"]["memoryFraction"] = "0.2"
    return ""


def _larger_than_a_node(spec: dict[str, Any]) -> str:
    del spec["budget"]
    spec["stages"][0] |= {"accelerator": {"class": "nvidia-h100-80gb", "count": 16}, "parallelism": {"tensor": 16}}
    return ""


def _too_many_replicas(spec: dict[str, Any]) -> str:
    """More than all nodes have, wherever they are."""
    del spec["stages"][0]["scaling"], spec["budget"]
    spec["stages"][0] |= {"accelerator": {"class": "nvidia-h100-80gb", "count": 8}, "parallelism": {"tensor": 8}}
    spec["stages"][0]["replicas"] = 1000
    return NAMESPACES[10]  # no tenant's


def _over_the_budget(spec: dict[str, Any]) -> str:
    return FULL


def measure(api: Api, kubeconfig: Path, count: int, log: Path) -> dict[str, float]:
    asked = questions(count)
    baseline = sorted(ask(api, one)[-1] for one in asked)
    with webhooks(kubeconfig, log) as (process, ports, started):
        install(api, ports["https"])
        _wait(lambda: _ready(ports["http"]), "the webhooks are ready", 600)
        ready_s = time.monotonic() - started
        for one in asked[:20]:
            ask(api, one)  # the configuration has reached the API server, and both are warm
        before = _cpu_seconds(process.pid)
        answers = [(one, *ask(api, one)) for one in asked]
        cpu = _cpu_seconds(process.pid) - before
        wrong = [(one.body["metadata"], said) for one, refused, said, _ in answers if refused == one.fits]
        if wrong:
            raise SystemExit(f"verdicts that should be otherwise: {wrong[:3]}")
        objects = _gauges(ports["http"], "omni_webhooks_cache_objects")
        rss = _rss_mb(process.pid)
        for one in asked * max(1, 2000 // count):
            ask(api, one)
        grown = _rss_mb(process.pid) - rss
    every = sorted(ms for *_, ms in answers)
    fits = sorted(ms for one, *_, ms in answers if one.fits)
    refused = sorted(ms for one, *_, ms in answers if not one.fits)
    return {
        "admissions": count,
        "p50_ms": quantile(every, 0.5),
        "p99_ms": quantile(every, 0.99),
        "fits_p50_ms": quantile(fits, 0.5),
        "fits_p99_ms": quantile(fits, 0.99),
        "refused_p50_ms": quantile(refused, 0.5),
        "refused_p99_ms": quantile(refused, 0.99),
        "baseline_p50_ms": quantile(baseline, 0.5),
        "baseline_p99_ms": quantile(baseline, 0.99),
        "cpu_ms": cpu / count * 1000,
        "rss_mb": rss,
        "rss_grown_mb": grown,
        "ready_s": ready_s,
        "cache_objects": objects,
    }


def ask(api: Api, one: Asked) -> tuple[bool, str, float]:
    """(refused, why or what was warned of, milliseconds) of a create that stores nothing."""
    body = json.dumps({"apiVersion": PIPELINE.api_version, "kind": PIPELINE.kind, **one.body})
    path = PIPELINE.path(one.body["metadata"]["namespace"])
    started = time.perf_counter()
    answer = api.http.post(path, content=body, params={"dryRun": "All"}, headers={"content-type": "application/json"})
    milliseconds = (time.perf_counter() - started) * 1000
    refused = answer.status_code >= 300
    return refused, answer.text[:500] if refused else "; ".join(answer.headers.get_list("warning")), milliseconds


def install(api: Api, port: int) -> None:
    """Validating and mutating, as the chart has them, with an address instead of a Service."""
    rules = [
        {
            "apiGroups": [PIPELINE.group],
            "apiVersions": [PIPELINE.version],
            "resources": [PIPELINE.plural],
            "operations": ["CREATE"],
        }
    ]
    for plural, path in zip(_KINDS, ("validate", "mutate"), strict=True):
        kind = "ValidatingWebhookConfiguration" if path == "validate" else "MutatingWebhookConfiguration"
        webhook = {
            "name": "pipelines.webhooks.serving.omni.dev",
            "clientConfig": {"url": f"https://127.0.0.1:{port}/{path}"},
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "timeoutSeconds": 5,
            "failurePolicy": "Fail",
            "rules": rules,
        }
        if path == "mutate":
            webhook["matchConditions"] = [{"name": "names-no-profile", "expression": NO_PROFILE}]
        body = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": CONFIGURATION}}
        put(api, f"/apis/admissionregistration.k8s.io/v1/{plural}/{CONFIGURATION}", {**body, "webhooks": [webhook]})


@contextmanager
def webhooks(kubeconfig: Path, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, int], float]]:
    ports = {name: _free_port() for name in ("https", "http")}
    command = [sys.executable, "-m", "omni_webhooks", "--host", "127.0.0.1", "--hostname", "127.0.0.1"]
    command += ["--port", str(ports["https"]), "--http-port", str(ports["http"]), "--drain-seconds", "0"]
    command += ["--configuration", CONFIGURATION, "--namespace", "default", "--poll-seconds", "1"]
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            yield process, ports, time.monotonic()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def _gauges(port: int, name: str) -> float:
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _wait(check: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not in {seconds} s")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
