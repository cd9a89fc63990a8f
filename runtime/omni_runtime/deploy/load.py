"""OmniPipeline and OmniRuntimeProfile objects from files, and the built-in profile of `omni run`. The only I/O here.

Files are read strictly: an unknown field is a misspelt one, and without an API server nobody else would say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from omni_crds.v1alpha1.base import API_VERSION, DNS_SUBDOMAIN, ObjectMeta
from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_crds.v1alpha1.runtimeprofile import (
    AcceleratorVendor,
    DeviceClass,
    ImagePullPolicy,
    ImagesSpec,
    OmniRuntimeProfile,
    RuntimeProfileSpec,
)
from omni_runtime.errors import FieldError, InvalidPipeline

MAX_FILE_BYTES = 4 << 20
MAX_VALUES = 500_000  # more than fit into such a file; aliases of aliases make billions of a few lines
MAX_NAME = 253
LOCAL_PROFILE = "cpu"

Model = TypeVar("Model", OmniPipeline, OmniRuntimeProfile)


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error: PyYAML would silently take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r} stands twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


@dataclass(frozen=True, slots=True)
class _Document:
    where: str  # "FILE, document 2"
    kind: str
    content: Mapping[str, Any]


def load_pipeline(path: Path, name: str | None = None) -> OmniPipeline:
    """The OmniPipeline of a YAML file; `name` picks one of several. Raises InvalidPipeline with every problem."""
    found = [_parse(d, OmniPipeline) for d in _documents(path) if d.kind == "OmniPipeline"]
    names = [p.metadata.name for p in found]
    if name is not None:
        chosen = [p for p in found if p.metadata.name == name]
        if not chosen:
            listed = ", ".join(names) or "none"
            raise _one(str(path), name, "the file has no OmniPipeline of this name", f"it has: {listed}")
        found = chosen
    if not found:
        raise _one(str(path), "", "the file has no OmniPipeline", f"write one with apiVersion {API_VERSION}")
    if len(found) > 1:
        raise _one(str(path), ", ".join(names), "the file has several OmniPipelines", "name the one to use")
    return found[0]


def load_profiles(path: Path) -> dict[str, OmniRuntimeProfile]:
    """Every OmniRuntimeProfile of a YAML file, by name. Raises InvalidPipeline with every problem."""
    found = [_parse(d, OmniRuntimeProfile) for d in _documents(path) if d.kind == "OmniRuntimeProfile"]
    if not found:
        raise _one(str(path), "", "the file has no OmniRuntimeProfile", f"write one with apiVersion {API_VERSION}")
    return {profile.metadata.name: profile for profile in found}


def local_profiles() -> dict[str, OmniRuntimeProfile]:
    """The profiles that `omni run` has without a cluster: this machine's CPU, and no images."""
    spec = RuntimeProfileSpec(
        vendor=AcceleratorVendor.CPU,
        images=ImagesSpec(runtime="local", pull_policy=ImagePullPolicy.NEVER),
        device_classes=(DeviceClass(name="cpu", memory="1Gi"),),
    )
    return {LOCAL_PROFILE: OmniRuntimeProfile(metadata=ObjectMeta(name=LOCAL_PROFILE), spec=spec)}


