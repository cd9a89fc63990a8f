"""The autoscaler at work on an API server in memory: it writes what was decided, once, and says why."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from prometheus_client import generate_latest

from omni_crds.v1alpha1.conditions import Reason
from omni_operator.autoscale.capacity import fit
from omni_operator.autoscale.loop import Autoscaler
from omni_operator.autoscale.record import read, replay
from omni_operator.autoscale.scrape import Scraper, Target, samples
from omni_operator.autoscale.snapshot import Scrape
from omni_operator.autoscale.tuning import UnknownTuning, parse_tuning
from omni_operator.cli.scaling import compared, explained
from omni_operator.cli.scaling_plot import COLOURS, draw, history
from omni_operator.errors import Conflict
from omni_operator.events import EventSink
from omni_operator.kinds import PIPELINE, PROFILE, STAGE
from omni_operator.names import AUTOSCALER_MANAGER
from omni_operator.observe import observe
from omni_operator.observed import Key
from omni_operator.plan import plan_pipeline
from tests.unit.operator.world import NS, World, made

from .test_snapshot import Entry

KEY = Key(NS, "p")
SCALED = {
    "objectives": {"ttfpMilliseconds": {"p95": 1500}},
    "stages": [{"name": "talker", "scaling": {"minReplicas": 1, "maxReplicas": 4}}],
}


class Played(Scraper):
    """Scrapes that the test makes up, one after the other; the last one stays."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = Entry()
        self.held: dict[str, dict[str, int]] = {}
        self.blind = False

    async def scrape(self, entry: Target | None, pods: Iterable[Target], now: float) -> Scrape:
        if self.blind:
            return Scrape(now)
        return Scrape(now, samples(generate_latest(self.entry.registry).decode()), self.held, entry_pod="e")


class Scaled:
    """A pipeline that is Ready, and its autoscaler."""

    def __init__(self, world: World, record: Path | None = None) -> None:
        self.world, self.scraper = world, Played()
        self.now = datetime(2026, 6, 1, tzinfo=UTC)
        self.autoscaler = Autoscaler(
            world.kube, lambda: None, EventSink(world.kube), clock=lambda: self.now, scraper=self.scraper, record=record
        )

    async def track(self) -> Any:
        observed = await observe(KEY, self.world.kube)
        plan = plan_pipeline(observed, now=self.now)
        return self.autoscaler.track(observed, plan.resolved)

    async def step(self, requests: int = 0, ttfp: float = 0.4, seconds: float = 15.0) -> bool:
        self.now += timedelta(seconds=seconds)
        for _ in range(requests):
            self.scraper.entry.request(ttfp)
        await self.track()
        return await self.autoscaler.step(KEY)

    def count(self, stage: str = "talker") -> int:
        return int(self.world.kube.all(STAGE)[f"p-{stage}"]["spec"]["replicas"])


async def scaled(spec: dict[str, Any] | None = None, record: Path | None = None) -> Scaled:
    world = await made(**(spec or SCALED))
    return Scaled(world, record)


async def test_a_slow_stage_grows_through_scale_and_the_status_says_why() -> None:
    it = await scaled()
    await it.step()
    changed = False
    for _ in range(8):
        it.scraper.held = {"talker": {"a": 40}}
        it.scraper.entry.waiting.labels("m", "talker").set(30)
        changed = await it.step(requests=30, ttfp=9.0) or changed
    assert changed and 1 < it.count() <= 4
    assert it.count("thinker") == 1, "a stage without scaling is untouched"
    scales = [c for c in it.world.kube.calls if c[0] == "scale"]
    assert scales and all(name == "p-talker" for _, _, name in scales)
    said = await it.track()
    grown = next(d for d in said.decisions if any(s.replicas > s.before for s in d.stages or ()))
    assert grown.limiting_stage and grown.inputs and grown.candidates
    assert len(said.decisions) <= 10


async def test_an_idle_pipeline_costs_no_write_and_no_new_line() -> None:
    it = await scaled()
    await it.step()
    await it.step()
    it.world.kube.calls.clear()
    news = [await it.step() for _ in range(20)]
    assert not any(news)
    assert it.world.kube.writes == []


