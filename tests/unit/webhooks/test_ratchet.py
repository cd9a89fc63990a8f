"""Ratcheting: an old invalid object can be edited, and edited toward valid, and not made worse (T52)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_runtime.errors import FieldError
from omni_webhooks.ratchet import Blame, new_violations, stable_path


def blame(path: str, value: str = "x", rule: str = "R", problem: str = "p") -> Blame:
    return rule, FieldError(path, value, problem, "fix it")


def body(*stages: str) -> dict[str, Any]:
    return {"spec": {"stages": [{"name": name} for name in stages], "edges": [{"from": "a", "to": "b"}]}}


@pytest.mark.parametrize(
    ("now", "before", "brought"),
    [
        pytest.param([blame("spec.a")], [blame("spec.a")], [], id="was so before"),
        pytest.param([blame("spec.a")], [], [blame("spec.a")], id="new"),
        pytest.param([blame("spec.a", "y")], [blame("spec.a", "x")], [blame("spec.a", "y")], id="touched, and still wrong"),
        pytest.param([blame("spec.a", "y")], [blame("spec.a", "x"), blame("spec.b")], [], id="touched, and fewer than before"),
        pytest.param([blame("spec.c")], [blame("spec.a"), blame("spec.b")], [blame("spec.c")], id="fewer, but elsewhere"),
        pytest.param([blame("spec.a", rule="S")], [blame("spec.a")], [blame("spec.a", rule="S")], id="another rule"),
        pytest.param([blame("spec", "", problem="8 of 4")], [blame("spec", "", problem="6 of 4")], [blame("spec", "", problem="8 of 4")], id="no single value: a larger violation is a new one"),
        pytest.param([blame("spec.a"), blame("spec.b")], [blame("spec.a")], [blame("spec.b")], id="only what is new blocks"),
    ],
)  # fmt: skip
def test_what_an_update_brings(now: list[Blame], before: list[Blame], brought: list[Blame]) -> None:
    assert new_violations(now, before, {}, {}) == brought


def test_a_stage_that_moved_in_its_list_is_the_same_stage() -> None:
    old, new = body("talker", "thinker"), body("thinker", "talker")
    assert new_violations([blame("spec.stages[1].engine")], [blame("spec.stages[0].engine")], new, old) == []
    assert new_violations([blame("spec.stages[0].engine")], [blame("spec.stages[0].engine")], new, old) != []


@pytest.mark.parametrize(
    ("path", "stable"),
    [
        ("spec.stages[1].accelerator.count", "spec.stages[b].accelerator.count"),
        ("spec.edges[0].connector.type", "spec.edges[a->b].connector.type"),
        ("spec.stages[7].name", "spec.stages[7].name"),
        ("spec.stages[name=c].replicas", "spec.stages[name=c].replicas"),
        ("spec.nothing[0]", "spec.nothing[0]"),
        ("metadata.name", "metadata.name"),
        ("", ""),
    ],
)
def test_stable_path(path: str, stable: str) -> None:
    assert stable_path(path, body("a", "b")) == stable


blames = st.lists(st.builds(blame, st.sampled_from(["spec.a", "spec.b", "spec.c"]), st.sampled_from("xyz")), max_size=6)


@given(blames)
def test_an_update_that_changes_no_violation_always_passes(found: list[Blame]) -> None:
    assert new_violations(found, found, {}, {}) == []


@given(blames, blames)
def test_a_clean_object_never_becomes_a_bad_one(now: list[Blame], before: list[Blame]) -> None:
    assert new_violations(now, [], {}, {}) == now
    assert set(new_violations(now, before, {}, {})) <= set(now)
