"""Processes that start, crash, hang and leave children behind: small real processes, no engine."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from omni_runtime.errors import DeadlineExceeded
from omni_runtime.local import process, supervisor
from omni_runtime.local.layout import ProcessSpec, choose_ports
from omni_runtime.local.process import log_tail
from omni_runtime.local.supervisor import ProcessFailed, Report, Supervisor
from tests.unit.orchestrator.conftest import eventually

SERVER = """
import http.server, sys, json
print(json.dumps({"event": "server.up", "level": "info", "ts": "t", "port": int(sys.argv[1])}), file=sys.stderr, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[2])); self.end_headers(); self.wfile.write(b"the engine is loading")
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def a_process(name: str, code: str, *arguments: str, seconds: float = 20.0, order: int = 1) -> ProcessSpec:
    port = choose_ports(0, 1).control
    command = (sys.executable, "-c", code, str(port), *arguments)
    return ProcessSpec(name, command, f"http://127.0.0.1:{port}/ready", seconds, order)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def reports() -> list[Report]:
    return []


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_SECONDS", (0.05,))
    monkeypatch.setattr(supervisor, "READY_POLL_SECONDS", 0.05)
    monkeypatch.setattr(process, "GROUP_SECONDS", 1.0)


async def test_ready_crash_restart_stop(tmp_path: Path, reports: list[Report]) -> None:
    """R34: a crash of one process ends no other, is told by name with its log, and is repaired."""
    specs = [a_process("thinker", SERVER, "200"), a_process("entry", SERVER, "200", order=0)]
    watch = Supervisor(specs, tmp_path, dict(os.environ), reports.append)
    await watch.start()
    first = watch.pids
    os.kill(first["thinker"], 9)
    await eventually(lambda: any("thinker ended (killed by signal 9)" in r.text for r in reports))
    crash = next(r for r in reports if "thinker ended" in r.text)
    assert any("server.up port=" in line for line in crash.lines)
    await eventually(lambda: watch.pids["thinker"] != first["thinker"], 10)
    await eventually(lambda: any("thinker is ready" in r.text for r in reports[reports.index(crash) :]), 10)
    assert watch.pids["entry"] == first["entry"]
    pids = watch.pids.values()
    await watch.stop(asyncio.Event())
    assert not any(alive(p) for p in pids)


async def test_a_process_that_never_gets_ready_is_given_up_by_name(tmp_path: Path, reports: list[Report]) -> None:
    watch = Supervisor(
        [a_process("talker", "raise SystemExit('no model here')")], tmp_path, dict(os.environ), reports.append
    )
    with pytest.raises(ProcessFailed, match="talker ended 3 times before it was ready"):
        await watch.start()
    assert any("no model here" in line for r in reports for line in r.lines)
    await watch.stop(asyncio.Event())


async def test_the_deadline_says_what_was_missing(tmp_path: Path, reports: list[Report]) -> None:
    spec = a_process("thinker", SERVER, "503", seconds=2.0)
    watch = Supervisor([spec], tmp_path, dict(os.environ), reports.append)
    with pytest.raises(DeadlineExceeded, match="thinker: the engine is loading"):
        await watch.start()
    await watch.stop(asyncio.Event())


async def test_stop_ends_hanging_processes_and_their_children(
    tmp_path: Path, reports: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_SECONDS", (0.2, 0.2, 0.2))
    code = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen(['sleep', '600']); open(sys.argv[2], 'w').write(str(child.pid));"
        + SERVER.replace("argv[2]", "argv[3]")
    )
    pid_file = tmp_path / "pid"
    watch = Supervisor([a_process("thinker", code, str(pid_file), "200")], tmp_path, dict(os.environ), reports.append)
    await watch.start()
    child = int(pid_file.read_text())
    assert alive(child)
    await watch.stop(asyncio.Event())
    await eventually(lambda: not alive(child))
    assert not any(alive(p) for p in watch.pids.values())
    assert any("was killed" in r.text for r in reports)


def test_log_tail_reads_like_prose(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(
        'old\n{"event": "engine.failed", "level": "error", "ts": "t", "process": "engine", "reason": "no memory"}\nplain\n'
    )
    assert log_tail(log, start=4) == ["engine.failed reason=no memory", "plain"]
    assert log_tail(tmp_path / "none.log") == []
