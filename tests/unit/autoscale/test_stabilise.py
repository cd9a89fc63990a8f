"""A count that was tried and taken back is not tried again under the same load (T24)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omni_operator.autoscale.stabilise import REGRET_SECONDS, Moves, Regret, Shrinking, moved, reason_to_keep
from omni_operator.autoscale.types import StageFleet, Tuning

from .builders import a_fleet, a_spec, a_stage, a_window

TUNING = Tuning()
BACK = moved(moved(Moves(), 3, 2, 0.0, 5.0), 2, 3, 30.0, 5.2)  # after half a minute with two
LATER = 31.0 + TUNING.reversal_seconds


def why_not(moves: Moves, count: int, load: float, now: float) -> str | None:
    spec = a_spec()
    return reason_to_keep(
        Shrinking(
            spec=a_stage(0), fleet=StageFleet("thinker", 3, ready=3), moves=moves,
            window=a_window(spec, a_fleet(3, 4, 1), load, now=now), tuning=TUNING, breach="", burst=False, now=now,
            count=count, load=load,
        )
    )  # fmt: skip


def test_what_is_taken_back_is_regretted() -> None:
    assert BACK.regret == Regret(2, 5.2, 30.0)


@pytest.mark.parametrize(
    ("first", "then"), [((3, 2), (2, 1)), ((2, 3), (3, 4))], ids=["further", "never tried smaller"]
)
def test_what_is_not_taken_back_is_no_mistake(first: tuple[int, int], then: tuple[int, int]) -> None:
    assert moved(moved(Moves(), *first, 0.0, 5.0), *then, 30.0, 9.0).regret is None


def test_what_is_taken_back_much_later_is_regretted_under_that_load() -> None:
    """Noise alone finds out late; where the load has grown, it is the larger load that the count did not bear."""
    assert moved(moved(Moves(), 3, 2, 0.0, 5.0), 2, 3, 3600.0, 9.0).regret == Regret(2, 9.0, 3600.0)


@pytest.mark.parametrize(
    ("count", "load", "now", "kept"),
    [
        (2, 5.2, LATER, True),
        (1, 5.2, LATER, True),
        (2, 4.8, LATER, True),
        (2, 4.6, LATER, False),  # less load than it failed at
        (2, 5.2, 30.0 + REGRET_SECONDS, False),  # long ago: the model has learned since
    ],
)
def test_the_same_mistake_is_not_made_twice(count: int, load: float, now: float, kept: bool) -> None:
    said = why_not(BACK, count, load, now)
    assert said == ("2 were too few at 5.20 requests/s" if kept else None)


def test_a_larger_count_is_another_matter() -> None:
    assert why_not(replace(BACK, regret=Regret(1, 5.2, 30.0)), 2, 5.2, LATER) is None


def test_a_regret_outlives_other_moves() -> None:
    grown = moved(BACK, 3, 5, 60.0, 9.0)
    assert moved(grown, 5, 4, 900.0, 6.0).regret == BACK.regret
