"""Processes are known by pid, start time and boot; a pid alone proves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omni_cluster import proc
from omni_cluster.errors import StepFailed
from omni_cluster.proc import ProcessId
from omni_cluster.processes import ProcessSpec, Record, Supervisor, write_atomically

SLEEP = (sys.executable, "-c", "import time; time.sleep(300)")
STUBBORN = (
    sys.executable,
    "-c",
    "import signal,time,sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(300)",
)


@pytest.fixture
def supervisor(tmp_path: Path):
    made = Supervisor(tmp_path / "cluster")
    made.root.mkdir()
    yield made
    made.stop_all(grace=0.2)


def spec(supervisor: Supervisor, argv: tuple[str, ...] = SLEEP, **more: object) -> ProcessSpec:
    return ProcessSpec("n1/kubelet", argv, supervisor.root / "logs" / "x.log", **more)  # type: ignore[arg-type]


def test_stat_of_a_command_with_spaces_and_brackets():
    fields = " ".join(str(number) for number in range(4, 50))
    assert proc.parse_stat(f"12 (a) b (c)) S {fields}") == ("S", 22)


def test_running_twice_starts_once(supervisor):
    assert supervisor.ensure(spec(supervisor)) is True
    first = supervisor.alive("n1/kubelet")
    assert supervisor.ensure(spec(supervisor)) is False
    assert supervisor.alive("n1/kubelet") == first


@pytest.mark.parametrize("change", [{"env": {"A": "1"}}, {"inputs": ("new content of its file",)}])
def test_changed_settings_start_it_anew(supervisor, change):
    supervisor.ensure(spec(supervisor))
    first = supervisor.alive("n1/kubelet")
    assert supervisor.ensure(spec(supervisor, **change)) is True
    assert not proc.is_alive(first)
    assert supervisor.alive("n1/kubelet") not in (None, first)


def test_a_killed_process_is_started_again(supervisor):
    supervisor.ensure(spec(supervisor))
    first = supervisor.alive("n1/kubelet")
    os.kill(first.pid, signal.SIGKILL)
    while proc.is_alive(first):
        time.sleep(0.01)
    with pytest.raises(StepFailed, match="n1/kubelet has stopped"):
        supervisor.require_alive("n1/kubelet")
    assert supervisor.ensure(spec(supervisor)) is True


@pytest.mark.parametrize("lie", ["start time", "boot"])
def test_a_stale_record_never_leads_to_somebody_elses_process(supervisor, lie):
    """The pid of a record is reused by an innocent process: it must be neither trusted nor ended."""
    innocent = subprocess.Popen(SLEEP)
    try:
        real = proc.identify(innocent.pid)
        stale = (
            ProcessId(real.pid, real.start_time - 7, real.boot_id)
            if lie == "start time"
            else ProcessId(real.pid, real.start_time, "another boot")
        )
        record = Record("n1/kubelet", stale, spec(supervisor).digest, Path("/x"))
        write_atomically(supervisor.root / "run" / "n1-kubelet.json", record.to_json())
        assert supervisor.alive("n1/kubelet") is None
        supervisor.stop("n1/kubelet", grace=0.2)
        assert proc.is_alive(real)
        assert proc.send(stale, signal.SIGKILL) is False
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


def test_started_but_never_recorded_is_found_and_replaced(supervisor):
    """`up` was killed between starting a process and writing its record."""
    supervisor.ensure(spec(supervisor))
    lost = supervisor.alive("n1/kubelet")
    (supervisor.root / "run" / "n1-kubelet.json").unlink()
    assert supervisor.ensure(spec(supervisor)) is True
    assert not proc.is_alive(lost)


def test_stop_all_ends_what_descends_from_ours_and_nothing_else(supervisor, tmp_path):
    """Shims of containerd leave its process group, but carry its mark."""
    child = "import subprocess,sys,time; subprocess.Popen([sys.executable,'-c','import time;time.sleep(300)'],start_new_session=True); time.sleep(300)"
    other = Supervisor(tmp_path / "cluster-2")
    other.root.mkdir()
    other.ensure(spec(other))
    try:
        supervisor.ensure(spec(supervisor, (sys.executable, "-c", child)))
        while len(list(proc.owned_by(supervisor.root))) < 2:
            time.sleep(0.01)
        supervisor.stop_all(grace=1)
        assert list(proc.owned_by(supervisor.root)) == []
        assert other.alive("n1/kubelet") is not None
    finally:
        other.stop_all(grace=1)


def test_a_process_deaf_to_sigterm_is_killed(supervisor):
    supervisor.ensure(spec(supervisor, STUBBORN))
    log = supervisor.root / "logs" / "x.log"
    while "deaf" not in log.read_text():
        time.sleep(0.01)
    supervisor.stop("n1/kubelet", grace=0.1)
    assert list(proc.owned_by(supervisor.root)) == []


@pytest.mark.parametrize("text", ["", "{", '{"component": "x"}', "[]"])
def test_a_record_cut_short_counts_as_none(supervisor, text):
    write_atomically(supervisor.root / "run" / "n1-kubelet.json", text)
    assert supervisor.record("n1/kubelet") is None
    assert supervisor.records() == ()


def test_record_round_trip():
    record = Record("etcd", ProcessId(1, 2, "b"), "d", Path("/l"))
    assert Record.from_json(record.to_json()) == record
    assert json.loads(record.to_json())["startTime"] == 2
