"""What an engine is built from, and how stage options are read. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omni_runtime.deploy.plan import EdgePlan, ModelRef, ResolvedPlan, StagePlan
from omni_runtime.errors import FieldError, InvalidPipeline

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


class EngineOptions:
    """`spec.stages[].engineArgs` of one stage, typed on read; a bad value names field, value and fix.

    Every option that is read is remembered, so that `reject_unknown` can name those that nobody reads.
    """

    def __init__(self, stage: str, options: Mapping[str, str]) -> None:
        self._stage = stage
        self._options = dict(options)
        self._known: set[str] = set()

    def text(self, name: str, default: str) -> str:
        self._known.add(name)
        return self._options.get(name, default)

    def integer(self, name: str, default: int, *, minimum: int = 0) -> int:
        raw = self.text(name, str(default))
        try:
            value = int(raw)
        except ValueError:
            raise self._invalid(name, raw, "is not a whole number", f"use for example {default}") from None
        if value < minimum:
            raise self._invalid(name, raw, f"is below {minimum}", f"use {minimum} or more")
        return value

    def number(self, name: str, default: float) -> float:
        raw = self.text(name, str(default))
        try:
            return float(raw)
        except ValueError:
            raise self._invalid(name, raw, "is not a number", f"use for example {default}") from None

    def flag(self, name: str, default: bool) -> bool:
        raw = self.text(name, str(default)).lower()
        if raw in _TRUE:
            return True
        if raw in _FALSE:
            return False
        raise self._invalid(name, raw, "is not a boolean", "use true or false")

    def choice(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        raw = self.text(name, default)
        if raw not in allowed:
            raise self._invalid(name, raw, "is not supported", f"use one of {', '.join(allowed)}")
        return raw

    def remaining(self) -> dict[str, str]:
        """Options that no reader asked for, for engines that hand them on."""
        return {k: v for k, v in self._options.items() if k not in self._known}

    def reject_unknown(self) -> None:
        if unknown := self.remaining():
            raise InvalidPipeline(
                tuple(
                    FieldError(
                        path=f"spec.stages[{self._stage}].engineArgs.{name}",
                        value=value,
                        problem="this engine has no such option",
                        fix=f"remove it, or use one of {', '.join(sorted(self._known))}",
                    )
                    for name, value in unknown.items()
                )
            )

    def _invalid(self, name: str, value: str, problem: str, fix: str) -> InvalidPipeline:
        return InvalidPipeline((FieldError(f"spec.stages[{self._stage}].engineArgs.{name}", value, problem, fix),))


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Everything that an engine may know of its surroundings."""

    plan: ResolvedPlan
    stage: StagePlan
    model_path: str  # a folder, or a hub id for hf:// models

    @property
    def model(self) -> ModelRef:
        return self.plan.model

    @property
    def inputs(self) -> tuple[EdgePlan, ...]:
        return self.plan.edges_to(self.stage.name)

    @property
    def outputs(self) -> tuple[EdgePlan, ...]:
        return self.plan.edges_from(self.stage.name)

    def options(self) -> EngineOptions:
        options = EngineOptions(self.stage.name, dict(self.stage.engine_args))
        options.number("chunk_deadline_s", 0.0)  # read by the worker, legal for every engine
        return options


def resolve_model(uri: str, models_dir: Path) -> str:
    """Where the model of `spec.model.uri` lies in this process's file system (a hub id stays a hub id).

    Raises InvalidPipeline when a folder that must exist does not, or the scheme is unknown.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or not rest:
        raise _bad_uri(uri, "has no scheme", "use packaged://NAME, file:///PATH, pvc://CLAIM/PATH or hf://ORG/NAME")
    if scheme == "hf":
        return rest.strip("/")
    if ".." in Path(rest).parts:
        raise _bad_uri(uri, "climbs out of its folder", "remove '..'")
    if scheme == "packaged":
        return _existing(uri, models_dir / rest, f"run `omni models prepare {rest} --target {models_dir}`")
    if scheme == "file":
        return _existing(uri, Path("/" + rest.lstrip("/")), "put the model there, or correct the path")
    if scheme == "pvc":
        return _existing(uri, Path("/models") / rest, "check the claim's content and the path after its name")
    raise _bad_uri(uri, f"scheme {scheme!r} is unknown", "use packaged, file, pvc or hf")


def _existing(uri: str, path: Path, fix: str) -> str:
    if not path.is_dir():
        raise _bad_uri(uri, f"folder {path} does not exist", fix)
    return str(path)


def _bad_uri(uri: str, problem: str, fix: str) -> InvalidPipeline:
    return InvalidPipeline((FieldError("spec.model.uri", uri, problem, fix),))
