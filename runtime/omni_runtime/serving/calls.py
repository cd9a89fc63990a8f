"""From a validated body to a Call: what every surface checks and fills in the same way."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from starlette.requests import HTTPConnection

from omni_runtime.errors import FieldError, InvalidRequest
from omni_runtime.orchestrator.calls import Call
from omni_runtime.serving.context import ServingContext, context_of
from omni_runtime.serving.errors import UnknownModel
from omni_runtime.serving.params import StageParams
from omni_runtime.serving.schema.chat import STREAMED_FORMATS, Spoken
from omni_runtime.serving.schema.common import Common, Sampling
from omni_runtime.topology.types import Modality


def check_model(name: str | None, context: ServingContext) -> str:
    """The served name. Raises UnknownModel (R56)."""
    if name is not None and name not in context.model_names:
        raise UnknownModel(f"model {name!r} is not served here; use {' or '.join(context.model_names)}")
    return name or context.model_names[0]


def check_modalities(asked: Iterable[str], context: ServingContext) -> frozenset[Modality]:
    """Raises InvalidRequest for what this pipeline does not give."""
    modalities = frozenset(Modality(m) for m in asked)
    beyond = sorted(modalities - context.outputs)
    if beyond:
        fix = f"use {', '.join(sorted(context.outputs))}"
        raise InvalidRequest(str(FieldError("modalities", ", ".join(beyond), "this model does not give it", fix)))
    return modalities


def check_voice(voice: str | None, context: ServingContext, field: str) -> str | None:
    """The voice as the talkers spell it. Raises InvalidRequest for one that no live talker has; None, and what no talker
    has told yet, passes on.

    The talker checks it again: the entry's knowledge is as old as the last registration.
    """
    if voice is None:
        return None
    known = context.voices()
    if not known:
        return voice
    for name in (*known, *VOICE_ALIASES):
        if name.lower() == voice.lower():
            return name
    raise InvalidRequest(str(FieldError(field, voice, "there is no such voice", f"use {', '.join(known)}")))


def check_streamed_format(audio_format: str | None) -> None:
    """Raises InvalidRequest for a format of whole files."""
    if audio_format is not None and audio_format not in STREAMED_FORMATS:
        fix = "use pcm16 or wav, or ask without stream"
        raise InvalidRequest(str(FieldError("audio.format", audio_format, "cannot be streamed", fix)))


VOICE_ALIASES = ("default", "alloy")  # OpenAI's clients must send a voice; these mean the model's own


def sampling_params(sampling: Sampling, modalities: frozenset[Modality], **more: Any) -> StageParams:
    """`more`: fields of StageParams that the surface has beyond the common ones."""
    return StageParams(
        modalities=tuple(sorted(modalities)),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(0, sampling.top_k),
        stop=tuple(sampling.stop),
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        **more,
    )


def spoken_params(asked: Spoken, context: ServingContext, **more: Any) -> tuple[frozenset[Modality], StageParams]:
    """What an answer that may be spoken consists of, and its parameters. `more`: as for `sampling_params`.

    Raises InvalidRequest for what this pipeline does not give, or cannot stream.
    """
    modalities = check_modalities(asked.modalities, context)
    if asked.stream and Modality.AUDIO in modalities:
        check_streamed_format(asked.audio.format)
    voice = check_voice(asked.audio.voice, context, "audio.voice")
    return modalities, sampling_params(asked, modalities, voice=voice, **more)


def build_call(
    connection: HTTPConnection,
    modalities: frozenset[Modality],
    params: StageParams,
    inputs: dict[str, Any],
    asked: Common,
    **more: Any,
) -> Call:
    """Label, tenant and session come from the connection, the deadline from the client as far as the plan lets it.

    Raises InvalidRequest for a tenant or session that is no name.
    """
    entry = context_of(connection).plan.entry
    limit = float(entry.request_timeout_seconds)
    return Call(
        modalities=modalities,
        params=params,
        inputs=inputs,
        deadline_seconds=min(asked.timeout_seconds or limit, limit),
        label=connection.state.request_id,
        tenant=_name_in(connection, entry.tenant_header),
        session=_name_in(connection, SESSION_HEADER) or asked.user or "",
        trace_parent=_trace_parent(connection),
        **more,
    )


def _name_in(connection: HTTPConnection, header: str) -> str:
    """The empty string if it is absent."""
    value = connection.headers.get(header, "")
    if value and not _NAME.fullmatch(value):
        fix = "use letters, digits, dots, dashes and underscores, at most 128"
        raise InvalidRequest(str(FieldError(header, value[:80], "not a name", fix)))
    return value


def _trace_parent(connection: HTTPConnection) -> str:
    """W3C trace context; whatever is not one is ignored, as the standard wants it."""
    value = connection.headers.get("traceparent", "")
    return value if _TRACE_PARENT.fullmatch(value) else ""


SESSION_HEADER = "x-omni-session"
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
