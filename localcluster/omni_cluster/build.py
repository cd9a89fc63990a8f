"""Builds the programs of a cluster from pinned Go modules, once per content of those modules."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omni_cluster.errors import MissingPrerequisite, StepFailed
from omni_cluster.paths import bin_dir, cache_dir, current_bin_dir, source_dir
from omni_cluster.progress import step

_K8S_VERSION = "k8s.io/component-base/version"


@dataclass(frozen=True, slots=True)
class Tool:
    """One program: the module folder that pins it, the package to build, and how it learns its own version."""

    name: str
    module: str
    package: str
    versioned_by: str = ""
    """Go module whose pinned version is the program's version."""
    version_variables: tuple[str, ...] = ()
    """Linker variables; `{v}` is v1.2.3, `{n}` 1.2.3, `{major}` and `{minor}` its parts."""
    aliases: tuple[str, ...] = ()


HYPER = Tool(
    "hyper", "kubernetes", ".", "k8s.io/kubernetes",
    (f"{_K8S_VERSION}.gitVersion={{v}}", f"{_K8S_VERSION}.gitMajor={{major}}", f"{_K8S_VERSION}.gitMinor={{minor}}",
     f"{_K8S_VERSION}.gitTreeState=clean"),
    ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"),
)  # fmt: skip
_CONTAINERD = "github.com/containerd/containerd/v2"
_CONTAINERD_VERSION = (f"{_CONTAINERD}/version.Version={{n}}",)
CONTAINERD = Tool("containerd", "tools", f"{_CONTAINERD}/cmd/containerd", _CONTAINERD, _CONTAINERD_VERSION)
SHIM = Tool(
    "containerd-shim-runc-v2", "tools", f"{_CONTAINERD}/cmd/containerd-shim-runc-v2", _CONTAINERD, _CONTAINERD_VERSION
)
CTR = Tool("ctr", "tools", f"{_CONTAINERD}/cmd/ctr", _CONTAINERD, _CONTAINERD_VERSION)
COREDNS = Tool("coredns", "tools", "github.com/coredns/coredns")
HELM = Tool(
    "helm", "tools", "helm.sh/helm/v4/cmd/helm", "helm.sh/helm/v4", ("helm.sh/helm/v4/internal/version.version={v}",)
)
KWOK = Tool(
    "kwok", "tools", "sigs.k8s.io/kwok/cmd/kwok", "sigs.k8s.io/kwok", ("sigs.k8s.io/kwok/pkg/consts.Version={v}",)
)
KIND = Tool("kind", "tools", "sigs.k8s.io/kind")
PAUSE = Tool("pause", "pause", ".")
TOOLS = {tool.name: tool for tool in (HYPER, CONTAINERD, SHIM, CTR, COREDNS, HELM, KWOK, KIND, PAUSE)}


def pinned_version(go_mod: str, module: str) -> str:
    """The version that a go.mod file requires of a module, or '' when it does not name it."""
    found = re.search(rf"^\s*(?:require\s+)?{re.escape(module)}\s+(v\S+)", go_mod, re.MULTILINE)
    return found.group(1) if found else ""


def linker_flags(tool: Tool, go_mod: str) -> str:
    """Value of -ldflags: no debug tables, and the version that the program reports."""
    flags = ["-s", "-w"]
    version = pinned_version(go_mod, tool.versioned_by) if tool.versioned_by else ""
    if version:
        number = version.removeprefix("v")
        major, minor = number.split(".")[:2]
        for variable in tool.version_variables:
            flags += ["-X", variable.format(v=version, n=number, major=major, minor=minor)]
    return " ".join(flags)


def source_digest(tool: Tool, files: dict[str, bytes]) -> str:
    """Names the result of a build: changes with the pins, our sources, the package and the flags."""
    digest = hashlib.sha256()
    go_mod = files.get("go.mod", b"").decode()
    for part in (tool.name, tool.package, linker_flags(tool, go_mod)):
        digest.update(part.encode() + b"\0")
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name] + b"\0")
    return digest.hexdigest()[:12]


