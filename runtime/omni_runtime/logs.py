"""JSON logs of every runtime process: one object a line on stderr, event name first, ids as fields. Torch-free.

    log = get_logger(__name__)
    log.info("replica.joined", stage="talker", replica=uid)

The request id travels in a context variable, so a line that is written while a request is handled names it without
being told. Only lines that somebody can act on are worth writing (R55).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

_request: ContextVar[str | None] = ContextVar("omni_request", default=None)
_FIELDS = "omni_fields"
_encode = msgspec.json.Encoder(enc_hook=str).encode
_MAX_TEXT = 4_000  # of one field: a client must not be able to fill a disk with one request


@contextmanager
def request_context(request: str) -> Iterator[None]:
    """Lines written inside carry `request`."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


def bind_request(request: str) -> None:
    """As `request_context`, for the rest of the current task."""
    _request.set(request)


class JsonFormatter(logging.Formatter):
    """One JSON object a line. `static` fields (process, stage, replica) stand on every line."""

    def __init__(self, static: dict[str, str]) -> None:
        super().__init__()
        self._static = static

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] | None = getattr(record, _FIELDS, None)
        line: dict[str, Any] = {"event": record.getMessage() if fields is not None else "log"}
        line["level"] = record.levelname.lower()
        line["ts"] = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line.update(self._static)
        request = _request.get()
        if request is not None:
            line["request"] = request
        if fields is None:  # a library's line
            line["logger"] = record.name
            line["message"] = record.getMessage()[:_MAX_TEXT]
        else:
            line.update({k: v[:_MAX_TEXT] if isinstance(v, str) else v for k, v in fields.items()})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-_MAX_TEXT:]
        try:
            return _encode(line).decode()
        except UnicodeEncodeError:  # half a surrogate pair, say from a file name
            return json.dumps(line, default=str)


class EventLogger:
    """A logger whose message is an event name and whose details are fields."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def _write(self, level: int, event: str, fields: dict[str, Any], exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: fields}, exc_info=exc_info)

    def debug(self, event: str, **fields: Any) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """With the traceback of the exception that is being handled."""
        self._write(logging.ERROR, event, fields, exc_info=True)


def get_logger(name: str) -> EventLogger:
    return EventLogger(logging.getLogger(name))


def configure(process: str, *, level: str = "INFO", stream: TextIO | None = None, **static: str) -> None:
    """Send every log line of this process, libraries included, to `stream` (stderr) as JSON. Call once in main."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter({"process": process, **static}))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("httpx", "httpcore", "asyncio", "zmq.auth", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
