"""Shows what is going on: one line a step with its time, and what it waits for while it waits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

REMINDER_SECONDS = 30.0  # between the lines of a long step where there is no terminal, as in a CI log

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
    """Announce a step and its duration. The yielded function tells what is being waited for: a terminal shows it at
    once and in place, a log gets a line now and then.
    """
    started = last_line = time.monotonic()
    live = not _quiet and sys.stderr.isatty()

    def waiting_for(what: str) -> None:
        nonlocal last_line
        now = time.monotonic()
        if not live and now - last_line >= REMINDER_SECONDS:
            last_line = now
            say(f"  … {name} ({now - started:.0f} s): {what[:100]}")
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
