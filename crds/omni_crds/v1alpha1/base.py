"""Shared building blocks of the API types: the base model and the constrained scalar types.

Read models are lenient (`extra="ignore"`), since the server may hold objects of another schema version;
the API server, not pydantic, refuses unknown fields on write (strict field validation).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

GROUP = "serving.omni.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CATEGORY = "omni"

# A stage or group name becomes a label value and part of child names: a DNS label, and short.
StageName = Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
# A Kubernetes quantity ("500m", "16Gi"). Strings, because floats do not survive a round trip through JSON patches.
Quantity = Annotated[str, Field(min_length=1, max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$")]
# A fraction in (0, 1] with at most three decimals, as a string.
Fraction = Annotated[str, Field(max_length=5, pattern=r"^(1|1\.0{1,3}|0\.(\d{0,2}[1-9]|[1-9]\d{0,2}|0[1-9]\d?))$")]
# A positive decimal such as a real-time factor, as a string.
PositiveDecimal = Annotated[str, Field(max_length=8, pattern=r"^[0-9]{1,4}(\.[0-9]{1,3})?$")]
Replicas = Annotated[int, Field(ge=0, le=1000)]


class OmniModel(BaseModel):
    """Frozen, camelCase on the wire, lenient on read."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class ObjectMeta(OmniModel):
    """The part of metadata that we read. Never written back."""

    name: str = ""
    namespace: str | None = None
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
