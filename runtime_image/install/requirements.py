#!/usr/bin/env python3
"""requirements.py PYPROJECT NAME: the project's own requirements with this extra, or those of this dependency group, one a line.

Runs in images that have no package tool yet: standard library only.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def expand(project: dict[str, Any], extras: Iterable[str]) -> list[str]:
    """Requirements of the project with `extras`; an extra may name others as `omni-operator[other]`.

    Raises KeyError for an extra that the project does not have.
    """
    own = re.compile(rf"^{re.escape(project['name'])}\[([a-z,]+)\]$")
    wanted, seen, result = list(extras), set[str](), list(project["dependencies"])
    while wanted:
        extra = wanted.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in project["optional-dependencies"][extra]:
            if match := own.match(requirement):
                wanted.extend(match[1].split(","))
            else:
                result.append(requirement)
    return sorted(set(result))


def requirements(pyproject: dict[str, Any], name: str) -> list[str]:
    """Of a dependency group alone, or of the project with an extra. Raises KeyError for neither."""
    if name in pyproject.get("dependency-groups", {}):
        return sorted(pyproject["dependency-groups"][name])
    return expand(pyproject["project"], [name])


if __name__ == "__main__":
    print("\n".join(requirements(tomllib.loads(Path(sys.argv[1]).read_text()), sys.argv[2])))
