"""Prometheus metrics of the webhook process; all of them, in one place and in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)

ADMISSIONS = Counter(
    "omni_webhooks_admissions",
    "Reviews by kind, verdict (allowed, warned, refused, error) and the rule that decided ('' where none had to).",
    ["kind", "verdict", "rule"],
    registry=REGISTRY,
)
RULE_FAILURES = Counter(
    "omni_webhooks_rule_failures", "Rules that raised: a mistake in this program.", ["rule"], registry=REGISTRY
)
ADMISSION_SECONDS = Histogram(
    "omni_webhooks_admission_seconds",
    "From the body of a review to its answer.",
    ["kind"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
    registry=REGISTRY,
)
CACHE_AGE_SECONDS = Gauge(
    "omni_webhooks_cache_age_seconds", "How long ago the copy of a resource was surely complete.", ["resource"],
    registry=REGISTRY,
)  # fmt: skip
CACHE_OBJECTS = Gauge("omni_webhooks_cache_objects", "Objects in the cache.", ["resource"], registry=REGISTRY)
CACHE_RELISTS = Counter("omni_webhooks_cache_relists", "Full lists that were needed.", ["resource"], registry=REGISTRY)
CERTIFICATE_EXPIRES = Gauge(
    "omni_webhooks_certificate_expires_timestamp_seconds", "End of the certificate in use.", registry=REGISTRY
)
IN_FLIGHT = Gauge("omni_webhooks_in_flight", "Reviews that are being answered.", registry=REGISTRY)
