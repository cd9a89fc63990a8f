"""kopf: login and watches. An event does one thing, it puts a pipeline's key into the queue; that cannot fail.

No change handlers, so kopf writes no annotation and no finalizer on anything: deletion never waits for us (T50).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import kopf

from omni_operator import metrics
from omni_operator.credentials import load_credentials
from omni_operator.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    PIPELINE,
    POD,
    PROFILE,
    SERVICE,
    SERVICE_ACCOUNT,
    STAGE,
    Kind,
)
from omni_operator.names import MANAGED_BY, MANAGED_BY_LABEL
from omni_operator.observe import key_of
from omni_operator.observed import Key

# Watched with a label selector on the server: other people's pods never reach this process.
LABELLED = (DEPLOYMENT, POD, SERVICE, CONFIG_MAP, SERVICE_ACCOUNT, DISRUPTION_BUDGET, NETWORK_POLICY)
# Changes of children come in bursts (a rollout touches a dozen objects): wait a moment and handle them in one go.
COALESCE_SECONDS = 0.1
# A relist that ends at once (a proxy that answers empty 200s) must not become a hot loop.
RECONNECT_SECONDS = 1.0
INACTIVITY_SECONDS = 70.0

Enqueue = Callable[[Key, float], None]


class EndlessBackoff(Iterable[float]):
    """Seconds between tries, for ever: an API server that is down for an hour must not end the operator."""

    def __iter__(self) -> Iterator[float]:
        delay = 1.0
        while True:
            yield delay
            delay = min(delay * 1.6, 30.0)


def build_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.networking.error_backoffs = EndlessBackoff()
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 10.0
    settings.watching.reconnect_backoff = RECONNECT_SECONDS
    settings.watching.inactivity_timeout = INACTIVITY_SECONDS
    settings.watching.connect_timeout = 10.0
    settings.scanning.disabled = True  # no watch on CRDs and namespaces: fewer permissions
    settings.posting.enabled = False  # Events are ours, with fixed reasons
    for kind in LABELLED:
        settings.watching.label_selectors[_selector(kind)] = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
    return settings


def build_registry(enqueue: Enqueue, all_keys: Callable[[], Iterable[Key]]) -> kopf.OperatorRegistry:
    """enqueue(key, delay); all_keys: the pipelines known so far, for events that concern them all."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(settings: kopf.OperatorSettings, **_: Any) -> kopf.ConnectionInfo:
        return load_credentials(settings)

    def watch(kind: Kind, delay: float) -> None:
        @kopf.on.event(kind.group, kind.version, kind.plural, id=kind.plural, registry=registry)
        async def on_event(event: Any, **_: Any) -> None:
            metrics.WATCH_EVENTS.labels(kind.plural).inc()
            key = key_of(event.get("object") or {}, kind is PIPELINE)
            if key is not None:
                enqueue(key, delay)

    watch(PIPELINE, 0.0)
    for kind in (STAGE, *LABELLED):
        watch(kind, COALESCE_SECONDS)

    @kopf.on.event(PROFILE.group, PROFILE.version, PROFILE.plural, registry=registry)
    async def on_profile(**_: Any) -> None:
        """A profile is part of every plan that uses it; which ones do is for the planner to find."""
        metrics.WATCH_EVENTS.labels(PROFILE.plural).inc()
        for key in all_keys():
            enqueue(key, COALESCE_SECONDS)

    return registry


def _selector(kind: Kind) -> tuple[str, str, str]:
    return (kind.group, kind.version, kind.plural)
