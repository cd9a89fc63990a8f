"""API types of serving.omni.dev and the generator of their CustomResourceDefinitions."""

from omni_crds.version import SCHEMA_VERSION, SCHEMA_VERSION_ANNOTATION, schema_is_outdated

__all__ = ["SCHEMA_VERSION", "SCHEMA_VERSION_ANNOTATION", "schema_is_outdated"]
