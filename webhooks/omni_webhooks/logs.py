"""Logs of the webhook process: the operator's format, one JSON object a line, event name first."""

from omni_operator.logs import error, info, setup_logging, warning

__all__ = ["error", "info", "setup_logging", "warning"]
