#!/usr/bin/env python3
"""application.py PYPROJECT MODULE...: finishes /opt/omni/app inside an image.

Compiles the sources (the root file system is read-only at run time), writes the metadata that importlib.metadata reads and
the command line scripts, and imports each MODULE: an image that lacks something fails here and not in a cluster.
"""

from __future__ import annotations

import compileall
import importlib
import py_compile
import sys
import tomllib
from pathlib import Path

APPLICATION = Path("/opt/omni/app")
PYTHON = Path("/opt/omni/env/bin/python")


def write_metadata(project: dict[str, object], application: Path) -> None:
    info = application / f"{str(project['name']).replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (info / "INSTALLER").write_text("omni-image\n")


def write_scripts(scripts: dict[str, str], folder: Path) -> None:
    for name, target in scripts.items():
        module, function = target.split(":")
        path = folder / name
        path.write_text(f"#!{PYTHON}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
        path.chmod(0o755)


def main() -> None:
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    write_metadata(project, APPLICATION)
    write_scripts(project["scripts"], PYTHON.parent)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    if not compileall.compile_dir(APPLICATION, quiet=1, invalidation_mode=mode):
        sys.exit("a source file does not compile")
    for module in sys.argv[2:]:
        importlib.import_module(module)


if __name__ == "__main__":
    main()
