#!/usr/bin/env python3
"""`make bench`: runs every benchmark of benchmarks/ and collects its JSON file.

A benchmark is a module with `--json FILE`; one that fails does not stop the others, but the exit status tells.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("crds", "operator", "webhooks", "runtime", "localcluster", "runtime_image")
DEADLINE_SECONDS = 1800


def benchmarks() -> list[str]:
    folder = ROOT / "benchmarks"
    modules = [path.stem for path in folder.glob("[a-z]*.py")]
    return sorted(modules + [path.parent.name for path in folder.glob("[a-z]*/__main__.py")])


def main() -> int:
    if len(sys.argv) < 2:
        print("usage: bench.py FOLDER [NAME...]", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    chosen = sys.argv[2:] or benchmarks()
    if unknown := sorted(set(chosen) - set(benchmarks())):
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(benchmarks())}", file=sys.stderr)
        return 2
    path = os.pathsep.join(str(ROOT / source) for source in SOURCES)
    failed = []
    for name in chosen:
        start = time.monotonic()
        print(f"[bench] {name} ...", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(folder / f"{name}.json")]
        try:
            status = subprocess.run(
                command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False, timeout=DEADLINE_SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
        print(
            f"[bench] {name}: {'ok' if status == 0 else f'failed ({status})'}, {time.monotonic() - start:.0f} s",
            flush=True,
        )
        if status:
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
