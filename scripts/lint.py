#!/usr/bin/env python3
"""`make lint`: every check runs even when an earlier one fails; the exit status tells of all of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
#: Checked with mypy --strict (settings and the few looser modules: pyproject.toml).
PACKAGES = {
    "omni_crds": "crds",
    "omni_operator": "operator",
    "omni_webhooks": "webhooks",
    "omni_cluster": "localcluster",
    "omni_runtime": "runtime",
    "omni_image": "runtime_image",
}


def checks() -> list[tuple[str, list[str]]]:
    typed = [name for name, folder in PACKAGES.items() if (ROOT / folder / name / "__init__.py").exists()]
    arguments = [argument for name in typed for argument in ("-p", name)]
    return [
        ("ruff check", [str(BIN / "ruff"), "check", "."]),
        ("ruff format", [str(BIN / "ruff"), "format", "--check", "."]),
        ("mypy", [str(BIN / "python"), "-m", "mypy", *arguments]),
        ("layers", [str(BIN / "lint-imports")]),
    ]


def main() -> int:
    failed = []
    # Loading numpy starts one thread per core in its BLAS; the linters do not need them.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    for name, command in checks():
        start = time.monotonic()
        result = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        verdict = "ok" if result.returncode == 0 else f"failed ({result.returncode})"
        print(f"[lint] {name}: {verdict}, {time.monotonic() - start:.1f} s", flush=True)
        if result.returncode:
            failed.append(name)
    if failed:
        print(f"[lint] failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
