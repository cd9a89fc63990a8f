"""`python -m omni_runtime.stages.worker`: the process of one stage replica. Arguments, environment, exit code."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from omni_runtime import eventloop
from omni_runtime.deploy.plan import ENGINE_HTTP_PORT, ENTRY_CONTROL_PORT, StagePlan, load_plan
from omni_runtime.errors import OmniError
from omni_runtime.logs import configure, get_logger
from omni_runtime.protocol.channels import Channels, load_keys
from omni_runtime.stages.context import EngineContext, EngineOptions, resolve_model
from omni_runtime.stages.engine import StageEngine
from omni_runtime.stages.replica import Worker, WorkerConfig

log = get_logger(__name__)

DEFAULT_CHUNK_DEADLINE_S = 120.0

BuildEngine = Callable[[EngineContext], StageEngine]


def engine_threads(stage: StagePlan) -> int:
    """`threads` of the engine args, else the CPU request rounded up."""
    options = EngineOptions(stage.name, dict(stage.engine_args))
    cpu = stage.cpu
    cores = float(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu)
    return options.integer("threads", max(1, math.ceil(cores)), minimum=1)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="omni_runtime.stages.worker", description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--curve", type=Path, required=True)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--replica", required=True, help="the pod's uid, or any id that nobody else has")
    parser.add_argument("--entry-host", required=True, help="name(s) of the entry's headless Service, comma-separated")
    parser.add_argument("--entry-port", type=int, default=ENTRY_CONTROL_PORT)
    parser.add_argument("--ipc-dir", type=Path, required=True)
    parser.add_argument("--node-dir", type=Path, help="folder of the node, to reach sidecars of other pods on it")
    parser.add_argument("--http-port", type=int, default=ENGINE_HTTP_PORT)
    parser.add_argument("--models-dir", type=Path, default=None)
    parser.add_argument("--log-level", default="INFO")
    return parser.parse_args(argv)


async def _main(args: argparse.Namespace, build: BuildEngine | None) -> int:
    from omni_runtime.connectors.client import SidecarEdgeClient
    from omni_runtime.connectors.node_folder import NodeFolder
    from omni_runtime.models.catalogue import default_models_dir
    from omni_runtime.stages.registry import build_engine

    plan = load_plan(args.plan.read_bytes())
    stage = plan.stage(args.stage)
    threads = engine_threads(stage)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # before any tensor library is imported
    for name, value in stage.env:
        os.environ.setdefault(name, value)
    model = resolve_model(plan.model.uri, args.models_dir or default_models_dir())
    engine = (build or build_engine)(EngineContext(plan=plan, stage=stage, model_path=model))
    options = EngineOptions(stage.name, dict(stage.engine_args))
    config = WorkerConfig(
        plan=plan,
        stage=stage,
        replica=args.replica,
        entry_hosts=tuple(h.strip() for h in args.entry_host.split(",") if h.strip()),
        entry_port=args.entry_port,
        http_port=args.http_port,
        chunk_deadline_s=options.number("chunk_deadline_s", 0.0) or DEFAULT_CHUNK_DEADLINE_S,
    )
    keys = load_keys(args.curve)
    node = None if args.node_dir is None else NodeFolder(args.node_dir, keys)
    edges = SidecarEdgeClient(args.ipc_dir, plan, stage.name, args.replica, node=node)
    async with Channels(keys) as channels:
        return await Worker(config, engine, edges, channels).run()


def main(argv: Sequence[str] | None = None, *, build: BuildEngine | None = None) -> int:
    """`build`: makes the engine, instead of the registry; for measuring everything but the engine."""
    args = _parse(argv)
    configure("engine", level=args.log_level, stage=args.stage, replica=args.replica)
    try:
        return eventloop.run(_main(args, build))
    except (OmniError, KeyError) as error:
        log.error("worker.bad_configuration", reason=str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
