"""What a broken rule says itself, done: its answer becomes a change that can be tried. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from omni_operator.placement.changes import Change, class_changes
from omni_operator.placement.edits import said_spread, with_argument, with_pipeline, with_tensor
from omni_operator.placement.question import Question, replace_stage
from omni_operator.placement.types import Infeasible
from omni_runtime.deploy.plan import ResolvedPlan


def obey_rules(question: Question, verdict: Infeasible) -> Iterator[Change]:
    """All violated rules at once. Where a rule leaves a choice of numbers, each of them is a change of its own."""
    choices = max(len(_numbers(error.fix)) for error in verdict.errors)
    for choice in range(max(1, choices)):
        changed, texts = question, []
        for error in verdict.errors:
            obeyed = _obey(changed, error.path, error.fix, choice)
            if obeyed is None:
                return
            changed = question.with_plan(obeyed[0])
            texts.append(obeyed[1])
        yield Change("; ".join(dict.fromkeys(texts)), changed)


def _numbers(fix: str) -> list[int]:
    """Of "use one of 1, 2, 4": the choices; else the only number, if there is one."""
    found = [int(w) for w in fix.replace(",", " ").split() if w.isdecimal()]
    return found if fix.startswith("use one of ") else found[:1]


def _obey(question: Question, path: str, fix: str, choice: int) -> tuple[ResolvedPlan, str] | None:
    """The plan that does what the rule says, and how a person is told."""
    plan, text = question.plan, f"{path}: {fix}"
    if path == "spec.entry.port":
        return msgspec.structs.replace(plan, entry=msgspec.structs.replace(plan.entry, port=8000)), text
    stage = next((s for s in plan.stages if path.startswith(f"{question.path(s.name)}.")), None)
    if stage is None:
        return None
    field, numbers = path.removeprefix(f"{question.path(stage.name)}."), _numbers(fix) or [1]
    number = numbers[min(choice, len(numbers) - 1)]
    if field == "accelerator.class":
        change = next(class_changes(question, stage), None)
        return (change.question.plan, change.text) if change else None
    if field in ("parallelism.tensor", "accelerator.count"):
        changed = with_tensor(stage, number)
        return replace_stage(plan, changed), said_spread(question, changed)
    if field == "parallelism.pipeline":
        changed = with_pipeline(stage, number)
        return replace_stage(plan, changed), said_spread(question, changed, field)
    name = field.removeprefix("engineArgs[name=").removesuffix("]")
    if name == field:
        return None
    if name == "dtype":
        return replace_stage(plan, with_argument(stage, name, "bfloat16")), text
    value = str(number) if _numbers(fix) else None
    return replace_stage(plan, with_argument(stage, name, value)), text
