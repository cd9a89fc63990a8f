"""Runs the programs that build images: output to a log, progress to the terminal, the log's end on failure."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from omni_cluster.errors import MissingPrerequisite, StepFailed, tail
from omni_cluster.paths import cache_dir

#: Slow disks and cold mirrors are slow; a build that hangs is not slow.
DEADLINE_SECONDS = 3600.0


def log_path(name: str) -> Path:
    path = cache_dir() / "logs" / f"image-{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def run(
    command: Sequence[str],
    *,
    log: Path,
    waiting_for: Callable[[str], None] | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    deadline: float = DEADLINE_SECONDS,
) -> None:
    """Run to the end, appending output to `log`.

    Raises StepFailed with the log's end when the status is not 0 or the deadline (seconds) passes, MissingPrerequisite
    when the program does not exist.
    """
    started = time.monotonic()
    with log.open("ab") as stream:
        stream.write(f"$ {' '.join(command)}\n".encode())
        stream.flush()
        try:
            child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd=cwd,
                env={**os.environ, **(environment or {})},
            )
        except FileNotFoundError as error:
            raise MissingPrerequisite(
                f"{command[0]} is not installed; install it (Debian: apt-get install {command[0]})"
            ) from error
        try:
            while True:
                try:
                    child.wait(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    if waiting_for is not None:
                        waiting_for(tail(log, 1).strip(" |"))
                if time.monotonic() - started > deadline:
                    raise StepFailed(f"{command[0]} did not end within {deadline:.0f} s", log)
        except BaseException:
            child.terminate()
            child.wait()
            raise
    if child.returncode != 0:
        raise StepFailed(f"`{' '.join(command[:4])} ...` ended with status {child.returncode}", log)


def capture(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, deadline: float = 60.0
) -> str | None:
    """Standard output, or None when the program is absent, fails or does not answer within `deadline` seconds."""
    try:
        result = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline,
            check=False,
            env={**os.environ, **(environment or {})},
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None