async def test_without_metrics_it_holds_says_so_once_and_recovers() -> None:
    """T27."""
    it = await scaled()
    await it.step()
    await it.step(3)
    it.scraper.blind = True
    news = [await it.step() for _ in range(5)]
    assert news.count(True) == 1 and it.count() == 1
    said = await it.track()
    assert not said.ready and said.reason is Reason.METRICS_STALE
    it.scraper.blind = False
    await it.step(3)
    assert await it.step(3)
    assert (await it.track()).ready


async def test_a_profile_can_name_a_prometheus() -> None:
    """And then the pods are not asked; one that is not there is told as any blindness is."""
    it = await scaled()
    annotations = {"serving.omni.dev/prometheus-url": "http://127.0.0.1:1"}
    it.world.kube.edit(PROFILE, "", "cpu", lambda b: b["metadata"].update(annotations=annotations))
    for _ in range(3):
        await it.step(3)
    said = await it.track()
    assert not said.ready and said.reason is Reason.METRICS_STALE
    await it.autoscaler.close()


async def test_mode_external_is_left_alone() -> None:
    spec = {"stages": [{"name": "talker", "scaling": {"minReplicas": 1, "maxReplicas": 4, "mode": "External"}}]}
    it = await scaled(spec)
    assert await it.track() is None
    it.world.kube.calls.clear()
    for _ in range(5):
        assert not await it.step(50, ttfp=9.0)
    assert it.world.kube.writes == []


async def test_a_second_owner_is_named_and_obeyed() -> None:
    """T19: kubectl, an HPA or KEDA has written the count."""
    it = await scaled()
    await it.step()

    def taken(body: dict[str, Any]) -> None:
        body["spec"]["replicas"] = 3
        fields = {"f:spec": {"f:replicas": {}}}
        # As a real API server has it: a write to /scale of a custom resource carries no time.
        body["metadata"]["managedFields"] = [{"manager": "kubectl", "subresource": "scale", "fieldsV1": fields}]

    it.world.kube.edit(STAGE, NS, "p-talker", taken)
    await it.world.converge()  # its pods are there: what starts is not asked for again
    for _ in range(3):
        it.scraper.entry.waiting.labels("m", "talker").set(90)
        await it.step(40, ttfp=9.0)
    assert it.count() == 3
    said = await it.track()
    assert said.reason is Reason.SECOND_OWNER and "kubectl" in said.message and "talker" in said.message
    for _ in range(40):
        await it.step(40, ttfp=9.0)
    assert it.count() == 4, "who has been silent for ten minutes gives way"


async def test_whoever_writes_between_the_look_and_the_write_wins() -> None:
    it = await scaled()
    await it.step()
    it.now += timedelta(seconds=15)
    it.scraper.entry.waiting.labels("m", "talker").set(90)
    it.scraper.held = {"talker": {"a": 40}}
    for _ in range(40):
        it.scraper.entry.request(9.0)
    await it.track()
    it.world.kube.edit(STAGE, NS, "p-talker", lambda b: b["spec"].update(replicas=2))
    with pytest.raises(Conflict):
        await it.autoscaler.step(KEY)
    assert it.count() == 2


async def test_a_restarted_operator_repeats_nothing() -> None:
    it = await scaled()
    await it.step()
    await it.step(3)
    said = await it.track()
    status = {"decisions": [d.model_dump(by_alias=True, exclude_none=True, mode="json") for d in said.decisions]}
    it.world.kube.edit(PIPELINE, NS, "p", lambda b: b["status"].update(status))
    successor = Scaled(it.world)
    successor.scraper = it.scraper
    again = await successor.track()
    assert again.decisions == said.decisions and again.message == said.message


