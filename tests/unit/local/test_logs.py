"""Two runs of one pipeline do not write over each other's logs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from omni_runtime.errors import InvalidOption
from omni_runtime.local.logs import OWNER, claim_logs


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    default = tmp_path / "run" / "smol"
    with claim_logs(None, default) as first:
        (first / "entry.log").write_text("first")
        with claim_logs(None, default) as second, claim_logs(None, default) as third:
            assert [f.name for f in (first, second, third)] == ["smol", "smol-2", "smol-3"]
            assert (first / "entry.log").read_text() == "first"
    with claim_logs(None, default) as again:
        assert again == default
        assert not (again / "entry.log").exists(), "logs of the last run"


def test_a_folder_that_was_asked_for_is_refused_with_its_owner(tmp_path: Path) -> None:
    with claim_logs(tmp_path, tmp_path / "unused"):
        (tmp_path / "entry.log").write_text("first")
        with pytest.raises(InvalidOption, match=rf"--logs: {tmp_path}: .*pid {os.getpid()}\)"):
            with claim_logs(tmp_path, tmp_path / "unused"):
                pass
        assert (tmp_path / "entry.log").read_text() == "first"
    assert not (tmp_path / "unused").exists()


def test_a_run_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / OWNER).write_text("4194304")
    (tmp_path / "entry.log").write_text("old")
    with claim_logs(tmp_path, tmp_path):
        assert (tmp_path / OWNER).read_text() == str(os.getpid())
    assert not (tmp_path / "entry.log").exists()
