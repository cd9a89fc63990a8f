"""Classification of answers, RBAC of calls, comparison of objects."""

from __future__ import annotations

from typing import Any

import pytest

from omni_operator import rbac
from omni_operator.errors import (
    AlreadyExists,
    Conflict,
    Expired,
    Forbidden,
    KubeError,
    NotFound,
    QuotaExceeded,
    Rejected,
    Transient,
    Unauthorized,
    classify,
)
from omni_operator.plan.diff import first_difference


def status(code: int, reason: str, message: str = "m", **details: Any) -> dict[str, Any]:
    return {"kind": "Status", "code": code, "reason": reason, "message": message, "details": details}


@pytest.mark.parametrize(
    ("code", "body", "expected"),
    [
        pytest.param(
            404, status(404, "NotFound", name="p", kind="omnipipelines"), NotFound, id="the server says it is gone"
        ),
        pytest.param(
            404, status(404, "NotFound"), Transient, id="T60: the kind is not served (CRD missing): nothing is gone"
        ),
        pytest.param(404, None, Transient, id="T60: a proxy's 404"),
        pytest.param(404, {"error": "no route"}, Transient, id="T60: a mesh's JSON 404"),
        pytest.param(500, status(500, "InternalError"), Transient, id="500"),
        pytest.param(429, status(429, "TooManyRequests"), Transient, id="429"),
        pytest.param(503, None, Transient, id="503"),
        pytest.param(418, status(418, "Teapot"), Transient, id="unknown"),
        pytest.param(409, status(409, "Conflict"), Conflict, id="conflict"),
        pytest.param(409, status(409, "AlreadyExists"), AlreadyExists, id="exists"),
        pytest.param(410, status(410, "Expired"), Expired, id="expired"),
        pytest.param(401, status(401, "Unauthorized"), Unauthorized, id="401"),
        pytest.param(401, None, Unauthorized, id="401 without a body"),
        pytest.param(422, status(422, "Invalid"), Rejected, id="invalid"),
        pytest.param(
            403,
            status(403, "Forbidden", 'pods "x" is forbidden: exceeded quota: compute, requested: pods=1'),
            QuotaExceeded,
            id="T65: quota",
        ),
        pytest.param(
            403,
            status(
                403, "Forbidden", 'services is forbidden: User "sa" cannot create resource "services" in API group ""'
            ),
            Forbidden,
            id="RBAC",
        ),
        pytest.param(403, status(403, "Forbidden", "denied by policy"), Rejected, id="admission"),
        pytest.param(403, None, Transient, id="a proxy's 403"),
    ],
)
def test_classify(code: int, body: dict[str, Any] | None, expected: type[KubeError]) -> None:
    error = classify(code, body)
    assert type(error) is expected
    assert isinstance(error, NotFound) == (expected is NotFound)


def test_calls_outside_the_table_are_errors() -> None:
    """T62: the code cannot use a verb that the chart does not grant."""
    rbac.require("apps", "deployments", "patch")
    for group, resource, verb in [("", "secrets", "get"), ("", "pods", "delete"), ("apps", "deployments", "update")]:
        with pytest.raises(rbac.MissingPermission):
            rbac.require(group, resource, verb)


def test_rules_have_no_wildcards_and_every_rule_says_why() -> None:
    for rule in rbac.RULES:
        assert "*" not in (rule.group, rule.resource, *rule.verbs)
        assert rule.why
    secret_verbs = {v for r in rbac.RULES if r.resource == "secrets" for v in r.verbs}
    assert secret_verbs == {"create"}


@pytest.mark.parametrize(
    ("want", "have", "expected"),
    [
        pytest.param({"a": 1}, {"a": 1, "b": 2}, None, id="others' fields are theirs"),
        pytest.param({"a": 1}, {"a": 2}, "a", id="edited"),
        pytest.param({"a": {"b": 1}}, {"a": {}}, "a.b", id="removed"),
        pytest.param({"a": {}}, {}, None, id="the server stores no empty maps"),
        pytest.param({"l": [{"name": "x", "v": 1}]}, {"l": [{"name": "y"}, {"name": "x", "v": 1}]}, None, id="by key"),
        pytest.param({"l": [{"name": "x", "v": 1}]}, {"l": [{"name": "y"}]}, "l[0]", id="item gone"),
        pytest.param({"l": ["a", "b"]}, {"l": ["b", "a"]}, "l[0]", id="plain lists keep their order"),
        pytest.param({"l": ["a"]}, {"l": ["a", "b"]}, "l", id="plain lists are whole"),
        pytest.param({"limits": {"memory": "1024Mi"}}, {"limits": {"memory": "1Gi"}}, None, id="quantities"),
        pytest.param({"limits": {"cpu": "0.5"}}, {"limits": {"cpu": "500m"}}, None, id="quantities, cpu"),
        pytest.param({"v": "1024Mi"}, {"v": "1Gi"}, "v", id="not a quantity there"),
        pytest.param({"b": False}, {"b": 0}, "b", id="false is not zero"),
    ],
)
def test_first_difference(want: Any, have: Any, expected: str | None) -> None:
    assert first_difference(want, have) == expected
