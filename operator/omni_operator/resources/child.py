"""A child as it should be, before it is owned and sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omni_operator.kinds import JsonObject, Kind
from omni_operator.names import PIPELINE_ANNOTATION, pipeline_labels


@dataclass(frozen=True, slots=True)
class Child:
    """`owner_stage` is the OmniStage (object name) that controls the child; None: the pipeline does.

    The owner's uid is filled in when the child is applied, since an OmniStage may be born in the same reconcile.
    """

    kind: Kind
    name: str
    body: JsonObject
    owner_stage: str | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose children are built: the part of the pipeline's identity that builders need."""

    pipeline: str
    namespace: str


def build_child(
    kind: Kind,
    scope: Scope,
    name: str,
    content: JsonObject,
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    owner_stage: str | None = None,
) -> Child:
    """A child with our labels and the pipeline's full name in an annotation."""
    body: JsonObject = {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {
            "name": name,
            "namespace": scope.namespace,
            "labels": {**pipeline_labels(scope.pipeline), **(labels or {})},
            "annotations": {PIPELINE_ANNOTATION: scope.pipeline, **(annotations or {})},
        },
        **content,
    }
    return Child(kind, name, body, owner_stage)
