"""`omni plan` as a user meets it: a table, JSON that pods could read, and one error a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omni_operator.cli.plan import app
from omni_runtime.cli.plan import render
from omni_runtime.deploy.plan import load_plan
from tests.unit.deploy.builders import QWEN, resolved

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_table() -> None:
    result = CliRunner().invoke(app, ["-f", str(EXAMPLES / "qwen3-omni-tiny.pipeline.yaml"), "--origins"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("qwen3-omni-tiny  topology qwen3_omni_moe  revision ")
    row = next(line for line in lines if line.startswith("code2wav"))
    assert " ".join(row.split()) == "code2wav qwen3_omni_code2wav cpu cpu with talker 1 100m 2Gi 64Mi audio"
    edge = next(line for line in lines if line.startswith("talker -> code2wav"))
    assert " ".join(edge.split()) == "talker -> code2wav codec_frames SharedMemory asyncChunk 4 / 25 / 28"
    assert any(line.split() == ["stages.thinker.cpu", "pipeline"] for line in lines)


def test_a_connector_that_depends_on_the_nodes_says_so() -> None:
    near = resolved(QWEN + "runtimeProfile: near\nedges: [{from: thinker, to: talker, connector: {type: TCP}}]")
    rows = [" ".join(line.split()) for line in render(near) if " -> " in line]
    assert rows == [
        "thinker -> talker thinker_hidden TCP asyncChunk as produced",
        "talker -> code2wav codec_frames TCP, SharedMemory on one node asyncChunk 4 / 25 / 28",
    ]


@pytest.mark.parametrize(
    ("profile", "way"), [("ib", "Mooncake by RDMA"), ("mooncake-tcp", "Mooncake"), ("cuda", "TCP")]
)
def test_what_mooncake_sends_by_is_said(profile: str, way: str) -> None:
    rows = [" ".join(line.split()) for line in render(resolved(f"{QWEN}runtimeProfile: {profile}")) if " -> " in line]
    assert rows[0] == f"thinker -> talker thinker_hidden {way} asyncChunk as produced"


def test_json_is_the_plan() -> None:
    result = CliRunner().invoke(app, ["-f", str(EXAMPLES / "smol-omni.pipeline.yaml"), "--json", "--local"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert answer["placement"] is None, "processes of one machine are not placed"
    plan = load_plan(json.dumps(answer["plan"]).encode())
    assert {e.connector for e in plan.edges} == {"SharedMemory"}


def test_errors_one_a_line_and_exit_code_1(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    text = (EXAMPLES / "qwen3-omni-tiny.pipeline.yaml").read_text()
    path.write_text(text.replace("qwen3_omni_moe", "custom").replace("to: talker", "to: tolker"))
    result = CliRunner().invoke(app, ["-f", str(path)])
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert len(lines) == 4
    assert sum("needs an engine" in line for line in lines) == 3
    assert "did you mean talker?" in lines[3]
    assert result.stdout == ""


@pytest.mark.parametrize("option", ["--nope", "--profiles"])
def test_wrong_options(option: str) -> None:
    assert CliRunner().invoke(app, ["-f", "x", option]).exit_code == 2
