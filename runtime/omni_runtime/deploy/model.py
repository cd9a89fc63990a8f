"""Checks of `spec.model`: does this uri mean something where the pipeline will run? Pure."""

from __future__ import annotations

import re
from typing import Literal

from omni_crds.v1alpha1.pipeline import ModelSpec
from omni_crds.v1alpha1.runtimeprofile import AcceleratorVendor, OmniRuntimeProfile
from omni_runtime.deploy.overlay import PIPELINE, Origins, Violations
from omni_runtime.deploy.plan import ModelRef

Target = Literal["kubernetes", "local"]

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_PACKAGED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def resolve_model(
    spec: ModelSpec,
    pipeline: str,
    profiles: list[OmniRuntimeProfile],
    target: Target,
    origins: Origins,
    bad: Violations,
) -> ModelRef:
    """The model reference, with a complaint for each uri that could not work on these profiles."""
    scheme, _, rest = spec.uri.partition("://")
    _check_form(spec.uri, scheme, rest, bad)
    if scheme == "packaged":
        # Only the CPU image carries packaged weights: they are made to be small, not to need an accelerator.
        for name in sorted({p.metadata.name for p in profiles if p.spec.vendor is not AcceleratorVendor.CPU}):
            bad.add(
                "spec.model.uri",
                spec.uri,
                f"packaged models are in the CPU image only, and runtime profile {name!r} is for another device",
                "use a profile with vendor cpu, or a model from hf://, pvc:// or file://",
            )
    if scheme == "pvc" and target == "local":
        bad.add(
            "spec.model.uri", spec.uri, "a claim exists only in a cluster", "use file:///PATH or hf://ORG/NAME here"
        )
    if spec.revision is not None and scheme != "hf":
        bad.add(
            "spec.model.revision", spec.revision, f"a {scheme}:// model has no revisions", "remove it, or use hf://"
        )
    revision = origins.pick("model.revision", [(PIPELINE, spec.revision)], "") or None
    served = origins.pick("model.servedName", [(PIPELINE, spec.served_name)], pipeline)
    return ModelRef(uri=spec.uri, revision=revision, served_name=served)


def _check_form(uri: str, scheme: str, rest: str, bad: Violations) -> None:
    path = "spec.model.uri"
    if not rest.isprintable() or any(c.isspace() for c in rest):
        bad.add(path, uri, "it contains spaces or control characters", "remove them")
    elif ".." in rest.split("/"):
        bad.add(path, uri, "it climbs out of its folder", "remove the '..' parts")
    elif scheme == "hf" and not _HUB_ID.fullmatch(rest):
        bad.add(path, uri, "not a hub id", "write hf://ORG/NAME; a branch or commit goes into spec.model.revision")
    elif scheme == "packaged" and not _PACKAGED.fullmatch(rest):
        bad.add(path, uri, "not the name of a packaged model", "write packaged://NAME, such as packaged://smol-omni")
    elif scheme == "file" and (not rest.startswith("/") or rest.strip("/") == ""):
        bad.add(path, uri, "not an absolute path", "write file:///PATH with three slashes")
    elif scheme == "pvc":
        if not _CLAIM.fullmatch(rest.partition("/")[0]):
            bad.add(path, uri, "it does not start with the name of a claim", "write pvc://CLAIM/PATH")
    elif scheme not in ("hf", "packaged", "file", "pvc"):
        bad.add(path, uri, f"unknown scheme {scheme!r}", "use hf://, pvc://, file:/// or packaged://")
