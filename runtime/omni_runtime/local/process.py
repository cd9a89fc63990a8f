"""One child process: its own process group, its log file, its end. No child outlives us, however we end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import uuid
from collections import deque
from pathlib import Path

from omni_runtime.local.layout import REPLICA_PLACEHOLDER, ProcessSpec

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
TAIL_LINES = 15
GROUP_SECONDS = 6.0
TRACKER_SECONDS = 4.0
TAIL_BYTES = 64 << 10


def _die_with_parent() -> None:
    """In the child, before exec: SIGTERM when the parent is gone, even by SIGKILL."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Child:
    """A running process of a spec. Its output goes to `log`, appended."""

    def __init__(self, spec: ProcessSpec, log: Path, log_start: int, process: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self.log = log
        self._log_start = log_start
        self._process = process

    @classmethod
    async def start(cls, spec: ProcessSpec, log: Path, environment: dict[str, str]) -> Child:
        identity = uuid.uuid4().hex
        command = [a.replace(REPLICA_PLACEHOLDER, identity) for a in spec.command]
        with log.open("ab") as output:
            log_start = output.tell()
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        return cls(spec, log, log_start, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def log_tail(self) -> list[str]:
        """The last lines that this very process wrote."""
        return log_tail(self.log, self._log_start)

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def end(self, grace_seconds: float) -> bool:
        """SIGTERM, then SIGKILL, then whatever is left of the process group. True: it ended by itself."""
        self.terminate()
        clean = True
        try:
            await asyncio.wait_for(self._process.wait(), grace_seconds)
        except TimeoutError:
            clean = False
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await self.end_group()
        return clean

    async def end_group(self) -> None:
        """The children of a process that is gone: time to tidy up, then SIGKILL.

        Python's resource tracker comes last: it removes the shared memory of those that died before it, and killed
        too early it leaves an engine's hundreds of megabytes in /dev/shm.
        """
        for member in group_members(self.pid):
            _send(member, signal.SIGTERM)
        await self._until_empty(GROUP_SECONDS)
        for member in group_members(self.pid):
            if not _is_tracker(member):
                _send(member, signal.SIGKILL)
        await self._until_empty(TRACKER_SECONDS)
        self.kill_group()

    async def _until_empty(self, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while group_members(self.pid) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - not ours
            await asyncio.sleep(0.05)

    def kill_group(self) -> None:
        """At once, the tracker too."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def group_members(group: int) -> list[int]:
    """Pids of the living processes of a process group."""
    members = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, _, pgid = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            if int(pgid) == group and state != "Z":
                members.append(int(folder.name))
    return members


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def log_tail(path: Path, start: int = 0, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log after the byte `start`, JSON events in a form that a person reads."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            raw = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [readable for line in deque(raw, maxlen=lines) for readable in _readable(line)]


def _readable(line: str) -> list[str]:
    try:
        event = json.loads(line)
        name = event.pop("event")
    except (ValueError, KeyError, TypeError, AttributeError):
        return [line]
    exception = str(event.pop("exception", "")).splitlines()
    for noise in ("ts", "process", "level", "logger"):
        event.pop(noise, None)
    return [f"{name} " + " ".join(f"{k}={v}" for k, v in event.items()), *exception[-8:]]
