"""Errors of this package. Each carries what its message needs: what failed, where the log is, what to do."""

from __future__ import annotations

from pathlib import Path


class ClusterError(Exception):
    """Anything that stops a cluster command; the text is meant for the person at the terminal."""


class InvalidArgument(ClusterError):
    """A flag or name that cannot be used: names the field, the value and the fix."""

    def __init__(self, field: str, value: object, problem: str, fix: str) -> None:
        super().__init__(f"{field}: {value!r} {problem}; {fix}")
        self.field, self.value, self.problem, self.fix = field, value, problem, fix


class MissingPrerequisite(ClusterError):
    """A program, a package or a right that this machine lacks."""


class NoSuchCluster(ClusterError):
    """There is no state for a cluster of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no cluster {name!r} here; run `omni cluster up --name {name}`")
        self.name = name


class StepFailed(ClusterError):
    """A build or a process failed; shows the end of its log and where the whole log is."""

    def __init__(self, what: str, log: Path | None = None, lines: int = 25) -> None:
        super().__init__(what if log is None else f"{what}\n{tail(log, lines)}\nwhole log: {log}")
        self.what, self.log = what, log


class DeadlineExceeded(ClusterError):
    """Something did not become true in time; says what was waited for and what was last seen."""

    def __init__(self, what: str, seconds: float, last_seen: str, log: Path | None = None) -> None:
        text = f"{what}: not so after {seconds:.0f} s; last seen: {last_seen}"
        super().__init__(text if log is None else f"{text}\n{tail(log)}\nwhole log: {log}")
        self.what, self.seconds, self.last_seen = what, seconds, last_seen


def tail(log: Path, lines: int = 25) -> str:
    """The last lines of a log, indented; tells when there is none."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - 64 * 1024))
            text = stream.read().decode(errors="replace")
    except OSError:
        return "  (no log was written)"
    return "\n".join("  | " + line[:400] for line in text.splitlines()[-lines:]) or "  (the log is empty)"
