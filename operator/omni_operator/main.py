"""`python -m omni_operator`: options, start, signals, end. Everything else is elsewhere.

The process ends with an error whenever something essential ends (the watches, the Lease): it is restarted clean, and a
start does nothing that a second start would not do again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import signal
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import kopf
from kopf._core.engines.peering import Identity

from omni_operator import logs
from omni_operator.autoscale.loop import PERIOD_SECONDS
from omni_operator.autoscale.tuning import UnknownTuning, parse_tuning
from omni_operator.autoscale.types import Tuning
from omni_operator.controller import Controller, ControllerOptions
from omni_operator.credentials import in_cluster_namespace, load_credentials
from omni_operator.kube import Kube
from omni_operator.lease import LeaseLoop
from omni_operator.server import serve
from omni_operator.watches import build_registry, build_settings


@dataclass(frozen=True, slots=True)
class Options:
    controller: ControllerOptions
    lease_namespace: str
    lease_name: str
    http_host: str
    http_port: int
    log_level: str


def _period(given: str) -> float:
    """Raises ArgumentTypeError: without a pause the loop would take all of a core."""
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{given!r}: give seconds from 1 to 3600")
    return seconds


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m omni_operator", description=__doc__)
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        help="watch this namespace only; may be repeated, or a comma-separated list; default: all namespaces",
    )
    parser.add_argument("--default-profile", default=os.environ.get("OMNI_DEFAULT_PROFILE") or None)
    parser.add_argument("--workers", type=int, default=8, help="pipelines reconciled at the same time")
    parser.add_argument("--resync-seconds", type=float, default=300.0, help="period of the full list")
    parser.add_argument(
        "--lease-namespace",
        default=os.environ.get("POD_NAMESPACE") or in_cluster_namespace() or "default",
        help="where the Lease lives; default: the operator's own namespace",
    )
    parser.add_argument("--lease-name", default="omni-operator")
    parser.add_argument("--http-host", default="0.0.0.0")  # noqa: S104 - probes come from the kubelet
    parser.add_argument("--http-port", type=int, default=8080, help="/livez, /readyz, /metrics; 0: any free port")
    parser.add_argument(
        "--record-windows", type=Path, help="folder that keeps what the autoscaler saw, for `omni replay`"
    )
    parser.add_argument(
        "--scaling-period-seconds",
        type=_period,
        default=os.environ.get("OMNI_SCALING_PERIOD_SECONDS") or PERIOD_SECONDS,
        help="time between two decisions of the autoscaler",
    )
    parser.add_argument(
        "--tune",
        action="append",
        default=os.environ.get("OMNI_SCALING_TUNING", "").split(),
        metavar="NAME=VALUE",
        help="a tuning of the autoscaler, as `omni replay --set` tries it, such as scale_down_seconds=60; repeatable",
    )
    parser.add_argument("--log-level", default=os.environ.get("OMNI_LOG_LEVEL", "INFO"))
    given = parser.parse_args(arguments)
    try:
        tuning = replace(Tuning(), **parse_tuning(given.tune))
    except UnknownTuning as error:
        parser.error(str(error))
    namespaces = tuple(n.strip() for entry in given.namespace for n in entry.split(",") if n.strip())
    return Options(
        controller=ControllerOptions(
            namespaces=namespaces,
            workers=given.workers,
            resync_seconds=given.resync_seconds,
            default_profile=given.default_profile,
            record_windows=given.record_windows,
            tuning=tuning,
            scaling_period_seconds=given.scaling_period_seconds,
        ),
        lease_namespace=given.lease_namespace,
        lease_name=given.lease_name,
        http_host=given.http_host,
        http_port=given.http_port,
        log_level=given.log_level,
    )


async def run_operator(options: Options) -> None:
    """Run until SIGTERM or SIGINT (a clean end) or until something essential ends (an exception)."""
    stop = asyncio.Event()
    kube = Kube(load_credentials)
    identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    lease = LeaseLoop(kube, options.lease_namespace, options.lease_name, identity)
    controller = Controller(kube, lease, options.controller)
    http = await serve(
        options.http_host,
        options.http_port,
        alive=controller.alive,
        ready=controller.ready,
        before_metrics=controller.measure,
    )
    watching_ends, watching_begins = asyncio.Event(), asyncio.Event()
    namespaces = options.controller.namespaces
    watching = asyncio.create_task(
        kopf.operator(
            registry=build_registry(controller.enqueue, controller.all_keys),
            settings=build_settings(),
            # kopf would ask for the user's name, which a container's bare user id does not have, and end the process.
            identity=Identity(identity),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=watching_ends,
            ready_flag=watching_begins,
        ),
        name="watches",
    )
    working = asyncio.create_task(controller.run(), name="controller")
    stopping = asyncio.create_task(_stop_by_signal(watching_begins, stop), name="stop")
    logs.info("operator.started", identity=identity, namespaces=namespaces or "all", http=http.addresses)
    try:
        done, _ = await asyncio.wait({watching, working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises what ended it
            if task is not stopping:
                raise RuntimeError(f"{task.get_name()} ended by itself")
    finally:
        logs.info("operator.stopping")
        working.cancel()
        stopping.cancel()
        watching_ends.set()
        await asyncio.gather(working, stopping, return_exceptions=True)
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(asyncio.gather(watching, return_exceptions=True), 10)
        await http.cleanup()
        await kube.close()


async def _stop_by_signal(watching_begins: asyncio.Event, stop: asyncio.Event) -> None:
    """kopf sets handlers of its own when it starts, which would end the watches before the work: ours come after."""
    loop = asyncio.get_running_loop()
    for begun in (False, True):
        if begun:
            await watching_begins.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
    await stop.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    logs.setup_logging(options.log_level)
    try:
        asyncio.run(run_operator(options))
    except Exception as error:  # noqa: BLE001 - the last line of the process; the kubelet restarts it
        logs.error("operator.failed", exc_info=True, error=f"{type(error).__name__}: {error}")
        return 1
    return 0
