"""Packaged models: built once, whole or not at all, readable by every user."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from omni_runtime.errors import InvalidRequest, OmniError
from omni_runtime.models import catalogue
from omni_runtime.models.chat import mel_frames
from omni_runtime.models.smol_omni import hf_name, interleaved_to_halves

built: list[str] = []


def build(folder: Path, report: catalogue.Report) -> None:
    built.append(folder.name)
    (folder / "weights").write_text("x")
    os.chmod(folder / "weights", 0o600)
    (folder / catalogue.MARKER).write_text("{}")


def build_half(folder: Path, report: catalogue.Report) -> None:
    (folder / "weights").write_text("x")
    raise OSError("disk full")


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    built.clear()
    models = (
        catalogue.PackagedModel("good", "d", "t", f"{__name__}:build"),
        catalogue.PackagedModel("half", "d", "t", f"{__name__}:build_half"),
    )
    monkeypatch.setattr(catalogue, "PACKAGED", models)
    monkeypatch.setattr(
        catalogue.PackagedModel, "load_builder", lambda self: build if self.name == "good" else build_half
    )


@pytest.mark.usefixtures("packaged")
def test_built_once_and_readable(tmp_path: Path) -> None:
    for _ in range(2):
        folder = catalogue.prepare("good", tmp_path, lambda _: None)
    assert len(built) == 1
    assert folder == tmp_path / "good"
    assert (folder / "weights").stat().st_mode & 0o777 == 0o644
    assert folder.stat().st_mode & 0o777 == 0o755
    catalogue.prepare("good", tmp_path, lambda _: None, force=True)
    assert len(built) == 2


@pytest.mark.usefixtures("packaged")
def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"):
        catalogue.prepare("half", tmp_path, lambda _: None)
    assert list(tmp_path.iterdir()) == []
    assert not catalogue.is_prepared("half", tmp_path)


@pytest.mark.usefixtures("packaged")
def test_a_folder_of_a_crash_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "weights").write_text("half")
    catalogue.prepare("good", tmp_path, lambda _: None)
    assert (tmp_path / "good" / "weights").read_text() == "x"


@pytest.mark.usefixtures("packaged")
def test_a_folder_of_an_earlier_version_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue.prepare("good", tmp_path, lambda _: None)
    newer = catalogue.PackagedModel("good", "d", "t", f"{__name__}:build", version=2)
    monkeypatch.setattr(catalogue, "PACKAGED", (newer,))
    assert not catalogue.is_prepared("good", tmp_path)
    for _ in range(2):
        catalogue.prepare("good", tmp_path, lambda _: None)
    assert len(built) == 2
    assert catalogue.is_prepared("good", tmp_path)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="smol-omni, qwen3-omni-tiny"):
        catalogue.prepare("gpt", tmp_path, lambda _: None)


def test_gguf_names() -> None:
    assert hf_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(OmniError, match="blk.0.new"):
        hf_name("blk.0.new.weight")


def test_rotary_rows_are_put_back() -> None:
    halves = np.arange(8)[:, None]  # one head of 8 rows: 0..3 first halves, 4..7 second halves
    interleaved = np.array([0, 4, 1, 5, 2, 6, 3, 7])[:, None]
    assert np.array_equal(interleaved_to_halves(interleaved, heads=1), halves)


@pytest.mark.parametrize(
    ("samples", "frames"), [([16_000], [100]), ([16_010], [100]), ([16_010, 32_000], [101, 200]), ([], [])]
)
def test_mel_frames(samples: list[int], frames: list[int]) -> None:
    assert mel_frames(samples, 160) == frames
