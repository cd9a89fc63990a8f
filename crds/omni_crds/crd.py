"""The four CustomResourceDefinitions, built from the types. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from omni_crds.schema import structural_schema
from omni_crds.v1alpha1.base import CATEGORY, GROUP, VERSION
from omni_crds.v1alpha1.pipeline import OmniPipeline
from omni_crds.v1alpha1.runtimeprofile import OmniRuntimeProfile
from omni_crds.v1alpha1.stage import OmniStage
from omni_crds.v1alpha1.tenant import OmniTenant
from omni_crds.version import SCHEMA_VERSION, SCHEMA_VERSION_ANNOTATION


@dataclass(frozen=True, slots=True)
class Column:
    """A column of `kubectl get`. `wide` columns show with `-o wide` only."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False


def condition_column(condition: str, *, field: str = "status", name: str | None = None, wide: bool = False) -> Column:
    return Column(name or condition, f'.status.conditions[?(@.type=="{condition}")].{field}', wide=wide)


AGE = Column("Age", ".metadata.creationTimestamp", "date")


@dataclass(frozen=True, slots=True)
class Kind:
    """What a CRD says beside the schema."""

    model: type[BaseModel]
    plural: str
    short_name: str
    namespaced: bool
    columns: tuple[Column, ...]
    scalable: bool = False

    @property
    def name(self) -> str:
        return self.model.__name__

    @property
    def crd_name(self) -> str:
        return f"{self.plural}.{GROUP}"


KINDS: tuple[Kind, ...] = (
    Kind(
        model=OmniPipeline,
        plural="omnipipelines",
        short_name="omp",
        namespaced=True,
        columns=(
            condition_column("Ready"),
            condition_column("Serving"),
            Column("Stages", ".status.stagesReady"),
            Column("TTFP-p95-ms", ".status.ttfpMillisecondsP95", "integer"),
            condition_column("Ready", field="reason", name="Reason"),
            AGE,
            Column("Revision", ".status.revision", wide=True),
            Column("Serving-Revision", ".status.servingRevision", wide=True),
            Column("Topology", ".spec.topology", wide=True),
            Column("Endpoint", ".status.endpoint", wide=True),
        ),
    ),
    Kind(
        model=OmniStage,
        plural="omnistages",
        short_name="oms",
        namespaced=True,
        scalable=True,
        columns=(
            Column("Pipeline", ".spec.pipelineRef.name"),
            Column("Stage", ".spec.stageName"),
            Column("Desired", ".spec.replicas", "integer"),
            Column("Ready", ".status.readyReplicas", "integer"),
            Column("Device", ".status.device"),
            Column("Revision", ".status.revision"),
            AGE,
            Column("Engine", ".spec.engine", wide=True),
            Column("Updated", ".status.updatedReplicas", "integer", wide=True),
            condition_column("Ready", field="reason", name="Reason", wide=True),
        ),
    ),
    Kind(
        model=OmniRuntimeProfile,
        plural="omniruntimeprofiles",
        short_name="omrp",
        namespaced=False,
        columns=(
            Column("Vendor", ".spec.vendor"),
            Column("Backend", ".spec.backend"),
            Column("Device-Classes", ".spec.deviceClasses[*].name"),
            AGE,
            Column("Image", ".spec.images.runtime", wide=True),
        ),
    ),
    Kind(
        model=OmniTenant,
        plural="omnitenants",
        short_name="omt",
        namespaced=False,
        columns=(
            Column("Weight", ".spec.weight", "integer"),
            Column("Namespaces", ".spec.namespaces"),
            AGE,
        ),
    ),
)


def build_crd(kind: Kind) -> dict[str, Any]:
    """One CustomResourceDefinition, ready to be applied."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": kind.crd_name,
            "annotations": {SCHEMA_VERSION_ANNOTATION: str(SCHEMA_VERSION)},
            "labels": {"app.kubernetes.io/part-of": "omni-operator"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": [kind.short_name],
                "categories": [CATEGORY],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": build_schema(kind)},
                    "subresources": _subresources(kind),
                    "additionalPrinterColumns": [_printer_column(c) for c in kind.columns],
                }
            ],
        },
    }


def build_crds() -> tuple[dict[str, Any], ...]:
    return tuple(build_crd(kind) for kind in KINDS)


def build_schema(kind: Kind) -> dict[str, Any]:
    """The schema of the whole object: metadata is the server's own, spec and status are ours."""
    spec = structural_schema(_member(kind.model, "spec"))
    status = structural_schema(_member(kind.model, "status"), defaults=False)
    return {
        "type": "object",
        "description": " ".join((kind.model.__doc__ or "").split()),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}"},
            "kind": {"type": "string", "description": kind.name},
            "metadata": {"type": "object"},
            "spec": {**spec, "description": kind.model.model_fields["spec"].description},
            "status": {**status, "description": kind.model.model_fields["status"].description},
        },
    }


def _member(model: type[BaseModel], field: str) -> type[BaseModel]:
    """The model of a field `X` or `X | None`."""
    annotation = model.model_fields[field].annotation
    candidates = [a for a in (annotation, *getattr(annotation, "__args__", ())) if isinstance(a, type)]
    for candidate in candidates:
        if issubclass(candidate, BaseModel):
            return candidate
    raise TypeError(f"{model.__name__}.{field} is no model")


def _subresources(kind: Kind) -> dict[str, Any]:
    if not kind.scalable:
        return {"status": {}}
    return {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",  # without it an HPA says "selector is required" (T16)
        },
    }


def _printer_column(column: Column) -> dict[str, Any]:
    out: dict[str, Any] = {"name": column.name, "type": column.type, "jsonPath": column.path}
    return {**out, "priority": 1} if column.wide else out