def _sources(tool: Tool) -> dict[str, bytes]:
    folder = source_dir() / tool.module
    names = [path for pattern in ("*.go", "go.mod", "go.sum") for path in folder.glob(pattern)]
    return {path.name: path.read_bytes() for path in names}


def binary_path(tool: Tool) -> Path:
    """Where the built program is or will be."""
    return bin_dir() / f"{tool.name}-{source_digest(tool, _sources(tool))}" / tool.name


def ensure_tool(tool: Tool) -> Path:
    """Path of the program, built now unless an identical one is cached. Safe to call from several processes."""
    target = binary_path(tool)
    if not target.exists():
        with _lock(tool.name):
            if not target.exists():
                _build(tool, target)
    _link_current(tool, target)
    return target


def ensure_client_tools() -> None:
    """kubectl and helm for clusters that bring their own nodes; built only where the machine has none."""
    for tool, program in ((HYPER, "kubectl"), (HELM, "helm")):
        if shutil.which(program) is None:
            ensure_tool(tool)


def module_files(tool: Tool, names: tuple[str, ...]) -> tuple[str, ...]:
    """Contents of files of the Go module that a tool comes from, at the pinned version."""
    argv = [find_go(), "mod", "download", "-json", tool.versioned_by]
    environment = {**os.environ, "GOFLAGS": "", "GOWORK": "off"}
    done = subprocess.run(argv, cwd=source_dir() / tool.module, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise StepFailed(f"go mod download of {tool.versioned_by} failed: {(done.stdout + done.stderr).strip()[-400:]}")
    folder = Path(json.loads(done.stdout)["Dir"])
    return tuple((folder / name).read_text() for name in names)


def _build(tool: Tool, target: Path) -> None:
    go = find_go()
    log = cache_dir() / "logs" / f"build-{tool.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{tool.name}.{os.getpid()}")
    go_mod = (source_dir() / tool.module / "go.mod").read_text()
    argv = [
        go, "build", "-buildvcs=false", "-mod=readonly", "-trimpath", "-v",
        f"-ldflags={linker_flags(tool, go_mod)}", "-o", str(unfinished), tool.package,
    ]  # fmt: skip
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}
    with step(f"build {tool.name}") as waiting_for, log.open("wb") as stream:
        child = subprocess.Popen(
            argv,
            cwd=source_dir() / tool.module,
            env=environment,
            stdout=stream,
            stderr=stream,
            stdin=subprocess.DEVNULL,
        )
        try:
            while child.poll() is None:
                waiting_for(f"{_count_lines(log)} packages compiled")
                time.sleep(0.5)
        except BaseException:
            child.terminate()
            child.wait()
            raise
        if child.returncode != 0:
            unfinished.unlink(missing_ok=True)
            raise StepFailed(f"go build of {tool.name} ended with status {child.returncode}", log)
    os.replace(unfinished, target)


def find_go() -> str:
    """The go command, or an error that says what to install."""
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go", "/usr/lib/go/bin/go"):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise MissingPrerequisite(
        "the Go compiler is needed to build the local cluster and is not on PATH: install Go 1.26 or newer "
        "from https://go.dev/dl/ (an older one from 1.21 on fetches the right toolchain by itself)"
    )


def _count_lines(log: Path) -> int:
    with log.open("rb") as stream:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(1 << 16), b""))


@contextmanager
def _lock(name: str) -> Iterator[None]:
    """One build of a program at a time on this machine; the second caller waits and then finds it built."""
    path = bin_dir() / f".{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with step(f"wait for another build of {name}"):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _link_current(tool: Tool, target: Path) -> None:
    folder = current_bin_dir()
    folder.mkdir(parents=True, exist_ok=True)
    for name in (tool.name, *tool.aliases):
        link = folder / name
        if link.is_symlink() and os.readlink(link) == str(target):
            continue
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        os.replace(temporary, link)