async def stopped(it: Scaled, record: Path | None = None, **learned: Any) -> Scaled:
    """Another process, which finds what the one before it had put into the status; learned: changed by hand."""
    said = await it.track()
    status = {
        "decisions": [d.model_dump(by_alias=True, exclude_none=True, mode="json") for d in said.decisions],
        "learned": {**said.learned.model_dump(by_alias=True, mode="json"), **learned},
    }
    it.world.kube.edit(PIPELINE, NS, "p", lambda b: b["status"].update(status))
    successor = Scaled(it.world, record)
    successor.scraper, successor.now = it.scraper, it.now
    return successor


async def learning(record: Path | None = None) -> Scaled:
    """A pipeline in twelve minutes of steady load: long enough that something of it has been kept."""
    it = await scaled(record=record)
    for _ in range(50):
        it.scraper.held = {"talker": {"a": 2}}
        await it.step(4)
    return it


async def test_a_restarted_operator_goes_on_from_what_was_learned(tmp_path: Path) -> None:
    it = await learning(tmp_path)
    said = await it.track()
    assert [s.name for s in said.learned.stages] == ["thinker", "talker", "code2wav"]
    assert all(s.learned_for for s in said.learned.stages), "and for whom"
    successor = await stopped(it, tmp_path)
    assert (await successor.track()).learned == said.learned
    for _ in range(6):
        await successor.step(4)
    again = (await successor.track()).learned
    assert again.stages[1].step_nanoseconds == pytest.approx(said.learned.stages[1].step_nanoseconds, rel=0.05)
    # A recording of both processes is replayed with what each of them began with.
    records = list(read(tmp_path / f"{NS}.p.jsonl"))
    starts = [r.start for r in records if r.start is not None]
    assert starts[0] == {} and starts[1]["version"] == 1 and len(starts) == 2
    last = list(replay(records))[-1].decision
    shown = list(replay([replace(r, start={} if r.start is not None else None) for r in records]))[-1].decision
    step, forgotten = (next(s for s in d.stages if s.name == "talker").step_seconds for d in (last, shown))
    tracked = successor.autoscaler._tracked[KEY]
    stage = tracked.spec.stage("talker")
    known = tracked.state.learned[tracked.spec.stages.index(stage)]
    assert step == pytest.approx(fit(known, stage.prior, stage.slots).step(0.0), rel=0.1)
    assert step != forgotten


async def test_what_was_learned_is_written_at_a_bounded_rate() -> None:
    it = await learning()
    await it.step(4)
    news = [await it.step(4 + i % 4) for i in range(120)]
    assert 1 <= news.count(True) <= 6, "half an hour under load: at most once in five minutes"
    it.scraper.held = {}
    for _ in range(45):
        await it.step(seconds=60.0)
    assert not any([await it.step(seconds=60.0) for _ in range(30)]), "an idle pipeline learns nothing"


