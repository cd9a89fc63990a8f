"""Shared building blocks of the API types: the base model and the constrained scalar types.

Read models are lenient (`extra="ignore"`), since the server may hold objects of another schema version;
the API server, not pydantic, refuses unknown fields on write (strict field validation).

Patterns keep to what Go's RE2 and Rust's regex read alike: no `\\d`, `\\s`, `\\w`, which differ in Unicode.
Every string, list, map and integer has an upper bound: the API server prices CEL rules by it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

GROUP = "serving.omni.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CATEGORY = "omni"

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
DNS_LABEL = rf"^{_LABEL}$"
DNS_SUBDOMAIN = rf"^{_LABEL}(\.{_LABEL})*$"
IDENTIFIER = r"^[a-z][a-z0-9_]*$"
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
PRINTABLE = r"^[!-~]+$"
# Tabs and line breaks only. A NUL fits into no argument or environment variable, and server-side apply reads its body
# as YAML, which refuses most control characters and turns U+0085 into a line break.
NO_CONTROLS = r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*$"
LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
_THOUSANDTHS = r"0\.([1-9][0-9]{0,2}|0[1-9][0-9]?|00[1-9])"  # 0.001 to 0.999
FRACTION = rf"^(1(\.0{{1,3}})?|{_THOUSANDTHS})$"
DECIMAL = rf"^([1-9][0-9]{{0,3}}(\.[0-9]{{1,3}})?|{_THOUSANDTHS})$"

# A stage or group name becomes a label value and part of child names: a DNS label, and short.
StageName = Annotated[str, Field(min_length=1, max_length=40, pattern=DNS_LABEL)]
# The name of another object. 253 characters and dots are legal in Kubernetes, so they are here (T4, T5).
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]
DeviceClassName = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_SUBDOMAIN)]
# Topologies, engines, engine flags: names of the registry, spelled as Python spells them.
Identifier = Annotated[str, Field(min_length=1, max_length=63, pattern=IDENTIFIER)]
ImageName = Annotated[str, Field(min_length=1, max_length=512, pattern=PRINTABLE)]
# A label value: a node selector with any other value could match no node.
LabelValue = Annotated[str, Field(max_length=63, pattern=LABEL_VALUE)]
# A Kubernetes quantity ("500m", "16Gi"). Strings, because floats do not survive a round trip through JSON patches.
Quantity = Annotated[str, Field(min_length=1, max_length=32, pattern=QUANTITY)]
# A fraction in (0, 1] with at most three decimals, as a string.
Fraction = Annotated[str, Field(min_length=1, max_length=5, pattern=FRACTION)]
# A positive decimal such as a real-time factor, as a string.
PositiveDecimal = Annotated[str, Field(min_length=1, max_length=8, pattern=DECIMAL)]
Replicas = Annotated[int, Field(ge=0, le=1000)]
PositiveReplicas = Annotated[int, Field(ge=1, le=1000)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]
# Whole numbers up to here are exact in every JSON reader.
Generation = Annotated[int, Field(ge=0, le=2**53 - 1)]
Message = Annotated[str, Field(max_length=1024)]
RevisionName = Annotated[str, Field(max_length=63)]
# The text that a person reads for devices of one replica, such as "2 x nvidia-h100-80gb".
DeviceText = Annotated[str, Field(max_length=128)]


class OmniModel(BaseModel):
    """Frozen, camelCase on the wire, lenient on read. The text under a field is its description for users."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True
    )


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
