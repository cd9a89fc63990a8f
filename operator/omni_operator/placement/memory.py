"""What one stage needs on each of its devices, term by term, each with its source. Pure.

Two kinds of engines. vLLM pages its KV cache: it starts when one request of max_model_len fits beside everything else,
and more memory means more requests at once. The own engines reserve their slots when they start, because a talker
that is preempted would lose the rows that it was conditioned on: all of it has to fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from omni_crds.v1alpha1.runtimeprofile import AcceleratorVendor
from omni_operator.placement import kvcache, workspace
from omni_operator.placement.devices import DeviceSpec
from omni_operator.placement.modelfacts import ModelPart, Parallelism, dtype_bytes
from omni_operator.placement.types import MemoryTerm, StageMemory
from omni_operator.placement.weights import device_bytes, with_arguments
from omni_runtime.deploy.plan import StagePlan
from omni_runtime.deploy.quantity import parse_quantity
from omni_runtime.topology.types import EngineKind

DEFAULT_MAX_MODEL_LEN = 32_768
CPU_KV_BYTES = 256 << 20  # what the stage worker gives vLLM on a CPU when nothing is said
TALKER_POSITIONS = 4096  # max_prefill_rows and max_frames of the talker engine, each
CODE2WAV_FRAMES = 53  # 25 new ones and 28 of left context
# Elements per frame of the decoder's widest tensors (96 channels at 1,920 samples), and how many live at once.
CODE2WAV_ELEMENTS = 96 * 1920 * 4


@dataclass(frozen=True, slots=True)
class _Load:
    """One stage on one device class: what all terms are computed from."""

    stage: StagePlan
    part: ModelPart
    device: DeviceSpec
    parallel: Parallelism
    capacity: int

    @property
    def arguments(self) -> dict[str, str]:
        return dict(self.stage.engine_args)

    @property
    def width(self) -> float:
        return dtype_bytes(self.part.dtype)

    @property
    def kv_width(self) -> float:
        named = self.arguments.get("kv_cache_dtype", "auto")
        return self.width if named == "auto" else dtype_bytes(named)


def parallelism_of(stage: StagePlan) -> Parallelism:
    return Parallelism(tensor=stage.tensor_parallel, pipeline=stage.pipeline_parallel)


def stage_memory(
    stage: StagePlan, part: ModelPart | None, device: DeviceSpec, declared: int | None = None
) -> StageMemory:
    """The stage on one device of the class. declared: bytes per device that a user states; they replace the sum."""
    on_cpu = stage.device.resource_name is None
    capacity = int(parse_quantity(stage.memory)) + _arena(stage) if on_cpu else device.usable
    budget = capacity if on_cpu else int(capacity * stage.device.memory_fraction)
    base = StageMemory(
        stage=stage.name,
        device_class=stage.device.device_class,
        devices=stage.device.count,
        capacity=capacity,
        budget=budget,
        terms=(),
        known=False,
    )
    if declared is not None:
        return replace(base, terms=(MemoryTerm("declared", declared, "the pipeline"),), known=True)
    if part is None:
        share = MemoryTerm("declared share", budget, "memoryFraction" if not on_cpu else "resources.memory")
        return replace(base, terms=(share,))
    part = _as_loaded(stage, part)
    load = _Load(stage, part, device, parallelism_of(stage), capacity)
    terms = [MemoryTerm("weights", device_bytes(part, load.parallel), part.source, _spread(load.parallel))]
    terms += _engine_terms(load, on_cpu)
    terms += workspace.runtime_terms(AcceleratorVendor.CPU if on_cpu else device.vendor, load.parallel)
    if on_cpu:
        terms.append(MemoryTerm("connector arena", _arena(stage), "resources.sharedMemory"))
    per_token, full = _kv_figures(load)
    return replace(base, terms=tuple(terms), known=True, kv_bytes_per_token=per_token, kv_full=full)


def concurrent_requests(memory: StageMemory) -> float | None:
    """Requests of full length that the KV cache holds at once; None for engines that reserve all of them."""
    kv = next((t.bytes for t in memory.terms if t.name == "KV cache"), 0)
    if not kv or not memory.kv_full or not memory.known:
        return None
    return (memory.budget - memory.need + kv) / kv


def least_cache(stage: StagePlan, part: ModelPart, device: DeviceSpec) -> tuple[int, int] | None:
    """(bytes of the KV cache that are set aside, bytes of one request of full length) on each device of a vLLM stage;
    None where the engine takes what is left."""
    on_cpu = stage.device.resource_name is None
    stated = dict(stage.engine_args).get("kv_cache_memory_bytes") or (str(CPU_KV_BYTES) if on_cpu else None)
    if stage.engine is not EngineKind.AR_VLLM or stated is None or not part.layers:
        return None
    load = _Load(stage, _as_loaded(stage, part), device, parallelism_of(stage), device.usable)
    tokens = workspace.batched_tokens(load.arguments, load.capacity)
    return int(stated), _one_request(load, max_model_len(stage, part), tokens)


def max_model_len(stage: StagePlan, part: ModelPart | None) -> int:
    stated = dict(stage.engine_args).get("max_model_len")
    if stated:
        return int(stated)
    return (part.max_positions if part else 0) or DEFAULT_MAX_MODEL_LEN


def _as_loaded(stage: StagePlan, part: ModelPart) -> ModelPart:
    arguments = dict(stage.engine_args)
    if arguments.get("language_model_only") == "true":
        part = replace(
            part, encoder_tokens=0
        )  # the encoders stay in the sum: whether they are loaded is the model's choice
    dtype = arguments.get("dtype")
    return with_arguments(part, dtype, arguments.get("quantization"), float(arguments.get("cpu_offload_gb", 0)))


def _engine_terms(load: _Load, on_cpu: bool) -> list[MemoryTerm]:
    engine, part, stage = load.stage.engine, load.part, load.stage
    if part.diffusion is not None:
        return workspace.diffusion_terms(part.diffusion, load.parallel, stage.max_concurrency, load.width)
    if engine is EngineKind.AR_VLLM:
        return _paged_terms(load, on_cpu)
    if engine is EngineKind.QWEN3_OMNI_TALKER:
        positions = _talker_positions(load)
        size = stage.max_concurrency * kvcache.bytes_per_request(part, positions, element=load.width)
        detail = f"{stage.max_concurrency} slots x {positions} positions x {_per_token(load)} B"
        return [
            MemoryTerm("KV slots", size, "reserved when the engine starts", detail),
            workspace.activation_term(part, load.parallel, TALKER_POSITIONS, stage.max_concurrency, load.width),
        ]
    if engine is EngineKind.QWEN3_OMNI_CODE2WAV:
        one = math.ceil(CODE2WAV_FRAMES * CODE2WAV_ELEMENTS * load.width) if part.hidden >= 512 else 1 << 20
        detail = f"{stage.max_concurrency} streams decode in one batch"
        return [MemoryTerm("activations", stage.max_concurrency * one, "estimate of one step", detail)]
    return []


def _paged_terms(load: _Load, on_cpu: bool) -> list[MemoryTerm]:
    part, stage, arguments = load.part, load.stage, load.arguments
    tokens = workspace.batched_tokens(arguments, load.capacity)
    length = max_model_len(stage, part)
    one = _one_request(load, length, tokens)
    stated = arguments.get("kv_cache_memory_bytes") or (str(CPU_KV_BYTES) if on_cpu else None)
    if stated and int(stated) >= one:
        kv = MemoryTerm("KV cache", int(stated), "kv_cache_memory_bytes" if not on_cpu else "reserved in RAM")
    else:
        detail = f"one request of {length} positions x {_per_token(load)} B"
        kv = MemoryTerm("KV cache", one, "least that the engine starts with", detail)
    if on_cpu:
        tokens, requests = min(tokens, length), stage.max_concurrency
    else:
        requests = stage.max_concurrency
    eager = on_cpu or arguments.get("enforce_eager") == "true"
    terms: list[MemoryTerm | None] = [
        kv,
        workspace.activation_term(part, load.parallel, tokens, requests, load.width),
        workspace.encoder_cache_term(part, load.width, tokens),
        workspace.graph_term(part, eager),
    ]
    return [t for t in terms if t is not None]


def _one_request(load: _Load, length: int, tokens: int) -> int:
    return kvcache.bytes_per_request(
        load.part,
        length,
        element=load.kv_width,
        tensor=load.parallel.tensor,
        pipeline=load.parallel.pipeline,
        batched_tokens=tokens,
    )


def _kv_figures(load: _Load) -> tuple[int, int]:
    """(bytes per token, bytes of all requests at full length) on one device."""
    if load.stage.engine is not EngineKind.AR_VLLM:
        return (_per_token(load), 0) if load.stage.engine is EngineKind.QWEN3_OMNI_TALKER else (0, 0)
    length = max_model_len(load.stage, load.part)
    tokens = workspace.batched_tokens(load.arguments, load.capacity)
    return _per_token(load), load.stage.max_concurrency * _one_request(load, length, tokens)


def _per_token(load: _Load) -> int:
    paged = load.stage.engine is EngineKind.AR_VLLM
    return kvcache.bytes_per_token(
        load.part,
        element=load.kv_width if paged else load.width,
        tensor=load.parallel.tensor,
        pipeline=load.parallel.pipeline,
    )


def _talker_positions(load: _Load) -> int:
    arguments = load.arguments
    return int(arguments.get("max_prefill_rows", TALKER_POSITIONS)) + int(arguments.get("max_frames", TALKER_POSITIONS))


def _spread(parallel: Parallelism) -> str:
    parts = [f"{name} {n}" for name, n in (("tensor", parallel.tensor), ("pipeline", parallel.pipeline)) if n > 1]
    return f"over {' x '.join(parts)}" if parts else ""


def _arena(stage: StagePlan) -> int:
    return int(parse_quantity(stage.shared_memory))
