"""A fix is followed to the letter: its words go into the pipeline's spec, which is then read, resolved and checked anew."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import pytest

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.placement import ClusterView, Feasible, Fix, Infeasible, QuotaView, TenantView
from omni_operator.placement.edits import last_words
from omni_runtime.errors import InvalidPipeline
from tests.unit.placement.builders import LABELS, QWEN, a_node, a_pipeline, check
from tests.unit.placement.corpus import CASES, H100

_SET = re.compile(r"set (\S+) of (\S+) to (\S+)(?: \(now \d+\))?(?:, and (\S+) to (\S+))?")
_CLUSTER = ("add ", "each a node", "raise ", "allow hot edges", "labelled")  # what is not in the pipeline
CLASSES = sorted(name for name in LABELS if name.startswith("nvidia"))


def followed(pipeline: OmniPipeline, text: str) -> OmniPipeline | None:
    """The pipeline as a person would write it; None where the fix is said in other words than `set ... to ...`."""
    spec: dict[str, Any] = copy.deepcopy(
        pipeline.model_dump(mode="json", by_alias=True, exclude_none=True)["spec"],
    )
    for part in text.split("; "):
        match = _SET.fullmatch(part)
        if match is None:
            if part.startswith(_CLUSTER):
                continue
            return None
        stages: list[dict[str, Any]] = spec.setdefault("stages", [])
        stage = next((s for s in stages if s["name"] == match[2]), None)
        if stage is None:
            stages.append(stage := {"name": match[2]})
        for field, value in ((match[1], match[3]), (match[4], match[5])):
            if field:
                _write(stage, field, value)
    return OmniPipeline.model_validate({"metadata": {"name": "speaker"}, "spec": spec})


def _write(stage: dict[str, Any], field: str, value: str) -> None:
    outer, _, inner = field.partition(".")
    if "_" in field:
        others = [a for a in stage.get("engineArgs", []) if a["name"] != field]
        stage["engineArgs"] = [*others, {"name": field, "value": value}]
    elif not inner:
        stage[field] = int(value)
    else:
        text = inner in ("class", "memoryFraction", "cpu", "memory")
        stage.setdefault(outer, {})[inner] = value if text else int(value)


def leads_out(pipeline: OmniPipeline, fix: Fix) -> bool:
    written = followed(pipeline, fix.text)
    return written is None or isinstance(check(written, fix.cluster, fixes=0), Feasible)


@pytest.mark.parametrize("case", [c for c in CASES if c.expect is not None], ids=lambda c: c.name)
def test_the_corpus(case: Any) -> None:
    verdict = check(case.pipeline, case.cluster)
    assert isinstance(verdict, Infeasible)
    assert verdict.fixes
    assert all(error.fix for error in verdict.errors)
    for fix in verdict.fixes:
        assert leads_out(case.pipeline, fix), fix.text


def a_muddle(seed: int) -> tuple[OmniPipeline, ClusterView]:
    """A pipeline with several things wrong at once: classes, shares, counts, replicas, nodes, quota, budget."""
    pick = random.Random(seed)
    stages = []
    for name in ("thinker", "talker", "code2wav"):
        parts = [f"name: {name}"]
        if pick.random() < 0.7:
            share = pick.choice(("", "", ", memoryFraction: '0.1'", ", memoryFraction: '0.5'"))
            parts.append(f"accelerator: {{class: {pick.choice(CLASSES)}{share}}}")
        if name == "thinker" and pick.random() < 0.5:
            parts.append(f"parallelism: {{tensor: {pick.choice((2, 3, 4, 16))}}}")
        if pick.random() < 0.3:
            parts.append(f"maxConcurrency: {pick.choice((8, 256, 512))}")
        if pick.random() < 0.4:
            parts.append(f"replicas: {pick.choice((1, 2, 20))}")
        stages.append("{" + ", ".join(parts) + "}")
    nodes = tuple(a_node(f"n{i}", pick.choice(CLASSES), pick.choice((1, 4, 8))) for i in range(pick.randint(0, 3)))
    quotas = (QuotaView("q", {"requests.nvidia.com/gpu": pick.randint(0, 6)}),) if pick.random() < 0.2 else ()
    tenant = TenantView("t", {H100: pick.randint(0, 4)}) if pick.random() < 0.2 else None
    return a_pipeline(f"{QWEN}runtimeProfile: cuda\nstages: [{', '.join(stages)}]"), ClusterView(nodes, quotas, tenant)


@pytest.mark.parametrize(
    "count",
    [pytest.param(40, id="40"), pytest.param(1000, id="1000", marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
def test_whatever_is_wrong_at_once_there_is_a_way_out(count: int) -> None:
    refused = 0
    for seed in range(count):
        pipeline, cluster = a_muddle(seed)
        try:
            verdict = check(pipeline, cluster)
        except InvalidPipeline:
            continue  # the resolver says each thing with its own fix
        if isinstance(verdict, Infeasible):
            refused += 1
            assert verdict.fixes, f"seed {seed}: {verdict.message}"
            for fix in verdict.fixes:
                assert leads_out(pipeline, fix), f"seed {seed}: {fix.text}"
    assert refused > count // 2


def test_of_a_field_that_is_set_twice_the_last_word_counts() -> None:
    steps = [
        "set a.b of x to 8, and a.c to 8; set a.b of y to 1",
        "add a node",
        "set a.b of x to 4, and a.c to 4",
        "add a node",
    ]
    assert last_words(steps) == "set a.b of y to 1; add a node; set a.b of x to 4, and a.c to 4; add a node"
    assert (
        last_words(["set a.b of x to 2, and a.c to z", "set a.c of x to y"]) == "set a.b of x to 2; set a.c of x to y"
    )
