"""Servers that a benchmark starts, and ends whatever happens: a pipeline as `omni run` lays it out, and plain vLLM."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from omni_cluster.paths import cache_dir
from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_runtime.deploy.load import LOCAL_PROFILE, local_profiles
from omni_runtime.deploy.plan import ResolvedPlan, canonical_json
from omni_runtime.deploy.resolve import resolve
from omni_runtime.local.layout import (
    LOOPBACK,
    LocalFolders,
    ProcessSpec,
    choose_ports,
    plan_processes,
    replica_counts,
)
from omni_runtime.local.process import group_members
from omni_runtime.local.supervisor import Report, Supervisor, child_environment
from omni_runtime.protocol.channels import generate_keys
from omni_runtime.stages.ar_vllm.arguments import engine_arguments, environment
from omni_runtime.stages.context import EngineContext, resolve_model
from omni_runtime.stages.worker import engine_threads

STARTUP_SECONDS = 900.0
_T = TypeVar("_T")
_WORKER = "omni_runtime.stages.worker"


def run(benchmark: Coroutine[Any, Any, _T]) -> _T:
    """On the loop that servers run on. SIGTERM (a deadline of `make bench`) ends what was started, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return uvloop.run(benchmark)


def models_dir() -> Path:
    return Path(os.environ.get("OMNI_MODELS_DIR") or cache_dir() / "models")


def local_plan(name: str, spec: dict[str, Any]) -> ResolvedPlan:
    """The plan of an OmniPipeline's spec, as `omni run` resolves it. Raises InvalidPipeline."""
    body = {"apiVersion": "serving.omni.dev/v1alpha1", "kind": "OmniPipeline", "metadata": {"name": name}, "spec": spec}
    return resolve(OmniPipeline.model_validate(body), local_profiles(), target="local", default_profile=LOCAL_PROFILE)


def null_plan(concurrency: int) -> ResolvedPlan:
    """Three stages without a model, for `benchmarks._null_stage`; edges and processes are those of smol_omni."""
    stages = [{"name": n, "maxConcurrency": concurrency} for n in ("thinker", "talker", "code2wav")]
    model = {"uri": f"file://{tempfile.gettempdir()}"}  # any folder: nothing is loaded from it
    return local_plan("null", {"model": model, "topology": "smol_omni", "stages": stages})


def smol_plan(thinker_concurrency: int) -> ResolvedPlan:
    stages = [{"name": "thinker", "maxConcurrency": thinker_concurrency}]
    return local_plan(
        "smol-omni", {"model": {"uri": "packaged://smol-omni"}, "topology": "smol_omni", "stages": stages}
    )


@dataclass(frozen=True, slots=True)
class Server:
    """url: of the OpenAI API; processes: pid by name."""

    url: str
    processes: Mapping[str, int]

    def cpu_seconds(self, name: str) -> float:
        """What the process has used so far, user and system, all threads; children that it has started are not in it."""
        return _cpu_seconds(self.processes[name])

    def cpu_seconds_of_all(self) -> float:
        """Of every process of the server and its living children."""
        return sum(_cpu_seconds(member) for pid in self.processes.values() for member in group_members(pid))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def pipeline(plan: ResolvedPlan, *, worker: str = _WORKER) -> AsyncIterator[Server]:
    """All processes of a plan, when it answers. `worker`: the module that runs a stage replica."""
    counts = replica_counts(plan, {})
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as private:
        folders = LocalFolders(Path(private), Path("/dev/shm"), models_dir())
        folders.plan.write_bytes(canonical_json(plan))
        generate_keys(folders.curve)
        port = _free_port()
        specs = [
            _with_module(spec, worker)
            for spec in plan_processes(plan, counts, folders, choose_ports(port, sum(counts.values())), LOOPBACK)
        ]
        async with _supervised(specs, Path(private), child_environment()) as supervisor:
            yield Server(f"http://{LOOPBACK}:{port}", supervisor.pids)


@asynccontextmanager
async def plain_vllm(plan: ResolvedPlan) -> AsyncIterator[Server]:
    """vLLM's own OpenAI server with the model, the engine arguments and the environment of the plan's thinker."""
    stage = plan.stages[0]
    model = resolve_model(plan.model.uri, models_dir())
    context = EngineContext(plan=plan, stage=stage, model_path=model)
    options = context.options()
    options.integer("threads", 1)  # ours, not vLLM's
    arguments = engine_arguments(context, options.remaining(), tap=None)
    arguments.pop("distributed_executor_backend", None)  # ours; vLLM's own is what it is compared with
    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", LOOPBACK, "--port", str(port)]
    command += ["--served-model-name", plan.model.served_name, "--disable-uvicorn-access-log", *_flags(arguments)]
    values = environment(context, engine_threads(stage), tapped=False) | dict(stage.env)
    spec = ProcessSpec("vllm", tuple(command), f"http://{LOOPBACK}:{port}/health", STARTUP_SECONDS, order=1)
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as private:
        async with _supervised([spec], Path(private), {**child_environment(), **values}) as supervisor:
            yield Server(f"http://{LOOPBACK}:{port}", supervisor.pids)


@asynccontextmanager
async def _supervised(
    specs: Sequence[ProcessSpec], logs: Path, environment: dict[str, str]
) -> AsyncIterator[Supervisor]:
    """A process that ends or is missing ends the benchmark, with the end of its log. BENCH_LOGS=FOLDER keeps the logs."""
    supervisor = Supervisor(specs, logs, environment, _tell)
    try:
        await supervisor.start()
        yield supervisor
    finally:
        hurry = asyncio.Event()
        await supervisor.stop(hurry)
        _keep(logs)


def _keep(logs: Path) -> None:
    if kept := os.environ.get("BENCH_LOGS"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        for log in logs.glob("*.log"):
            shutil.copy(log, kept)


def _tell(report: Report) -> None:
    if report.warning or os.environ.get("BENCH_LOGS"):
        print(report.text, *report.lines, sep="\n    ", file=sys.stderr, flush=True)


def _with_module(spec: ProcessSpec, module: str) -> ProcessSpec:
    command = tuple(module if argument == _WORKER else argument for argument in spec.command)
    return ProcessSpec(spec.name, command, spec.ready_url, spec.startup_seconds, spec.order, spec.stage)


def _flags(arguments: dict[str, Any]) -> list[str]:
    """Keyword arguments of vLLM's engine as flags of its server."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", value if isinstance(value, str) else msgspec.json.encode(value).decode()]
    return flags


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])
