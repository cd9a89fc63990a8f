"""From scrapes to windows: absent, stale, reset, partial and zombie series are told apart (T26, T27, T33)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from omni_operator.autoscale import snapshot
from omni_operator.autoscale.scrape import held_of, samples
from omni_operator.autoscale.snapshot import PodTimes, Scrape, short_name, window_of
from omni_operator.autoscale.types import Freshness
from omni_runtime.metrics.entry import EntryMetrics
from omni_runtime.stages.metrics import StageMetrics
from tests.unit.orchestrator.plans import a_plan

from .builders import NAMES, a_spec

PODS = (PodTimes("thinker", "t-0", 60.0), PodTimes("talker", "k-0", 70.0))


class Entry:
    """The families of an entry, as its process has them."""

    def __init__(self, prefix: str = "vllm_omni:") -> None:
        self.registry = CollectorRegistry()
        stage = ["model_name", "stage"]
        self.ttfp = Histogram(
            f"{prefix}audio_ttfp_s", "", [*stage, "replica"], buckets=(0.5, 1.0, 2.0), registry=self.registry
        )
        self.share = Histogram("omni:ttfp_component_seconds", "", ["model_name", "component", "stage"], buckets=(0.5, 1.0), registry=self.registry)  # fmt: skip
        self.seconds = Histogram(f"{prefix}stage_gen_time_s", "", [*stage, "stage_type"], buckets=(1.0, 10.0), registry=self.registry)  # fmt: skip
        self.waiting = Gauge(f"{prefix}stage_waiting_requests", "", stage, registry=self.registry)
        self.e2e = Histogram(f"{prefix}e2e_request_latency_s", "", ["model_name"], registry=self.registry)
        for name in NAMES:  # the entry shows its series from the start, with and without traffic
            self.waiting.labels("m", name).set(0)
            self.seconds.labels("m", name, "x")

    def request(self, ttfp: float, replica: str = "r0") -> None:
        self.ttfp.labels("m", "code2wav", replica).observe(ttfp)
        self.e2e.labels("m").observe(3.0)
        for name in NAMES:
            self.seconds.labels("m", name, "x").observe(2.0)
            self.share.labels("m", "compute", name).observe(ttfp / 3)

    def scrape(self, at: float, **more: object) -> Scrape:
        return Scrape(at, samples(generate_latest(self.registry).decode()), entry_pod="e", **more)  # type: ignore[arg-type]


def test_a_window_is_the_difference_of_two_scrapes() -> None:
    entry = Entry()
    entry.request(0.4)
    before = entry.scrape(100.0, held={"talker": {"a": 1}}, work={"talker": {"k-0": 100.0}})
    for ttfp, replica in ((0.7, "r0"), (1.5, "r1"), (0.6, "r2")):
        entry.request(ttfp, replica)
    entry.waiting.labels("m", "talker").set(2)
    after = entry.scrape(115.0, held={"talker": {"a": 3, "b": 1}}, work={"talker": {"k-0": 700.0}})
    window = window_of(a_spec(), before, after, PODS, 116.0)
    assert window.freshness is Freshness.FRESH and window.seconds == 15.0
    assert window.ttfp.count == 3 and window.ttfp.total == pytest.approx(2.8)
    assert window.ttfp.share_above(1.0) == pytest.approx(1 / 3)
    talker = window.stage("talker")
    assert (talker.completions, talker.busy_seconds, talker.work) == (3, 6.0, 600.0)
    assert talker.in_flight == 2.5 and talker.waiting == 2
    assert talker.arrivals == 3 + 3 + 2, "what ended, and what is there more than before"
    assert talker.compute.count == 3


def test_both_spellings_of_the_prefix_are_read() -> None:
    """T33."""
    entry = Entry("vllm:omni_")
    before = entry.scrape(0.0)
    entry.request(0.4)
    assert window_of(a_spec(), before, entry.scrape(15.0), PODS, 15.0).ttfp.count == 1


@pytest.mark.parametrize(
    ("before", "after", "now", "expected"),
    [
        pytest.param(Scrape(0.0), Scrape(15.0), 15.0, Freshness.ABSENT, id="the entry does not answer"),
        pytest.param(None, "entry", 15.0, Freshness.ABSENT, id="one scrape is no rate"),
        pytest.param("entry", "entry", 200.0, Freshness.STALE, id="the last answer is old"),
    ],
)
def test_blindness_has_a_name(before: object, after: object, now: float, expected: Freshness) -> None:
    entry = Entry()
    entry.request(0.4)
    earlier = entry.scrape(0.0) if before == "entry" else before
    later = entry.scrape(15.0) if after == "entry" else after
    window = window_of(a_spec(), earlier, later, PODS, now)  # type: ignore[arg-type]
    assert window.freshness is expected and window.problem


def test_a_counter_that_went_back_is_a_reset_and_never_negative() -> None:
    entry, restarted = Entry(), Entry()
    for _ in range(5):
        entry.request(0.4)
    restarted.request(0.4)
    window = window_of(a_spec(), entry.scrape(0.0), restarted.scrape(15.0), PODS, 15.0)
    assert window.freshness is Freshness.RESET
    assert window.stage("talker").completions == 1 and window.ttfp.count == 1


def test_another_entry_process_is_a_reset_even_if_its_counters_are_higher() -> None:
    entry = Entry()
    before = replace(entry.scrape(0.0), entry_pod="older")
    entry.request(0.4)
    assert window_of(a_spec(), before, entry.scrape(15.0), PODS, 15.0).freshness is Freshness.RESET


def test_a_pod_without_an_answer_makes_the_window_partial() -> None:
    entry = Entry()
    window = window_of(a_spec(), entry.scrape(0.0), entry.scrape(15.0, missing=("k-0",)), PODS, 15.0)
    assert window.freshness is Freshness.PARTIAL and "k-0" in window.problem


def test_series_of_a_pod_that_is_gone_are_left_out() -> None:
    """T26."""
    entry = Entry()
    before = entry.scrape(0.0, work={"talker": {"k-0": 0.0, "dead": 0.0}})
    after = entry.scrape(15.0, work={"talker": {"k-0": 10.0, "dead": 9000.0}})
    talker = window_of(a_spec(), before, after, PODS, 15.0).stage("talker")
    assert talker.work == 10.0 and talker.zombie


def test_cold_starts_are_those_of_pods_that_were_not_there_before() -> None:
    entry = Entry()
    window = window_of(a_spec(), entry.scrape(0.0), entry.scrape(15.0), PODS, 15.0, frozenset({"k-0"}))
    assert window.stage("talker").cold_starts == (70.0,) and window.stage("thinker").cold_starts == ()


@pytest.mark.parametrize("text", ["", "not json", "[]", '{"stages": [{}]}', '{"stages": 3}'])
def test_a_status_that_cannot_be_read_holds_nothing(text: str) -> None:
    assert held_of(text) == {}


def test_held_requests_come_from_the_status() -> None:
    text = '{"stages": [{"name": "talker", "replicas": [{"replica": "a", "bound": 3}]}]}'
    assert held_of(text) == {"talker": {"a": 3}}


def test_families_that_are_not_ours_do_no_harm() -> None:
    registry = CollectorRegistry()
    Counter("python_gc", "", registry=registry).inc()
    assert "python_gc_total" in samples(generate_latest(registry).decode())


def test_the_families_that_are_read_are_those_that_entry_and_stages_have() -> None:
    """A family that is renamed there must not silently make the scaler blind here."""
    entry = EntryMetrics(a_plan())
    stage = StageMetrics(model_name="m", stage="talker", replica="r")
    there = {short_name(family.name) for family in entry.registry.collect()}
    assert {snapshot.TTFP, snapshot.RTF, snapshot.UNDERRUN, snapshot.SHARES, snapshot.STAGE_SECONDS} <= there
    assert {snapshot.WAITING, snapshot.E2E} <= there
    made = {f"{short_name(family.name)}_total" for family in stage.registry.collect()}
    assert set(snapshot.WORK) <= made
    shown = samples(entry.render()[0].decode())
    assert f"{snapshot.STAGE_SECONDS}_count" in shown, "shown without traffic, or an idle entry looks blind"
