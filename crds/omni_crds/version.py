"""The version of the schemas, carried by each CRD, so that an operator can tell that its CRDs are too old (T58).

An API server prunes the fields that its CRD does not know. An operator that is newer than the CRD then reads an
object without those fields, takes them for removed, and deletes what they stood for. So it asks first, and refuses
to act.
"""

from __future__ import annotations

from collections.abc import Mapping

# Raise by one whenever a field is added; tests/unit/crds/test_schema_version.py holds the fields of each version.
SCHEMA_VERSION = 9
SCHEMA_VERSION_ANNOTATION = "serving.omni.dev/schema-version"


def schema_is_outdated(crd_annotations: Mapping[str, str] | None) -> bool:
    """Whether an installed CRD is older than the types of this process, or says nothing about its version."""
    installed = (crd_annotations or {}).get(SCHEMA_VERSION_ANNOTATION, "")
    return not installed.isdecimal() or int(installed) < SCHEMA_VERSION
