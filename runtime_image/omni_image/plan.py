"""Which images there are, what they are made of, and how the result is named. Pure.

An image is built in tiers that change ever more often: Debian, packages (gigabytes), models, application (kilobytes). Each tier
is an image of its own, named by a digest of everything below and in it, so that a build starts at the lowest tier
that changed and a cluster imports only the layers that it does not have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

REPOSITORY = "docker.io/omni-operator"
#: Bump to rebuild everything, after a change that no digest sees.
LAYOUT = 1


@dataclass(frozen=True, slots=True)
class ImageKind:
    """One kind of image and what goes into it."""

    name: str
    extra: str
    """Extra or dependency group of pyproject.toml whose packages the image has."""
    sources: tuple[str, ...]
    """Source folders of the checkout that its application tier copies."""
    targets: tuple[str, ...]
    """Stages of its Dockerfile, lowest first."""
    stub_cuda: bool = False
    """Replace torch's CUDA libraries, unused on CPUs, by stubs (3.3 instead of 7.5 GB)."""

    @property
    def dockerfile(self) -> str:
        return f"runtime_image/Dockerfile.{self.name}"


OPERATOR = ImageKind(
    name="operator",
    extra="operator",
    sources=(
        "crds/omni_crds",
        "runtime/omni_runtime",
        "operator/omni_operator",
        "webhooks/omni_webhooks",
    ),
    targets=("environment", "application"),
)
CONNECTOR = ImageKind(
    name="connector",
    extra="connector",
    sources=("runtime/omni_runtime",),
    targets=("environment", "application"),
)
CPU = ImageKind(
    name="cpu",
    extra="cpu",
    sources=("crds/omni_crds", "runtime/omni_runtime"),
    targets=("environment", "models", "application"),
    stub_cuda=True,
)
KINDS: Mapping[str, ImageKind] = {kind.name: kind for kind in (OPERATOR, CONNECTOR, CPU)}


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of what a build takes from the checkout and the machine; hex, any length."""

    debian: str
    """The base image's recipe."""
    pins: str
    """Names and versions of the packages of the image's extra."""
    recipes: Mapping[str, str]
    """For each stage of the Dockerfile, its text and the scripts that it runs."""
    models: str
    """Files of the demo models; empty for an image without models."""
    sources: str
    """Files of the source folders."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One build: a stage of the Dockerfile on top of `base`."""

    target: str
    image: str
    base: str


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """Everything that is built for one kind of image, lowest tier first; the last one is the image."""

    kind: ImageKind
    debian: str
    tiers: tuple[Tier, ...]

    @property
    def image(self) -> str:
        return self.tiers[-1].image


def combine(*parts: str) -> str:
    """One digest of several; the separator keeps ("ab", "c") and ("a", "bc") apart."""
    return hashlib.sha256("\0".join((str(LAYOUT), *parts)).encode()).hexdigest()


def short_name(image: str) -> str:
    """The name as a pod's spec has it: `omni-operator/cpu:dev-1234abcd`."""
    return image.removeprefix("docker.io/")


def plan_image(kind: ImageKind, digests: Digests) -> ImagePlan:
    """Tiers and their names. Equal input gives equal names, on any machine."""
    debian = f"{REPOSITORY}/debian:{combine('debian', digests.debian)[:12]}"
    adds = {
        "environment": (digests.pins, kind.extra, str(kind.stub_cuda)),
        "models": (digests.models,),
        "application": (digests.sources,),
    }
    base, tiers = debian, []
    for target in kind.targets:
        digest = combine(kind.name, target, base, digests.recipes[target], *adds[target])
        last = target == kind.targets[-1]
        image = (
            f"{REPOSITORY}/{kind.name}:dev-{digest[:8]}" if last else f"{REPOSITORY}/{kind.name}-{target}:{digest[:12]}"
        )
        tiers.append(Tier(target, image, base))
        base = image
    return ImagePlan(kind, debian, tuple(tiers))


def plan_work(plan: ImagePlan, existing: Iterable[str]) -> tuple[Tier, ...]:
    """The tiers that have to be built: those above the highest one that exists."""
    there = set(existing)
    for index in range(len(plan.tiers) - 1, -1, -1):
        if plan.tiers[index].image in there:
            return plan.tiers[index + 1 :]
    return plan.tiers


def context_parts(kind: ImageKind, target: str) -> tuple[str, ...]:
    """What the build context of a tier holds beside the install scripts: only what that tier adds."""
    if target == "application":
        return kind.sources
    return (target,)
