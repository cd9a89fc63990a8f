"""The tree of errors of the runtime. HTTP status and wire code are derived here and nowhere else. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldError:
    """One violation in an object: which field, which value, what is wrong, and what to do."""

    path: str
    value: str
    problem: str
    fix: str

    def __str__(self) -> str:
        value = f"{self.value!r}: " if self.value else ""
        return f"{self.path}: {value}{self.problem}; {self.fix}"


class OmniError(Exception):
    code = "InternalError"
    http_status = 500


class InvalidPipeline(OmniError):
    """The spec cannot be resolved; carries every violation, not only the first."""

    code = "InvalidPipeline"
    http_status = 400

    def __init__(self, errors: tuple[FieldError, ...]) -> None:
        self.errors = errors
        super().__init__("; ".join(str(e) for e in errors))


class InvalidOption(OmniError):
    """An option of a command line has a value that cannot be used here."""

    code = "InvalidOption"
    http_status = 400


class InvalidRequest(OmniError):
    """A client's request is wrong; names the field, the value and the fix."""

    code = "InvalidRequest"
    http_status = 400


class QueueFull(OmniError):
    code = "QueueFull"
    http_status = 429


class StageUnavailable(OmniError):
    """No live replica of a stage that the request needs."""

    code = "StageUnavailable"
    http_status = 503


class ReplicaLost(OmniError):
    code = "ReplicaLost"
    http_status = 502


class UpstreamLost(OmniError):
    code = "UpstreamLost"
    http_status = 502


class DeadlineExceeded(OmniError):
    code = "DeadlineExceeded"
    http_status = 504


class InputTimeout(OmniError):
    """A client that sends its input in pieces stopped sending, and did not end it."""

    code = "InputTimeout"
    http_status = 408


class InputLost(OmniError):
    """A piece of the client's input did not reach the stage that reads it."""

    code = "InputLost"
    http_status = 502


class StreamClosed(OmniError):
    code = "StreamClosed"
    http_status = 499


class ContractMismatch(OmniError):
    code = "ContractMismatch"
    http_status = 409


class Conflict(OmniError):
    """What was asked for does not go with what is going on."""

    code = "Conflict"
    http_status = 409


class EngineError(OmniError):
    code = "EngineError"
    http_status = 500


class CapacityExceeded(OmniError):
    code = "CapacityExceeded"
    http_status = 400


def by_code(code: str) -> type[OmniError]:
    """The error class of a wire code; unknown codes are OmniError, so that a newer stage cannot crash an older entry."""
    pending: list[type[OmniError]] = [OmniError]
    while pending:
        cls = pending.pop()
        if cls.code == code:
            return cls
        pending.extend(cls.__subclasses__())
    return OmniError
