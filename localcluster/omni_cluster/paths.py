"""Where files live: the cache folder of the product, one folder a cluster, and our Go sources."""

from __future__ import annotations

import os
import re
from pathlib import Path

from omni_cluster.errors import InvalidArgument, MissingPrerequisite

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?")


def cache_dir() -> Path:
    """Cache folder of the product: $OMNI_CACHE, else $XDG_CACHE_HOME/omni-operator, else ~/.cache/omni-operator."""
    if chosen := os.environ.get("OMNI_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache").absolute() / "omni-operator"


def bin_dir() -> Path:
    """Built programs, one folder a hash of their sources; `current` holds symlinks to the ones in use."""
    return cache_dir() / "bin"


def current_bin_dir() -> Path:
    """Symlinks `kubectl`, `helm`, `ctr`, ... to put on PATH."""
    return bin_dir() / "current"


def clusters_dir() -> Path:
    """State of every cluster, one folder each."""
    return cache_dir() / "clusters"


def cluster_dir(name: str) -> Path:
    """State folder of one cluster; refuses names that could not be a folder, a label and part of a link name."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument("--name", name, "is no cluster name", "use up to 24 of a-z, 0-9 and '-'")
    return clusters_dir() / name


def source_dir() -> Path:
    """The folder with our Go modules (kubernetes/, tools/, pause/), beside this package in a checkout."""
    found = Path(__file__).resolve().parent.parent
    if not (found / "kubernetes" / "go.mod").is_file():
        raise MissingPrerequisite(
            f"the Go sources of the local cluster are not at {found}; use a checkout of the repository, "
            "or another provider (--provider existing|kind)"
        )
    return found
