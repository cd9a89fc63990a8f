"""The connector sidecar: `python -m omni_runtime.connectors.sidecar`. One per pod, one for all stages of `omni run`.

It owns the arena and the way to other pods. It starts before the engines and stops after them: on SIGTERM it serves
until the engines have detached and what they finished is delivered, or until the grace deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path

from omni_runtime import eventloop, logs
from omni_runtime.connectors import engine_session, privileges, residence
from omni_runtime.connectors.arena import Arena, create_file
from omni_runtime.connectors.far_lines import FarLines
from omni_runtime.connectors.hub import Hub
from omni_runtime.connectors.ipc import IpcServer
from omni_runtime.connectors.links import PeerLinks
from omni_runtime.connectors.metrics import SidecarMetrics
from omni_runtime.connectors.mooncake import START_SECONDS, Mooncake, MooncakeOptions, MooncakeUnavailable
from omni_runtime.connectors.node_folder import NodeFolder
from omni_runtime.connectors.outbound import PeerListener
from omni_runtime.connectors.probes import ProbeServer, Response, text
from omni_runtime.connectors.streams import Limits
from omni_runtime.deploy.plan import SIDECAR_DATA_PORT, SIDECAR_HTTP_PORT, ResolvedPlan, load_plan
from omni_runtime.errors import OmniError
from omni_runtime.protocol.channels import CurveKeys, load_keys

log = logs.get_logger(__name__)

_SETTLED_SECONDS = 1.0  # by then the transfer engine's own threads have run through theirs, too
_TICK_SECONDS = 0.25
_MIN_ARENA_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SidecarOptions:
    ipc_dir: Path
    shm_dir: Path
    arena_bytes: int
    advertise_host: str
    domain: str
    data_host: str = "0.0.0.0"  # noqa: S104 - other pods dial it; CURVE and a NetworkPolicy guard it
    data_port: int = SIDECAR_DATA_PORT  # 0: any free port
    http_host: str = "0.0.0.0"  # noqa: S104 - the kubelet probes it
    http_port: int = SIDECAR_HTTP_PORT  # 0: any free port
    lease_seconds: float = 300.0
    grace_seconds: float = 600.0
    mooncake: MooncakeOptions = field(default_factory=MooncakeOptions)
    node_dir: Path | None = None  # folder of the node through which engines of other pods attach


class Sidecar:
    """The running parts. `start` raises OSError with a reason and leaves nothing behind then."""

    def __init__(self, plan: ResolvedPlan, keys: CurveKeys, options: SidecarOptions) -> None:
        self.plan = plan
        self.options = options
        self.metrics = SidecarMetrics(plan.model.served_name)
        self.data_port = self.http_port = 0
        self._keys = keys
        self._ready = False
        self._parts = AsyncExitStack()

    async def start(self) -> None:
        try:
            await self._start(self._parts)
        except BaseException:
            await self._parts.aclose()
            raise
        self._ready = True
        options = self.options
        log.info("sidecar.serving", endpoint=self.hub.endpoint, domain=options.domain, arena_bytes=options.arena_bytes)

    async def _start(self, parts: AsyncExitStack) -> None:
        """Each part is closed in the opposite order: engines first, the arena last."""
        options = self.options
        if options.arena_bytes < _MIN_ARENA_BYTES:
            raise OSError(f"--arena-bytes {options.arena_bytes} is too small; at least {_MIN_ARENA_BYTES}")
        self.arena = Arena(create_file(str(options.shm_dir), options.arena_bytes), options.arena_bytes)
        parts.callback(self.arena.close)
        limits = Limits(lease_seconds=options.lease_seconds)
        self.hub = Hub(self.plan, self.arena, self.metrics, domain=options.domain, limits=limits)
        if any(edge.connector == "Mooncake" for edge in self.plan.edges):
            await self._start_mooncake(parts)
        self.far_lines = self.hub.far_lines = FarLines(
            self._keys, self.hub.new_session, self.hub.has_engine, self.hub.tell_of_line
        )
        parts.push_async_callback(self.far_lines.close)
        self.links = self.hub.remote = PeerLinks(self.hub, self._keys)
        parts.callback(self.links.close)
        self.listener = PeerListener(self.hub, self._keys)
        parts.push_async_callback(self.listener.close)
        self.data_port = self.listener.start(options.data_host, options.data_port)
        host = f"[{options.advertise_host}]" if ":" in options.advertise_host else options.advertise_host
        self.hub.endpoint = f"tcp://{host}:{self.data_port}"
        probes = ProbeServer({"/livez": self._livez, "/ready": self._readyz, "/metrics": self._metrics})
        parts.push_async_callback(probes.close)
        self.http_port = await probes.start(options.http_host, options.http_port)
        ticker = asyncio.get_running_loop().create_task(self._tick())
        parts.callback(ticker.cancel)
        parts.push_async_callback(self._hang_up)
        ipc = IpcServer(options.ipc_dir, self.arena.fd, partial(engine_session.accept, self.hub), self.hub.claim)
        ipc.start()
        parts.push_async_callback(ipc.close)
        if options.node_dir is not None:
            self._serve_neighbours(NodeFolder(options.node_dir, self._keys).of(options.domain), parts)

    def _serve_neighbours(self, folder: Path, parts: AsyncExitStack) -> None:
        """Without it their streams go over the network: slower, but they go."""
        ipc = IpcServer(folder, self.arena.fd, partial(engine_session.accept, self.hub), self.hub.claim)
        parts.callback(_remove_empty, folder)
        parts.push_async_callback(ipc.close)
        try:
            if not folder.parent.is_dir():
                raise NotADirectoryError(f"no folder {folder.parent}")
            ipc.start()
        except OSError as error:
            log.warning("neighbours.unavailable", folder=str(folder.parent), reason=str(error), instead="the network")

    async def _start_mooncake(self, parts: AsyncExitStack) -> None:
        """Without it the edges go over TCP: slower, but they go."""
        options, loop = self.options, asyncio.get_running_loop()
        starting = loop.run_in_executor(None, Mooncake.start, self.arena, options.advertise_host, options.mooncake)
        try:
            mooncake = self.hub.mooncake = await asyncio.wait_for(starting, START_SECONDS)
        except (MooncakeUnavailable, TimeoutError) as error:
            reason = str(error) or f"no answer within {START_SECONDS:g} s"
            self.metrics.fallbacks.labels("unavailable").inc()
            log.warning("mooncake.unavailable", protocol=options.mooncake.protocol, reason=reason, instead="TCP")
            return
        parts.callback(mooncake.close)
        log.info("mooncake.serving", protocol=options.mooncake.protocol, segments=mooncake.segments)

    async def _hang_up(self) -> None:
        for engine in list(self.hub.engines.values()):
            if engine.channel is not None:
                engine.channel.close("the sidecar stops")
        await asyncio.sleep(0)  # they are told before the arena goes

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                self.hub.tick()
                self.links.tick()
                self.listener.tick()
                self.far_lines.tick(time.monotonic())
            except Exception:
                log.exception("sidecar.tick_failed")

    async def drain(self) -> bool:
        """Serve on until idle or the grace deadline; True if nothing was cut off. Engines may still re-attach."""
        self._ready = False
        deadline = time.monotonic() + self.options.grace_seconds
        log.info("sidecar.draining", engines=len(self.hub.engines), streams=len(self.hub.table))
        while not (self.hub.idle and self.listener.idle):
            if time.monotonic() > deadline:
                log.warning("sidecar.drain_deadline", engines=len(self.hub.engines), streams=len(self.hub.table))
                return False
            await asyncio.sleep(0.05)
        return True

    async def close(self) -> None:
        """Idempotent."""
        self._ready = False
        await self._parts.aclose()

    # --- probes

    def _livez(self) -> Response:
        return text(HTTPStatus.OK, "ok\n")

    def _readyz(self) -> Response:
        if self._ready:
            return text(HTTPStatus.OK, "ok\n")
        return text(HTTPStatus.SERVICE_UNAVAILABLE, "draining\n")

    def _metrics(self) -> Response:
        return HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", self.metrics.render()


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m omni_runtime.connectors.sidecar", description=__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="plan.json")
    parser.add_argument("--curve", type=Path, required=True, help="folder with the pipeline's CURVE keys")
    parser.add_argument("--ipc-dir", type=Path, required=True, help="folder of the engines' unix socket")
    parser.add_argument("--shm-dir", type=Path, default=Path("/dev/shm"))  # noqa: S108 - the pod's memory volume
    parser.add_argument("--arena-bytes", type=int, required=True)
    parser.add_argument("--advertise-host", required=True, help="address at which other pods reach this one")
    parser.add_argument("--domain", required=True, help="pod uid: engines with the same one share this arena")
    parser.add_argument("--data-port", type=int, default=SIDECAR_DATA_PORT)
    parser.add_argument("--http-port", type=int, default=SIDECAR_HTTP_PORT)
    parser.add_argument("--http-host", default="0.0.0.0")  # noqa: S104 - the kubelet probes it
    parser.add_argument("--data-host", default="0.0.0.0")  # noqa: S104 - other pods dial it
    parser.add_argument("--lease-seconds", type=float, default=300.0, help="a stream without movement is an orphan")
    parser.add_argument("--grace-seconds", type=float, help="drain at most so long; default: the plan's drain timeout")
    parser.add_argument("--node-dir", type=Path, help="folder of the node, for engines of other pods on it")
    protocol = os.environ.get("OMNI_MOONCAKE_PROTOCOL", "tcp")
    parser.add_argument(
        "--mooncake-protocol", choices=["tcp", "rdma"], default=protocol, help="$OMNI_MOONCAKE_PROTOCOL"
    )
    device = os.environ.get("OMNI_MOONCAKE_DEVICE", "")
    parser.add_argument(
        "--mooncake-device", default=device, help="RDMA devices, separated by commas; $OMNI_MOONCAKE_DEVICE"
    )
    parser.add_argument(
        "--run-as", type=int, help="started as root: become this user, and keep the right to lock memory"
    )
    return parser.parse_args(argv)


async def run(plan: ResolvedPlan, keys: CurveKeys, options: SidecarOptions) -> int:
    sidecar = Sidecar(plan, keys, options)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await sidecar.start()
    eventloop.settle()
    settled = loop.call_later(_SETTLED_SECONDS, residence.let_go)
    await stop.wait()
    settled.cancel()
    await sidecar.drain()
    await sidecar.close()
    log.info("sidecar.stopped")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(sys.argv[1:] if argv is None else argv)
    logs.configure("sidecar", domain=args.domain)
    try:
        if args.run_as is not None and not privileges.become(args.run_as):
            log.warning("memory.not_lockable", reason="no capability IPC_LOCK", instead="the limit of the node")
        plan = load_plan(args.plan.read_bytes())
        keys = load_keys(args.curve)
        options = SidecarOptions(
            ipc_dir=args.ipc_dir,
            shm_dir=args.shm_dir,
            arena_bytes=args.arena_bytes,
            advertise_host=args.advertise_host,
            domain=args.domain,
            data_host=args.data_host,
            data_port=args.data_port,
            http_host=args.http_host,
            http_port=args.http_port,
            lease_seconds=args.lease_seconds,
            node_dir=args.node_dir,
            mooncake=MooncakeOptions(args.mooncake_protocol, args.mooncake_device),
            grace_seconds=plan.drain_timeout_seconds if args.grace_seconds is None else args.grace_seconds,
        )
        return eventloop.run(run(plan, keys, options))
    except (OSError, OmniError, ValueError) as error:
        log.error("sidecar.cannot_start", reason=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
