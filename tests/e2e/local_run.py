"""`omni run` as a child process of a test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
SMOL_OMNI = ROOT / "examples" / "smol-omni.pipeline.yaml"


def wait_for(check: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.2)


class LocalRun:
    """One `omni run` and what it prints. Use as a context manager: it is ready inside, and gone afterwards."""

    def __init__(self, folder: Path, pipeline: Path, *options: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.output = folder / "output"
        command = [sys.executable, "-m", "omni_runtime.cli", "run", "-f", str(pipeline), "--port", str(port), *options]
        self.process = subprocess.Popen(
            [*command, "--logs", str(folder / "logs")],
            cwd=ROOT,
            stdout=self.output.open("wb"),
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p), "PYTHONUNBUFFERED": "1"},
        )

    def __enter__(self) -> LocalRun:
        try:
            wait_for(lambda: self.printed("ready: http"), 600, "readiness")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)

    def printed(self, text: str) -> bool:
        assert self.process.poll() is None or "stopped" in text, self.output.read_text()
        return text in self.output.read_text()

    def children(self) -> dict[int, str]:
        """pid -> command line."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                    if parent == self.process.pid:
                        found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
                except OSError:
                    continue
        return found

    def ready(self, process: str) -> list[int]:
        """pids of the processes of that name that say that they are ready."""
        found = []
        for pid, command in self.children().items():
            if self.mark_of(process) in command:
                try:
                    if httpx.get(f"http://127.0.0.1:{_http_port(command)}/ready", timeout=10).status_code == 200:
                        found.append(pid)
                except httpx.HTTPError:  # it has not come so far
                    continue
        return found

    def metric(self, process: str, family: str) -> list[float]:
        """A gauge or counter of each process of that name (entry, connector, or a stage), summed over its series."""
        found = []
        for command in self.children().values():
            if self.mark_of(process) in command:
                text = httpx.get(f"http://127.0.0.1:{_http_port(command)}/metrics", timeout=10).text
                series = (s for f in text_string_to_metric_families(text) for s in f.samples)
                found.append(sum(s.value for s in series if s.name == family))
        assert found, f"no process {process}"
        return found

    @staticmethod
    def mark_of(process: str) -> str:
        """What stands in the command line of entry, connector, or a stage's replicas, and in no other."""
        modules = {"entry": "omni_runtime.entry", "connector": "omni_runtime.connectors.sidecar"}
        return modules.get(process, f"--stage {process} ")

    def missing(self) -> list[str]:
        response = httpx.get(f"{self.url}/ready", timeout=5)
        missing: list[str] = response.json().get("missing", [])
        return missing


def _http_port(command: str) -> str:
    return command.split("--http-port ", 1)[1].split()[0]
