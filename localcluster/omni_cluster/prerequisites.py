"""What local work needs from its machine: rights and a few Debian packages, installed when that is possible."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from omni_cluster.errors import MissingPrerequisite, StepFailed
from omni_cluster.node import CNI_BIN_DIR
from omni_cluster.paths import cache_dir
from omni_cluster.progress import step

CNI_PACKAGE = "containernetworking-plugins"
# A program or file that shows that the package is there.
NODE_PACKAGES = {
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "iproute2": "ip",
    "util-linux": "nsenter",
    "mount": "mount",
    "procps": "sysctl",
    CNI_PACKAGE: f"{CNI_BIN_DIR}/ptp",
}


def missing_packages(wanted: Mapping[str, str], has: Callable[[str], bool]) -> tuple[str, ...]:
    """Debian packages whose program or file is absent. wanted: package -> what shows that it is there."""
    return tuple(package for package, witness in wanted.items() if not has(witness))


def is_present(witness: str) -> bool:
    """Whether a program is on PATH (or in /usr/sbin, which users often lack), or a file exists."""
    if witness.startswith("/"):
        return Path(witness).exists()
    return shutil.which(witness, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def ensure_node_prerequisites() -> None:
    """Check rights and packages; install packages with apt when root on Debian. Raises MissingPrerequisite."""
    if os.geteuid() != 0:
        raise MissingPrerequisite(
            "a local node needs root (namespaces, mounts, control groups): run as root, use --provider kind or "
            "existing, or --control-plane-only, which needs no rights"
        )
    ensure_packages(NODE_PACKAGES)


def ensure_packages(wanted: Mapping[str, str]) -> None:
    """Install what is missing, as root on Debian. Raises MissingPrerequisite, which says what to install, or StepFailed."""
    missing = missing_packages(wanted, is_present)
    if not missing:
        return
    _install(missing)
    left = missing_packages(wanted, is_present)
    if left:
        raise MissingPrerequisite(f"still missing after the installation: {', '.join(left)}")


def _install(packages: tuple[str, ...]) -> None:
    command = f"apt-get install -y --no-install-recommends {' '.join(packages)}"
    if not Path("/etc/debian_version").exists() or shutil.which("apt-get") is None:
        plugins = f" (the CNI plugins are looked for in {CNI_BIN_DIR})" if CNI_PACKAGE in packages else ""
        raise MissingPrerequisite(
            f"these Debian packages, or what your system calls them, are needed: {' '.join(packages)}{plugins}"
        )
    if os.geteuid() != 0:
        raise MissingPrerequisite(f"{', '.join(packages)} needed: `sudo {command}`")
    log = cache_dir() / "logs" / "apt.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with step(f"install {' '.join(packages)}"), log.open("ab") as stream:
        for argv in (["apt-get", "update"], command.split()):
            done = subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
            if done.returncode != 0 and argv[1] == "install":
                raise StepFailed(f"`{command}` failed; install these packages yourself", log)
