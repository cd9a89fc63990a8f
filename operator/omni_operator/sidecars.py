"""How the edges of each pipeline do, asked from the sidecars of its pods now and then; a change asks for a reconcile.

Optional, as TTFP is (`ttfp`): a sidecar that does not answer is left out, and where none answers, as with an operator outside
the pod network, edges are what the readiness of their pods says.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from omni_operator import logs
from omni_operator.autoscale.scrape import Scraper, Target, samples
from omni_operator.autoscale.snapshot import Labels
from omni_operator.autoscale.target import stage_targets
from omni_operator.edges import LOOKS, EdgeHealth, Look, SidecarReading, judge_edges
from omni_operator.observed import Key, Observed
from omni_runtime.deploy.plan import SIDECAR_HTTP_PORT, ResolvedPlan

PERIOD_SECONDS = 15.0
_Families = Mapping[str, Mapping[Labels, float]]


@dataclass(slots=True)
class _Watched:
    plan: ResolvedPlan
    pods: tuple[Target, ...]
    looks: deque[Look] = field(default_factory=lambda: deque(maxlen=LOOKS))
    health: Mapping[str, EdgeHealth] = field(default_factory=dict)


class SidecarReader:
    """Knows where the pods are from the reconciles, and what their sidecars said last."""

    def __init__(self, scraper: Scraper | None = None) -> None:
        self._scraper = scraper or Scraper()
        self._watched: dict[Key, _Watched] = {}

    def edges(self, observed: Observed, plan: ResolvedPlan | None) -> Mapping[str, EdgeHealth]:
        """By name of the edge, as far as anything is known. A reconcile itself asks nobody."""
        if plan is None or not plan.edges or observed.pipeline_live is None:
            self._watched.pop(observed.key, None)
            return {}
        pods = stage_targets(observed, plan)
        known = self._watched.get(observed.key)
        if known is None or known.plan.revision != plan.revision:
            known = self._watched[observed.key] = _Watched(plan, pods)
        known.pods = pods
        return known.health

    async def refresh(self) -> tuple[Key, ...]:
        """Ask every sidecar once. Returns the pipelines of which something else is to be said now."""
        asked = await asyncio.gather(*(self._look(key, watched) for key, watched in tuple(self._watched.items())))
        return tuple(key for key in asked if key is not None)

    async def _look(self, key: Key, watched: _Watched) -> Key | None:
        pods = watched.pods
        texts = await asyncio.gather(*(self._scraper.get(p.address, SIDECAR_HTTP_PORT, "/metrics") for p in pods))
        if self._watched.get(key) is not watched:
            return None
        readings = ((pod.uid, reading_of(pod.stages[0], text)) for pod, text in zip(pods, texts, strict=True) if text)
        watched.looks.append({uid: reading for uid, reading in readings if reading is not None})
        health = judge_edges(watched.plan, tuple(watched.looks), watched.health)
        if health == watched.health or not (watched.looks[-1] or watched.health):
            return None
        watched.health = health
        return key

    async def refresh_forever(self, enqueue: Callable[[Key], None]) -> None:
        """Runs beside the workers until it is cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            try:
                for key in await self.refresh():
                    enqueue(key)
            except Exception:  # noqa: BLE001 - what one sidecar says must not end the watch of all others
                logs.error("sidecars.failed", exc_info=True)

    async def close(self) -> None:
        await self._scraper.close()


def reading_of(group: str, text: str) -> SidecarReading | None:
    """None: it is not what a sidecar says."""
    try:
        families = samples(text)
    except ValueError:
        return None
    if "connector_streams" not in families:
        return None
    return SidecarReading(
        group,
        {edge: int(count) for (edge,), count in _by_edge(families, "connector_edge_stalled_streams")},
        {(edge, over): int(n) for (edge, over), n in _by_edge(families, "connector_chunks_total", "connector")},
        int(families.get("connector_fallbacks_total", {}).get((("reason", "fetch"),), 0)),
        any(families.get("connector_mooncake_up", {}).values()),
    )


def _by_edge(families: _Families, name: str, *more: str) -> Iterable[tuple[tuple[str, ...], float]]:
    """Summed over replicas: ((edge, values of the labels `more`), value)."""
    sums: dict[tuple[str, ...], float] = {}
    for labels, value in families.get(name, {}).items():
        named = dict(labels)
        edge = f"{named.get('from_stage', '')}->{named.get('to_stage', '')}"
        key = (edge, *(named.get(label, "") for label in more))
        sums[key] = sums.get(key, 0.0) + value
    return sums.items()
