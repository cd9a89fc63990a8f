"""A connector that may lock memory for RDMA, in a process with the capabilities that its container has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from omni_runtime.connectors import privileges
from tests.unit.connectors.pods import ENVIRONMENT

# As a container runtime starts it: root, of the capabilities the two that the pod adds, and no way to more.
CONTAINER = (
    "setpriv", "--regid=65532", "--clear-groups", "--bounding-set=-all,+ipc_lock,+setuid", "--no-new-privs", sys.executable
)  # fmt: skip
LOCKS = """
import ctypes, mmap, os, resource
from omni_runtime.connectors import privileges
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
kept = privileges.become(65532)
page = mmap.mmap(-1, 1 << 20)
place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
locked = ctypes.CDLL(None).mlock(place, ctypes.c_size_t(1 << 20)) == 0
fields = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
print(kept, locked, os.getresuid(), fields["CapEff"], fields["CapPrm"])
"""
NOTHING, ONLY_IPC_LOCK = f"{0:016x}", f"{1 << 14:016x}"
NEEDED = sum(1 << capability for capability in (6, 7, 8, 14))  # SETGID, SETUID, SETPCAP, IPC_LOCK


def can_start_as_a_container() -> bool:
    effective = re.search(r"^CapEff:\t([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    held = int(effective[1], 16) if effective else 0
    return os.geteuid() == 0 and held & NEEDED == NEEDED and shutil.which("setpriv") is not None


as_root = pytest.mark.skipif(
    not can_start_as_a_container(), reason="only root with all capabilities starts one like that"
)


def run(*container: str) -> subprocess.CompletedProcess[str]:
    command = [*container, "-c", LOCKS]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60)


@as_root
def test_it_locks_memory_past_the_limit_and_is_no_longer_root() -> None:
    done = run(*CONTAINER)
    assert done.stdout == f"True True (65532, 65532, 65532) {ONLY_IPC_LOCK} {ONLY_IPC_LOCK}\n", done.stderr


@as_root
def test_without_the_capability_it_keeps_nothing_and_goes_on() -> None:
    """Mooncake may then not start, and edges go over TCP: slower, but they go."""
    done = run(*(part.replace("+ipc_lock,", "") for part in CONTAINER))
    assert done.stdout == f"False False (65532, 65532, 65532) {NOTHING} {NOTHING}\n", done.stderr


@as_root
def test_it_does_not_stay_root() -> None:
    done = run(*(part.replace(",+setuid", "") for part in CONTAINER))
    assert done.returncode != 0
    assert done.stdout == ""


def test_who_is_not_root_stays_who_he_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster may start the container as another user; memory is then locked within the node's limit, or TCP it is."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    before = os.getresuid()
    assert not privileges.become(65532)
    assert os.getresuid() == before


def test_the_sidecar_becomes_another_user_before_it_reads_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_runtime.connectors import sidecar

    became: list[int] = []
    monkeypatch.setattr(privileges, "become", lambda user: became.append(user) or True)
    nowhere = ("--plan", "/nowhere", "--curve", "/nowhere", "--ipc-dir", "/nowhere", "--arena-bytes", "1")
    who = ("--advertise-host", "127.0.0.1", "--domain", "d")
    assert sidecar.main([*nowhere, *who]) == 1
    assert became == []
    assert sidecar.main([*nowhere, *who, "--run-as", "65532"]) == 1
    assert became == [65532]
