"""Logs: one JSON object a line on stderr, event name first."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_LOGGER = logging.getLogger("omni_operator")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "event": record.getMessage(),
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
        }
        if record.name != _LOGGER.name:
            line["logger"] = record.name
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup_logging(level: str = "INFO") -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # libraries: only what somebody can act on
    _LOGGER.setLevel(level.upper())


def info(event: str, **fields: object) -> None:
    _LOGGER.info(event, extra={"fields": fields})


def warning(event: str, **fields: object) -> None:
    _LOGGER.warning(event, extra={"fields": fields})


def error(event: str, exc_info: bool = False, **fields: object) -> None:
    _LOGGER.error(event, extra={"fields": fields}, exc_info=exc_info)
