"""Sidecars and engines as processes of their own, so that tests can kill and pause them."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from omni_runtime.connectors.client import ClientLimits, SidecarEdgeClient
from omni_runtime.connectors.node_folder import NodeFolder
from omni_runtime.protocol.control import Producer
from tests.unit.connectors.kit import MIB, Site

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}/crds:{ROOT}/runtime:{ROOT}"}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@dataclass(slots=True)
class Pod:
    """A sidecar process."""

    site: Site
    domain: str
    process: asyncio.subprocess.Process
    http: str
    started_s: float
    children: list[asyncio.subprocess.Process] = field(default_factory=list)

    @property
    def ipc_dir(self) -> Path:
        return self.site.root / self.domain

    def proc(self, name: str) -> str:
        return Path(f"/proc/{self.process.pid}/{name}").read_text()

    @property
    def resident_kb(self) -> int:
        """Besides the arena."""
        fields = dict(line.split(":", 1) for line in self.proc("status").splitlines())
        return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile"))

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.get(self.http + path)

    async def gauge(self, name: str) -> float:
        lines = (await self.get("/metrics")).text.splitlines()
        return float(next(line for line in lines if line.startswith(name + " ")).split()[1])

    async def until_gauge(self, name: str, value: float, deadline_s: float = 40) -> None:
        async with asyncio.timeout(deadline_s):
            while await self.gauge(name) != value:  # noqa: ASYNC110 - the state of another process
                await asyncio.sleep(0.05)

    async def nothing_left(self) -> None:
        await self.until_gauge("omni:connector_arena_used_bytes", 0)
        await self.until_gauge("omni:connector_streams", 0)
        await self.until_gauge("omni:connector_remote_streams", 0)

    @asynccontextmanager
    async def engine(self, replica: str, limits: ClientLimits | None = None) -> AsyncIterator[SidecarEdgeClient]:
        node = None if self.site.node_dir is None else NodeFolder(self.site.node_dir, self.site.keys)
        client = SidecarEdgeClient(self.ipc_dir, self.site.plan, "stage", replica, limits, node)
        await client.connect(20)
        try:
            yield client
        finally:
            await client.close()

    async def engine_process(
        self, role: str, request: str, chunks: int, upstream: Producer | None = None, *, size: int = 0
    ) -> Engine:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.unit.connectors.engine_process",
            str(self.ipc_dir),
            str(self.site.root / "plan.json"),
            role,
            request,
            str(chunks),
            str(size),
            *(() if self.site.node_dir is None else (str(self.site.node_dir),)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=ENVIRONMENT,
            cwd=ROOT,
        )
        self.children.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        if upstream is not None:
            process.stdin.write(msgspec.json.encode(upstream) + b"\n")
        producer = None
        async with asyncio.timeout(60):
            if upstream is None:
                producer = msgspec.json.decode(await process.stdout.readline(), type=Producer)
            assert (await process.stdout.readline()).startswith(b"ready")
        return Engine(process, producer)


@dataclass(frozen=True, slots=True)
class Engine:
    process: asyncio.subprocess.Process
    producer: Producer | None


async def start_sidecar(
    site: Site, domain: str, *, grace_s: float = 60, module: str = "omni_runtime.connectors.sidecar"
) -> Pod:
    http_port = free_port()
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", module),
        *("--plan", str(site.root / "plan.json"), "--curve", str(site.root / "curve")),
        *("--ipc-dir", str(site.root / domain), "--shm-dir", str(site.shm), "--arena-bytes", str(16 * MIB)),
        *("--advertise-host", "127.0.0.1", "--domain", domain, "--data-port", str(free_port())),
        *(() if site.node_dir is None else ("--node-dir", str(site.node_dir))),
        *(
            "--grace-seconds",
            str(grace_s),
            "--http-port",
            str(http_port),
            "--http-host",
            "127.0.0.1",
            "--data-host",
            "127.0.0.1",
        ),
        env=ENVIRONMENT,
        cwd=ROOT,
        stderr=asyncio.subprocess.DEVNULL,
    )
    pod = Pod(site, domain, process, f"http://127.0.0.1:{http_port}", 0.0)
    async with asyncio.timeout(60):
        while process.returncode is None:
            try:
                if (await pod.get("/ready")).status_code == 200:
                    break
            except httpx.TransportError:
                await asyncio.sleep(0.02)
    assert process.returncode is None, "the sidecar did not start"
    pod.started_s = time.monotonic() - began
    return pod


@asynccontextmanager
async def a_pod(site: Site, domain: str = "pod-a", **options: Any) -> AsyncIterator[Pod]:
    """options: those of start_sidecar."""
    pod = await start_sidecar(site, domain, **options)
    try:
        yield pod
    finally:
        for process in (*pod.children, pod.process):
            if process.returncode is None:
                process.kill()
            await process.wait()


@asynccontextmanager
async def two_pods(site: Site, mode: str, **options: Any) -> AsyncIterator[tuple[Pod, Pod]]:
    """(the producer's pod, the consumer's pod). options: those of start_sidecar."""
    async with a_pod(site, "pod-a", **options) as first:
        if mode == "same pod":
            yield first, first
        else:
            async with a_pod(site, "pod-b", **options) as second:
                yield first, second
