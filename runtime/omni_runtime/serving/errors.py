"""Errors as OpenAI's clients expect them. Status and code come from the error's class, in one place."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from omni_runtime.errors import FieldError, InvalidRequest, OmniError
from omni_runtime.orchestrator.admission import Overloaded


class UnknownModel(OmniError):
    code = "model_not_found"
    http_status = 404


class BodyTooLarge(OmniError):
    code = "BodyTooLarge"
    http_status = 413


class SlowBody(OmniError):
    """The connection ends with the answer: what is still on its way is not read."""

    code = "RequestTimeout"
    http_status = 408


class UnsupportedEncoding(OmniError):
    code = "UnsupportedEncoding"
    http_status = 415


_TYPES = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}


def error_body(error: OmniError) -> dict[str, Any]:
    kind = _TYPES.get(error.http_status, "server_error")
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def error_response(error: OmniError) -> Response:
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(error.retry_after_seconds)
    elif error.http_status == 503:
        headers["retry-after"] = "5"
    elif isinstance(error, SlowBody):
        headers["connection"] = "close"
    body = msgspec.json.encode(error_body(error))
    return Response(body, status_code=error.http_status, media_type="application/json", headers=headers)


def invalid_fields(error: ValidationError) -> InvalidRequest:
    """Every violation with its path, value and what would be right."""
    problems = []
    for item in error.errors(include_url=False)[:20]:
        value, path = item["input"], _path(item["loc"])
        if item["type"] in ("union_tag_invalid", "union_tag_not_found"):
            path, value = f"{path}.type", item.get("ctx", {}).get("tag", "")
        shown = value if isinstance(value, str | int | float | bool | None) else type(value).__name__
        problems.append(str(FieldError(path, str(shown)[:80], *_advice(item))))
    return InvalidRequest("; ".join(problems))


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for i, step in enumerate(location):
        if isinstance(step, int):
            path += f"[{step}]"
        elif not (_names_a_branch(step) or (i and isinstance(location[i - 1], int) and step in PART_TYPES)):
            path += f".{step}" if path else step
    return path or "body"


def _names_a_branch(step: str) -> bool:
    """What pydantic puts into a location for the branch of a union; no field of a request has such a name."""
    return step in ("str", "none") or step.startswith(("list[", "constrained-", "nullable", "function-"))


#: `type` of a content part, which stands in a location behind the part's number.
PART_TYPES = frozenset("text input_text output_text input_audio image_url input_image audio_url video_url".split())


def _advice(item: ErrorDetails) -> tuple[str, str]:
    match item["type"]:
        case "missing":
            return "is missing", "add it"
        case "union_tag_not_found":
            return "is missing", "send an object that says what it is"
        case "union_tag_invalid":
            return "unknown type", f"use {item['ctx']['expected_tags']}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "not an object", "send a JSON object"
    text = item["msg"].removeprefix("Value error, ")
    if ";" in text:
        problem, _, fix = text.partition(";")
        return problem, fix.strip()
    return "invalid value", text[:1].lower() + text[1:]


def install(app: FastAPI) -> None:
    """Every error leaves the server in the same form."""

    async def on_omni_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, OmniError)
        return error_response(error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        body = {"error": {"message": str(error.detail), "type": "invalid_request_error", "param": None, "code": None}}
        return Response(
            msgspec.json.encode(body),
            error.status_code,
            media_type="application/json",
            headers=dict(error.headers or {}),
        )

    app.add_exception_handler(OmniError, on_omni_error)
    app.add_exception_handler(HTTPException, on_http)
