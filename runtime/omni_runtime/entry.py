"""The entry of a pipeline: orchestrator and API server in one process.

    python -m omni_runtime.entry --plan FILE --curve DIR [--http-host 0.0.0.0] [--http-port 8000] [--control-port 5500]
        [--admin | --admin-token-file FILE]

SIGTERM drains: /ready turns 503, nothing new is taken, running streams end (up to the plan's drain timeout), exit 0.
A second signal ends at once. No tensor library is ever imported here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Iterator
from pathlib import Path

import msgspec
import uvicorn

from omni_runtime import eventloop, logs
from omni_runtime.deploy.plan import ENTRY_CONTROL_PORT, ENTRY_HTTP_PORT, ResolvedPlan, load_plan
from omni_runtime.errors import InvalidPipeline, OmniError
from omni_runtime.metrics.entry import EntryMetrics
from omni_runtime.metrics.traces import build_tracer
from omni_runtime.orchestrator.loop import Orchestrator
from omni_runtime.protocol.channels import Channels, load_keys
from omni_runtime.serving.admin import AdminGuard
from omni_runtime.serving.admin import build_router as build_admin_router
from omni_runtime.serving.app import build_app
from omni_runtime.serving.context import ServingContext
from omni_runtime.serving.fetch import MediaFetcher, check_domains
from omni_runtime.topology.registry import TOPOLOGIES

log = logs.get_logger(__name__)

KEEP_ALIVE_SECONDS = 75
MIN_TOKEN_CHARACTERS = 16
MAX_WEBSOCKET_BYTES = 1 << 20  # of one message; the surfaces have limits of their own below it
GRACE_SECONDS = 5  # after the drain: for connections that are still open


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="omni_runtime.entry", description="Orchestrator and API server.")
    parser.add_argument("--plan", type=Path, required=True, help="plan.json of the pipeline")
    parser.add_argument("--curve", type=Path, required=True, help="folder of the CURVE keys")
    parser.add_argument("--http-host", default="0.0.0.0")  # noqa: S104 - the pod's own interface
    parser.add_argument("--http-port", type=int, default=ENTRY_HTTP_PORT)
    parser.add_argument("--control-host", default="0.0.0.0")  # noqa: S104 - CURVE lets in only the pipeline's replicas
    parser.add_argument("--control-port", type=int, default=ENTRY_CONTROL_PORT)
    parser.add_argument("--admin", action="store_true", help="serve /v1/omni/pause, resume, sleep, wakeup to loopback")
    parser.add_argument("--admin-token-file", type=Path, help="serve them to whoever sends this bearer token")
    parser.add_argument("--otlp-endpoint", help="OTLP/HTTP collector that gets a span per stage and request")
    parser.add_argument(
        "--allowed-media-domain",
        action="append",
        default=[],
        metavar="HOST",
        help="host whose image, audio and video URLs are followed; may be given several times; none by default",
    )
    parser.add_argument("--log-level", default=os.environ.get("OMNI_LOG_LEVEL", "INFO"))
    return parser.parse_args(arguments)


def read_plan(path: Path) -> ResolvedPlan:
    """Raises InvalidPipeline or OmniError with the path in the message."""
    try:
        return load_plan(path.read_bytes())
    except OSError as error:
        raise OmniError(f"plan {path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise OmniError(
            f"plan {path} is not a resolved plan: {error}; use one release for operator and images"
        ) from error


def admin_guard(options: argparse.Namespace, plan: ResolvedPlan) -> AdminGuard | None:
    """None: no admin surface. Raises OmniError if the token cannot be read or is empty."""
    if options.admin_token_file is not None:
        try:
            token = options.admin_token_file.read_text().strip()
        except OSError as error:
            raise OmniError(f"--admin-token-file {options.admin_token_file}: {error.strerror}") from error
        if len(token) < MIN_TOKEN_CHARACTERS:
            raise OmniError(
                f"--admin-token-file {options.admin_token_file}: {len(token)} characters; "
                f"use a random token of at least {MIN_TOKEN_CHARACTERS}"
            )
        return AdminGuard(token)
    return AdminGuard() if options.admin or plan.entry.admin == "Loopback" else None


def media_fetcher(options: argparse.Namespace, plan: ResolvedPlan) -> MediaFetcher:
    """Raises OmniError for a name that is no host."""
    try:
        return MediaFetcher(check_domains((*plan.entry.allowed_media_domains, *options.allowed_media_domain)))
    except ValueError as error:
        raise OmniError(f"--allowed-media-domain: {error}") from error


def package_version() -> str:
    try:
        return importlib.metadata.version("omni-operator")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0"


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: signals belong to `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(options: argparse.Namespace) -> int:
    plan = read_plan(options.plan)
    metrics = EntryMetrics(plan)
    tracer = build_tracer(
        options.otlp_endpoint or plan.entry.otlp_endpoint,
        pipeline=plan.pipeline,
        revision=plan.revision,
        version=package_version(),
    )
    endpoint = f"tcp://{options.control_host}:{options.control_port}"
    async with (
        Channels(load_keys(options.curve)) as channels,
        Orchestrator(plan, channels, endpoint=endpoint, observer=metrics, tracer=tracer) as orchestrator,
    ):
        topology = TOPOLOGIES.get(plan.topology)
        context = ServingContext(
            plan=plan,
            requests=orchestrator,
            render_metrics=metrics.render,
            inputs=topology.inputs if topology is not None else ("text", "audio", "image"),
            version=package_version(),
            fetcher=media_fetcher(options, plan),
            speech_streams=metrics,
        )
        app = build_app(context)
        guard = admin_guard(options, plan)
        if guard is not None:
            app.include_router(build_admin_router(orchestrator.administration, orchestrator.status, guard))
        config = uvicorn.Config(
            app,
            host=options.http_host,
            port=options.http_port,
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            server_header=False,
            proxy_headers=False,  # a client's address is what the socket says: the admin surface relies on it
            timeout_graceful_shutdown=GRACE_SECONDS,
            ws_max_size=MAX_WEBSOCKET_BYTES,
            ws_per_message_deflate=False,  # audio does not get smaller, only later
        )
        server = _Server(config)
        listener = socket.create_server(
            (options.http_host, options.http_port), family=_family(options.http_host), backlog=1024
        )
        running = asyncio.create_task(server.serve(sockets=[listener]))
        first, second = _signals()
        eventloop.settle()
        log.info("entry.serving", pipeline=plan.pipeline, revision=plan.revision, port=listener.getsockname()[1])
        await _first_of(running, first.wait())
        if not running.done():
            await _first_of(orchestrator.drain(plan.drain_timeout_seconds), second.wait())
            log.info("entry.drained", unfinished=orchestrator.unfinished)
            server.should_exit = True
            server.force_exit = second.is_set()
        await running
    if tracer is not None:
        await asyncio.to_thread(tracer.close)
    return 0


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


async def _first_of(*waits: Awaitable[object]) -> None:
    """Return when one of them is done; the others are cancelled, except tasks, which go on."""
    tasks = [w if isinstance(w, asyncio.Task) else asyncio.ensure_future(w) for w in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, wait in zip(tasks, waits, strict=True):
        if task is not wait:
            task.cancel()


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set at the first and at the second SIGTERM or SIGINT."""
    first, second = asyncio.Event(), asyncio.Event()

    def handle(name: str) -> None:
        log.info("entry.signal", signal=name, second=first.is_set())
        (second if first.is_set() else first).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number.name)
    return first, second


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    logs.configure("entry", level=options.log_level)
    try:
        return eventloop.run(serve(options))
    except InvalidPipeline as error:
        log.error("entry.invalid_plan", errors=[str(e) for e in error.errors])
    except OmniError as error:
        log.error("entry.failed", code=error.code, error=str(error))
    except OSError as error:
        log.error("entry.failed", code="OSError", error=str(error))
    return 1


if __name__ == "__main__":
    sys.exit(main())
