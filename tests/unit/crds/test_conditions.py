"""How a condition list changes: kstatus and Argo CD read it, so transitions and absence matter."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from omni_crds.v1alpha1.conditions import (
    MAX_MESSAGE,
    Condition,
    ConditionStatus,
    ConditionType,
    Reason,
    merge_conditions,
    truncate,
)

BEFORE, NOW = "2026-01-01T00:00:00Z", "2026-01-01T00:05:00Z"


@dataclass(frozen=True)
class A:
    """`A(READY).true("Why", at=NOW)` reads as prose."""

    type: ConditionType

    def true(self, reason: str = Reason.PROGRESSING, at: str = NOW, generation: int = 1) -> Condition:
        return self._with(ConditionStatus.TRUE, reason, at, generation)

    def false(self, reason: str = Reason.PROGRESSING, at: str = NOW, generation: int = 1) -> Condition:
        return self._with(ConditionStatus.FALSE, reason, at, generation)

    def unknown(self, reason: str = Reason.UNKNOWN, at: str = NOW, generation: int = 1) -> Condition:
        return self._with(ConditionStatus.UNKNOWN, reason, at, generation)

    def _with(self, status: ConditionStatus, reason: str, at: str, generation: int) -> Condition:
        return Condition(
            type=self.type, status=status, reason=reason, last_transition_time=at, observed_generation=generation
        )


READY, STALLED, RECONCILING = A(ConditionType.READY), A(ConditionType.STALLED), A(ConditionType.RECONCILING)


@pytest.mark.parametrize(
    ("old", "new", "merged"),
    [
        pytest.param([], [READY.false()], [READY.false()], id="first"),
        pytest.param(
            [READY.false(at=BEFORE)],
            [READY.false(at=NOW)],
            [READY.false(at=BEFORE)],
            id="same status: the time is kept",
        ),
        pytest.param(
            [READY.false("ImagePullFailed", at=BEFORE)],
            [READY.false("CrashLooping", at=NOW)],
            [READY.false("CrashLooping", at=BEFORE)],
            id="another reason is no transition",
        ),
        pytest.param(
            [READY.false(at=BEFORE, generation=1)],
            [READY.false(at=NOW, generation=2)],
            [READY.false(at=BEFORE, generation=2)],
            id="another generation is no transition",
        ),
        pytest.param([READY.false(at=BEFORE)], [READY.true(at=NOW)], [READY.true(at=NOW)], id="False to True"),
        pytest.param([READY.unknown(at=BEFORE)], [READY.false(at=NOW)], [READY.false(at=NOW)], id="Unknown to False"),
        pytest.param(
            [READY.true(at=BEFORE), RECONCILING.true(at=BEFORE), STALLED.true(at=BEFORE)],
            [READY.true(at=NOW)],
            [READY.true(at=BEFORE)],
            id="Reconciling and Stalled exist only while true",
        ),
        pytest.param(
            [READY.true(at=BEFORE)],
            [READY.false(at=NOW), STALLED.true(at=NOW)],
            [READY.false(at=NOW), STALLED.true(at=NOW)],
            id="Stalled appears",
        ),
        pytest.param(
            [STALLED.true(at=BEFORE), READY.false(at=BEFORE)],
            [READY.false(at=NOW), STALLED.true(at=NOW)],
            [READY.false(at=BEFORE), STALLED.true(at=BEFORE)],
            id="the new order holds: a list that is equal but for its order would be written each time",
        ),
    ],
)
def test_merge(old: list[Condition], new: list[Condition], merged: list[Condition]) -> None:
    assert merge_conditions(old, new) == tuple(merged)


def test_merge_is_idempotent() -> None:
    """Written again, the list is the same: no write, no watch event, no hot loop."""
    once = merge_conditions([], [READY.true(at=BEFORE), RECONCILING.true(at=BEFORE)])
    assert merge_conditions(once, [READY.true(at=NOW), RECONCILING.true(at=NOW)]) == once


def test_reasons_and_types_satisfy_the_schema() -> None:
    for reason in Reason:
        for condition_type in ConditionType:
            A(condition_type).true(reason)


@pytest.mark.parametrize("length", [0, 1, MAX_MESSAGE - 1, MAX_MESSAGE, MAX_MESSAGE + 1, 10 * MAX_MESSAGE])
def test_message_fits_the_schema(length: int) -> None:
    message = truncate("x" * length)
    assert len(message) == min(length, MAX_MESSAGE)
    assert message.endswith("…") == (length > MAX_MESSAGE)


def test_message_is_one_line_without_escape_sequences() -> None:
    """It may quote a container's log, and ends on somebody's terminal."""
    assert truncate("Traceback:\n\t\x1b[31mboom\x9b0m\r\n") == "Traceback: [31mboom 0m "
