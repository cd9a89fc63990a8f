"""A Prometheus that cannot be asked leaves the autoscaler with the pods, or blind."""

from __future__ import annotations

from collections.abc import Iterator

from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_operator.autoscale.source import is_prometheus_url
from omni_operator.kinds import PROFILE
from omni_operator.names import PROMETHEUS_ANNOTATION
from omni_runtime.errors import FieldError
from omni_webhooks.context import Context
from omni_webhooks.rules.rule import Change, Rule


def check(change: Change[OmniRuntimeProfile], context: Context) -> Iterator[FieldError]:
    url = change.new.metadata.annotations.get(PROMETHEUS_ANNOTATION)
    if url is not None and not is_prometheus_url(url):
        problem = "the autoscaler cannot ask this for metrics"
        fix = "write a URL such as http://prometheus.monitoring:9090, or leave the annotation out: pods are asked then"
        yield FieldError(f"metadata.annotations[{PROMETHEUS_ANNOTATION}]", url, problem, fix)


RULE = Rule("PrometheusUrl", PROFILE, check)
