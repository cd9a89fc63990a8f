"""The processes of a pipeline without its models: what the benchmarks of the path measure is there and works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]


def test_overhead_without_a_model(tmp_path: Path) -> None:
    """Text and audio through entry, workers and sidecar, streamed and whole; no request may fail."""
    result = tmp_path / "overhead.json"
    parts = ["relay", "streams", "gateway"]
    command = [sys.executable, "-m", "benchmarks.overhead", "--parts", *parts, "--seconds", "1", "--rate", "20"]
    run = subprocess.run(
        [*command, "--json", str(result)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    told = json.loads(result.read_text())
    assert told["benchmark"] == "overhead"
    figures = told["figures"]
    wanted = {"relay_ms_p50", "relay_audio_ms_p50", "gateway_ms_p50", "gateway_ms_p99", "gateway_stream_ms_p50"}
    assert wanted <= set(figures)
    assert all(0 < figures[name] < 60_000 for name in wanted), figures
    assert figures["stream_chunks_per_s"] > 0
