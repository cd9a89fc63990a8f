"""The few things outside the cache folder that a node needs from its machine, and how they are put back.

kubelet sets kernel parameters of the whole machine, and mount points that are overlaid inside a node's
namespace must exist outside. Both are recorded before the first local node starts and restored when the
last one is gone.
"""

from __future__ import annotations

import json
from pathlib import Path

from omni_cluster.paths import clusters_dir
from omni_cluster.processes import write_atomically

# Folders that containerd, CNI and kubelet use whatever their configuration says. Every node sees a private
# one of its own here; the host's is only a mount point and stays empty if we made it.
PRIVATE_FOLDERS = ("/var/lib/cni", "/var/lib/kubelet", "/var/log/containers", "/run/containerd")
_SYSCTLS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
            "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes")  # fmt: skip


def _record() -> Path:
    return clusters_dir() / "host-settings.json"


def missing_folders(folders: tuple[str, ...] = PRIVATE_FOLDERS) -> list[str]:
    """Folders to make, parents first, so that removing them in reverse order restores the machine."""
    missing: list[str] = []
    for folder in folders:
        path = Path(folder)
        chain = [*reversed(path.parents), path]
        missing += [str(part) for part in chain if not part.exists() and str(part) not in missing]
    return missing


def prepare() -> None:
    """Record the machine's settings once, then make the mount points. Safe to repeat after a crash."""
    if not _record().exists():
        values = {name: path.read_text().strip() for name in _SYSCTLS if (path := Path("/proc/sys") / name).exists()}
        write_atomically(_record(), json.dumps({"sysctls": values, "folders": missing_folders()}))
    for folder in PRIVATE_FOLDERS:
        Path(folder).mkdir(parents=True, exist_ok=True)


def restore() -> None:
    """Put everything back. Call only when no local node is left on this machine."""
    try:
        recorded = json.loads(_record().read_text())
    except (OSError, ValueError):
        return
    for name, value in recorded["sysctls"].items():
        path = Path("/proc/sys") / name
        try:
            if path.read_text().strip() != value:
                path.write_text(value)
        except OSError:
            continue  # not ours to change in this container: kubelet could not change it either
    for folder in reversed(recorded["folders"]):
        try:
            Path(folder).rmdir()
        except OSError:
            continue  # somebody else uses it by now
    _record().unlink(missing_ok=True)
