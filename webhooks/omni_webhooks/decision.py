"""The answer to one review. Pure: the change and the context in, the verdict out; the same for a dry run.

No rule is asked about an object that is being deleted, nor about an update that leaves the spec as it was: finalizers,
labels and annotations can always be written (T52).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from omni_crds.v1alpha1.base import OmniModel
from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_crds.v1alpha1.stage import OmniStage
from omni_crds.v1alpha1.tenant import OmniTenant
from omni_operator.kinds import PIPELINE, PROFILE, STAGE, TENANT, JsonObject, Kind
from omni_runtime.errors import FieldError
from omni_webhooks import logs, metrics
from omni_webhooks.cache import key_of
from omni_webhooks.context import Context
from omni_webhooks.ratchet import Blame, new_violations
from omni_webhooks.rules.rule import Advice, AnyRule, Change, Finding, Operation

MODELS: Mapping[str, tuple[Kind, type[OmniModel]]] = {
    PIPELINE.kind: (PIPELINE, OmniPipeline),
    STAGE.kind: (STAGE, OmniStage),
    PROFILE.kind: (PROFILE, OmniRuntimeProfile),
    TENANT.kind: (TENANT, OmniTenant),
}
# A copy that is older than this decides nothing: its findings are warnings (a watch proves itself every 25 s).
STALE_SECONDS = 75.0


@dataclass(frozen=True, slots=True)
class Review:
    """One call of the API server, as far as it matters here."""

    kind: str
    operation: Operation
    new: JsonObject  # of a DELETE: what is deleted
    old: JsonObject | None = None
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """errors: what refuses, with the rule that says so. warnings: shown by kubectl whatever the verdict."""

    errors: tuple[Blame, ...] = ()
    warnings: tuple[tuple[str, str], ...] = ()  # rule, text
    needs: frozenset[str] = frozenset()  # resources that the errors rest on

    @property
    def allowed(self) -> bool:
        return not self.errors


def decide(
    review: Review, rules: Iterable[AnyRule], context: Context, stale_seconds: float = STALE_SECONDS
) -> Decision:
    """Every violation and every warning of a change."""
    known = MODELS.get(review.kind)
    if known is None or _needs_no_look(review):
        return Decision()
    kind, model = known
    new = _parse(model, review.new)
    if isinstance(new, str):
        # Stored objects satisfy the CRD before this is asked, so the CRD is newer than this program: not ours to judge.
        return Decision(warnings=(("", f"not checked: this version of the webhooks does not read the object: {new}"),))
    old = _parse(model, review.old) if review.old else None
    change = Change(review.operation, key_of(review.new), new, None if isinstance(old, str) else old)
    asked = [r for r in rules if r.kind == kind and review.operation in r.operations]
    errors, warnings = _ask(asked, change, context, stale_seconds)
    if errors and change.old is not None and review.old is not None:
        blamed = {rule for rule, _ in errors}
        before, _ = _ask(
            [r for r in asked if r.name in blamed], replace(change, new=change.old, old=None), context, stale_seconds
        )
        blocking = new_violations(errors, before, review.new, review.old)
        warnings += [(rule, f"{error} (was so before)") for rule, error in errors if (rule, error) not in blocking]
        errors = blocking
    refusing = {rule for rule, _ in errors}
    needs = frozenset(need for rule in asked if rule.name in refusing for need in rule.needs)
    return Decision(tuple(errors), tuple(dict.fromkeys(warnings)), needs)


def _ask(
    rules: Iterable[AnyRule], change: Change[Any], context: Context, stale_seconds: float
) -> tuple[list[Blame], list[tuple[str, str]]]:
    errors: list[Blame] = []
    warnings: list[tuple[str, str]] = []
    for rule in rules:
        doubt = _doubt(rule, context, stale_seconds)
        unknown = any(context.ages.get(need) is None for need in rule.needs)
        if unknown:
            warnings.append((rule.name, f"not checked ({rule.name}): {doubt}"))
            continue
        for finding in _findings(rule, change, context):
            if not isinstance(finding, FieldError):
                warnings.append((rule.name, str(finding)))
            elif doubt is None:
                errors.append((rule.name, finding))
            else:
                warnings.append((rule.name, f"{finding} (not refused: {doubt})"))
    return errors, warnings


def _findings(rule: AnyRule, change: Change[Any], context: Context) -> list[Finding]:
    """A mistake in a rule must not stop a platform's writes: it is logged, counted and said, and the others go on."""
    try:
        return list(rule.check(change, context))
    except Exception as error:  # noqa: BLE001
        logs.error("rule.failed", exc_info=True, rule=rule.name, object="/".join(change.key))
        metrics.RULE_FAILURES.labels(rule.name).inc()
        return [Advice("", f"not checked ({rule.name}): the rule itself failed with {type(error).__name__}")]


def _doubt(rule: AnyRule, context: Context, stale_seconds: float) -> str | None:
    """Why the rule's word is not to be taken for the truth: what it looks at may have changed."""
    for need in rule.needs:
        age = context.ages.get(need)
        if age is None:
            return f"the list of {need} is not known yet"
        if age > stale_seconds:
            return f"what is known of {need} is {age:.0f} s old"
    return None


def _needs_no_look(review: Review) -> bool:
    if review.operation is Operation.DELETE:
        return False
    deleting = (review.new.get("metadata") or {}).get("deletionTimestamp") is not None
    return deleting or (review.old is not None and review.old.get("spec") == review.new.get("spec"))


def _parse(model: type[OmniModel], body: JsonObject) -> OmniModel | str:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
