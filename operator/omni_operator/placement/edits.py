"""A stage with one thing changed, and what a person writes into the pipeline for it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from omni_operator.placement.devices import DeviceSpec
from omni_operator.placement.question import Question
from omni_runtime.deploy.overlay import PIPELINE
from omni_runtime.deploy.plan import StagePlan

_SET = re.compile(r"set (\S+) of (\S+) to (.+?)(?:, and (\S+) to (.+))?")


def with_argument(stage: StagePlan, name: str, value: str | None) -> StagePlan:
    arguments = {k: v for k, v in stage.engine_args if k != name}
    if value is not None:
        arguments[name] = value
    return msgspec.structs.replace(stage, engine_args=tuple(sorted(arguments.items())))


def with_tensor(stage: StagePlan, tensor: int) -> StagePlan:
    device = msgspec.structs.replace(stage.device, count=tensor * stage.pipeline_parallel)
    return msgspec.structs.replace(stage, tensor_parallel=tensor, device=device)


def with_pipeline(stage: StagePlan, pipeline: int) -> StagePlan:
    device = msgspec.structs.replace(stage.device, count=stage.tensor_parallel * pipeline)
    return msgspec.structs.replace(stage, pipeline_parallel=pipeline, device=device)


def with_class(stage: StagePlan, old: DeviceSpec | None, new: DeviceSpec) -> StagePlan:
    """The class of a stage and the labels of its nodes: the old class's go, the stage's own stay."""
    dropped = set((old.node_selector if old else None) or {})
    selector = {k: v for k, v in stage.node_selector if k not in dropped} | dict(new.node_selector or {})
    device = msgspec.structs.replace(stage.device, device_class=new.name, resource_name=new.resource_name)
    return msgspec.structs.replace(stage, device=device, node_selector=tuple(sorted(selector.items())))


def said(question: Question, stage: StagePlan, field: str, value: object) -> str:
    """`accelerator` needs its class: a pipeline that leaves it to the profile has to name it with any other field."""
    shown = field.removeprefix("engineArgs[name=").removesuffix("]")
    text = f"set {shown} of {stage.name} to {value}"
    in_accelerator = field.startswith("accelerator.") and field != "accelerator.class"
    if in_accelerator and not is_stated(question, stage, "accelerator.class"):
        text += f", and accelerator.class to {stage.device.device_class}"
    return text


def said_spread(question: Question, stage: StagePlan, field: str = "parallelism.tensor") -> str:
    """Parallelism and the number of devices are one decision, and may stand in the spec as two fields."""
    value = stage.pipeline_parallel if field == "parallelism.pipeline" else stage.tensor_parallel
    text = f"set {field} of {stage.name} to {value}"
    if is_stated(question, stage, "accelerator.count"):
        text += f", and accelerator.count to {stage.device.count}"
    return text


def is_stated(question: Question, stage: StagePlan, field: str) -> bool:
    """Whether the pipeline itself says it; where nothing tells, it may."""
    return question.plan.origins.get(f"stages.{stage.name}.{field}", PIPELINE) == PIPELINE


def last_words(texts: Iterable[str]) -> str:
    """Several changes in a row as one instruction: of a field that was set twice the last value."""
    parts = [part for text in texts for part in text.split("; ")]
    later: set[tuple[str, str]] = set()
    kept: list[str] = []
    for part in reversed(parts):
        match = _SET.fullmatch(part)
        if match is None:
            kept.append(part)
            continue
        stage = match[2]
        fields = [(f, v) for f, v in ((match[1], match[3]), (match[4], match[5])) if f and (stage, f) not in later]
        later |= {(stage, f) for f, _ in fields}
        if fields:
            rest = "".join(f", and {f} to {v}" for f, v in fields[1:])
            kept.append(f"set {fields[0][0]} of {stage} to {fields[0][1]}{rest}")
    return "; ".join(reversed(kept))
