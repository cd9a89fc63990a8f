"""The body of a request -> a value of `schema`: bounded, JSON, every wrong field named."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel, ValidationError

from omni_runtime.errors import InvalidRequest
from omni_runtime.serving.context import Patience, context_of
from omni_runtime.serving.errors import BodyTooLarge, SlowBody, UnsupportedEncoding, invalid_fields
from omni_runtime.serving.schema.common import Refused, first_refused

MAX_BODY_BYTES = 100 << 20

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, limit: int = MAX_BODY_BYTES, patience: Patience | None = None) -> bytes:
    """The body, up to `limit` bytes, whatever content-length says. Raises BodyTooLarge, UnsupportedEncoding, and
    SlowBody: thousands of requests that never end would cost memory and descriptors."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise UnsupportedEncoding(f"content-encoding: {encoding!r} is not read; send the JSON uncompressed")
    patience = patience or context_of(request).patience
    pieces: list[bytes] = []
    size = 0
    stream = request.stream()
    try:
        async with asyncio.timeout(patience.body):
            while True:
                async with asyncio.timeout(patience.body_piece):
                    piece = await anext(stream, None)
                if piece is None:
                    return b"".join(pieces)
                size += len(piece)
                if size > limit:
                    raise BodyTooLarge(f"the request body is over {limit} bytes; send less")
                pieces.append(piece)
    except TimeoutError:
        raise SlowBody(
            f"the request body: {size} bytes came, and then nothing for {patience.body_piece:g} s or not all of it "
            f"within {patience.body:g} s; send it faster"
        ) from None


def parse_body(body: bytes, model: type[Model], refused: Iterable[Refused] = ()) -> Model:
    """Raises InvalidRequest, which names every wrong field."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"body: not JSON: {error}; send a JSON object") from error
    return parse_fields(fields, model, refused)


def parse_fields(fields: Any, model: type[Model], refused: Iterable[Refused] = ()) -> Model:
    """The same for JSON that is decoded already."""
    if not isinstance(fields, dict):
        raise InvalidRequest(f"body: {type(fields).__name__}: not an object; send a JSON object")
    problem = first_refused(fields, refused)
    if problem is not None:
        raise InvalidRequest(str(problem))
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise invalid_fields(error) from error


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """For a route's `openapi_extra`: the routes read their bodies themselves, to bound them."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
