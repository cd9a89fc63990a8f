"""Starts, recognises and ends the programs of a cluster. State is one small file a component."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from omni_cluster import proc
from omni_cluster.errors import StepFailed
from omni_cluster.proc import ProcessId

_PR_SET_PDEATHSIG = 1
_LOG_LIMIT = 32 << 20  # bytes; a longer log is set aside when its program is started again


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A program to run: `prefix` (nsenter ...) replaces itself with `argv`, so the process shows as `argv`."""

    component: str
    argv: tuple[str, ...]
    log: Path
    prefix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    """Contents of the files it reads at start; when they change it is started anew."""

    @property
    def digest(self) -> str:
        """Changes when the process must be started anew."""
        parts = json.dumps([self.argv, self.prefix, sorted(self.env.items()), self.inputs])
        return hashlib.sha256(parts.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Record:
    """What the state folder remembers of a started component."""

    component: str
    process: ProcessId
    digest: str
    log: Path

    def to_json(self) -> str:
        p = self.process
        return json.dumps(
            {"component": self.component, "pid": p.pid, "startTime": p.start_time, "bootId": p.boot_id,
             "digest": self.digest, "log": str(self.log)}
        )  # fmt: skip

    @staticmethod
    def from_json(text: str) -> Record | None:
        """None for a file that was cut short by a crash."""
        try:
            raw = json.loads(text)
            process = ProcessId(int(raw["pid"]), int(raw["startTime"]), str(raw["bootId"]))
            return Record(str(raw["component"]), process, str(raw["digest"]), Path(raw["log"]))
        except (ValueError, KeyError, TypeError):
            return None


class Supervisor:
    """The processes of one state folder. Not a daemon: every command reads the records and /proc afresh."""

    def __init__(self, root: Path, *, die_with_parent: bool = False) -> None:
        self.root = root
        self._records = root / "run"
        self._die_with_parent = die_with_parent

    def records(self) -> tuple[Record, ...]:
        """Every component that was started and not stopped, alive or not."""
        found = (Record.from_json(path.read_text()) for path in sorted(self._records.glob("*.json")))
        return tuple(record for record in found if record is not None)

    def record(self, component: str) -> Record | None:
        try:
            return Record.from_json(self._path(component).read_text())
        except FileNotFoundError:
            return None

    def alive(self, component: str) -> ProcessId | None:
        """The running process of a component, told from a stale record by its start time."""
        record = self.record(component)
        return record.process if record and proc.is_alive(record.process) else None

    def is_current(self, spec: ProcessSpec) -> bool:
        """Whether the component runs with exactly these arguments and inputs."""
        record = self.record(spec.component)
        return bool(record and record.digest == spec.digest and proc.is_alive(record.process))

    def ensure(self, spec: ProcessSpec) -> bool:
        """Make the component run as `spec` says; True when it had to be started."""
        if self.is_current(spec):
            return False
        self.stop(spec.component)
        self._end(self._strays(spec), grace=5)
        self._start(spec)
        return True

    def stop(self, component: str, grace: float = 10) -> None:
        """End a component: SIGTERM, then SIGKILL after `grace` seconds; forgets it only once it is gone."""
        record = self.record(component)
        if record is not None:
            self._end([record.process], grace)
        self._path(component).unlink(missing_ok=True)

    def stop_all(self, first: Iterable[str] = (), grace: float = 10) -> None:
        """End everything that carries this folder's mark, the named components first, in their order."""
        for component in first:
            self.stop(component, grace)
        self._end(list(proc.owned_by(self.root)), grace)
        for path in self._records.glob("*.json"):
            path.unlink(missing_ok=True)

    def require_alive(self, component: str) -> None:
        """Raise with the end of the log when a component that should run has died."""
        record = self.record(component)
        if record is None or not proc.is_alive(record.process):
            raise StepFailed(f"{component} has stopped", record.log if record else None)

    def _path(self, component: str) -> Path:
        return self._records / f"{component.replace('/', '-')}.json"

    def _strays(self, spec: ProcessSpec) -> list[ProcessId]:
        """Same program, same arguments, ours, but not recorded: `up` was killed between start and record."""
        return [process for process in proc.owned_by(self.root) if proc.command_line(process.pid) == spec.argv]

    def _start(self, spec: ProcessSpec) -> None:
        self._records.mkdir(parents=True, exist_ok=True)
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            "HOME": str(self.root),
            **spec.env,
            proc.OWNER_VARIABLE: str(self.root),
        }
        if spec.log.exists() and spec.log.stat().st_size > _LOG_LIMIT:
            spec.log.replace(spec.log.with_name(f"{spec.log.name}.old"))
        tie = self._die_with_parent and threading.current_thread() is threading.main_thread()
        with spec.log.open("ab") as log:
            child = subprocess.Popen(
                [*spec.prefix, *spec.argv],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=self.root,
                start_new_session=True, preexec_fn=_die_with_parent if tie else None,
            )  # fmt: skip
        process = proc.identify(child.pid)
        child.returncode = 0  # the records, not this handle, own the process: no warning when it is collected
        if process is None:
            raise StepFailed(f"{spec.component} stopped at once", spec.log)
        record = Record(spec.component, process, spec.digest, spec.log)
        write_atomically(self._path(spec.component), record.to_json())

    def _end(self, processes: list[ProcessId], grace: float) -> None:
        end_processes(processes, grace)


def end_processes(processes: list[ProcessId], grace: float) -> None:
    """SIGTERM to all, SIGKILL to those that still run after `grace` seconds, and wait until they are gone."""
    for process in processes:
        proc.send(process, signal.SIGTERM)
    left = _wait_gone(processes, grace)
    for process in left:
        proc.send(process, signal.SIGKILL)
    stuck = _wait_gone(left, 10)
    if stuck:
        pids = ", ".join(f"{p.pid} ({' '.join(proc.command_line(p.pid))[:80]})" for p in stuck)
        raise StepFailed(f"processes do not end even after SIGKILL: {pids}")


def _wait_gone(processes: list[ProcessId], seconds: float) -> list[ProcessId]:
    deadline = time.monotonic() + seconds
    pause = 0.005
    left = [process for process in processes if proc.is_alive(process)]
    while left and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
        left = [process for process in left if proc.is_alive(process)]
    return left


def write_atomically(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file in one step, so that a crash leaves the old or the new content, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
    os.replace(temporary, path)


def _die_with_parent() -> None:
    """In the child: be killed when the thread that started us ends, so that a killed test run leaves nothing."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
