"""One JSON object a line, event first."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest

from omni_runtime import logs


@pytest.fixture
def stream() -> io.StringIO:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.configure("entry", stream=stream, stage="thinker")
    yield stream  # type: ignore[misc]
    root.handlers[:] = handlers
    root.setLevel(level)


def test_event_fields_and_request(stream: io.StringIO) -> None:
    log = logs.get_logger("x")
    with logs.request_context("r-1"):
        log.info("replica.joined", replica="a", count=2)
    log.debug("not.shown")
    line = stream.getvalue()
    assert line.startswith('{"event":"replica.joined"')
    value = json.loads(line)
    assert (value["request"], value["stage"], value["count"]) == ("r-1", "thinker", 2)


def test_libraries_and_exceptions_and_newlines_stay_one_line(stream: io.StringIO) -> None:
    logging.getLogger("library").warning("two\nlines %s", "x")
    try:
        raise ValueError("broken")
    except ValueError:
        logs.get_logger("x").exception("step.failed")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines[0]["event"] == "log"
    assert lines[0]["message"] == "two\nlines x"
    assert "ValueError: broken" in lines[1]["exception"]


def test_any_value_can_be_written(stream: io.StringIO, tmp_path: Path) -> None:
    log = logs.get_logger("x")
    log.info("file.odd", path=tmp_path, name="\udcff", error=KeyError("k"), share=float("nan"))
    value = json.loads(stream.getvalue())
    assert value["path"] == str(tmp_path)
    assert value["name"] == "\udcff"
    log.info("file.odd", path=tmp_path, error=KeyError("k"), names={"b", "a"})
    assert json.loads(stream.getvalue().splitlines()[1])["error"] == "'k'"
