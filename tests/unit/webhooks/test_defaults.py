"""Defaults: few, idempotent, never a replica count, and never a reason to be refused."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_crds.v1alpha1.tenant import OmniTenant
from omni_webhooks.context import Context
from omni_webhooks.defaults import Patch, default_patch
from omni_webhooks.rules.rule import Operation
from tests.apiserver.webhooks.corpus import Object, World, cases


def patched(kind: str, body: Object, patch: Patch) -> Object:
    result = copy.deepcopy(body)
    for step in patch:
        assert step["op"] == "add"
        *folders, last = step["path"].strip("/").split("/")
        target: Any = result
        for folder in folders:
            target = target[folder]
        target[last] = step["value"]
    return result


def defaulted(kind: str, spec: Object, context: Context, old: Object | None = None, namespace: str = "ns") -> Object:
    body: Object = {"metadata": {"name": "x"}, "spec": spec}
    operation = Operation.CREATE if old is None else Operation.UPDATE
    patch = default_patch(kind, namespace, operation, body, None if old is None else {"spec": old}, context)
    spec_after: Object = patched(kind, body, patch)["spec"]
    return spec_after


def tenant(*allowed: str) -> Context:
    spec = {"namespaces": ["ns"], "allowedProfiles": list(allowed)}
    return Context(tenants={"t": OmniTenant.model_validate({"metadata": {"name": "t"}, "spec": spec})})


CLASSES = [{"name": "a"}, {"name": "b"}]


class TestPipeline:
    def test_the_only_profile_that_a_tenant_may_use(self) -> None:
        assert defaulted("OmniPipeline", {}, tenant("rocm")) == {"runtimeProfile": "rocm"}

    @pytest.mark.parametrize(
        "context",
        [
            pytest.param(tenant("rocm", "npu"), id="a choice is the user's"),
            pytest.param(tenant("default"), id="the common default is used anyway"),
            pytest.param(tenant(), id="none is allowed: the rule says so"),
            pytest.param(Context(), id="no tenant"),
        ],
    )
    def test_else_nothing(self, context: Context) -> None:
        assert defaulted("OmniPipeline", {}, context) == {}

    def test_what_the_user_says_stays(self) -> None:
        assert defaulted("OmniPipeline", {"runtimeProfile": "cuda"}, tenant("rocm")) == {"runtimeProfile": "cuda"}

    def test_an_update_adds_nothing(self) -> None:
        assert defaulted("OmniPipeline", {}, tenant("rocm"), old={"runtimeProfile": "rocm"}) == {}


class TestProfile:
    def test_the_class_of_stages_that_name_none_is_written_out(self) -> None:
        spec = defaulted("OmniRuntimeProfile", {"deviceClasses": CLASSES}, Context())
        assert spec["defaultDeviceClass"] == "a"

    def test_one_that_went_while_the_user_never_wrote_it_is_moved(self) -> None:
        """Else the CRD refused every change of the classes (T52)."""
        old = {"deviceClasses": CLASSES, "defaultDeviceClass": "a"}
        spec = {"deviceClasses": [{"name": "b"}], "defaultDeviceClass": "a"}
        assert defaulted("OmniRuntimeProfile", spec, Context(), old)["defaultDeviceClass"] == "b"

    def test_a_slip_of_the_user_is_not_corrected_silently(self) -> None:
        old = {"deviceClasses": CLASSES, "defaultDeviceClass": "a"}
        spec = {"deviceClasses": CLASSES, "defaultDeviceClass": "aa"}
        assert defaulted("OmniRuntimeProfile", spec, Context(), old)["defaultDeviceClass"] == "aa"
        assert defaulted("OmniRuntimeProfile", spec, Context())["defaultDeviceClass"] == "aa"


def test_a_tenant_has_a_weight() -> None:
    assert defaulted("OmniTenant", {"namespaces": ["a"]}, Context())["weight"] == 1
    assert defaulted("OmniTenant", {"namespaces": ["a"], "weight": 7}, Context())["weight"] == 7


def test_an_object_that_is_being_deleted_is_left_alone() -> None:
    body = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "spec": {"namespaces": ["a"]}}
    assert default_patch("OmniTenant", "", Operation.UPDATE, body, body, Context()) == []


@lru_cache
def world_context() -> Context:
    return World().context()


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.id)
def test_twice_is_once_and_no_count_is_touched(case: Any) -> None:
    context = world_context()
    once = defaulted(case.kind, case.spec, context, case.old, case.namespace)
    assert defaulted(case.kind, once, context, case.old, case.namespace) == once
    assert counts(once) == counts(case.spec)
    assert defaulted(case.kind, once, context, once, case.namespace) == once, "an update of the result changes nothing"


def counts(value: object) -> list[object]:
    """Every replica count in an object, in order."""
    if isinstance(value, dict):
        own = [v for k, v in value.items() if k.lower().endswith("replicas")]
        return own + [c for v in value.values() for c in counts(v)]
    return [c for v in value for c in counts(v)] if isinstance(value, list) else []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("deviceClasses", "defaultDeviceClass", "runtimeProfile", "stages", "weight", "name")


@given(
    st.sampled_from(["OmniPipeline", "OmniStage", "OmniRuntimeProfile", "OmniTenant", "Scale"]),
    st.dictionaries(st.sampled_from(KEYS), json_values),
)
def test_whatever_is_sent_nothing_breaks(kind: str, spec: Object) -> None:
    """The schema is checked after the defaults are written, so anything may come."""
    body: Object = {"metadata": {}, "spec": spec}
    default_patch(kind, "ns", Operation.UPDATE, body, body, tenant("rocm"))
