"""Small resolved plans for stage tests, without the resolver."""

from __future__ import annotations

from omni_runtime.deploy.plan import (
    CONTRACT_VERSION,
    DevicePlan,
    EdgePlan,
    EntryPlan,
    ModelRef,
    ResolvedPlan,
    StagePlan,
)
from omni_runtime.stages.context import EngineContext
from omni_runtime.topology.types import EngineKind, Modality, PayloadContract

STAGE_KINDS: dict[str, dict[str, EngineKind]] = {
    "smol_omni": {
        "thinker": EngineKind.AR_VLLM,
        "talker": EngineKind.HIBARI_ACOUSTIC,
        "code2wav": EngineKind.HIBARI_VOCODER,
    },
    "qwen3_omni_moe": {
        "thinker": EngineKind.AR_VLLM,
        "talker": EngineKind.QWEN3_OMNI_TALKER,
        "code2wav": EngineKind.QWEN3_OMNI_CODE2WAV,
    },
}
PAYLOADS: dict[str, tuple[PayloadContract, PayloadContract]] = {
    "smol_omni": (PayloadContract.TEXT_SEGMENTS, PayloadContract.ACOUSTIC_FRAMES),
    "qwen3_omni_moe": (PayloadContract.THINKER_HIDDEN, PayloadContract.CODEC_FRAMES),
}
THINKER_EDGE, TALKER_EDGE = "thinker->talker", "talker->code2wav"


def stage_plan(
    name: str, engine: EngineKind, engine_args: dict[str, str] | None = None, concurrency: int = 8
) -> StagePlan:
    return StagePlan(
        name=name,
        engine=engine,
        emits=(),
        required_for=(Modality.AUDIO,),
        pod_group=name,
        profile="cpu",
        image="",
        connector_image="",
        image_pull_policy="IfNotPresent",
        image_pull_secrets=(),
        device=DevicePlan(device_class="cpu", count=0, resource_name=None, memory_fraction=1.0),
        tensor_parallel=1,
        pipeline_parallel=1,
        max_concurrency=concurrency,
        cpu="1",
        memory="2Gi",
        shared_memory="64Mi",
        engine_args=tuple(sorted((engine_args or {}).items())),
        env=(),
        node_selector=(),
        tolerations=(),
        priority_class_name=None,
        model_cache_claim=None,
        model_cache_host_path=None,
        startup_timeout_seconds=600,
        probe_period_seconds=5,
    )


def a_plan(
    topology: str = "smol_omni",
    *,
    uri: str = "file:///nowhere",
    engine_args: dict[str, dict[str, str]] | None = None,
    chunk: tuple[int, int, int] = (4, 25, 28),
    concurrency: int = 8,
    drain_timeout_seconds: int = 5,
) -> ResolvedPlan:
    """A three-stage pipeline; engine_args by stage; chunk = initial, regular, left context of the second edge."""
    stages = tuple(
        stage_plan(name, kind, (engine_args or {}).get(name), concurrency)
        for name, kind in STAGE_KINDS[topology].items()
    )
    first, second = PAYLOADS[topology]
    edges = (
        EdgePlan("thinker", "talker", first, "asyncChunk", "SharedMemory", 1, 1, 0),
        EdgePlan("talker", "code2wav", second, "asyncChunk", "SharedMemory", *chunk),
    )
    entry = EntryPlan(
        image="",
        image_pull_policy="IfNotPresent",
        image_pull_secrets=(),
        cpu="100m",
        memory="256Mi",
        port=8000,
        max_queue=64,
        node_selector=(),
        tolerations=(),
    )
    return ResolvedPlan(
        pipeline="test",
        topology=topology,
        revision="0123456789",
        contract_version=CONTRACT_VERSION,
        model=ModelRef(uri=uri, revision=None, served_name="test"),
        stages=stages,
        edges=edges,
        entry=entry,
        drain_timeout_seconds=drain_timeout_seconds,
        replicas={},
        origins={},
    )


def a_context(plan: ResolvedPlan, stage: str, model_path: str = "") -> EngineContext:
    return EngineContext(plan=plan, stage=plan.stage(stage), model_path=model_path)
