"""Options of a vLLM stage: which tap is chosen, and combinations that would give no or wrong hidden states."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from omni_runtime.errors import InvalidPipeline
from omni_runtime.stages.ar_vllm.arguments import Tap, choose_tap, engine_arguments
from omni_runtime.stages.ar_vllm.rows import RowAssembler, RowsHeader
from omni_runtime.stages.context import EngineContext
from tests.unit.stages.plans import a_context, a_plan


def a_thinker(*, gpu: bool = False, pipeline_parallel: int = 1) -> EngineContext:
    context = a_context(a_plan("qwen3_omni_moe"), "thinker", "model")
    device = replace(context.stage.device, resource_name="nvidia.com/gpu" if gpu else None)
    stage = replace(context.stage, device=device, pipeline_parallel=pipeline_parallel)
    return EngineContext(context.plan, stage, context.model_path)


@pytest.mark.parametrize(
    ("gpu", "asked", "options", "chosen"),
    [
        pytest.param(True, "auto", {}, Tap.AUX, id="an accelerator keeps its graphs"),
        pytest.param(True, "auto", {"enforce_eager": "true"}, Tap.HOOKS, id="no graphs to keep"),
        pytest.param(False, "auto", {}, Tap.HOOKS, id="a CPU has none"),
        pytest.param(False, "aux", {}, Tap.AUX, id="asked for"),
        pytest.param(True, "hooks", {}, Tap.HOOKS, id="asked for hooks"),
    ],
)
def test_the_tap_follows_what_the_stage_can(gpu: bool, asked: str, options: dict[str, str], chosen: Tap) -> None:
    assert choose_tap(a_thinker(gpu=gpu), asked, options) is chosen


def test_one_worker_on_cpus_computes_in_the_engine_core() -> None:
    """Where there are several, or an accelerator, vLLM knows better."""
    backend = "distributed_executor_backend"
    assert engine_arguments(a_thinker(), {}, tap=None)[backend].endswith("InCoreExecutor")
    for elsewhere in (a_thinker(gpu=True), a_thinker(pipeline_parallel=2)):
        assert backend not in engine_arguments(elsewhere, {}, tap=None)


def test_auxiliary_outputs_leave_compilation_on_and_hooks_do_not() -> None:
    context = a_thinker(gpu=True)
    aux, hooks = (engine_arguments(context, {}, tap=tap) for tap in (Tap.AUX, Tap.HOOKS))
    assert "enforce_eager" not in aux
    assert aux["worker_cls"].endswith("AuxStateWorker")
    assert hooks["enforce_eager"] is True
    assert "worker_cls" not in hooks
    for arguments in (aux, hooks):
        assert arguments["enable_prefix_caching"] is False
        assert arguments["worker_extension_cls"].endswith("HiddenStateTap")
    assert "worker_extension_cls" not in engine_arguments(context, {}, tap=None)


@pytest.mark.parametrize(
    ("tap", "options", "says"),
    [
        (Tap.HOOKS, {"enable_prefix_caching": "true"}, r"engineArgs\.enable_prefix_caching: 'true'.*cache hit.*remove"),
        (Tap.AUX, {"enable_prefix_caching": "true"}, r"engineArgs\.enable_prefix_caching: 'true'.*cache hit.*remove"),
        (Tap.HOOKS, {"enforce_eager": "false"}, r"engineArgs\.enforce_eager: 'false'.*hooks.*tap to aux"),
        (None, {"limit_mm_per_prompt": "{audio"}, r"limit_mm_per_prompt.*not valid JSON.*quotes"),
        (None, {"enable_sleep_mode": "true"}, r"enable_sleep_mode: 'true'.*no device memory.*scale"),
    ],
)
def test_a_combination_that_cannot_work_names_field_value_and_fix(
    tap: Tap | None, options: dict[str, str], says: str
) -> None:
    with pytest.raises(InvalidPipeline, match=says):
        engine_arguments(a_thinker(), options, tap=tap)


def test_prefix_caching_is_free_where_nobody_wants_hidden_states() -> None:
    arguments = engine_arguments(a_thinker(), {"enable_prefix_caching": "true"}, tap=None)
    assert arguments["enable_prefix_caching"] is True


def test_layers_on_several_machines_cannot_be_tapped() -> None:
    with pytest.raises(InvalidPipeline, match=r"parallelism\.pipeline: '2'.*first layers.*tensor"):
        engine_arguments(a_thinker(gpu=True, pipeline_parallel=2), {}, tap=Tap.AUX)


def test_rows_are_complete_when_the_last_one_is_there() -> None:
    rows = RowAssembler()
    rows.add_tokens([1, 2], [3])
    rows.add_tokens(None, [4])
    rows.add_rows(RowsHeader("r", 0, 2, 1, "float32"), bytes(8), bytes(8))
    rows.finish()
    assert not rows.complete
    rows.add_rows(RowsHeader("r", 2, 1, 1, "float32"), bytes(4), bytes(4))
    assert rows.complete
    payload = rows.take()
    assert payload is not None
    assert (payload.start, payload.rows, payload.finished) == (0, 3, True)
