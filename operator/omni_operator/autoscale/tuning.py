"""name=value pairs of Tuning, as the operator's --tune and `omni replay --set` take them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields

from omni_operator.autoscale.types import Tuning
from omni_runtime.errors import OmniError


class UnknownTuning(OmniError):
    """There is no tuning of this name, or its value is no finite number."""

    code = "UnknownTuning"


def parse_tuning(given: Iterable[str]) -> dict[str, float]:
    """Raises UnknownTuning, which says what there is."""
    known = {f.name for f in fields(Tuning)}
    found = {}
    for pair in given:
        name, _, value = pair.partition("=")
        if name not in known:
            raise UnknownTuning(f"{pair}: there is no tuning {name!r}; there are {', '.join(sorted(known))}")
        try:
            found[name] = float(value)
        except ValueError:
            raise UnknownTuning(f"{pair}: {value!r} is no number; write one such as {name}=1.5") from None
        if not math.isfinite(found[name]):
            raise UnknownTuning(f"{pair}: {value!r} is not finite; write a number such as {name}=1.5")
    return found
