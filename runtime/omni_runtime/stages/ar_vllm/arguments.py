"""Engine options of a vLLM stage: plan values -> AsyncEngineArgs. Names are vLLM's own; values are strings."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from typing import Any

from omni_runtime.errors import FieldError, InvalidPipeline
from omni_runtime.stages.context import EngineContext

_CPU_KV_CACHE_BYTES = 256 << 20


_EXTENSION = "omni_runtime.stages.ar_vllm.tap.HiddenStateTap"
_IN_CORE_EXECUTOR = "omni_runtime.stages.ar_vllm.executor.InCoreExecutor"
_AUX_WORKER = "omni_runtime.stages.ar_vllm.aux_worker.AuxStateWorker"


class Tap(StrEnum):
    """How hidden states are read. auto: the model's auxiliary outputs where compilation pays, hooks on CPUs."""

    AUTO = "auto"
    HOOKS = "hooks"
    AUX = "aux"


def choose_tap(context: EngineContext, asked: str, options: dict[str, str]) -> Tap:
    """The way that this stage can and should go; never AUTO."""
    tap = Tap(asked)
    if tap is not Tap.AUTO:
        return tap
    eager = context.stage.device.resource_name is None or options.get("enforce_eager") == "true"
    return Tap.HOOKS if eager else Tap.AUX


def environment(context: EngineContext, threads: int, *, tapped: bool) -> dict[str, str]:
    """Variables that vLLM reads when it starts its processes; none of them overrides what the pod sets."""
    values = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if context.stage.device.resource_name is None:
        # Binding threads to cores would put every engine of a small node onto the same ones.
        values["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        values["OMP_NUM_THREADS"] = str(threads)
        # A thread that spins at a barrier takes the cores from the talker and the connectors of the same small node.
        values["OMP_WAIT_POLICY"] = "PASSIVE"
    if tapped:
        values["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the tap reads the V1 runner's batch
    return values


def apply_environment(values: dict[str, str]) -> None:
    for name, value in values.items():
        os.environ.setdefault(name, value)


def engine_arguments(context: EngineContext, options: dict[str, str], *, tap: Tap | None) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs. Raises InvalidPipeline for a value that is not what vLLM takes, or that
    cannot be had together with the tap (None: nobody downstream wants hidden states)."""
    arguments: dict[str, Any] = {
        "model": context.model_path,
        "revision": context.model.revision,
        "max_num_seqs": context.stage.max_concurrency,
        "tensor_parallel_size": context.stage.tensor_parallel,
        "pipeline_parallel_size": context.stage.pipeline_parallel,
        "enable_log_requests": False,
        "mm_processor_cache_gb": 0,  # parts of a chat are rarely sent twice, and the cache is per process
    }
    if context.stage.device.resource_name is None:
        arguments["kv_cache_memory_bytes"] = _CPU_KV_CACHE_BYTES
        arguments["enforce_eager"] = True
        if context.stage.tensor_parallel * context.stage.pipeline_parallel == 1:
            arguments["distributed_executor_backend"] = _IN_CORE_EXECUTOR
    else:
        arguments["gpu_memory_utilization"] = context.stage.device.memory_fraction
    for name, raw in options.items():
        arguments[name] = _parse(context.stage.name, name, raw)
    if arguments.get("enable_sleep_mode") is True and context.stage.device.resource_name is None:
        problem = "a CPU stage has no device memory to give back"
        raise _invalid(context.stage.name, "enable_sleep_mode", "true", problem, "remove it, or scale the stage down")
    if tap is not None:
        _check_tapped(context, arguments, tap)
        arguments["enable_prefix_caching"] = False
        arguments["worker_extension_cls"] = _EXTENSION
        if tap is Tap.HOOKS:
            arguments["enforce_eager"] = True
        else:
            arguments["worker_cls"] = _AUX_WORKER
    return arguments


def _parse(stage: str, name: str, raw: str) -> Any:
    """JSON where it is JSON (numbers, booleans, objects), else the text itself."""
    try:
        return json.loads(raw)
    except ValueError:
        if raw[:1] in "{[":
            raise _invalid(stage, name, raw, "is not valid JSON", "check quotes and brackets") from None
        return raw


def _check_tapped(context: EngineContext, arguments: dict[str, Any], tap: Tap) -> None:
    stage = context.stage.name
    if tap is Tap.HOOKS and arguments.get("enforce_eager") is False:
        problem = "the next stage needs hidden states, and captured graphs do not call the hooks that read them"
        raise _invalid(stage, "enforce_eager", "false", problem, "remove it, or set engineArgs.tap to aux")
    if arguments.get("enable_prefix_caching") is True:
        problem = "the next stage needs hidden states, and a cache hit computes none"
        raise _invalid(stage, "enable_prefix_caching", "true", problem, "remove it")
    if context.stage.pipeline_parallel > 1:
        problem = "the next stage needs hidden states, and they are read where the first layers are"
        path = f"spec.stages[{stage}].parallelism.pipeline"
        value = str(context.stage.pipeline_parallel)
        raise InvalidPipeline((FieldError(path, value, problem, "use 1, and parallelism.tensor for more devices"),))


def _invalid(stage: str, name: str, value: str, problem: str, fix: str) -> InvalidPipeline:
    return InvalidPipeline((FieldError(f"spec.stages[{stage}].engineArgs.{name}", value, problem, fix),))
