"""kubectl, helm and this project's own commands, as the demo and the end-to-end tests use them.

Thin subprocess wrappers: what they run is what a user would type. Waits have deadlines and say what was missing.
"""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from omni_runtime.errors import DeadlineExceeded, OmniError

REPOSITORY = Path(__file__).resolve().parents[3]
SYSTEM_NAMESPACE = "omni-system"

console = Console(highlight=False, soft_wrap=True)


class StepFailed(OmniError):
    """A command ended with an error; its output is above."""

    code = "StepFailed"


def run(*command: str, quiet: bool = False, environment: dict[str, str] | None = None) -> str:
    """Run one command of the demo; its output goes to the terminal unless `quiet`, then it is returned."""
    shown = [Path(command[0]).name, *command[1:]]
    if not quiet:
        console.print(f"[dim]    $ {shlex.join(shown)}[/]")
    result = subprocess.run(
        command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE if quiet else None, env=environment, check=False
    )
    if result.returncode != 0:
        raise StepFailed(f"{shlex.join(shown)} ended with status {result.returncode}")
    return result.stdout or ""


def omni(*arguments: str, quiet: bool = False, environment: dict[str, str] | None = None) -> str:
    return run(sys.executable, "-m", "omni_runtime.cli", *arguments, quiet=quiet, environment=environment)


@dataclass(frozen=True, slots=True)
class Kube:
    """kubectl and helm bound to one kubeconfig."""

    kubectl: str
    helm: str
    environment: dict[str, str]

    def show(self, *arguments: str) -> None:
        run(self.kubectl, *arguments, environment=self.environment)

    def read(self, *arguments: str) -> str:
        return run(self.kubectl, *arguments, quiet=True, environment=self.environment)

    def omni(self, *arguments: str) -> str:
        """One of our own commands that asks this cluster, whatever cluster kubectl means by itself."""
        return omni(*arguments, "--kubectl", self.kubectl, quiet=True, environment=self.environment)

    def get(self, *arguments: str) -> dict[str, Any]:
        value = json.loads(self.read("get", *arguments, "-o", "json"))
        assert isinstance(value, dict)
        return value


def progress_line(pipeline: dict[str, Any]) -> str:
    """One line that says what Ready waits for: the Ready condition and each stage's count."""
    status = pipeline.get("status") or {}
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    ready = conditions.get("Ready") or {}
    stages = ", ".join(
        f"{s['name']} {s.get('readyReplicas', 0)}/{s.get('desiredReplicas', 0)}" for s in status.get("stages") or []
    )
    return f"Ready={ready.get('status', 'Unknown')} {ready.get('reason', '')}: {ready.get('message', 'not seen by the operator yet')} [{stages}]"


def is_ready(pipeline: dict[str, Any]) -> bool:
    """Ready=True for the generation that is stored now, so that an old True cannot pass for a new one."""
    status = pipeline.get("status") or {}
    if status.get("observedGeneration") != pipeline["metadata"].get("generation"):
        return False
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or [])


def wait_ready(read: Callable[[], dict[str, Any]], seconds: float, *, pause: float = 1.0) -> None:
    """Wait until the pipeline is Ready, printing each change of what it waits for. Raises DeadlineExceeded."""
    deadline = time.monotonic() + seconds
    shown = ""
    while True:
        pipeline = read()
        line = progress_line(pipeline)
        if line != shown:
            console.print(f"    {line}")
            shown = line
        if is_ready(pipeline):
            return
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{pipeline['metadata']['name']} is not Ready after {seconds:.0f} s; last seen: {line}"
            )
        time.sleep(pause)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


@contextmanager
def port_forward(kube: Kube, namespace: str, service: str, port: int = 80) -> Iterator[str]:
    """A kubectl port-forward on a free local port, as a URL; ended with the block."""
    local = _free_port()
    command = [kube.kubectl, "-n", namespace, "port-forward", f"service/{service}", f"{local}:{port}"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=kube.environment)
        try:
            deadline = time.monotonic() + 30
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", local)) == 0:
                        break
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise StepFailed(f"port-forward to service {service} did not open: {log.read().strip()}")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{local}"
        finally:
            process.terminate()
            process.wait(timeout=10)


def tools(environment: dict[str, str]) -> Kube:
    """kubectl and helm that `omni cluster` built, else those on PATH. Raises StepFailed if one is nowhere."""
    from omni_cluster.paths import current_bin_dir

    def find(name: str) -> str:
        built = current_bin_dir() / name
        found = str(built) if built.exists() else shutil.which(name)
        if found is None:
            raise StepFailed(f"{name} is neither in {current_bin_dir()} nor on PATH; install it, or use provider local")
        return found

    return Kube(kubectl=find("kubectl"), helm=find("helm"), environment=environment)


def install_operator(kube: Kube) -> None:
    values = omni("image", "values", quiet=True)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(values)
        file.flush()
        command = [kube.helm, "upgrade", "--install", "omni-operator", "charts/omni-operator"]
        command += ["--namespace", SYSTEM_NAMESPACE, "--create-namespace", "--values", file.name]
        run(*command, "--wait", "--timeout", "180s", environment=kube.environment)
