"""`omni run`: the plan that Kubernetes would run, as processes of this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from omni_runtime.deploy.load import LOCAL_PROFILE, load_pipeline, load_profiles, local_profiles
from omni_runtime.deploy.plan import ResolvedPlan, canonical_json
from omni_runtime.deploy.resolve import resolve
from omni_runtime.errors import InvalidOption, InvalidPipeline, OmniError
from omni_runtime.local.layout import LocalFolders, ProcessSpec, choose_ports, plan_processes, replica_counts
from omni_runtime.local.logs import claim_logs
from omni_runtime.local.supervisor import Report, Supervisor, child_environment
from omni_runtime.protocol.channels import generate_keys

PACKAGED = "packaged://"


def run(
    file: Annotated[Path, typer.Option("--file", "-f", help="YAML file with an OmniPipeline.")],
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the OpenAI API.")] = 8000,
    host: Annotated[str, typer.Option("--host", help="Interface of the OpenAI API.")] = "127.0.0.1",
    name: Annotated[str | None, typer.Option("--name", help="Which OmniPipeline, if the file has several.")] = None,
    profiles: Annotated[Path | None, typer.Option("--profiles", help="YAML file with OmniRuntimeProfiles.")] = None,
    replicas: Annotated[
        list[str] | None, typer.Option("--replicas", help="STAGE=N, may be repeated; default: as the plan says.")
    ] = None,
    logs: Annotated[
        Path | None,
        typer.Option("--logs", help="Folder of the logs, of this run alone.", show_default="<cache>/run/NAME"),
    ] = None,
    models: Annotated[
        Path | None, typer.Option("--models-dir", help="Prepared models.", show_default="<cache>/models")
    ] = None,
) -> None:
    """Run a pipeline until Ctrl-C. A second Ctrl-C ends it at once."""
    known = load_profiles(profiles) if profiles else local_profiles()
    default = "default" if "default" in known else None if profiles else LOCAL_PROFILE
    try:
        plan = resolve(load_pipeline(file, name), known, target="local", default_profile=default)
    except InvalidPipeline as invalid:
        for error in invalid.errors:
            typer.echo(str(error), err=True)
        if not profiles and any(error.path.endswith("runtimeProfile") for error in invalid.errors):
            typer.echo("without --profiles there is only this machine's CPU, as profile 'cpu'", err=True)
        raise typer.Exit(1) from invalid
    counts = replica_counts(plan, _overrides(replicas or [], plan))
    _check_port(host, port)
    from omni_cluster.paths import cache_dir

    models_dir = models or Path(os.environ.get("OMNI_MODELS_DIR") or cache_dir() / "models")
    _prepare_model(plan, models_dir)
    with (
        claim_logs(logs, cache_dir() / "run" / plan.pipeline) as log_dir,
        tempfile.TemporaryDirectory(prefix="omni-run-") as private,  # mode 0700: keys and sockets
    ):
        folders = LocalFolders(Path(private), Path("/dev/shm"), models_dir)  # noqa: S108 - shared memory, on purpose
        folders.plan.write_bytes(canonical_json(plan))
        generate_keys(folders.curve)
        specs = plan_processes(plan, counts, folders, choose_ports(port, sum(counts.values())), host)
        code = asyncio.run(_supervise(plan, specs, log_dir, f"http://{host}:{port}"))
    raise typer.Exit(code)


async def _supervise(plan: ResolvedPlan, specs: tuple[ProcessSpec, ...], log_dir: Path, url: str) -> int:
    stop, hurry = _signals()
    started = time.monotonic()

    def tell(report: Report) -> None:
        typer.echo(f"[{time.monotonic() - started:6.1f} s] {report.text}", err=report.warning)
        for line in report.lines:
            typer.echo(f"           | {line}", err=True)

    tell(Report(f"pipeline {plan.pipeline}, revision {plan.revision}, {len(specs)} processes, logs in {log_dir}"))
    supervisor = Supervisor(specs, log_dir, child_environment(), tell)
    code = 0
    try:
        starting = asyncio.create_task(supervisor.start())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if starting.done():
            starting.result()
            tell(
                Report(f"ready: {url}/v1 serves {plan.model.served_name}; try: omni chat --url {url} 'Name a colour.'")
            )
            await supervisor.run_until(stop)
        else:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        tell(Report("stopping; Ctrl-C again ends it at once"))
    except OmniError as error:
        tell(Report(f"{error.code}: {error}", warning=True))
        code = 1
    finally:
        await supervisor.stop(hurry)
    tell(Report("stopped"))
    return code


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def handle() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, handle)
    return stop, hurry


def _overrides(values: list[str], plan: ResolvedPlan) -> dict[str, int]:
    names = [s.name for s in plan.stages]
    overrides = {}
    for value in values:
        stage, _, count = value.partition("=")
        if stage not in names or not count.isdigit() or not 1 <= int(count) <= 64:
            raise InvalidOption(
                f"--replicas: {value!r}: not STAGE=N with N from 1 to 64; stages are {', '.join(names)}"
            )
        overrides[stage] = int(count)
    return overrides


def _check_port(host: str, port: int) -> None:
    """Say that a port is taken before a minute of loading models, not after."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise InvalidOption(f"--port: {port}: cannot listen on {host} ({reason}); use another port") from error


def _prepare_model(plan: ResolvedPlan, models_dir: Path) -> None:
    """Packaged models are prepared on first use, in a process of its own: preparing loads tensor libraries."""
    uri = plan.model.uri
    if not uri.startswith(PACKAGED):
        return
    model = uri.removeprefix(PACKAGED)
    from omni_runtime.models.catalogue import is_prepared, packaged_model

    packaged_model(model)
    if is_prepared(model, models_dir):
        return
    typer.echo(f"preparing model {model} in {models_dir} (once)")
    command = [sys.executable, "-m", "omni_runtime.cli", "models", "prepare", model, "--target", str(models_dir)]
    if subprocess.run(command, check=False).returncode != 0:
        raise OmniError(
            f"model {model} could not be prepared; free space: {shutil.disk_usage(models_dir.parent).free >> 20} MiB"
        )
