"""Reads /proc: who a process is. A pid alone says nothing (pids are reused); pid and start time together do."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

OWNER_VARIABLE = "OMNI_CLUSTER_OWNER"


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, for all time: pid, start time in clock ticks since boot, and the boot it belongs to."""

    pid: int
    start_time: int
    boot_id: str


@cache
def boot_id() -> str:
    """Identity of this boot of the machine; start times of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def parse_stat(text: str) -> tuple[str, int]:
    """State letter and start time from /proc/PID/stat; the command name may hold spaces and brackets."""
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now, or None when there is none or it is only a zombie."""
    try:
        state, start = parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (OSError, ValueError):
        return None
    if state in "ZX":
        reap(pid)
        return None
    return ProcessId(pid, start, boot_id())


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process still runs, as opposed to a later one with the same pid."""
    return process.boot_id == boot_id() and identify(process.pid) == process


def command_line(pid: int) -> tuple[str, ...]:
    """The argument vector of a process; empty when it is gone or a kernel thread."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(os.fsdecode(part) for part in raw.split(b"\0")[:-1])


def owned_by(owner: Path) -> Iterator[ProcessId]:
    """Every process that was started for this state folder, or that descends from one with its environment.

    The mark is inherited, so helpers (containerd's shims) and processes whose start was never recorded
    because `up` was killed in between are found as well.
    """
    mark = f"{OWNER_VARIABLE}={owner}".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        process = identify(int(entry))
        if process is None:
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue
        if mark in environment.split(b"\0"):
            yield process


def send(process: ProcessId, number: signal.Signals) -> bool:
    """Signal exactly this process; False when it is gone. The pidfd closes the gap between check and signal."""
    try:
        handle = os.pidfd_open(process.pid)
    except (ProcessLookupError, OSError):
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)


def reap(pid: int) -> None:
    """Collect a dead child of ours so that it does not stay a zombie; others' children are not our business."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except (ChildProcessError, OSError):
        return
