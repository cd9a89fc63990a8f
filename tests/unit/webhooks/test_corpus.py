"""Every rule against the corpus, in memory: it refuses or warns where it must, and what it says is what a person needs."""

from __future__ import annotations

import pytest

from omni_webhooks.decision import Decision, decide
from omni_webhooks.rules import RULES
from omni_webhooks.rules.rule import Operation
from tests.apiserver.webhooks.corpus import Case, World, cases


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def judge(case: Case, world: World, without: str = "") -> Decision:
    return decide(case.review(), [rule for rule in RULES if rule.name != without], world.context())


def is_as_expected(case: Case, decision: Decision) -> list[str]:
    """What is wrong; empty where all is as the case says."""
    wrong = []
    if case.refused is None and decision.errors:
        wrong.append(f"refused: {decision.errors}")
    if case.refused is not None:
        hits = [e for rule, e in decision.errors if rule == case.refused and e.path.startswith(case.field)]
        if not any(case.message in str(e) for e in hits):
            wrong.append(f"{case.refused} at {case.field} with {case.message!r} is not among {decision.errors}")
        fields = {e.path for _, e in decision.errors}
        wrong += [f"{field} is not named" for field in case.also if field not in fields]
    if case.warns:
        rule, *texts = case.warns
        said = [text for name, text in decision.warnings if name == rule]
        wrong += [f"{text!r} is not among {said}" for text in texts if not any(text in s for s in said)]
        wrong += [] if said else [f"{rule} warns of nothing"]
    return wrong


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.id)
def test_verdict(case: Case, world: World) -> None:
    assert not is_as_expected(case, judge(case, world))


@pytest.mark.parametrize("rule", [r.name for r in RULES])
def test_without_the_rule_a_case_fails(rule: str, world: World) -> None:
    """The mutation check: each rule has a case that nothing but this rule satisfies (T55)."""
    own = [case for case in cases() if case.rule == rule]
    assert own, f"no case is about {rule}"
    for case in own:
        assert is_as_expected(case, judge(case, world, without=rule)), f"{case.id} passes without {rule}"


def test_the_corpus_is_large_and_covers_all_vendors() -> None:
    pipelines = [c for c in cases() if c.kind == "OmniPipeline"]
    assert len(pipelines) >= 60
    profiles = {c.spec.get("runtimeProfile") for c in pipelines}
    assert profiles >= {"cpu", "cuda", "rocm", "npu", "gaudi", "musa"}
    assert {c.operation for c in cases()} == set(Operation)


@pytest.mark.parametrize("case", [c for c in cases() if c.refused], ids=lambda c: c.id)
def test_every_refusal_says_what_to_do(case: Case, world: World) -> None:
    for _, error in judge(case, world).errors:
        assert error.path
        assert error.problem
        assert error.fix
