"""A connector that may lock memory for RDMA, in a process with the capabilities that its container has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

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
privileges.become(65532)
page = mmap.mmap(-1, 1 << 20)
place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
locked = ctypes.CDLL(None).mlock(place, ctypes.c_size_t(1 << 20)) == 0
fields = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
print(locked, os.getresuid(), fields["CapEff"], fields["CapPrm"])
"""
as_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can start a process as a container's root"
)


@as_root
def test_it_locks_memory_past_the_limit_and_is_no_longer_root() -> None:
    done = subprocess.run(
        [*CONTAINER, "-c", LOCKS], env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    only_ipc_lock = f"{1 << 14:016x}"
    assert done.stdout.split("\n")[0] == f"True (65532, 65532, 65532) {only_ipc_lock} {only_ipc_lock}"


@as_root
def test_without_the_capability_it_does_not_start_half() -> None:
    """What the pod does not give is said with its name, and not found by a transfer that fails."""
    container = [part.replace("+ipc_lock,", "") for part in CONTAINER]
    done = subprocess.run(
        [*container, "-c", LOCKS], env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode != 0
    assert "cannot keep the capability IPC_LOCK" in done.stderr


def test_who_is_not_root_stays_who_he_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster may start the container as another user; memory is then locked within the node's limit, or TCP it is."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    before = os.getresuid()
    privileges.become(65532)
    assert os.getresuid() == before


def test_the_sidecar_becomes_another_user_before_it_reads_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_runtime.connectors import sidecar

    became: list[int] = []
    monkeypatch.setattr(privileges, "become", became.append)
    nowhere = ("--plan", "/nowhere", "--curve", "/nowhere", "--ipc-dir", "/nowhere", "--arena-bytes", "1")
    who = ("--advertise-host", "127.0.0.1", "--domain", "d")
    assert sidecar.main([*nowhere, *who]) == 1
    assert became == []
    assert sidecar.main([*nowhere, *who, "--run-as", "65532"]) == 1
    assert became == [65532]
