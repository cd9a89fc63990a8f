"""A whole pipeline of real processes (entry, connector, three stage workers) whose engines compute nothing.

What is left is everything that can hang or leak: sockets, streams, slots, timers, shared memory. A started process is
started again by `start`, at once, as a kubelet would after a moment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks._servers import null_plan
from omni_runtime.deploy.plan import ResolvedPlan, canonical_json
from omni_runtime.local.layout import (
    LOOPBACK,
    REPLICA_PLACEHOLDER,
    LocalFolders,
    ProcessSpec,
    choose_ports,
    plan_processes,
    replica_counts,
)
from omni_runtime.local.supervisor import child_environment
from omni_runtime.protocol.channels import generate_keys
from tests.e2e.local_run import ROOT, wait_for

CONCURRENCY = 16
STAGES = ("thinker", "talker", "code2wav")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds. rss: bytes."""

    descriptors: int
    threads: int
    rss: int


@dataclass(slots=True)
class NullPipeline:
    url: str
    folder: Path
    specs: dict[str, ProcessSpec]
    null_stages: frozenset[str] = frozenset(STAGES)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        worker = "omni_runtime.stages.worker"
        command = [a.replace(REPLICA_PLACEHOLDER, uuid.uuid4().hex) for a in self.specs[name].command]
        if self.specs[name].stage in self.null_stages:
            command = ["benchmarks._null_stage" if a == worker else a for a in command]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env=child_environment(), start_new_session=True
            )

    def kill(self, name: str) -> None:
        """SIGKILL, and a new process at once."""
        child = self.running[name]
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(10)
        self.start(name)

    def wait_ready(self, seconds: float = 60.0) -> None:
        """Every process serves, and the entry sees a live replica of every stage."""
        for name, spec in self.specs.items():
            wait_for(partial(_answers, spec.ready_url), seconds, f"{name} ready; log: {self.log(name)}")
        wait_for(lambda: _answers(f"{self.url}/ready"), seconds, "the entry ready")

    def log(self, name: str) -> str:
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace")[-2000:] if file.exists() else ""

    def metric(self, process: str, family: str) -> float:
        """Sum over the series of a gauge or counter of one process."""
        base = self.specs[process].ready_url.rsplit("/", 1)[0]
        text = httpx.get(f"{base}/metrics", timeout=5).text
        return sum(s.value for f in text_string_to_metric_families(text) for s in f.samples if s.name == family)

    def busy(self) -> dict[str, float]:
        """What is not free, by name; empty when nothing of any request is left."""
        found = {
            "entry running": self.metric("entry", "vllm_omni:num_requests_running"),
            "entry waiting": self.metric("entry", "vllm_omni:num_requests_waiting"),
            "arena bytes": self.metric("connector", "omni:connector_arena_used_bytes"),
            "streams": self.metric("connector", "omni:connector_streams"),
        }
        for stage in (name for name, spec in self.specs.items() if spec.stage):
            found[f"{stage} running"] = self.metric(stage, "omni:stage_running_requests")
            found[f"{stage} waiting"] = self.metric(stage, "vllm_omni:stage_waiting_requests")
        return {name: value for name, value in found.items() if value}

    def wait_free(self, seconds: float = 15.0) -> None:
        """Slots, bindings, streams and shared memory are back at nothing."""
        deadline = time.monotonic() + seconds
        while busy := self.busy():
            assert time.monotonic() < deadline, f"still held after {seconds} s: {busy}"
            time.sleep(0.1)

    def footprints(self) -> dict[str, Footprint]:
        found = {}
        for name, child in self.running.items():
            status = Path(f"/proc/{child.pid}/status").read_text()
            values = dict(line.split(":", 1) for line in status.splitlines())
            descriptors = len(list(Path(f"/proc/{child.pid}/fd").iterdir()))
            found[name] = Footprint(descriptors, int(values["Threads"]), int(values["VmRSS"].split()[0]) << 10)
        return found


@contextmanager
def null_pipeline(
    plan: ResolvedPlan | None = None, null_stages: Iterable[str] = STAGES, **replicas: int
) -> Iterator[NullPipeline]:
    """Ready inside; no process and no shared memory afterwards. replicas: of a stage, where it is not one.

    plan, null_stages: a pipeline some of whose stages are real.
    """
    plan = plan or null_plan(CONCURRENCY)
    shared_before = _shared_memory()
    with tempfile.TemporaryDirectory(prefix="omni-null-") as private:
        folder = Path(private)
        folders = LocalFolders(folder, Path("/dev/shm"), folder)
        folders.plan.write_bytes(canonical_json(plan))
        generate_keys(folders.curve)
        http = choose_ports(0, 1).control
        counts = replica_counts(plan, replicas)
        specs = plan_processes(plan, counts, folders, choose_ports(http, sum(counts.values())), LOOPBACK)
        url = f"http://{LOOPBACK}:{http}"
        pipeline = NullPipeline(url, folder, {s.name: s for s in specs}, frozenset(null_stages))
        try:
            for name in pipeline.specs:
                pipeline.start(name)
            pipeline.wait_ready()
            yield pipeline
        finally:
            for child in pipeline.running.values():
                child.terminate()
            for child in pipeline.running.values():
                _end(child)
    assert _shared_memory() - shared_before == set(), "shared memory was left behind"


def _shared_memory() -> set[str]:
    """Files in /dev/shm, but for those of Python's multiprocessing, which nothing here uses and other processes may."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("psm_", "sem."))}


def _end(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(10)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
