"""The talker engine on the tiny model, and what the tests of it ask and compare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.unit.stages.plans import TALKER_EDGE, THINKER_EDGE, a_context, a_plan

pytest.importorskip("torch")
pytest.importorskip("transformers")


from omni_runtime.stages.context import EngineContext
from omni_runtime.stages.engine import CodesOut, StageOutput, StageRequest
from omni_runtime.stages.qwen3_omni.talker import Qwen3OmniTalkerEngine
from tests.unit.stages.qwen3_reference import Expected, Reference, tiny_model_path

MAX_CODES = 14
GREEDY = {"talker_temperature": 0.0, "talker_max_tokens": MAX_CODES}
FEW, MANY = 9, 24  # requests; nine fill the largest batch and leave one waiting


def a_prompt(k: int) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": "word " * (1 + k % 5) + chr(97 + k)}]


def answers(reference: Reference, requests: int) -> list[Expected]:
    return [
        reference.generate(reference.inputs(a_prompt(k)), max_text=4 + k % 9, max_codes=MAX_CODES)
        for k in range(requests)
    ]


def an_engine(slots: int, device: str = "cpu", **engine_args: str) -> Qwen3OmniTalkerEngine:
    args = {"talker": {"dtype": "float32", "max_frames": "64", "max_prefill_rows": "256", **engine_args}}
    plan = a_plan("qwen3_omni_moe", engine_args=args, concurrency=slots, chunk=(4, 5, 28))
    context = a_context(plan, "talker", tiny_model_path())
    if device == "cuda":
        gpu = replace(context.stage.device, resource_name="nvidia.com/gpu", count=1)
        context = EngineContext(plan, replace(context.stage, device=gpu), context.model_path)
    engine = Qwen3OmniTalkerEngine(context)
    engine.load()
    return engine


def start(engine: Qwen3OmniTalkerEngine, request: str, params: dict[str, Any] | None = None) -> None:
    engine.submit(StageRequest(request, params or GREEDY, {}, (THINKER_EDGE,), (TALKER_EDGE,), emit_codes=True))


def drain(engine: Qwen3OmniTalkerEngine) -> list[StageOutput]:
    outputs: list[StageOutput] = []
    while engine.stats().running or engine.stats().waiting:
        step = engine._step()
        if step is None:
            break
        outputs += step
    return outputs


def codes_of(outputs: list[StageOutput], request: str) -> np.ndarray:
    rows = [f for o in outputs if isinstance(o, CodesOut) and o.request == request for f in o.codes]
    return np.asarray(rows, dtype=np.int32).reshape(len(rows), -1)


def same(codes: np.ndarray, want: Expected) -> bool:
    return codes.shape[0] == want.codes.shape[0] and np.array_equal(codes.reshape(want.codes.shape), want.codes)
