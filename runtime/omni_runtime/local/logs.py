"""The folder that one `omni run` writes its logs into, and no other one while it lives."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omni_runtime.errors import InvalidOption

OWNER = "run.pid"  # locked while the run lives; a run that was killed holds no lock


@contextmanager
def claim_logs(asked: Path | None, default: Path) -> Iterator[Path]:
    """`asked`, or `default`, or the first of `default-2`, `default-3`, ... that no other run writes into; without the logs
    of the last run there. Raises InvalidOption when `asked` is taken."""
    folders = [asked] if asked else itertools.chain([default], (Path(f"{default}-{n}") for n in itertools.count(2)))
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / OWNER).open("a+") as owner:
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner.seek(0)
                taken_by = owner.read().strip() or "unknown"
                continue
            owner.truncate(0)
            owner.write(str(os.getpid()))
            owner.flush()
            for old in folder.glob("*.log"):
                old.unlink()
            yield folder  # the file stays: a second one of its name could be locked by another run
            return
    raise InvalidOption(
        f"--logs: {asked}: another `omni run` (pid {taken_by}) writes its logs there; give each run its own"
    )
