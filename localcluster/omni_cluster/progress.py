"""Shows what is going on: one line a step with its time, and what it waits for while it waits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_quiet = False


def set_quiet(quiet: bool) -> None:
    """Silence step lines (tests, `--quiet`); errors still reach the caller as exceptions."""
    global _quiet
    _quiet = quiet


def say(text: str) -> None:
    """One line to standard error, so that standard output stays usable in scripts."""
    if not _quiet:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def step(name: str) -> Iterator[Callable[[str], None]]:
    """Announce a step and its duration. The yielded function tells what is being waited for (terminals only)."""
    started = time.monotonic()
    live = not _quiet and sys.stderr.isatty()

    def waiting_for(what: str) -> None:
        if live:
            sys.stderr.write(f"\r\033[K  … {name} ({time.monotonic() - started:.0f} s): {what[:100]}")
            sys.stderr.flush()

    def line(mark: str) -> None:
        say(("\r\033[K" if live else "") + f"  {mark} {name} ({time.monotonic() - started:.1f} s)")

    if live:
        waiting_for("started")
    try:
        yield waiting_for
    except BaseException:
        line("✗")
        raise
    line("✓")
