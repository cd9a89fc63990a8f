"""The same moment of a pipeline as `scrape` has it, from a Prometheus that scrapes the pods; for clusters in which the
operator may not reach them. A profile says so with the annotation serving.omni.dev/prometheus-url.

Raw samples with their own times are asked for (an instant query of a range): an instant vector carries the time of the
question, and shows a series that has ended for five minutes more. Every failure means "no answer".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from omni_operator.autoscale.scrape import MAX_BODY_BYTES, Target
from omni_operator.autoscale.snapshot import WORK, Labels, Scrape, short_name

TIMEOUT_SECONDS = 8.0
LOOK_BACK_SECONDS = 60
RUNNING = "stage_running_requests"
NAMES = r"(vllm_omni|vllm:omni_|omni):?.+"
# What Prometheus knows of a target and the process does not say itself.
TARGET_LABELS = frozenset(
    {"__name__", "namespace", "pod", "instance", "job", "container", "endpoint", "node", "service"}
)


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    labels: Mapping[str, str]
    at: float
    value: float


class PrometheusReader:
    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def scrape(
        self, url: str, namespace: str, entry: Target | None, pods: Iterable[Target], now: float
    ) -> Scrape:
        """Blank where the entry has no series. `at` is when the entry was scraped last, so that old data show (T27)."""
        if entry is None:
            return Scrape(now)
        targets = tuple(pods)
        answer = await self._query(url, query_of(namespace, (entry.pod, *(t.pod for t in targets))))
        try:
            samples = newest(json.loads(answer or ""))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return Scrape(now)
        return moment(samples, entry, targets, now)

    async def _query(self, url: str, query: str) -> str | None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS))
        try:
            async with self._session.post(f"{url.rstrip('/')}/api/v1/query", data={"query": query}) as response:
                if response.status != 200:
                    return None
                body = await response.content.read(MAX_BODY_BYTES + 1)
                while len(body) <= MAX_BODY_BYTES and (more := await response.content.read(MAX_BODY_BYTES)):
                    body += more
                return body.decode() if len(body) <= MAX_BODY_BYTES else None
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None


def query_of(namespace: str, pods: Iterable[str]) -> str:
    """Names of pods and namespaces are DNS labels: nothing of them needs more than the escapes of a regular expression."""
    chosen = "|".join(re.escape(pod).replace("\\", "\\\\") for pod in pods)
    return f'{{__name__=~"{NAMES}",namespace="{namespace}",pod=~"{chosen}"}}[{LOOK_BACK_SECONDS}s]'


def newest(answer: Any) -> list[Sample]:
    """The last sample of each series. Raises for what is no answer of Prometheus."""
    if answer["status"] != "success" or answer["data"]["resultType"] != "matrix":
        raise ValueError("no matrix")
    found = []
    for series in answer["data"]["result"]:
        at, value = series["values"][-1]
        metric = dict(series["metric"])
        found.append(Sample(short_name(str(metric.get("__name__", ""))), metric, float(at), float(value)))
    return found


def moment(samples: Iterable[Sample], entry: Target, pods: Iterable[Target], now: float) -> Scrape:
    families: dict[str, dict[Labels, float]] = {}
    by_pod: dict[str, list[Sample]] = {}
    scraped = 0.0
    for sample in samples:
        pod = sample.labels.get("pod", "")
        if pod != entry.pod:
            by_pod.setdefault(pod, []).append(sample)
            continue
        scraped = max(scraped, sample.at)
        own = ((k, v) for k, v in sample.labels.items() if k not in TARGET_LABELS and k != "model_name")
        families.setdefault(sample.name, {})[tuple(sorted(own))] = sample.value
    if not families:
        return Scrape(now)
    work: dict[str, dict[str, float]] = {}
    held: dict[str, dict[str, int]] = {}
    missing = []
    for target in pods:
        seen = by_pod.get(target.pod, [])
        if not seen:
            missing.append(target.pod)
        for stage in target.stages if seen else ():
            mine = [s for s in seen if s.labels.get("stage") == stage]
            units = (sum(s.value for s in mine if s.name == name) for name in WORK)
            work.setdefault(stage, {})[target.pod] = next((u for u in units if u > 0), 0.0)
            held.setdefault(stage, {})[target.uid] = int(sum(s.value for s in mine if s.name == RUNNING))
    return Scrape(scraped, families, held, work, entry.uid, tuple(missing))