def _documents(path: Path) -> Iterator[_Document]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _one(str(path), "", f"the file is larger than {MAX_FILE_BYTES >> 20} MiB", "is it the right file?")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise _one(
            str(path), "", f"cannot read the file: {error.strerror}", "check the path and its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise _one(str(path), "", "the file is not UTF-8 text", "save it as UTF-8") from error
    try:
        # _StrictLoader is a SafeLoader: it builds plain values only.
        loaded = list(yaml.load_all(text, Loader=_StrictLoader))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        problem = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise _one(str(path), "", f"not valid YAML: {problem}", "correct the file") from error
    if not _countable(loaded):
        problem = f"aliases (*name) make more than {MAX_VALUES} values of it"
        raise _one(str(path), "", problem, "write out what is meant, without aliases of aliases")
    for number, content in enumerate(loaded, start=1):
        where = f"{path}, document {number}" if len(loaded) > 1 else str(path)
        if content is None:
            continue
        if not isinstance(content, dict):
            raise _one(
                where, type(content).__name__, "not a Kubernetes object", "write a mapping with apiVersion and kind"
            )
        items = content.get("items")
        if str(content.get("kind", "")).endswith("List") and isinstance(items, list):  # kubectl get -o yaml
            for index, item in enumerate(items):
                if isinstance(item, dict):
                    yield _document(f"{where}, item {index}", item)
        else:
            yield _document(where, content)


def _countable(content: object) -> bool:
    """Whether it has at most MAX_VALUES values, each counted as often as it is referred to."""
    waiting, count = [content], 0
    while waiting and count <= MAX_VALUES:
        value = waiting.pop()
        count += 1
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple | set):
            waiting.extend(value)
    return count <= MAX_VALUES


def _document(where: str, content: dict[Any, Any]) -> _Document:
    kind, version = str(content.get("kind", "")), str(content.get("apiVersion", ""))
    if kind in ("OmniPipeline", "OmniRuntimeProfile") and version != API_VERSION:
        raise _one(f"{where}: apiVersion", version, "not a version that this program reads", f"use {API_VERSION}")
    return _Document(where, kind, content)


def _parse(document: _Document, model: type[Model]) -> Model:
    errors: list[FieldError] = []
    metadata = document.content.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        errors.append(FieldError(f"{document.where}: metadata.name", "", "the object has no name", "give it one"))
    elif len(name) > MAX_NAME or not re.fullmatch(DNS_SUBDOMAIN, name):
        fix = f"use at most {MAX_NAME} lower-case letters, digits, '-' and '.'"
        errors.append(FieldError(f"{document.where}: metadata.name", _short(name), "not a name in Kubernetes", fix))
    spec = document.content.get("spec")
    spec_model = model.model_fields["spec"].annotation
    if isinstance(spec, dict) and isinstance(spec_model, type) and issubclass(spec_model, BaseModel):
        errors += [
            FieldError(f"{document.where}: {path}", "", "unknown field", f"known fields here: {', '.join(known)}")
            for path, known in _unknown_fields(spec, spec_model, "spec")
        ]
    try:
        parsed = model.model_validate(document.content)
    except ValidationError as error:
        errors += [
            FieldError(
                f"{document.where}: {_path(e['loc'])}", _short(e["input"]), e["msg"], "see docs/api-reference.md"
            )
            for e in error.errors()
        ]
        raise InvalidPipeline(tuple(errors)) from error
    if errors:
        raise InvalidPipeline(tuple(errors))
    return parsed


def _unknown_fields(value: dict[Any, Any], model: type[BaseModel], path: str) -> Iterator[tuple[str, list[str]]]:
    """(path, known field names) of every key that the API type does not have."""
    by_alias = {field.alias or name: field for name, field in model.model_fields.items()}
    for key, inner in value.items():
        field = by_alias.get(key)
        if field is None:
            yield f"{path}.{key}", sorted(by_alias)
            continue
        nested = _model_of(field.annotation)
        if nested is None:
            continue
        if isinstance(inner, dict):
            yield from _unknown_fields(inner, nested, f"{path}.{key}")
        elif isinstance(inner, list):
            for i, item in enumerate(inner):
                if isinstance(item, dict):
                    yield from _unknown_fields(item, nested, f"{path}.{key}[{i}]")


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The API type inside an annotation such as `tuple[Annotated[StageSpec, ...], ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if (found := _model_of(argument)) is not None:
            return found
    return None


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or "the object"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _one(path: str, value: str, problem: str, fix: str) -> InvalidPipeline:
    return InvalidPipeline((FieldError(path, value, problem, fix),))
