"""Long work shows progress, in a log too: a step that says nothing for minutes reads like one that hangs."""

from __future__ import annotations

import pytest

from omni_cluster import progress


def test_a_log_gets_a_line_of_a_long_step_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.step("compile") as waiting_for:
        for packages in range(0, 91, 3):
            now = float(packages)
            waiting_for(f"{packages} packages")
    assert capsys.readouterr().err.splitlines() == [
        "  … compile (30 s): 30 packages",
        "  … compile (60 s): 60 packages",
        "  … compile (90 s): 90 packages",
        "  ✓ compile (90.0 s)",
    ]


def test_a_short_step_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.step("start") as waiting_for:
        waiting_for("the port")
    assert len(capsys.readouterr().err.splitlines()) == 1
