"""From the spec to the plan that should run; the last good plan while the spec is wrong. Pure."""

from __future__ import annotations

import msgspec

from omni_crds.v1alpha1.pipeline import RolloutSpec
from omni_operator.kinds import CONFIG_MAP
from omni_operator.names import plan_name
from omni_operator.observed import Observed
from omni_operator.resources.config import PLAN_KEY
from omni_runtime.deploy.plan import ResolvedPlan, load_plan
from omni_runtime.deploy.resolve import resolve
from omni_runtime.errors import InvalidPipeline


def resolve_spec(observed: Observed, default_profile: str | None) -> tuple[ResolvedPlan | None, tuple[str, ...]]:
    """(plan, ()) or (None, every violation)."""
    if observed.pipeline is None:
        return None, tuple(f"spec does not parse: {problem}" for problem in observed.pipeline_error)
    try:
        return resolve(observed.pipeline, observed.profiles, target="kubernetes", default_profile=default_profile), ()
    except InvalidPipeline as error:
        return None, tuple(str(e) for e in error.errors)


def stored_plan(observed: Observed, revision: str) -> ResolvedPlan | None:
    """The plan of a revision, from its ConfigMap; None where it is gone or of another version of the plan's schema."""
    config_map = observed.child(CONFIG_MAP, plan_name(observed.key.name, revision))
    if config_map is None:
        return None
    try:
        return load_plan(str((config_map.body.get("data") or {}).get(PLAN_KEY, "")).encode())
    except msgspec.MsgspecError:
        return None


def last_good_plan(observed: Observed) -> ResolvedPlan | None:
    """What ran before the spec became invalid: the newest revision that the status names, else the one that answers
    requests. Edits that follow each other quickly remove the newest one's plan before the status names the next."""
    status = observed.pipeline_live.status if observed.pipeline_live else {}
    named = (status.get(field) for field in ("revision", "servingRevision"))
    plans = (stored_plan(observed, revision) for revision in named if isinstance(revision, str))
    return next((plan for plan in plans if plan is not None), None)


def rollout_of(observed: Observed) -> RolloutSpec:
    spec = observed.pipeline.spec if observed.pipeline else None
    return (spec.rollout if spec else None) or RolloutSpec()


def last_serving(observed: Observed) -> str | None:
    status = observed.pipeline_live.status if observed.pipeline_live else {}
    revision = status.get("servingRevision")
    return revision if isinstance(revision, str) else None
