"""Stage options and model places: a wrong one names field, value and fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omni_runtime.errors import InvalidPipeline
from omni_runtime.stages.context import EngineOptions, resolve_model
from omni_runtime.stages.worker import engine_threads
from omni_runtime.topology.types import EngineKind
from tests.unit.stages.plans import stage_plan


def test_options_are_typed_on_read() -> None:
    options = EngineOptions("talker", {"a": "3", "b": "true", "c": "0.5", "d": "x"})
    assert (options.integer("a", 1), options.flag("b", False), options.number("c", 0.0)) == (3, True, 0.5)
    assert options.remaining() == {"d": "x"}
    with pytest.raises(InvalidPipeline, match=r"spec\.stages\[talker\]\.engineArgs\.d: 'x'.*no such option"):
        options.reject_unknown()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("integer", "many", "whole number"),
        ("integer", "-1", "below 0"),
        ("flag", "maybe", "true or false"),
        ("number", "x", "not a number"),
    ],
)
def test_a_bad_value_is_named(name: str, value: str, says: str) -> None:
    options = EngineOptions("talker", {"v": value})
    default: object = {"integer": 1, "flag": True, "number": 1.0}[name]
    with pytest.raises(InvalidPipeline, match=says):
        getattr(options, name)("v", default)


@pytest.mark.parametrize(
    ("cpu", "args", "threads"), [("400m", {}, 1), ("1500m", {}, 2), ("4", {}, 4), ("4", {"threads": "2"}, 2)]
)
def test_threads_follow_the_cpu_request(cpu: str, args: dict[str, str], threads: int) -> None:
    from msgspec.structs import replace

    assert engine_threads(replace(stage_plan("s", EngineKind.AR_VLLM, args), cpu=cpu)) == threads


def test_model_places(tmp_path: Path) -> None:
    (tmp_path / "smol-omni").mkdir()
    assert resolve_model("packaged://smol-omni", tmp_path) == str(tmp_path / "smol-omni")
    assert resolve_model(f"file://{tmp_path}", tmp_path) == str(tmp_path)
    assert resolve_model("hf://Qwen/Qwen3-Omni-30B-A3B-Instruct", tmp_path) == "Qwen/Qwen3-Omni-30B-A3B-Instruct"


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("smol-omni", "no scheme"),
        ("packaged://missing", "omni models prepare missing"),
        ("packaged://../../etc", "climbs out"),
        ("ftp://x/y", "'ftp' is unknown"),
        ("file:///does/not/exist", "does not exist"),
    ],
)
def test_a_wrong_place_says_what_to_do_r56(uri: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidPipeline, match=says):
        resolve_model(uri, tmp_path)


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("omni_runtime.stages.worker", ("torch", "vllm", "transformers")),
        ("omni_runtime.stages.hibari.vocoder", ("torch", "vllm", "transformers")),
        ("omni_runtime.stages.hibari.acoustic", ("torch", "vllm", "transformers")),
        ("omni_runtime.cli.models", ("torch", "vllm", "transformers", "zmq")),
    ],
)
def test_a_stage_loads_only_its_own_libraries(module: str, never: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([m for m in {never!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
