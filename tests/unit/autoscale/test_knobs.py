"""Every knob changes what is decided (T36): each test fails if its knob is disconnected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from omni_operator.autoscale.demand import LoadSample, estimate
from omni_operator.autoscale.types import Objectives, Tuning
from omni_operator.main import parse_options

from .builders import Runner, a_fleet, a_spec, a_window, counts_of


def total(runner: Runner) -> int:
    return sum(runner.counts)


def settle(tuning: Tuning, seconds: float = 60, rate: float = 3.0, start: tuple[int, int, int] = (1, 1, 1)) -> Runner:
    runner = Runner(a_spec(tuning=tuning), a_fleet(*start))
    runner.run(rate, seconds)
    return runner


def turned(tuning: Tuning) -> int:
    """Down after up: how many replicas are left 510 s after the load has gone."""
    runner = Runner(a_spec(tuning=tuning), a_fleet(1, 6, 1))
    runner.run(1.0, 600)
    runner.run(6.0, 60)
    runner.run(1.0, 510)
    return runner.counts[1]


def after_idle(tuning: Tuning) -> int:
    runner = Runner(a_spec(minimum=0, tuning=tuning), a_fleet(1, 1, 1))
    runner.run(0.5, 60)
    runner.run(0.0, 1500)
    return total(runner)


def planned(tuning: Tuning, rates: list[float], waiting: float = 0.0) -> float:
    samples = [LoadSample(15.0 * (i + 1), 15.0, (rate * 15.0,)) for i, rate in enumerate(rates)]
    return estimate(samples, 0, tuning, 120.0, waiting).planned


BURSTS = ([0.2] * 12 + [8.0] * 4) * 4 + [0.2] * 12
RARE_BURST = ([0.2] * 12 + [8.0] * 4) * 3 + [0.2] * 12 + [16.0] * 4 + [0.2] * 12


def written_together(tuning: Tuning) -> int:
    """How often a stage shrinks within two minutes of a load that falls away step by step."""
    runner = Runner(a_spec(tuning=replace(tuning, scale_down_seconds=30.0)), a_fleet(6, 14, 3))
    for i in range(30):
        runner.step(max(0.2, 6.0 - 0.2 * i))
    return sum(len(d.changes) for d in runner.decisions)


TUNINGS: dict[str, tuple[float, Callable[[Tuning], float]]] = {
    "scale_down_seconds": (60.0, lambda t: total(settle(t, 150, 1.0, (4, 8, 3)))),
    "reversal_seconds": (0.0, turned),
    "idle_seconds": (3000.0, after_idle),
    "margin": (0.3, lambda t: total(settle(t, 600, 1.0, (4, 10, 3)))),
    "confidence": (6.0, lambda t: total(settle(t))),
    "shrink_share": (1.0, lambda t: total(settle(t, 330, 1.0, (8, 16, 5)))),
    "burst_ratio": (100.0, lambda t: planned(t, [0.3] * 6 + [3.0] * 2)),
    "memory_seconds": (120.0, lambda t: planned(t, BURSTS)),
    "burst_coverage": (0.3, lambda t: planned(t, RARE_BURST)),
    "min_write_seconds": (300.0, written_together),
}


def test_every_tuning_has_a_test() -> None:
    assert {f.name for f in fields(Tuning)} == set(TUNINGS)


@pytest.mark.parametrize("name", TUNINGS)
def test_tuning_changes_the_outcome(name: str) -> None:
    value, outcome = TUNINGS[name]
    assert outcome(Tuning()) != outcome(replace(Tuning(), **{name: value}))


def test_ttfp_objective() -> None:
    tight = Runner(a_spec(objectives=Objectives(ttfp_p95_seconds=0.9)), a_fleet(1, 1, 1)).run(2.0, 60)
    loose = Runner(a_spec(objectives=Objectives(ttfp_p95_seconds=5.0)), a_fleet(1, 1, 1)).run(2.0, 60)
    assert tight.devices > loose.devices


def test_real_time_factor_objective() -> None:
    tight = Runner(a_spec(objectives=Objectives(rtf_p95=0.3)), a_fleet(1, 1, 1)).run(2.0, 60)
    loose = Runner(a_spec(objectives=Objectives(rtf_p95=1.5)), a_fleet(1, 1, 1)).run(2.0, 60)
    assert tight.target("talker") > loose.target("talker")


def test_queue_depth_objective() -> None:
    """Without a TTFP objective a queue is room; and a queue beyond it is a breach."""
    short = Runner(a_spec(objectives=Objectives(queue_per_replica=1)), a_fleet(1, 1, 1)).run(4.0, 60)
    long = Runner(a_spec(objectives=Objectives(queue_per_replica=60)), a_fleet(1, 1, 1)).run(4.0, 60)
    assert short.devices > long.devices
    runner = Runner(a_spec(objectives=Objectives(9.0, None, 4)), a_fleet(2, 4, 1))
    breach = runner.show(a_window(runner.spec, runner.fleet, 1.0, now=15.0, waiting=40.0))
    assert "queue" in breach.message
    runner = Runner(a_spec(objectives=Objectives(9.0, None, 400)), a_fleet(2, 4, 1))
    assert "queue" not in runner.show(a_window(runner.spec, runner.fleet, 1.0, now=15.0, waiting=40.0)).message


def test_min_and_max_replicas() -> None:
    assert Runner(a_spec(minimum=3), a_fleet(1, 1, 1)).step(0.1).target("talker") == 3
    assert Runner(a_spec(talker={"maximum": 2}), a_fleet(1, 1, 1)).run(9.0, 60).target("talker") == 2
    assert counts_of(Runner(a_spec(talker={"maximum": 2}), a_fleet(1, 9, 1)).step(9.0))[1] == 2


def test_budget() -> None:
    assert Runner(a_spec(budget=6), a_fleet(1, 1, 1)).run(9.0, 60).devices <= 6
    assert Runner(a_spec(budget=60), a_fleet(1, 1, 1)).run(9.0, 60).devices > 6


def test_the_operator_takes_tunings_and_its_period() -> None:
    given = parse_options(["--tune", "scale_down_seconds=60", "--tune", "margin=0.7", "--scaling-period-seconds", "5"])
    assert given.controller.tuning == replace(Tuning(), scale_down_seconds=60.0, margin=0.7)
    assert given.controller.scaling_period_seconds == 5.0
    assert parse_options([]).controller.tuning == Tuning()


@pytest.mark.parametrize("wrong", ["nothing=1", "margin=x", "margin=nan", "margin=inf"])
def test_a_tuning_that_does_not_exist_ends_the_operator_with_a_reason(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--tune", wrong])
    assert wrong in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "soon", "86400"])
def test_a_period_that_cannot_be_ends_the_operator_with_a_reason(
    wrong: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a pause the loop would take all of a core; the variable is read as the option is."""
    monkeypatch.setenv("OMNI_SCALING_PERIOD_SECONDS", wrong)
    with pytest.raises(SystemExit):
        parse_options([])
    assert f"'{wrong}': give seconds from 1 to 3600" in capsys.readouterr().err
