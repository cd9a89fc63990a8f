"""What several surfaces share: bounds, sampling fields, and the list of fields that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from omni_runtime.errors import FieldError

MAX_TEXT_CHARACTERS = 1_000_000
MAX_TOKENS = 1_048_576


def _voice_by_id(value: Any) -> Any:
    """OpenAI's clients may send {"id": NAME}."""
    return value.get("id") if isinstance(value, dict) else value


#: A name, never a path (R58).
VoiceName = Annotated[
    str, BeforeValidator(_voice_by_id), Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
]


def _form(value: Any) -> str | None:
    return "str" if isinstance(value, str) else "list[]" if isinstance(value, list) else None


#: For a field that is either a text, tagged "str", or a list, tagged "list[]": what is wrong is said of the one that was
#: sent, and not of both.
TEXT_OR_LIST = Discriminator(
    _form, custom_error_type="text_or_list", custom_error_message="is neither text nor a list; send one of them"
)


class Value(BaseModel):
    """Frozen. A null is a field that the client did not set, as OpenAI's clients send it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class StreamOptions(Value):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # usage with every text chunk, as vLLM's benchmark client asks for it


class Common(Value):
    """Fields of every surface that asks the pipeline for something."""

    model: str | None = Field(default=None, max_length=256)
    user: str | None = Field(default=None, max_length=128)  # requests of one user may meet the same replicas
    timeout_seconds: float | None = Field(default=None, gt=0.0, le=86_400.0, allow_inf_nan=False)  # extension

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes it for 1."""
        annotation: Any = cls.model_fields[str(info.field_name)].annotation
        inner = _types_in(annotation)
        if inner & {int, float} and _is_or_holds_truth(value) and not (str in inner and isinstance(value, bool)):
            raise ValueError("a boolean is not a number; send a number")
        return value


def _is_or_holds_truth(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, list) and any(map(_is_or_holds_truth, value)))


@cache
def _types_in(annotation: Any) -> frozenset[Any]:
    """Of a field's annotation: int and list of `list[int] | None`, without what its models hold."""
    return frozenset({annotation}).union(*(_types_in(part) for part in get_args(annotation)))


class Sampling(Common):
    """Fields of every surface that generates text."""

    stream: bool = False
    temperature: float = Field(default=0.0, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=-1, le=1_000_000)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(default_factory=list, max_length=16)
    # Extensions
    ignore_eos: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that asks for something else than this server does, unless its value is `allowed`."""

    name: str
    fix: str
    allowed: Callable[[Any], bool] = lambda value: not value


def first_refused(body: dict[str, Any], rules: Iterable[Refused]) -> FieldError | None:
    for rule in rules:
        value = body.get(rule.name)
        if value is not None and not rule.allowed(value):
            return FieldError(rule.name, str(value)[:80], "not supported", rule.fix)
    return None


def _no_penalty(value: Any) -> bool:
    return value == 0 and value is not False


def _one(value: Any) -> bool:
    return value == 1 and value is not True


def _plain_text(value: Any) -> bool:
    return bool(value == {"type": "text"})


LOGIT_FIELDS = (
    Refused("logprobs", "log probabilities are not supported; leave the field out"),
    Refused("logit_bias", "logit_bias is not supported; leave the field out"),
    Refused("presence_penalty", "only 0 is supported", allowed=_no_penalty),
    Refused("frequency_penalty", "only 0 is supported", allowed=_no_penalty),
)
ONE_CHOICE = Refused("n", "one choice per request; send n requests", allowed=_one)
NO_TOOLS = Refused("tools", "tools are not supported; leave the field out")
PLAIN_TEXT_ONLY = Refused("response_format", 'only {"type": "text"} is supported', allowed=_plain_text)
