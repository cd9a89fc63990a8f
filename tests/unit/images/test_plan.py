"""Names of images follow from their content, and only what changed is built."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from omni_image.plan import CPU, KINDS, OPERATOR, Digests, context_parts, plan_image, plan_work, short_name

RECIPES = {"environment": "re", "models": "rm", "application": "ra"}
DIGESTS = Digests(debian="d", pins="p", recipes=RECIPES, models="m", sources="s")


def changed(**fields: Any) -> Digests:
    return dataclasses.replace(DIGESTS, **fields)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_same_content_same_names(kind) -> None:
    assert plan_image(kind, DIGESTS) == plan_image(kind, changed())
    assert re.fullmatch(rf"omni-operator/{kind.name}:dev-[0-9a-f]{{8}}", short_name(plan_image(kind, DIGESTS).image))


@pytest.mark.parametrize(
    ("change", "first_changed"),
    [
        pytest.param({"sources": "x"}, "application", id="an edit builds the application only"),
        pytest.param({"models": "x"}, "models", id="other weights keep the packages"),
        pytest.param({"pins": "x"}, "environment", id="a moved pin"),
        pytest.param({"recipes": RECIPES | {"environment": "x"}}, "environment", id="another install script"),
        pytest.param({"recipes": RECIPES | {"models": "x"}}, "models", id="another way to copy models"),
        pytest.param({"recipes": RECIPES | {"application": "x"}}, "application", id="another entrypoint"),
        pytest.param({"debian": "x"}, "environment", id="another base changes everything above it"),
    ],
)
def test_a_change_renames_its_tier_and_those_above(change: dict[str, Any], first_changed: str) -> None:
    before, after = plan_image(CPU, DIGESTS), plan_image(CPU, changed(**change))
    renamed = [a.target for b, a in zip(before.tiers, after.tiers, strict=True) if a.image != b.image]
    assert renamed == list(CPU.targets[CPU.targets.index(first_changed) :])


def test_tiers_stand_on_each_other() -> None:
    plan = plan_image(CPU, DIGESTS)
    assert [tier.base for tier in plan.tiers] == [plan.debian, *(tier.image for tier in plan.tiers[:-1])]


def test_work_starts_above_the_highest_tier_that_exists() -> None:
    plan = plan_image(CPU, DIGESTS)
    environment, models, application = plan.tiers
    assert plan_work(plan, []) == plan.tiers
    assert plan_work(plan, [environment.image]) == (models, application)
    assert plan_work(plan, [environment.image, models.image]) == (application,)
    assert plan_work(plan, [application.image]) == (), "lower tiers may be pruned"
    assert plan_work(plan, ["docker.io/omni-operator/cpu:dev-00000000"]) == plan.tiers


def test_a_context_holds_what_its_tier_adds() -> None:
    assert context_parts(CPU, "environment") == ("environment",)
    assert context_parts(CPU, "models") == ("models",)
    assert context_parts(OPERATOR, "application") == OPERATOR.sources


def test_kinds_do_not_share_names() -> None:
    images = [tier.image for kind in KINDS.values() for tier in plan_image(kind, DIGESTS).tiers]
    assert len(set(images)) == len(images)
