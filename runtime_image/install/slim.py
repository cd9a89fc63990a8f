#!/usr/bin/env python3
"""slim.py NAME...: leaves these distributions in /opt/omni/env and deletes all others, and what the transfer engine does not load.

Whoever asks for a package gets all that it names; a small image keeps what is used. Run it in the RUN that installs, so that what
goes is in no layer, and import what has to work afterwards.
"""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

#: Servers, tools and the key-value store of mooncake, and second copies of libraries that lie beside the engine.
SUPERFLUOUS = (
    "mooncake/mooncake_client",
    "mooncake/mooncake_master",
    "mooncake/store.so",
    "mooncake/transfer_engine_bench",
    "mooncake_transfer_engine_non_cuda.libs/libasio-*",
    "mooncake_transfer_engine_non_cuda.libs/libetcd_wrapper-*",
    "mooncake_transfer_engine_non_cuda.libs/liburing-*",
    "mooncake_transfer_engine_non_cuda.libs/libxxhash-*",
    "mooncake_transfer_engine_non_cuda.libs/libzstd-*",
    "zmq/tests",
)


def name_of(distribution: Distribution) -> str:
    return re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()


def places(distribution: Distribution) -> set[str]:
    """Top-level files and folders of site-packages that it has something in; scripts lie elsewhere."""
    tops = {file.parts[0] for file in distribution.files or ()}
    return tops - {"..", "__pycache__"}


def slim(packages: Path, kept: Iterable[str]) -> None:
    """Raises SystemExit for a name that is not installed: it would be missed only in a cluster."""
    found = {name_of(item): places(item) for item in distributions(path=[str(packages)])}
    wanted = set(kept)
    if missing := sorted(wanted - found.keys()):
        sys.exit(f"not installed: {', '.join(missing)}")
    stays = set[str]().union(*(found[name] for name in wanted))
    for top in sorted(set[str]().union(*found.values()) - stays):
        delete(packages / top)
    for pattern in SUPERFLUOUS:
        for path in packages.glob(pattern):
            delete(path)


def delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    slim(Path(sysconfig.get_path("purelib")), sys.argv[1:])