@pytest.mark.parametrize("changes", [{"version": 99}, {"stages": "none"}, {"time": "yesterday"}])
async def test_what_somebody_else_wrote_there_is_ignored_and_said(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    it = await learning()
    decisions = (await it.track()).decisions
    successor = await stopped(it, **changes)
    with caplog.at_level(logging.INFO, logger="omni_operator"):
        for _ in range(3):
            await successor.step(4)
    said = [r.fields for r in caplog.records if r.getMessage() == "autoscaler.restored"]  # type: ignore[attr-defined]
    assert len(said) == 1 and not said[0]["used"] and said[0]["ignored"]
    weights = [known.weight for known in successor.autoscaler._tracked[KEY].state.learned]
    assert max(weights) <= 2
    assert set(decisions) <= set((await successor.track()).decisions), "the rest of the status is still read"


@pytest.mark.parametrize(
    ("change", "anew"),
    [
        ({"engineArgs": [{"name": "seed", "value": "7"}]}, True),
        ({"maxConcurrency": 2}, True),
        ({"scaling": {"minReplicas": 1, "maxReplicas": 7}}, False),
        ({"scheduling": {"nodeSelector": {"a": "b"}}}, False),
    ],
)
async def test_another_setting_of_an_engine_is_another_stage(change: dict[str, Any], anew: bool) -> None:
    it = await learning()
    stages = [{**SCALED["stages"][0], **change}]  # type: ignore[index]
    it.world.kube.edit(PIPELINE, NS, "p", lambda b: b["spec"].update(stages=stages))
    successor = await stopped(it)
    for _ in range(2):
        await successor.step(4)
    thinker, talker, code2wav = (k.weight for k in successor.autoscaler._tracked[KEY].state.learned)
    assert (talker <= 1.0) is anew and min(thinker, code2wav) > 1.0


async def test_what_was_recorded_can_be_replayed_and_compared(tmp_path: Path) -> None:
    it = await scaled(record=tmp_path)
    for i in range(12):
        it.scraper.entry.waiting.labels("m", "talker").set(30 if i > 6 else 0)
        it.scraper.held = {"talker": {"a": 40 if i > 6 else 1}}
        await it.step(30, ttfp=9.0 if i > 6 else 0.4)
    records = list(read(tmp_path / f"{NS}.p.jsonl"))
    assert len(records) == 11, "the first scrape is no window"
    again = list(replay(records))
    assert max(r.decision.target("talker") for r in again) == it.count()
    lines = list(compared(replay(records), replay(records, {"confidence": 8.0})))
    assert lines[-1].startswith("11 windows, ")
    assert any("talker 1->" in line for line in compared(replay(records), None))


def test_explain_reads_a_pipeline_as_kubectl_prints_it() -> None:
    decision = {"time": "2026-06-01T00:00:00Z", "reason": "ScaleUp", "message": "talker limits", "limitingStage": "talker",
                "stages": [{"name": "talker", "before": 1, "replicas": 3, "reason": "burst"}], "inputs": "a=1"}  # fmt: skip
    ready = {"type": "ScalingReady", "status": "True", "reason": "Autoscaling", "message": "follows the objectives"}
    text = "\n".join(explained({"metadata": {"name": "p"}, "status": {"conditions": [ready], "decisions": [decision]}}))
    assert "1 -> 3" in text and "limiting: talker" in text and "####" in text and "ScalingReady True" in text
    assert "no decision yet" in "\n".join(explained({"metadata": {"name": "p"}}))


def test_a_picture_has_a_line_for_every_stage_and_decision(tmp_path: Path) -> None:
    """Coarse: it is drawn, in the size of what there is to say, and the steps start at the count before the first."""
    stages = [
        {"name": "talker", "before": 1, "replicas": 3, "reason": "burst"},
        {"name": "thinker", "before": 2, "replicas": 2},
    ]
    said = {"reason": "ScaleUp", "message": "talker limits", "limitingStage": "talker", "stages": stages}
    later = [{**stages[0], "before": 3, "replicas": 2}, stages[1]]
    decisions = [{**said, "time": "2026-06-01T00:09:00Z", "stages": later}, {**said, "time": "2026-06-01T00:00:00Z"}]
    assert [count for _, count in history(decisions)["talker"]] == [1, 3, 2]
    sizes = []
    for shown in (decisions[1:], decisions):
        file = tmp_path / "explain.png"
        draw({"metadata": {"name": "p"}, "status": {"decisions": shown}}, file)
        with Image.open(file) as image:
            sizes.append(image.size)
            colours = image.convert("RGB").getcolors(1 << 20) or []
        assert {COLOURS[0], COLOURS[1]} <= {colour for _, colour in colours}
    assert sizes[0][0] == sizes[1][0] and sizes[0][1] < sizes[1][1]


@pytest.mark.parametrize(
    ("pair", "said"), [("nothing=1", "there is no tuning 'nothing'"), ("margin=x", "is no number")]
)
def test_a_wrong_change_says_what_would_be_right(pair: str, said: str) -> None:
    with pytest.raises(UnknownTuning, match=said):
        parse_tuning([pair])


async def test_the_loop_ends_with_its_task() -> None:
    it = await scaled()
    task = asyncio.create_task(it.autoscaler.run_forever(lambda key: None))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await it.autoscaler.close()


def test_the_manager_of_the_count_is_its_own() -> None:
    assert AUTOSCALER_MANAGER not in ("omni-operator", "omni-operator-replicas")
