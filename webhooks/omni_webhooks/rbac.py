"""Every permission that the webhook process uses, and why. The Helm chart renders its roles from this table.

Nothing of the cluster is written but its own Secret and the authority in its own two configurations.
"""

from __future__ import annotations

from omni_crds.v1alpha1.base import GROUP
from omni_operator.rbac import READ, Rule, allow

# Placeholders that scripts/chart.py replaces by the names of the release; the process itself gets them as options.
SECRET_NAME, CONFIGURATION_NAME = "$SECRET", "$CONFIGURATION"

FOLLOW = ("list", "watch")

# What the rules look at.
CACHE_RULES: tuple[Rule, ...] = (
    Rule(GROUP, "omnipipelines", FOLLOW, "what runs already: names, budgets, who uses a profile"),
    Rule(GROUP, "omnistages", READ, "replica counts as they were scaled; one that was made just now is asked for"),
    Rule(GROUP, "omniruntimeprofiles", FOLLOW, "images, device classes and connectors that a plan is resolved with"),
    Rule(GROUP, "omnitenants", FOLLOW, "budgets, and what a tenant may use"),
    Rule("", "nodes", FOLLOW, "devices, labels and taints that placement is checked against"),
    Rule("resource.k8s.io", "resourceslices", FOLLOW, "devices that nodes offer through DRA"),
    Rule("resource.k8s.io", "deviceclasses", FOLLOW, "by which resource a pod gets them"),
    Rule("", "pods", FOLLOW, "what of the nodes is in use"),
    Rule("", "resourcequotas", FOLLOW, "what the namespace of a pipeline may use"),
)

# Its own certificates; not granted where somebody else makes them.
CERTIFICATE_RULES: tuple[Rule, ...] = (
    Rule(
        "admissionregistration.k8s.io",
        "validatingwebhookconfigurations",
        ("get", "update"),
        "the authority that the API server trusts, kept up while it rotates",
        resource_names=(CONFIGURATION_NAME,),
    ),
    Rule(
        "admissionregistration.k8s.io",
        "mutatingwebhookconfigurations",
        ("get", "update"),
        "the same",
        resource_names=(CONFIGURATION_NAME,),
    ),
    Rule(
        "",
        "secrets",
        ("get", "update"),
        "its own certificate",
        resource_names=(SECRET_NAME,),
        lease_namespace_only=True,
    ),
    Rule("", "secrets", ("create",), "make it when it is missing", lease_namespace_only=True),
)

RULES = (*CACHE_RULES, *CERTIFICATE_RULES)

require = allow(RULES, "omni_webhooks.rbac.RULES")
