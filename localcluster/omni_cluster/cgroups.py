"""Control groups of nodes: one group a node at the root of every hierarchy, with all its pods below.

Works with version 1 (one folder tree a controller) and version 2 (one tree). Everything that runs in a
node's group is the node's, so the group also says what to end when the node goes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from omni_cluster import proc
from omni_cluster.errors import StepFailed
from omni_cluster.proc import ProcessId
from omni_cluster.processes import end_processes


def parse_hierarchies(mounts: str) -> tuple[Path, ...]:
    """Mount points of all control group hierarchies in the text of /proc/mounts.

    On a mixed machine the version 2 tree has no controllers, but belongs to the list all the same.
    """
    rows = [line.split() for line in mounts.splitlines()]
    return tuple(dict.fromkeys(Path(row[1]) for row in rows if len(row) > 2 and row[2] in ("cgroup", "cgroup2")))


def hierarchies() -> tuple[Path, ...]:
    """Mount points on this machine."""
    return parse_hierarchies(Path("/proc/mounts").read_text())


def is_version_2() -> bool:
    """Whether the machine uses version 2 alone."""
    return (Path("/sys/fs/cgroup") / "cgroup.controllers").exists()


def group_name(cluster: str, node: str) -> str:
    """Name of a node's group, without the leading slash."""
    return f"omni-{cluster}-{node}"


def ensure_group(name: str) -> None:
    """Make the group in every hierarchy. A new cpuset is empty and takes no process until it has its parent's."""
    for root in hierarchies():
        folder = root / name
        folder.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):
            own, parent = folder / file, root / file
            if own.exists() and parent.exists() and not own.read_text().strip():
                value = parent.read_text().strip()
                if value:
                    own.write_text(value)


def groups_of(cluster: str) -> tuple[str, ...]:
    """Names of all node groups of a cluster that exist, also of nodes that nobody remembers."""
    prefix = group_name(cluster, "n")
    found = {
        entry.name for root in hierarchies() for entry in root.iterdir()
        if entry.name.removeprefix(prefix).isdigit() and entry.name.startswith(prefix)
    }  # fmt: skip
    return tuple(sorted(found))


def members(name: str) -> list[ProcessId]:
    """Every process in the group or below it."""
    pids: set[int] = set()
    for folder in _folders(name):
        try:
            pids.update(int(line) for line in (folder / "cgroup.procs").read_text().split())
        except OSError:
            continue
    return [process for pid in sorted(pids) if (process := proc.identify(pid)) is not None]


def remove_group(name: str, seconds: float = 20) -> None:
    """End everything in the group, then delete it everywhere. Raises StepFailed when it cannot be emptied."""
    deadline = time.monotonic() + seconds
    while True:
        end_processes(members(name), grace=0)
        left = [folder for folder in _folders(name) if not _rmdir(folder)]
        if not left:
            return
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in members(name))
            raise StepFailed(f"control group {left[0]} cannot be removed; processes in it: {pids or 'none'}")
        time.sleep(0.05)


def _folders(name: str) -> Iterator[Path]:
    """The group's folders in all hierarchies, children before parents."""
    for root in hierarchies():
        for folder, _, _ in os.walk(root / name, topdown=False):
            yield Path(folder)


def _rmdir(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
