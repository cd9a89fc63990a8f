"""One review: which rules are asked, what a stale or missing copy does, and what is said on the wire."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_operator.kinds import PIPELINE
from omni_runtime.errors import FieldError
from omni_webhooks import metrics, rules
from omni_webhooks.context import PROFILES, RESOURCES, Context
from omni_webhooks.decision import STALE_SECONDS, Review, decide
from omni_webhooks.ledger import StageCount
from omni_webhooks.review import (
    MAX_WARNING,
    MAX_WARNINGS,
    BadReview,
    parse_call,
    patch_answer,
    scale_review,
    verdict_answer,
)
from omni_webhooks.rules import RULES
from omni_webhooks.rules.rule import Advice, Change, Finding, Operation, Rule
from omni_webhooks.server import select_rules

SPEC: dict[str, Any] = {"model": {"uri": "packaged://smol-omni"}, "topology": "smol_omni"}
ERROR = FieldError("spec.topology", "x", "is wrong", "make it right")


def body(spec: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "namespace": "ns", **metadata}, "spec": spec or SPEC}


def create(spec: dict[str, Any] | None = None, **metadata: Any) -> Review:
    return Review("OmniPipeline", Operation.CREATE, body(spec, **metadata))


def says(*findings: Finding, needs: tuple[str, ...] = (), name: str = "Test") -> Rule[OmniPipeline]:
    def check(change: Change[OmniPipeline], context: Context) -> Iterator[Finding]:
        yield from findings

    return Rule(name, PIPELINE, check, needs)


def fails(change: Change[OmniPipeline], context: Context) -> Iterator[Finding]:
    raise KeyError("a mistake of ours")


class TestTable:
    def test_every_file_is_a_rule_of_the_table(self) -> None:
        """T55: a rule that is written and never registered."""
        folder = Path(rules.__file__).parent
        files = {path.stem for path in folder.glob("*.py")} - {"__init__", "rule"}
        listed = {rule.check.__module__.rsplit(".", 1)[1] for rule in RULES}
        assert files == listed

    def test_names_are_distinct_and_stable_words(self) -> None:
        names = [rule.name for rule in RULES]
        assert len(set(names)) == len(names)
        assert all(name.isalpha() and name[0].isupper() for name in names)
        assert {need for rule in RULES for need in rule.needs} <= set(RESOURCES)

    def test_the_page_lists_them_all(self) -> None:
        page = (Path(__file__).parents[3] / "docs" / "admission.md").read_text()
        assert [rule.name for rule in RULES if f"| `{rule.name}` | {rule.kind.kind} |" not in page] == []

    def test_one_can_be_turned_off_and_a_slip_is_told(self) -> None:
        assert "NameConflict" not in {r.name for r in select_rules(RULES, ["NameConflict"])}
        with pytest.raises(ValueError, match="no such rule: NameConflct"):
            select_rules(RULES, ["NameConflct"])


class TestWhoIsAsked:
    def test_all_violations_at_once(self) -> None:
        decision = decide(create(), [says(ERROR, name="A"), says(ERROR, Advice("spec", "hm"), name="B")], Context())
        assert [rule for rule, _ in decision.errors] == ["A", "B"]
        assert decision.warnings == (("B", "spec: hm"),)

    @pytest.mark.parametrize(
        "review",
        [
            pytest.param(create(deletionTimestamp="2026-01-01T00:00:00Z"), id="being deleted (T52)"),
            pytest.param(Review("OmniPipeline", Operation.UPDATE, body(labels={"a": "b"}), body()), id="spec untouched"),
            pytest.param(Review("Pod", Operation.CREATE, body()), id="not ours"),
            pytest.param(Review("OmniTenant", Operation.CREATE, body({"namespaces": ["a"]})), id="rules of another kind"),
            pytest.param(Review("OmniPipeline", Operation.DELETE, body()), id="another operation"),
        ],
    )  # fmt: skip
    def test_nobody(self, review: Review) -> None:
        decision = decide(review, [says(ERROR)], Context())
        assert decision.allowed
        assert not decision.warnings

    def test_an_object_of_a_newer_schema_is_not_ours_to_judge(self) -> None:
        decision = decide(create({"model": {"uri": 7}}), [says(ERROR)], Context())
        assert decision.allowed
        assert "does not read the object: spec." in decision.warnings[0][1]

    def test_an_old_object_that_does_not_parse_blocks_nothing_but_the_new_errors(self) -> None:
        review = Review("OmniPipeline", Operation.UPDATE, body(), body({"model": 7}))
        assert decide(review, [says()], Context()).allowed
        assert not decide(review, [says(ERROR)], Context()).allowed

    def test_a_mistake_in_a_rule_stops_nobody_and_the_others_go_on(self) -> None:
        before = metrics.RULE_FAILURES.labels("Broken")._value.get()
        broken: Rule[OmniPipeline] = Rule("Broken", PIPELINE, fails)
        decision = decide(create(), [broken, says(ERROR)], Context())
        assert [rule for rule, _ in decision.errors] == ["Test"]
        assert decision.warnings[0] == ("Broken", "not checked (Broken): the rule itself failed with KeyError")
        assert metrics.RULE_FAILURES.labels("Broken")._value.get() == before + 1


class TestOldFacts:
    def context(self, age: float | None) -> Context:
        return replace(Context(), ages={**dict.fromkeys(RESOURCES, 0.0), PROFILES: age})

    def test_fresh(self) -> None:
        decision = decide(create(), [says(ERROR, needs=(PROFILES,))], self.context(STALE_SECONDS))
        assert not decision.allowed
        assert decision.needs == {PROFILES}

    def test_stale_facts_refuse_nobody(self) -> None:
        decision = decide(create(), [says(ERROR, needs=(PROFILES,))], self.context(STALE_SECONDS + 1))
        assert decision.allowed
        assert "(not refused: what is known of omniruntimeprofiles is 76 s old)" in decision.warnings[0][1]

    def test_missing_facts_are_not_looked_at(self) -> None:
        broken: Rule[OmniPipeline] = Rule("Broken", PIPELINE, fails, needs=(PROFILES,))
        decision = decide(create(), [broken], self.context(None))
        assert decision.warnings == (
            ("Broken", "not checked (Broken): the list of omniruntimeprofiles is not known yet"),
        )

    def test_rules_that_need_nothing_go_on(self) -> None:
        assert not decide(create(), [says(ERROR)], self.context(None)).allowed


def request(**fields: Any) -> bytes:
    given: dict[str, Any] = {
        "uid": "u", "kind": {"group": "g", "version": "v", "kind": "OmniPipeline"}, "operation": "CREATE",
        "namespace": "ns", "name": "p", "object": body(), "oldObject": None, "dryRun": True, **fields,
    }  # fmt: skip
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": given}).encode()


class TestWire:
    def test_a_refusal(self) -> None:
        call = parse_call(request())
        answer = verdict_answer(call, decide(call.review(), [says(ERROR)], Context()))["response"]
        assert (answer["uid"], answer["allowed"]) == ("u", False)
        status = answer["status"]
        assert (status["code"], status["reason"]) == (422, "Invalid")
        assert status["message"] == "spec.topology: 'x': is wrong; make it right"
        (cause,) = status["details"]["causes"]
        assert cause == {
            "reason": "FieldValueInvalid",
            "field": "spec.topology",
            "message": "'x': is wrong; make it right [Test]",
        }

    def test_warnings_are_few_short_and_one_line(self) -> None:
        call = parse_call(request())
        many = says(*(Advice(f"spec.a{i}", "x" * 1000 + "\n") for i in range(30)))
        warnings = verdict_answer(call, decide(call.review(), [many], Context()))["response"]["warnings"]
        assert len(warnings) == MAX_WARNINGS + 1
        assert warnings[-1] == f"and {30 - MAX_WARNINGS} more warnings"
        assert max(map(len, warnings)) <= MAX_WARNING
        assert sum(map(len, warnings)) < 4096, "what the API server passes on"
        assert not any("\n" in w for w in warnings)

    def test_what_is_deleted_is_what_there_is_to_look_at(self) -> None:
        review = parse_call(request(operation="DELETE", object=None, oldObject=body())).review()
        assert review.new["spec"] == SPEC
        assert review.old is None

    def test_a_generated_name(self) -> None:
        call = parse_call(request(name="", object={"metadata": {"generateName": "p-"}, "spec": SPEC}))
        assert call.key == ("ns", "p-")

    def test_a_scale_is_a_change_of_the_stage(self) -> None:
        kind = {"group": "autoscaling", "version": "v1", "kind": "Scale"}
        call = parse_call(
            request(kind=kind, subResource="scale", operation="UPDATE", object={"spec": {"replicas": 9}}, oldObject={"spec": {}})
        )  # fmt: skip
        review = scale_review(call, StageCount("p", "talker", 1, 1, 4, None))
        decision = decide(review, RULES, Context())
        assert [(rule, e.path) for rule, e in decision.errors] == [("ReplicasOutOfBounds", "spec.replicas")]

    @pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"request": {}}', b'{"request": {"uid": 1, "kind": "x"}}'])
    def test_what_is_no_review(self, raw: bytes) -> None:
        with pytest.raises(BadReview):
            parse_call(raw)

    def test_a_patch(self) -> None:
        call = parse_call(request())
        step = {"op": "add", "path": "/spec/weight", "value": 1}
        answer = patch_answer(call, [step])["response"]
        assert json.loads(base64.b64decode(answer["patch"])) == [step]
        assert answer["patchType"] == "JSONPatch"
        assert "patch" not in patch_answer(call, [])["response"]


def test_metrics_have_a_registry_of_their_own() -> None:
    """The operator's gauges would read 0 here and be believed."""
    assert isinstance(metrics.REGISTRY, CollectorRegistry)
    names = {family.name for family in metrics.REGISTRY.collect()}
    assert "omni_webhooks_admissions" in names
    assert not [name for name in names if name.startswith("omni_operator")]
