"""The packages of an extra with their versions: what an image's environment and a wheelhouse contain.

They are read from the environment that `make setup` made from constraints.txt: the same versions are tested here and shipped,
and no resolver runs when an image is built.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

#: Version and requirements of an installed package by its canonical name, None when it is not installed.
Lookup = Callable[[str], "tuple[str, tuple[str, ...]] | None"]


class UnpinnedPackage(Exception):
    """A requirement that is not installed, so that nobody tested a version of it."""

    def __init__(self, name: str, wanted_by: str) -> None:
        super().__init__(
            f"{wanted_by} needs {name}, which is not installed here; add its pin to constraints.txt and run `make setup`"
        )


@functools.cache
def installed(name: str) -> tuple[str, tuple[str, ...]] | None:
    """The running interpreter's packages as a Lookup."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return distribution.version, tuple(distribution.requires or ())


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    """Whether the requirement's marker holds here for any of the extras of the package that states it."""
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def dropped_names(overrides: str) -> frozenset[str]:
    """Packages that an overrides file removes, by a marker that never holds."""
    lines = (line.split("#", 1)[0].strip() for line in overrides.splitlines())
    requirements = [Requirement(line) for line in lines if line]
    return frozenset(canonicalize_name(item.name) for item in requirements if not applies(item, ()))


def closure(roots: Iterable[str], overrides: str, lookup: Lookup = installed) -> tuple[str, ...]:
    """`name==version` of the roots and everything they need, sorted.

    Raises UnpinnedPackage for a requirement that is not installed and not dropped by `overrides`.
    """
    dropped = dropped_names(overrides)
    versions: dict[str, str] = {}
    visited: set[tuple[str, str]] = set()
    open_requirements: list[tuple[Requirement, str]] = [(Requirement(root), "pyproject.toml") for root in roots]
    while open_requirements:
        requirement, wanted_by = open_requirements.pop()
        name = canonicalize_name(requirement.name)
        if name in dropped:
            continue
        found = lookup(name)
        if found is None:
            raise UnpinnedPackage(name, wanted_by)
        versions[name] = found[0]
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) in visited:
                continue
            visited.add((name, extra))
            open_requirements.extend((child, name) for child in _children(found[1], extra))
    return tuple(f"{name}=={version}" for name, version in sorted(versions.items()))


def _children(requires: Iterable[str], extra: str) -> Iterator[Requirement]:
    for text in requires:
        requirement = Requirement(text)
        if applies(requirement, (extra,) if extra else ()):
            yield requirement
