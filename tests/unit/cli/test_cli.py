"""The `omni` command line: quick, lazy, one clear line for an error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from omni_runtime import cli
from omni_runtime.errors import OmniError


def omni(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "omni_runtime.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", "COLUMNS": "120"},
    )


def test_help_lists_every_command() -> None:
    result = omni("--help")
    assert result.returncode == 0
    for command in cli.SUBCOMMANDS:
        assert command.name in result.stdout


def test_help_imports_no_sub_command() -> None:
    code = "import sys, omni_runtime.cli; print([m for m in ('zmq', 'fastapi', 'torch', 'numpy', 'rich') if m in sys.modules and m != 'rich'])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert result.stdout.strip() == "[]"


def test_help_of_a_sub_command_reaches_it() -> None:
    assert "--save" in omni("chat", "--help").stdout


def test_errors_are_one_line() -> None:
    result = omni("chat", "--url", "http://127.0.0.1:9", "hi")
    assert result.returncode == 1
    assert result.stderr.startswith("omni: ServerUnreachable: http://127.0.0.1:9")
    assert "Traceback" not in result.stderr


def test_a_folder_that_cannot_be_made_is_one_line() -> None:
    for arguments in (
        ("models", "prepare", "--target", "/dev/null/models", "qwen3-omni-tiny"),
        ("run", "-f", "examples/smol-omni.pipeline.yaml", "--port", "28431", "--logs", "/dev/null/logs"),
    ):
        result = omni(*arguments)
        assert result.returncode == 1
        assert result.stderr.splitlines()[-1].startswith("omni: /dev/null/"), result.stderr
        assert "Traceback" not in result.stderr


def test_defaults_that_are_words_stand_in_the_help() -> None:
    """rich takes what stands in brackets for markup, and leaves a gap."""
    for command, default in (("run", "<cache>/run/NAME"), ("models prepare", "<cache>/models")):
        shown = omni(*command.split(), "--help").stdout
        assert default in shown
        assert " ." not in shown


def test_a_missing_dependency_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = cli.SubCommand("x", "omni_runtime.no_such_module", "app", "")
    with pytest.raises(OmniError, match=r"omni-operator\[runtime\]"):
        cli.load(absent)


def test_run_refuses_a_taken_port_and_bad_replicas(tmp_path: object) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = omni("run", "-f", "examples/smol-omni.pipeline.yaml", "--port", port)
    assert result.returncode == 1
    assert "InvalidOption" in result.stderr
    assert "(Address already in use); use another port" in result.stderr
    result = omni("run", "-f", "examples/smol-omni.pipeline.yaml", "--replicas", "vae=2")
    assert "stages are thinker, talker, code2wav" in result.stderr
    assert omni("run", "-f", "no-such-file.yaml").returncode == 1
