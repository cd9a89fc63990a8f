"""The autoscaler in a cluster, on pods whose engines compute nothing: who grows, who shrinks, and that nobody is cut off."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from omni_runtime.cli.kubectl import Kube, port_forward, wait_ready
from omni_runtime.client import Answer, ask
from tests.e2e.conftest import conditions, eventually
from tests.e2e.null_pods import (
    PERIOD_SECONDS,
    STAGES,
    Clients,
    NullPods,
    kubectl_scale,
    null_pods,
    quick_autoscaler,
    script,
)

pytestmark = pytest.mark.timeout(900)

READY_SECONDS = 300
OBJECTIVE_SECONDS = 1.5
HOLD_SECONDS = 600.0
FEW_PLACES, MANY_PLACES = {"maxConcurrency": 2}, {"maxConcurrency": 32}


@pytest.fixture(scope="module")
def site(kube: Kube) -> Iterator[NullPods]:
    with quick_autoscaler(kube), null_pods(kube) as found:
        yield found


def scaled(minimum: int, maximum: int, **more: Any) -> dict[str, Any]:
    return {"scaling": {"minReplicas": minimum, "maxReplicas": maximum, **more}}


def remove(site: NullPods, name: str) -> None:
    site.kube.read("-n", site.namespace, "delete", "omnipipeline", name, "--timeout=60s")


def test_a_step_of_load_grows_the_stage_that_is_full(site: NullPods) -> None:
    """T30: the talker has two places, the others 32. TTFP comes back under its objective while the load lasts."""
    name = "step"
    site.make(name, {s: {**scaled(1, 5), **(FEW_PLACES if s == "talker" else MANY_PLACES)} for s in STAGES})
    wait_ready(lambda: site.pipeline(name), READY_SECONDS)
    with port_forward(site.kube, site.namespace, name) as url, Clients(url, 1.5, script(10, 200)) as clients:
        eventually(lambda: clients.latest_ttfp(3) or None, 60, "first answers")
        eventually(lambda: site.replicas(name)["talker"] > 1 or None, 120, "more talkers")
        late = max(clients.latest_ttfp(3))
        eventually(
            lambda: max(clients.latest_ttfp(15), default=99) < OBJECTIVE_SECONDS or None,
            240,
            f"fifteen answers in a row within the objective; {late:.1f} s when it grew",
        )
        grown = [d for d in site.decisions(name) if any(s["replicas"] > s["before"] for s in d["stages"])]
        first = {s["name"]: s["replicas"] - s["before"] for s in grown[-1]["stages"]}
        assert grown[-1]["limitingStage"] == "talker" and first["talker"] > 0, grown[-1]
        # Replicas without accelerators are cheap, so that another stage may get one as well; the full one gets most.
        counts = site.replicas(name)
        assert counts["talker"] == max(counts.values()) > min(counts.values()), counts
    assert not clients.errors
    explained = site.kube.omni("explain", name, "-n", site.namespace)
    assert "limiting: talker" in explained


@pytest.mark.long
def test_it_shrinks_with_twenty_streams_open_and_cuts_none(site: NullPods) -> None:
    """T44, T45: replicas that leave finish what they carry; the emptiest leave first."""
    name, streams, chunks = "shrink", 20, 75
    talker = {**scaled(5, 6), "maxConcurrency": 8}
    body = site.make(name, {"talker": talker, "thinker": {"maxConcurrency": 32}, "code2wav": {"maxConcurrency": 32}})
    wait_ready(lambda: site.pipeline(name), READY_SECONDS)
    open_now, lock = [0], threading.Lock()

    with port_forward(site.kube, site.namespace, name) as url, ThreadPoolExecutor(streams) as pool:

        def stream() -> Answer:
            def first(*_: object) -> None:
                if not counted:
                    counted.append(True)
                    with lock:
                        open_now[0] += 1

            counted: list[bool] = []
            answer = ask(url, script(chunks, 2000), on_audio=first, timeout_s=400)
            with lock:
                open_now[0] -= 1
            return answer

        answers = [pool.submit(stream) for _ in range(streams)]
        eventually(lambda: open_now[0] == streams or None, 60, "twenty open streams")
        before = {p["metadata"]["name"] for p in site.pods(name, "talker")}
        assert len(before) == 5
        talkers = next(s for s in body["spec"]["stages"] if s["name"] == "talker")
        talkers["scaling"]["minReplicas"] = 1
        site.make(name, {"talker": {k: v for k, v in talkers.items() if k in ("scaling", "maxConcurrency")},
                         "thinker": {"maxConcurrency": 32}, "code2wav": {"maxConcurrency": 32}})  # fmt: skip
        eventually(lambda: site.replicas(name)["talker"] < 5 or None, 120, "fewer talkers")
        assert open_now[0] == streams, "the streams were to be open while it shrinks"
        done = [a.result(300) for a in answers]
    assert all(a.finish_reason == "stop" and round(a.audio_s / 0.2) == chunks for a in done), "every stream to its end"
    remove(site, name)


@pytest.mark.long
def test_from_zero_a_request_is_held_and_answered(site: NullPods) -> None:
    """T34: nothing but the entry runs; a request wakes all stages that it needs at once, and waits for them."""
    name = "zero"
    site.make(name, {s: scaled(0, 2) for s in STAGES})
    eventually(lambda: len(site.pods(name, "entry")) == 1 or None, 60, "the entry")
    eventually(lambda: entry_ready(site, name), 120, "an entry that takes requests though all stages sleep")
    eventually(lambda: site.replicas(name) == dict.fromkeys(STAGES, 0) or None, 60, "all stages asleep")
    with port_forward(site.kube, site.namespace, name) as url:
        started = time.monotonic()
        answer = ask(url, script(3, 50), timeout_s=180)
        assert round(answer.audio_s / 0.2) == 3
        print(f"from zero: answered after {time.monotonic() - started:.1f} s")
        woken = site.decisions(name)
        assert "FromZero" in [d["reason"] for d in woken]
        # Text alone keeps the thinker awake, and lets the others sleep.
        with Clients(url, 0.5, script(2, 50), modalities=("text",)) as clients:
            eventually(
                lambda: site.replicas(name) == {"thinker": 1, "talker": 0, "code2wav": 0} or None,
                180,
                "audio stages asleep under text-only traffic",
            )
        assert not clients.errors and clients.answers
        eventually(lambda: site.replicas(name) == dict.fromkeys(STAGES, 0) or None, 180, "all stages asleep again")
    remove(site, name)


def entry_ready(site: NullPods, name: str) -> bool | None:
    containers = (c for p in site.pods(name, "entry") for c in p["status"].get("containerStatuses", ()))
    return True if any(c["ready"] for c in containers) else None


@pytest.mark.long
def test_kubectl_scale_wins_in_mode_external(site: NullPods) -> None:
    """T12: for ten minutes, under a load that the operator would have answered with more."""
    name = "external"
    site.make(name, {"talker": {**scaled(1, 5, mode="External"), **FEW_PLACES}})
    wait_ready(lambda: site.pipeline(name), READY_SECONDS)
    kubectl_scale(site.kube, site.namespace, f"{name}-talker", 2)
    with port_forward(site.kube, site.namespace, name) as url, Clients(url, 1.0, script(10, 500)):
        until = time.monotonic() + HOLD_SECONDS
        while time.monotonic() < until:
            assert site.replicas(name)["talker"] == 2
            time.sleep(PERIOD_SECONDS)
    assert conditions(site.pipeline(name))["ScalingReady"]["reason"] == "Manual"
    remove(site, name)


PIPELINES: dict[str, dict[str, dict[str, Any]]] = {
    "even": {},
    "few-talkers": {"talker": {"maxConcurrency": 20}},
    "two-thinkers": {"thinker": scaled(2, 2)},
}
USUAL = {"even": {}, "few-talkers": {"talker": 400.0}, "two-thinkers": {"code2wav": 300.0, "talker": 300.0}}


@pytest.mark.long
@pytest.mark.parametrize("name", PIPELINES)
def test_a_slowed_stage_is_named(site: NullPods, name: str) -> None:
    """T30: three stages of three pipelines, whatever their usual shares; the first decision after the knob names it."""
    bounds = {s: {**scaled(1, 1), **MANY_PLACES} for s in STAGES}
    site.slow(**USUAL[name])
    site.make(name, {s: {**bounds[s], **PIPELINES[name].get(s, {})} for s in STAGES})
    wait_ready(lambda: site.pipeline(name), READY_SECONDS)
    with port_forward(site.kube, site.namespace, name) as url, Clients(url, 2.0, script(3, 50)) as clients:
        for stage in STAGES:
            calm = len(clients.answers)
            eventually(lambda n=calm: len(clients.answers) > n + 40 or None, 120, "twenty seconds of calm")
            eventually(
                lambda: newest(site, name).get("reason") == "Steady" or None,
                120,
                lambda: f"a steady pipeline; the last decision is {newest(site, name)}",
            )
            seen = newest(site, name).get("time")
            site.slow(**{**USUAL[name], stage: 4000.0})
            decision = eventually(lambda t=seen: changed(site, name, t), 120, f"a decision about {stage}")
            site.slow(**USUAL[name])
            assert decision["limitingStage"] == stage, decision
    assert not clients.errors
    remove(site, name)


def newest(site: NullPods, name: str) -> dict[str, Any]:
    return next(iter(site.decisions(name)), {})


def changed(site: NullPods, name: str, before: str | None) -> dict[str, Any] | None:
    decision = newest(site, name)
    return decision if decision.get("time") != before and decision.get("reason") != "Steady" else None
